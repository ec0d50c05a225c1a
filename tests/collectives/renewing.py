"""Two ranks of which one fails and one is woken, at random times among collectives, again and again. Run by tests.

python -m tests.collectives.renewing TIMES SEED: prints a line of JSON: the longest that a wake and a `renew` took.
"""

import json
import os
import random
import sys
import threading
import time

from fmegatron.collectives import connect
from fmegatron.layout import Mesh


def woken(world, seconds, what):
    """How long `what` went on after an abort in a thread, `seconds` from now; it has to end by an error."""
    at = [0.0]

    def wake():
        at[0] = time.monotonic()
        world.abort()

    timer = threading.Timer(seconds, wake)
    timer.start()
    try:
        while True:
            what()
    except RuntimeError:
        timer.join()
        return time.monotonic() - at[0]


def main(times, seed):
    """Every second time the woken rank waits in a collective of two, else for a group that the other does not make."""
    rank, own, both = int(os.environ["RANK"]), random.Random(seed + int(os.environ["RANK"])), random.Random(seed)
    world, longest = connect(Mesh(dp=2), timeout_s=60), {"wake": 0.0, "renew": 0.0}
    for number in range(times):
        fails, pending, opens = both.randrange(2), both.randrange(3), both.random() < 0.2
        world.barrier()
        asked = [world.ask(True) for _ in range(pending)]
        if rank == fails:
            time.sleep(own.random() * 0.005)
        else:
            collective = lambda: (time.sleep(own.random() * 0.0005), world.ask(False)())  # noqa: E731
            opened = lambda: world.group_name(("dp",), f"use{number}")  # noqa: E731, B023
            took = woken(world, own.random() * 0.004, opened if opens else collective)
            longest["wake"] = max(longest["wake"], took)
        began = time.monotonic()
        world.renew(20)
        longest["renew"] = max(longest["renew"], time.monotonic() - began)
        del asked
    world.barrier()
    world.close()
    print(json.dumps(longest), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

"""A run with a fault in each attempt of its job: `torchrun ... faulty_run.py EXPERIMENT FAULTS,FAULTS,... FLAGS`.

EXPERIMENT: a module with a Config and a main. FAULTS of the attempts, in their order, each KIND:RANK:STEP and joined by
"+": what happens to that rank when it begins that update. The file RUN-faults counts the attempts that have ended by
one. After the last attempt the run is done once more, by the same processes in the folder RUN-clean, without faults.
"""

import dataclasses
import errno
import importlib
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fmegatron import loop, tree

STOPPED_S = 2


def happen(kind, state, go):
    """The fault, on this rank. go: the file whose appearance ends a "wait"."""
    pid = os.getpid()
    if kind == "kill":
        os.kill(pid, signal.SIGKILL)
    elif kind == "raise":
        raise ValueError("a bad thing")
    elif kind == "exit":
        sys.exit(3)
    elif kind == "stop":
        subprocess.Popen(["sh", "-c", f"sleep {STOPPED_S}; kill -CONT {pid}"])
        os.kill(pid, signal.SIGSTOP)
    elif kind == "wait":
        while not go.exists():
            time.sleep(0.05)
    elif kind == "hang":
        os.kill(pid, signal.SIGSTOP)
    elif kind == "nan":
        next(x for x in tree.leaves(state) if x.dim()).flatten()[0] = math.nan
    elif kind == "full":
        write = os.write

        def full(fd, content):
            if fd > 2 and os.path.isfile(f"/proc/self/fd/{fd}"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(fd, content)

        os.write = full
    else:
        raise ValueError(f"no fault {kind!r}")


def main(config):
    """The run with the faults of this attempt; the last attempt is followed by the run that had none."""
    rank, train, count, due = int(os.environ["RANK"]), loop.train, Path(f"{config.run.folder}-faults"), {}
    attempt = count.stat().st_size if count.exists() else 0
    for fault in filter(None, ATTEMPTS[attempt].split("+")):
        kind, where, when = fault.split(":")
        if int(where) == rank:
            due[int(when)] = kind

    def with_faults(step, state, batch_at, **settings):
        number = settings["start"]

        def faulty(state, batch):
            nonlocal number
            number += 1
            if number in due:
                if due[number] not in ("stop", "wait"):
                    with count.open("a") as file:
                        file.write("x")
                happen(due.pop(number), state, Path(f"{config.run.folder}-go"))
            return step(state, batch)

        return train(faulty, state, batch_at, **settings)

    loop.train = with_faults
    result = EXPERIMENT.main(config)
    if attempt == len(ATTEMPTS) - 1:
        clean = dataclasses.replace(config.run, folder=f"{config.run.folder}-clean")
        EXPERIMENT.main(dataclasses.replace(config, run=clean))
    return result


if __name__ == "__main__":
    EXPERIMENT, ATTEMPTS = importlib.import_module(sys.argv.pop(1)), sys.argv.pop(1).split(",")
    loop.launch(main, EXPERIMENT.Config)

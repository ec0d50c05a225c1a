"""Rendezvous: the processes of one attempt of a job agree on a fresh prefix of a store.

torchrun keeps one store for all attempts of a job, so a process that is started again finds in it what the ranks of the
attempt before have left: addresses of dead processes, to which gloo would connect until its time is over (torch 2.13
has no prefix per attempt), and the failure by which they ended. No number in the environment names an attempt:
TORCHELASTIC_RESTART_COUNT counts the restarts of one node, and nodes that were not at fault count none.

So rank 0 makes a word up, and every other rank asks for it under a word of its own: an answer that a rank reads was
written for that very process. Rank 0 answers new questions until all ranks have said that they are here.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import torch.distributed as dist

_SHOWN = 8  # ranks that an error lists


def meet(
    store: dist.Store,
    rank: int,
    size: int,
    use: str,
    timeout_s: float,
    given_up: Callable[[], bool] = lambda: False,
) -> dist.PrefixStore | None:
    """A part of `store` that is empty, and the same for all `size` ranks that call this at the same time.

    Ctrl-C is noticed as soon as `given_up`.

    Args:
        store: of all attempts of the job.
        rank: of this process.
        size: number of ranks.
        use: what it is for, a word; meetings of other uses may go on beside it.
        timeout_s: seconds after which ranks that are missing are an error.
        given_up: asked a few times a second; when it is true the meeting is left, and None returned.

    Raises TimeoutError after `timeout_s` seconds, which on rank 0 names the ranks that did not come.
    """
    own, until, pause = secrets.token_hex(8), time.monotonic() + timeout_s, 0.002
    hall = dist.PrefixStore(f"fmegatron/{use}", store)
    questions, answered, word = [f"asks/{r}" for r in range(1, size)], set(), own if rank == 0 else ""
    if rank > 0:
        hall.set(f"asks/{rank}", own)
    while True:
        if rank > 0 and hall.check([f"answer/{own}"]):
            word = hall.get(f"answer/{own}").decode()
            if hall.add(f"here/{word}", 1) == size - 1:
                hall.set(f"all/{word}", "")
            break
        if rank == 0 and (size == 1 or hall.check([f"all/{word}"])):
            break
        if rank == 0 and hall.check(questions):
            for asked in set(hall.multi_get(questions)) - answered:
                hall.set(f"answer/{asked.decode()}", word)
                answered.add(asked)
        if given_up():
            return None
        if time.monotonic() > until:
            raise TimeoutError(_late(hall, rank, questions, timeout_s))
        time.sleep(pause)
        pause = min(1.5 * pause, 0.05 + size / 50_000)  # thousands of ranks must not keep the store busy with asking
    return dist.PrefixStore(word, hall)


def absent(store: dist.Store, size: int, use: str) -> list[int]:
    """Ranks that have not come to this meeting. After a restart of the job it may be more: what those of the attempt
    before have asked still stands there. Whether rank 0 has come is not seen.
    """
    hall = dist.PrefixStore(f"fmegatron/{use}", store)
    return [rank for rank in range(1, size) if not hall.check([f"asks/{rank}"])]


def _late(hall: dist.Store, rank: int, questions: list[str], timeout_s: float) -> str:
    if rank > 0:
        return f"rank 0 did not answer within {timeout_s:g} s; was its process started, and did it fail?"
    absent = [r for r, question in enumerate(questions, 1) if not hall.check([question])]
    if not absent:  # the questions of an attempt before stand there in their place
        return f"not all ranks came within {timeout_s:g} s; were all processes started, and did one fail?"
    more = f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
    ranks = ", ".join(map(str, absent[:_SHOWN]))
    return f"no word from rank {ranks}{more} of {len(questions) + 1} within {timeout_s:g} s; were they started?"

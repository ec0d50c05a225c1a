"""Other threads of this process that may be inside of a write to what is saved: they are let run, so that it shows."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

__all__ = ["changed", "let_others_run"]

_RUN_NS = 1_000_000
_MOST_S = 1.0


def let_others_run() -> None:
    """Wait until each thread of the process that the scheduler keeps from a core has had one for a millisecond, at most
    a second: one that is inside of a write then has moved on. Without /proc, or clocks of threads, at once."""
    waiting = {thread: ran for thread in _runnable() if (ran := _ran(thread)) < sys.maxsize}
    end = time.monotonic() + _MOST_S
    while waiting and time.monotonic() < end:
        time.sleep(_RUN_NS / 1e9)
        some = _runnable()
        waiting = {thread: ran for thread, ran in waiting.items() if thread in some and _ran(thread) < ran + _RUN_NS}


def _runnable() -> set[int]:
    """Numbers of the other threads of this process that run, or would if they had a core."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{name}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[:1] == [b"R"]:
                    found.add(int(name))
    return found - {threading.get_native_id()}


def _ran(thread: int) -> int:
    """Nanoseconds that a thread of this process has run, by its clock: the number of clock_getcpuclockid(3)."""
    try:
        return time.clock_gettime_ns((~thread << 3) | 6)
    except OSError:  # it has ended, or this system has no such clock
        return sys.maxsize


def changed(path: str) -> str:
    """The error for a leaf that changed meanwhile."""
    return (
        f"{path}: got a leaf that changed while it was saved, wanted one that stays as it is until the call returns;"
        " have no other thread write to the state meanwhile, or save a clone of it (nothing was saved)"
    )

"""How much work something is: calls of functions, bytes read, memory. Counted, not timed, so a busy machine changes
nothing."""

import contextlib
import itertools
import sys
import threading
from dataclasses import dataclass

from tests.checkpoint.memory import peak, reset_peak


@dataclass
class Work:
    """calls: of Python's and C's functions, and their returns, on all threads.  read: bytes read from files, pipes and
    sockets.  memory: bytes that the process had at most, above those at the beginning (Linux)."""

    calls: int = 0
    read: int = 0
    memory: int = 0

    def __iadd__(self, other):
        """The larger of each: for the worst of many."""
        self.calls, self.read = max(self.calls, other.calls), max(self.read, other.read)
        self.memory = max(self.memory, other.memory)
        return self


@contextlib.contextmanager
def counted():
    """The Work of this block, known at its end."""
    work, calls = Work(), itertools.count()

    def seen(frame, event, argument):
        next(calls)

    start, read = reset_peak(), _read()
    threading.setprofile(seen)
    sys.setprofile(seen)
    try:
        yield work
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        work.calls, work.read, work.memory = next(calls), _read() - read, peak() - start


def _read():
    with open("/proc/self/io") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("rchar"))

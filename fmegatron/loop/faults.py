"""When one rank fails, all end, soon, and the first message is the one that is read.

A rank that raises writes its message into the rendezvous store before it dies. A thread on every other rank looks there
twice a second, so that a rank ends even while its main thread waits in a collective that will never return.
Ranks that are killed without a word (out of memory) are noticed by torchrun, which then ends the others.
"""

import contextlib
import datetime
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Place:
    """Where this process stands among the ranks that a launcher (torchrun) started: rank, ranks, and those of its node.

    The four numbers are 0, 1, 0, 1 in a process that no launcher started.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @staticmethod
    def of_environment() -> "Place":
        """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun sets them."""
        size = int(os.environ.get("WORLD_SIZE", 1))
        return Place(
            int(os.environ.get("RANK", 0)),
            size,
            int(os.environ.get("LOCAL_RANK", 0)),
            int(os.environ.get("LOCAL_WORLD_SIZE", size)),
        )


class Faults:
    """The shared notice board of one run: `report` an own failure, `reason()` of another's. Made by `watch`."""

    def __init__(self, place: Place, host: str, port: int):
        self.place, self.address, self._store = place, (host, port), None
        # A restart by torchrun is another run: it must not read the failure of the one before.
        run = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._key = "/".join(("fmegatron", "failed", *run))

    def connect(self) -> bool:
        """Open an own connection to the store (the main thread's may be blocked). False: not reachable yet."""
        if self._store is None:
            host, port = self.address
            with contextlib.suppress(RuntimeError, OSError):  # DistNetworkError and its kin are RuntimeErrors
                self._store = TCPStore(
                    host, port, is_master=False, wait_for_workers=False, timeout=datetime.timedelta(seconds=5)
                )
        return self._store is not None

    def report(self, error: BaseException) -> str:
        """Say that this rank failed; return the line of the rank that said so first, this one's included."""
        line = f"rank {self.place.rank}: {type(error).__name__}: {error}"
        if not self.connect():
            return line
        with contextlib.suppress(RuntimeError, OSError):
            return self._store.compare_set(self._key, "", line).decode()
        return line

    def reason(self) -> str | None:
        """The line of the rank that failed first, None while all are well."""
        return self._store.get(self._key).decode() if self._store.check([self._key]) else None


@contextlib.contextmanager
def watch(place: Place) -> Iterator[Faults | None]:
    """Within this block, a failure reported by any rank ends this process (status 1) within about a second.

    Yields the notice board, or None when there is one rank or no rendezvous address in the environment.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if place.size == 1 or not (address and port):
        yield None
        return
    done = threading.Event()

    def look(faults: Faults) -> None:
        while not done.wait(POLL_SECONDS):
            if not faults.connect():
                continue
            try:
                reason = faults.reason()
            except (RuntimeError, OSError):  # the store is gone: its owner ended, and torchrun decides
                return
            if reason and not done.is_set():
                end(f"rank {place.rank} ends because another failed: {reason}")

    thread = threading.Thread(target=look, args=(Faults(place, address, int(port)),), name="faults", daemon=True)
    thread.start()
    try:
        yield Faults(place, address, int(port))
    finally:
        done.set()
        # A thread that is inside the store's C++ while Python shuts down takes the whole process with it.
        thread.join(timeout=10)


def fail(error: BaseException, place: Place, faults: Faults | None, status: int = 1, brief: bool = False) -> None:
    """Print what happened on this rank, tell the others and torchrun, and end the process. Does not return.

    The rank that was first prints its traceback (brief: only its last line). The others print one line, as their errors
    are mostly echoes of the first (a closed connection), and nothing when theirs is the same (a bad flag).
    """
    own = f"rank {place.rank}: {type(error).__name__}: {error}"
    first = faults.report(error) if faults else own
    if first != own:
        same = first.partition(": ")[2] == own.partition(": ")[2]
        end("" if same else f"rank {place.rank} ends because another failed: {first}", status)
    handler = get_error_handler()
    handler.initialize()
    with contextlib.suppress(OSError):
        handler.record_exception(error)  # torchrun shows this file as the root cause
    trace = "" if brief else "".join(traceback.format_exception(error))
    end(f"{trace}rank {place.rank} of {place.size} failed: {type(error).__name__}: {error}", status)


def end(message: str, status: int = 1) -> None:
    """Write `message` on stderr and leave at once, without waiting for threads or process groups. Does not return."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.write(message + "\n" if message else "")
        sys.stderr.flush()
    os._exit(status)

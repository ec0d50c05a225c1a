"""When one rank fails, all end, soon, and the first message is the one that is read.

A rank that raises, or leaves by SystemExit, writes its message into the rendezvous store before it dies. A thread on
every other rank looks there twice a second, so that a rank ends even while its main thread waits in a collective that
will never return. Ranks that are killed without a word (out of memory) are noticed by torchrun, which ends the others.
"""

import contextlib
import datetime
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fmegatron.collectives import meet
from fmegatron.collectives.world import FailedOnRank
from fmegatron.loop.signals import told_to_end

POLL_SECONDS = 0.5
LOOKS_A_SECOND = 1000  # of all ranks together, about: so many a store answers, however many ranks there are
MEET_SECONDS = 1.0  # how long one that ends waits for the ranks to have met here
START_SECONDS = 10.0  # how long a rank that fails waits for those that have not come yet
FIRST_SECONDS = 1.0  # how much later those end that ended because of another
TOLD_SECONDS = 5.0  # how long one that has printed why it ends waits for the others to have
LAST_WORD_SECONDS = 3.0  # how long one that lost a connection waits for the word of the rank at the other end
# What torch 2.11 to 2.13 report, over gloo and NCCL, when a peer is gone, and when it does not come.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
_TIMED_OUT = ("Timed out waiting", "Application timeout caused pair closure")
_LATE = "another rank did not come to this collective in time: is it stopped, or does it wait for something else?"


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
        self.place, self.address = place, (host, port)
        self._store: TCPStore | None = None
        self._board: Store | None = None
        self._open, self._ends, self._tells = threading.Event(), threading.Lock(), threading.Lock()
        self.pause = POLL_SECONDS + place.size / LOOKS_A_SECOND

    def open(self, given_up: Callable[[], bool]) -> bool:
        """Reach the store by an own connection (the main thread's may be blocked) and meet the other ranks there.

        False: not reachable yet, or `given_up()`. A board is of one attempt: what an attempt before a restart by
        torchrun has reported stands on another.
        """
        host, port = self.address
        with contextlib.suppress(RuntimeError, OSError):  # DistNetworkError and its kin are RuntimeErrors
            if self._store is None:
                limit = datetime.timedelta(seconds=5)
                self._store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
            self._board = meet.meet(self._store, self.place.rank, self.place.size, "faults", math.inf, given_up)
            if self._board is not None:
                self._open.set()
        return self._open.is_set()

    def report(self, error: BaseException) -> str:
        """Report that this rank failed; return the line of the rank that reported first, this one's included.

        An echo of another rank's failure is not reported, as that rank speaks for itself: a lost connection, or what
        failed on it in something that all do together. This waits some seconds for its word, unless the launcher ends
        this process (SIGTERM): it has then seen another end, whose word would be here.
        """
        line = f"rank {self.place.rank}: {_said(error)}"
        if not self._reached() or self._board is None:
            return line
        with contextlib.suppress(RuntimeError, OSError):
            if not (lost_peer(error) or isinstance(error, FailedOnRank) and error.rank != self.place.rank):
                return self._board.compare_set("failed", "", line).decode()
            until = time.monotonic() + (0.0 if told_to_end(error) else LAST_WORD_SECONDS)
            while (reason := self.reason()) is None and time.monotonic() < until:
                time.sleep(POLL_SECONDS / 5)
            return reason or line
        return line

    def reason(self) -> str | None:
        """The line of the rank that failed first, None while all are well."""
        return self._read("failed")

    def leave(self, how: str) -> None:
        """Note that this rank ends well, for those that may still wait for it."""
        if self._open.wait(MEET_SECONDS) and self._board is not None:  # it may leave as soon as it has come
            with contextlib.suppress(RuntimeError, OSError):
                self._board.compare_set("left", "", f"rank {self.place.rank} {how}")
                self._tell()

    def _tell(self) -> None:
        """Count this rank once among those that have printed why they end."""
        if self._tells.acquire(blocking=False) and self._board is not None:
            self._board.add("told", 1)

    def speaks(self) -> bool:
        """Whether the thread that asks is the first of this rank that ends it: no other prints anything more."""
        return self._ends.acquire(blocking=False)

    def all_told(self, first: bool) -> None:
        """Note that this rank has printed why it ends, and wait until all have; then the one that failed ends first.

        A launcher that sees one rank end sends SIGTERM to the others, which ends them on the spot: those that have not
        spoken yet would never, and the one whose end it saw is the one that it reports. first: whether this one failed.
        """
        if self._board is None:
            return
        with contextlib.suppress(RuntimeError, OSError):
            self._tell()
            until = time.monotonic() + TOLD_SECONDS
            while self._board.add("told", 0) < self.place.size and time.monotonic() < until:
                time.sleep(self.pause / 10)
        if not first:
            time.sleep(FIRST_SECONDS)

    def told(self) -> str | None:
        """`reason()`, None also where the board cannot be read."""
        with contextlib.suppress(RuntimeError, OSError):
            return self.reason() if self._open.is_set() else None

    def left(self) -> str | None:
        """How the rank that ended well first did so, None while all are there."""
        with contextlib.suppress(RuntimeError, OSError):
            return self._read("left") if self._open.wait(MEET_SECONDS) else None

    def _read(self, key: str) -> str | None:
        board = self._board
        return board.get(key).decode() if board is not None and board.check([key]) else None

    def _reached(self) -> bool:
        if self._open.wait(MEET_SECONDS) or self._store is None:  # ranks start seconds apart
            return self._open.is_set()
        return self._open.wait(START_SECONDS)


@contextlib.contextmanager
def watch(place: Place) -> Iterator[Faults | None]:
    """Within this block, a failure reported by any rank ends this process (status 1) within about a second.

    Yields the notice board, or None when there is one rank or no rendezvous address in the environment.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if place.size == 1 or not (address and port):
        yield None
        return
    done, faults = threading.Event(), Faults(place, address, int(port))

    def look() -> None:
        while not faults.open(done.is_set):
            if done.wait(POLL_SECONDS):
                return
        while not done.wait(faults.pause):
            try:
                reason = faults.reason()
            except (RuntimeError, OSError):  # the store is gone: its owner ended, and torchrun decides
                return
            if reason and not done.is_set() and faults.speaks():
                say(f"rank {place.rank} ends because another failed: {reason}")
                faults.all_told(first=False)
                end("")

    thread = threading.Thread(target=look, name="faults", daemon=True)
    thread.start()
    try:
        yield faults
    finally:
        done.set()
        # A thread that is inside the store's C++ while Python shuts down takes the process with it.
        thread.join(timeout=10)


def lost_peer(error: BaseException | None) -> bool:
    """Whether this error, or one that it came from, reports that a connection to another rank was lost."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if any(words in str(error) for words in _LOST):
            return True
        error = error.__cause__ or error.__context__
    return False


def fail(error: BaseException, place: Place, faults: Faults | None, status: int = 1, brief: bool = False) -> None:
    """Print what happened on this rank, report it to the others and torchrun, and end the process. Does not return.

    The rank that was first prints its traceback (brief: only its last line). The others print one line, as their errors
    are mostly echoes of the first (a closed connection), and nothing when theirs is the same (a bad flag).
    """
    if faults and not faults.speaks():
        threading.Event().wait()  # the thread that has spoken ends the process

    def leave(message: str) -> None:
        say(message)
        if faults and faults.told():  # of one that was killed nothing comes
            faults.all_told(first=first == own)
        end("", status)

    own, lost = f"rank {place.rank}: {_said(error)}", lost_peer(error)
    if lost and not (faults and faults.told()):  # at once: torchrun may end this process while it waits for a word
        how = (faults.left() if faults else None) or _gone(os.environ)
        say(f"rank {place.rank} of {place.size} lost its connection to another rank: {how}")
    first = faults.report(error) if faults else own
    if first != own:
        same = first.partition(": ")[2] == own.partition(": ")[2]
        leave("" if same else f"rank {place.rank} ends because another failed: {first}")
    if lost and told_to_end(error):  # its one line is printed above, and the cause is not here
        leave("")
    handler = get_error_handler()
    handler.initialize()
    with contextlib.suppress(OSError):
        handler.record_exception(error)  # torchrun shows this file as the root cause
    trace = "" if brief else "".join(traceback.format_exception(error))
    if isinstance(error, KeyboardInterrupt):
        leave(f"rank {place.rank} of {place.size}: {str(error) or 'interrupted'}")
    late = f"; {_LATE}" if any(words in str(error) for words in _TIMED_OUT) else ""
    leave(f"{trace}rank {place.rank} of {place.size} failed: {_said(error)}{late}")


def _said(error: BaseException) -> str:
    """Its class and its text, where it has one."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _gone(environment: Mapping[str, str]) -> str:
    """What is known of a rank that left no word, and who names it: only a launcher that has seen its status."""
    how = "it was killed, ran out of memory, or left without a word"
    if "TORCHELASTIC_RUN_ID" in environment:
        return f"{how}; torchrun's report names it"
    return f"{how}; see what the launcher of the ranks reports of it"


def say(message: str) -> None:
    """Write `message` on stderr, after what this process has printed so far."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.write(message + "\n" if message else "")
        sys.stderr.flush()


def end(message: str, status: int = 1) -> None:
    """Print `message` and leave at once, without waiting for threads or process groups. Does not return."""
    say(message)
    os._exit(status)

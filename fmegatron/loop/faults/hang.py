"""Hangs are seen: a thread per rank that knows what its rank does, and ends all when one makes no progress.

The loop states which section of a run it is in (`Pulse.enter`). A few times a second a thread writes that into the
rendezvous store, over a connection of its own. When ranks are in a section for longer than the section's limit, one of
them (`judge.Judge`) looks which ranks are behind, and reports it. When a late rank is one of them, or when not
even the threads of those give a sign (SIGSTOP, a machine that is gone), it declares a hang. Every rank that still can
then writes the stacks of its threads, kills those on its machine that cannot, and ends with status 75, so that torchrun
can start all again. The one that declares it writes it into the events of the run.
"""

import contextlib
import datetime
import faulthandler
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fmegatron.collectives import meet, torch_private, waiting
from fmegatron.loop.events import Events
from fmegatron.loop.faults.judge import Judge, View
from fmegatron.loop.faults.notice import Place, end, say
from fmegatron.loop.faults.pulse import Now, Pulse
from fmegatron.loop.faults.siblings import kill_siblings, leave_stacks, own_process, write_stacks_into

HANG = 75  # exit status: EX_TEMPFAIL of sysexits.h, try again
POLL_SECONDS = 0.25
LOOKS_A_SECOND = 1000  # of all ranks together, about: so many a store answers, however many ranks there are
LAST_SECONDS = 1.0  # for the stacks of the other ranks, before those of this machine are killed
SILENT_SECONDS = 60.0  # a process that gives no sign for so long does nothing, whatever it is in
SHOWN = 8  # ranks that a message lists


@contextlib.contextmanager
def watched(pulse: Pulse, folder: str | os.PathLike, size: int = 1) -> Iterator[Pulse]:
    """Within this block a hang of any rank ends all of them with status 75.

    pulse: of this rank. folder: of the run; stacks are in its `stacks/`. size: number of ranks. All ranks enter the
    block; one that does not is waited for as long as its limits allow. Without limits, and with one rank that is not
    restarted, no thread is started.
    """
    if pulse.patience is None and size == 1:
        yield pulse
        return
    done = threading.Event()
    watch = _Watch(pulse, size, Path(folder) / "stacks", done)
    thread = threading.Thread(target=watch.run, name="pulse", daemon=True)
    thread.start()
    try:
        yield pulse
    finally:
        done.set()
        # A thread that is inside the store's C++ while Python shuts down takes the process with it.
        thread.join(timeout=10)
        watch.close()


class _Watch:
    """The thread of one rank: it reports, and judges."""

    def __init__(self, pulse: Pulse, size: int, folder: Path, done: threading.Event):
        self.pulse, self.rank, self.size, self.folder, self.done = pulse, pulse.rank, size, folder, done
        self.host, self.path = socket.gethostname(), folder / f"rank-{pulse.rank}.txt"
        self.process = own_process(self.host)
        address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        self.address = (address, int(port)) if size > 1 and address and port else None
        self.main = threading.get_ident()  # of the thread that trains
        self.base, self.board, self.file, self.beats, self.faults = None, None, None, 0, 0
        self.before = 0  # bytes of stacks from before this process
        self.pause = POLL_SECONDS + size / LOOKS_A_SECOND
        self.judge = Judge(self.rank, self.pause)
        self.last: dict[int, tuple[int, float]] = {}  # of each rank: its beats, and when this rank saw them change

    def run(self) -> None:
        if self.pulse.patience is not None:
            with contextlib.suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                self.file = self.path.open("a")  # a run may hang again after a restart: the first stacks stay
                self.before = self.file.tell()
                write_stacks_into(self.file)
                self.process["stacks"] = True
            self._arm()  # also where a thread takes the GIL before this one looks for the first time
        while not self.done.wait(self.pause):
            self._arm()
            try:
                self._look()
            except (RuntimeError, OSError):  # the store is gone: torchrun decides about the others
                self.address = self.board = None

    def close(self) -> None:
        """This rank has left the block: it is behind no other."""
        with contextlib.suppress(RuntimeError, OSError):
            if self.board is not None:
                self._beat(self.pulse.now, left=True)
        if self.file is not None:
            faulthandler.cancel_dump_traceback_later()
            leave_stacks()
            with contextlib.suppress(OSError):
                self.file.truncate(self.before)  # what was late, and came after all
            self.file.close()
            with contextlib.suppress(OSError):
                if not self.before:
                    self.path.unlink()
                    self.folder.rmdir()  # where others have written theirs, it stays

    def _arm(self) -> None:
        """Let the interpreter write the stacks when not even this thread runs, because another holds the GIL."""
        if self.file is not None and self.pulse.now.limit < math.inf:
            left = max(0.0, self.pulse.now.limit - self.pulse.now.seconds)
            faulthandler.dump_traceback_later(left + 2 * self.pause, file=self.file)

    def _look(self) -> None:
        now = self.pulse.now
        if self.address is not None and self.board is None and not self._meet():
            if not self.done.is_set():
                asks = self.size <= LOOKS_A_SECOND or self.rank < SHOWN
                missing = meet.absent(self.base, self.size, "pulse")[:SHOWN] if self.base is not None and asks else []
                missing = missing or [0] * (self.rank > 0)  # all others have come, and rank 0 does not answer
                who = f": behind: rank {', '.join(map(str, missing))} gave no sign at all" if missing else ""
                self._declare(now, f"not all ranks have come to where they are watched{who}")
            return
        if self.board is not None:
            self._beat(now)
            if self.board.check(["hang"]):
                self._end(self.board.get("hang").decode())
            self._see_faults()
        late = now.seconds - now.limit
        if late < -4 * self.pause or self.pulse.now is not now:
            self.judge.leave(self.board)
            return
        # Some pauses before it is needed, to see whose beats change. Only one rank reads the words of all.
        if self.judge.is_own(self.board, self.beats):
            others = self._others()
            behind = self._behind(others)
            who = self._who(behind, others)
            self.judge.tell(self.board, View(self.beats, self._least(others), bool(behind), who))
            hangs = late > 0 and self._judge(now, behind, others)
        else:
            view = self.judge.told(self.board, now.count)
            who, hangs = ("", False) if view is None else (view.who, late > 0 and view.hangs(now.count))
        if hangs and not self.done.is_set():
            self._declare(now, who)

    def _see_faults(self) -> None:
        on_fault = self.pulse.on_fault  # the main thread takes it away when it knows of a fault itself
        attempt = self.pulse.attempt  # before the fault is read: the ranks may have met again when it has been
        if on_fault is not None and self.faults <= attempt and self.pulse.fault(attempt):
            self.faults = attempt + 1
            on_fault(attempt)

    def _beat(self, now: Now, left: bool = False) -> None:
        self.beats += 1
        beat = {"beats": self.beats, "count": now.count, "section": now.section, "step": now.step, "left": left}
        beat |= {"limit": min(now.limit, 1e9), **self.process}
        if now.seconds > now.limit - 4 * self.pause:
            beat["at"] = _place_of(self.main)
        if self.board is not None:
            self.board.set(f"beat/{self.rank}", json.dumps(beat))

    def _meet(self) -> bool:
        """Reach the store by an own connection, and meet the other ranks there; False when they are too late."""
        if self.address is None:
            return False
        host, port = self.address
        if self.base is None:
            limit = datetime.timedelta(seconds=5)
            self.base = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        given_up = lambda: self.done.is_set() or self.pulse.now.seconds > self.pulse.now.limit  # noqa: E731
        self.board = meet.meet(self.base, self.rank, self.size, "pulse", math.inf, given_up)
        if self.board is not None:
            self.pulse.opened(self.board)
        return self.board is not None

    # ---- judgement
    def _neighbours(self) -> list[int]:
        """The ranks that this one's launcher has started, and may have to end; all where that is not known."""
        place = Place.of_environment()
        if place.rank != self.rank or place.size != self.size or not 0 <= place.local_rank < place.local_size:
            return list(range(self.size))
        first = self.rank - place.local_rank
        return list(range(first, min(first + place.local_size, self.size)))

    def _others(self, ranks: list[int] | None = None) -> dict[int, dict]:
        """The last words of these ranks (default: of all), where they have not left."""
        if self.board is None:
            return {}
        keys = [f"beat/{rank}" for rank in (range(self.size) if ranks is None else ranks)]
        now = time.monotonic()
        if not self.board.check(keys):
            keys = [key for key in keys if self.board.check([key])]
        found = {}
        for key, text in zip(keys, self.board.multi_get(keys) if keys else [], strict=True):
            rank, beat = int(key.rpartition("/")[2]), json.loads(text)
            if self.last.get(rank, (None, 0.0))[0] != beat["beats"]:
                self.last[rank] = beat["beats"], now
            if not beat["left"]:
                found[rank] = beat
        return found

    @staticmethod
    def _least(others: dict[int, dict]) -> int:
        return min((beat["count"] for beat in others.values()), default=0)

    def _behind(self, others: dict[int, dict]) -> list[int]:
        """Ranks that have entered the fewest sections; none when all have entered as many."""
        least = self._least(others)
        behind = [rank for rank, beat in others.items() if beat["count"] == least]
        return behind if len(behind) < len(others) else []

    def _silence(self, rank: int) -> float:
        """Seconds without a sign of the thread of that rank, as far as this rank has looked."""
        return time.monotonic() - self.last[rank][1]

    def _judge(self, now: Now, behind: list[int], others: dict[int, dict]) -> bool:
        """Whether what takes so long is a hang. One that is behind judges by its own limit while its thread lives."""
        if not behind or self.rank in behind:
            return True
        quiet = min(self._silence(rank) for rank in behind)
        patient = now.seconds > max(others[rank]["limit"] for rank in behind)
        return quiet > 3 * self.pause and (patient or quiet > SILENT_SECONDS)

    def _who(self, behind: list[int], others: dict[int, dict]) -> str:
        """Where the ranks are: those that are behind, or all of them, the fewest at one place first."""
        if not behind and len(others) > 1:
            places: dict[str, list[int]] = {}
            for rank, beat in others.items():
                places.setdefault(beat.get("at", "a place that is not known"), []).append(rank)
            few = sorted(places.items(), key=lambda item: len(item[1]))[:SHOWN]
            return "all ranks are in it: " + "; ".join(f"{_named(ranks, others)} at {place}" for place, ranks in few)
        shown = [
            f"{_named([rank], others)} was last seen in section {others[rank]['section']!r} of update "
            f"{others[rank]['step']}"
            + ", and its process does not run (stopped?)"
            * (self._silence(rank) > 3 * self.pause)
            for rank in behind[:SHOWN]
        ]
        more = f" and {len(behind) - SHOWN} more" * (len(behind) > SHOWN)
        return f"behind: {'; '.join(shown)}{more}" if shown else "see its stacks"

    # ---- the end
    def _declare(self, now: Now, who: str) -> None:
        longest = self.pulse.slowest[now.section]
        learnt = f", the longest before took {longest:.2f} s" if longest else ""
        text = (
            f"hang: rank {self.rank} ({self.host}) makes no progress for {now.seconds:.1f} s in section "
            f"{now.section!r} of update {now.step} (limit {now.limit:.1f} s{learnt}); {who}"
        )
        text += f" ({doing})" if (doing := waiting.doing_of(self.main)) else ""
        if self.board is not None:
            text = self.board.compare_set("hang", "", text).decode()
        self._end(text)

    def _end(self, text: str) -> None:
        """Stacks, then the end of this process. Does not return."""
        until, now = time.monotonic() + LAST_SECONDS, self.pulse.now
        with contextlib.suppress(OSError, ValueError):
            faulthandler.cancel_dump_traceback_later()
            file = self.file or self.path.open("a")
            file.write(f"{text}\nrank {self.rank} ({self.host}, process {os.getpid()}) has been in section ")
            file.write(f"{now.section!r} of update {now.step} for {now.seconds:.1f} s\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            if (record := torch_private.flight_record()) is not None:
                (self.folder / f"flight-{self.rank}.bin").write_bytes(record)
        declares = text.startswith(f"hang: rank {self.rank} (")
        if declares:
            with contextlib.suppress(OSError):
                Events(self.folder.parent / "events.jsonl")("hang", now.step, text=text)
        if self.rank == 0 or declares:
            say(f"rank {self.rank} of {self.size}: {text}; the stacks are in {self.folder}")
        with contextlib.suppress(RuntimeError, OSError):
            if self.board is not None:
                self.board.set(f"written/{self.rank}", "")
                others = missing = self._others(self._neighbours())
                silent = {r for r in others if self._silence(r) > 3 * self.pause}  # they will not write
                while missing.keys() - silent and time.monotonic() < until:
                    time.sleep(0.02)
                    missing = {r: x for r, x in missing.items() if not self.board.check([f"written/{r}"])}
                kill_siblings(missing, self.host)
        with contextlib.suppress(Exception):
            handler = get_error_handler()
            handler.initialize()
            handler.record_exception(RuntimeError(text))  # torchrun shows it as the root cause
        end("", HANG)


def _named(ranks: list[int], others: dict[int, dict]) -> str:
    """Ranks with their machines, and the process of one."""
    hosts = ", ".join(dict.fromkeys(others[rank]["host"] for rank in ranks[:SHOWN]))
    if len(ranks) == 1:
        return f"rank {ranks[0]} ({hosts}, process {others[ranks[0]]['pid']})"
    more = f" and {len(ranks) - SHOWN} more" * (len(ranks) > SHOWN)
    return f"ranks {', '.join(map(str, ranks[:SHOWN]))}{more} ({hosts})"


def _place_of(thread: int) -> str:
    """The line that a thread executes, and the nearest one that is not of torch."""
    frame, places = sys._current_frames().get(thread), []
    while frame is not None and len(places) < 2:
        path = frame.f_code.co_filename
        of_torch = f"{os.sep}torch{os.sep}" in path
        if not places or not of_torch:
            places.append(f"{os.sep.join(path.split(os.sep)[-3:])}:{frame.f_lineno} in {frame.f_code.co_name}")
        if not of_torch:
            break
        frame = frame.f_back
    doing = waiting.doing_of(thread)
    return ", from ".join(places) + (f" ({doing})" if doing else "")

"""The saves in flight of one rank: reports of the writer process, agreement of the ranks, success or failure."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fmegatron.checkpoint.background.arena import SAVE, TICKS, WRITTEN, Arena
from fmegatron.checkpoint.background.handle import Handle
from fmegatron.checkpoint.background.process import WriterProcess
from fmegatron.checkpoint.background.staging import Landing
from fmegatron.checkpoint.calls.arguments import check_fork, ranks_of
from fmegatron.checkpoint.calls.ranks import Ranks
from fmegatron.collectives import interrupt

START_S = 120.0  # a fresh Python that imports torch on a busy node
LOOK_S = 0.05
_LOOK_S = 0.02  # while the caller waits for the end
_STOP_S = 30.0  # for a writer, which has low priority, to let go of a save that is given up, on a busy node
_HELD_TIDY_S = 2.0  # for the removal of its files where the writer was held: it goes on when the disk answers
_CLOSE_S = 5.0


class Flights:
    """The saves that have begun and are not known to have ended (`pending`, oldest first), and their writer process.

    failed: those whose failure the user has not heard of yet.  world: of the pending saves.
    """

    def __init__(self, arena: Arena, time_limit_s: float, nice: int):
        self.arena, self.time_limit_s, self.nice = arena, time_limit_s, nice
        self.pending: list[Handle] = []
        self.failed: list[Handle] = []
        self.world: Ranks = ranks_of(None)
        self.process: WriterProcess | None = None
        self.closed = False
        self._seen, self._since = None, 0.0  # the last sign of progress, and when
        self._landing: list[tuple[Handle, Landing, dict[str, Any]]] = []  # of the writer, later
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _forgotten, self.pending, self._owner)

    def start(self) -> WriterProcess:
        """The writer process, a new one if there is none."""
        if self.process is None:
            self.process = WriterProcess(self.arena.fd, self.nice)
            self._seen, self._since = None, time.monotonic()
        return self.process

    def room(self, handle: Handle, nbytes: int) -> int | None:
        """A region for the save, when there is one; None if its writer died meanwhile. What comes from devices comes
        first, as the memory may move."""
        for _, landing, _ in self._landing:
            landing.wait()
        self._send_landed()
        while handle.error is None:
            if (at := self.arena.allocate(nbytes)) is not None:
                handle.regions.add(at)
                return at
            self.listen(LOOK_S)
        return None

    def send(self, handle: Handle, landing: Landing, **message: Any) -> None:
        """Give the writer work for a save, as soon as it has landed, in turn; starts a writer if there is none."""
        self._landing.append((handle, landing, message))
        self._send_landed()

    def _send_landed(self) -> None:
        while self._landing and self._landing[0][1].is_done:
            handle, _, message = self._landing.pop(0)
            self._send(handle, message)

    def _send(self, handle: Handle, message: dict[str, Any]) -> None:
        if not any(map(_busy, self.pending)):
            self._since = time.monotonic()
        self.start().send(do="write", id=handle.number, capacity=self.arena.capacity, **message)
        handle.sent = True

    def give_up(self, handle: Handle, error: str) -> None:
        """It could not be staged on this rank; all ranks hear of it at the next poll."""
        handle.error = handle.error or error
        if not handle.sent:
            self._release(handle)

    def poll(self) -> None:
        """`Handle.poll` of all pending saves."""
        self.advance()
        if self.failed:
            raise RuntimeError(self.failed.pop(0).failure)

    def wait(self, ended: Callable[[], bool], what: str, so: str, timeout_s: float | None = None) -> None:
        """Return when `ended()`, which an exchange makes true on all ranks at once; all ranks call it.

        Raises TimeoutError on all ranks when `timeout_s` is over on one. After Ctrl-C on one rank KeyboardInterrupt
        there and RuntimeError on the others. so: what the messages state of the save then.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with interrupt.held_interrupt() as pressed:
            while not ended():
                late = end is not None and time.monotonic() >= end
                interrupted, late_rank = self.advance(bool(pressed), late)
                if ended():
                    break
                if interrupted is not None:
                    if pressed:
                        raise pressed[0]
                    raise RuntimeError(f"{what}: waiting for it was interrupted on rank {interrupted}; {so}")
                if late_rank is not None:
                    where = f" on rank {late_rank}" if self.world.size > 1 else ""
                    again = "call result() or poll() again, or abandon()"
                    raise TimeoutError(f"{what}: not durable after {timeout_s:g} s{where}; {so}: {again}")
                self.listen(_LOOK_S)

    def advance(self, interrupted: bool = False, late: bool = False) -> tuple[int | None, int | None]:
        """One exchange of all ranks about all pending saves; nothing when there is none.

        Returns the first rank that is interrupted and the first that is late, None for none. Ctrl-C is raised after
        it: what ends on one rank ends on all. RuntimeError in a fork (`check_fork`), to which no report belongs.
        """
        check_fork()
        with interrupt.held_interrupt():
            return self._advance(interrupted, late)

    def _advance(self, interrupted: bool, late: bool) -> tuple[int | None, int | None]:
        self.listen()
        if not self.pending:
            return None, None
        world = self.world
        size, rank = world.size, world.rank
        row = [rank if interrupted else size, rank if late else size]
        for h in self.pending:
            row += [h.written, h.committed or rank > 0, size if h.error is None else rank]
        first, first_late, *rest = world.minimum(torch.tensor([int(x) for x in row])).tolist()
        for i, h in enumerate(self.pending[:]):
            written, committed, failed = rest[3 * i : 3 * i + 3]
            if failed < size:
                self._fail(h)
            elif committed and written:
                self._finish(h, "durable")
            elif written and rank == 0 and size > 1 and not h.told_to_commit and self.process:
                h.told_to_commit, self._since = True, time.monotonic()
                self.process.send(do="commit", id=h.number)
        return first if first < size else None, first_late if first_late < size else None

    def listen(self, timeout_s: float = 0.0) -> None:
        """Take the writer's reports, waiting for the first; see whether it is dead or stuck. No Ctrl-C loses one."""
        with interrupt.held_interrupt():
            self._send_landed()
            self._listen(timeout_s)

    def _listen(self, timeout_s: float) -> None:
        process = self.process
        if process is None:
            time.sleep(timeout_s)
            return
        for report in process.reports(timeout_s):
            self._take(report)
        if process.channel.closed:
            process.wait_for_death()
        if (death := process.death()) is not None:
            for report in process.reports():
                self._take(report)
            self._lose(death)
            return
        board, now = self.arena.board, time.monotonic()
        assert board is not None, "the arena outlives the process"
        seen = (int(board[TICKS]), process.ready)
        if seen != self._seen or not any(map(_busy, self.pending)):
            self._seen, self._since = seen, now
        elif now - self._since > (self.time_limit_s if process.ready else max(START_S, self.time_limit_s)):
            state = process.state()
            process.kill()
            for h in filter(_busy, self.pending):
                h.tidy_s = _HELD_TIDY_S
            self._lose(
                f"its writer process {process.pid} made no progress for {now - self._since:.1f} s (it was {state};"
                f" the limit is {self.time_limit_s:g} s) and was killed"
            )

    def abandon(self, handle: Handle) -> None:
        """`Handle.abandon`."""
        if handle.done:
            return
        check_fork()
        with interrupt.held_interrupt():
            self._stop(handle)
            handle.world.agree(None, handle.what)
            self._clear(handle)
            self._finish(handle, "abandoned")

    def bytes_written(self, number: int) -> int:
        """Of the save that the writer is at."""
        board = self.arena.board
        return int(board[WRITTEN]) if board is not None and int(board[SAVE]) == number else 0

    def reported(self, handle: Handle) -> None:
        """The user knows of this failure."""
        self.failed = [h for h in self.failed if h is not handle]

    def close(self, wait: bool, timeout_s: float | None) -> None:
        """`AsyncSaver.close`."""
        if self.closed:
            return
        if os.getpid() != self._owner:  # a fork leaves the block of its parent's saver: nothing of it is its own
            self.closed = True
            return
        error: Exception | None = None
        try:
            for handle in self.pending[:] if wait else []:
                try:
                    handle.result(timeout_s)
                except RuntimeError as failed:
                    error = error or failed
                    if not handle.done:
                        break
        finally:
            self.closed = True
            for handle in self.pending[:]:
                self._stop(handle)
                self._finish(handle, "abandoned")
            if self.process:
                self.process.close(_CLOSE_S)
                self.process = None
            self._end.detach()
            self.arena.close()
        if wait and error is None and self.failed:
            error = RuntimeError(self.failed[0].failure)
        if error is not None:
            raise error

    # ---- inside
    def _take(self, report: dict[str, Any]) -> None:
        handle = next((h for h in self.pending if h.number == report["id"]), None)
        if handle is None:
            return
        match report["did"]:
            case "portion" | "written":
                handle.regions.discard(report["at"])
                self.arena.release(report["at"])
                handle.written = report["did"] == "written"
            case "committed":
                handle.committed = True
            case "failed":
                handle.error, handle.stopped = handle.error or report["error"], True
                self._release(handle)
            case "cancelled":
                handle.stopped = True
                self._release(handle)

    def _lose(self, why: str) -> None:
        """The writer is dead, and with it what only it knew."""
        for h in self.pending:
            if h.sent and not (h.committed if h.world.rank == 0 else h.written):
                h.error, h.stopped = h.error or why, True
                self._release(h)
        if self.process is not None:
            self.process.close(0.0)
            self.process = None

    def _stop(self, handle: Handle) -> None:
        """On return this rank's writer writes nothing of the save any more."""
        ended = handle.stopped or (handle.written and handle.world.rank > 0)
        if handle.sent and not ended and self.process:
            self.process.send(do="cancel", id=handle.number)
            end = time.monotonic() + _STOP_S
            while not handle.stopped and self.process and time.monotonic() < end:
                self.listen(LOOK_S)
            if not handle.stopped and self.process:
                self.process.kill()
                self._lose(f"its writer process {self.process.pid} did not let go of another save and was killed")
        self._release(handle)

    def _release(self, handle: Handle) -> None:
        """Give its regions back, when nothing comes from devices any more."""
        for of, landing, _ in self._landing:
            if of is handle:
                landing.wait()
        self._landing = [one for one in self._landing if one[0] is not handle]
        while handle.regions:
            self.arena.release(handle.regions.pop())

    def _fail(self, handle: Handle) -> None:
        """All ranks together: stop, send the first message to all, remove the files."""
        self._stop(handle)
        try:
            handle.world.agree(handle.error, handle.what)
        except RuntimeError as error:
            handle.failure = str(error)
        self._clear(handle)
        self.failed.append(handle)
        self._finish(handle, "failed")

    def _clear(self, handle: Handle) -> None:
        """All ranks together, when none writes any more: on return nothing of the save is left."""
        _tidy(handle)
        handle.world.agree(None, handle.what)

    def _finish(self, handle: Handle, state: str) -> None:
        self.pending.remove(handle)
        _tidy(handle)
        handle.state = state
        if state == "durable":
            handle.durable_s = time.perf_counter() - handle.began
        if handle.owns_saver:
            self.close(False, None)


def _busy(handle: Handle) -> bool:
    """Whether the writer has something to do for it."""
    if not handle.sent or handle.stopped or handle.error is not None:
        return False
    return not handle.written or (handle.told_to_commit or handle.world.size == 1) and not handle.committed


def _tidy(handle: Handle) -> None:
    """Rank 0: remove what a save has left, its note last, without waiting for ever for a file system that is away."""
    draft, handle.draft = handle.draft, None
    if draft is None:
        return

    def work():
        with contextlib.suppress(Exception):
            handle.store.end(draft)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(handle.tidy_s)


def _forgotten(pending: list[Handle], owner: int) -> None:
    """The saver was dropped, or Python ends, without `close`."""
    if pending and os.getpid() == owner:
        names = ", ".join(h.text for h in pending)
        warnings.warn(
            f"saves were abandoned because the program ended without waiting for them: {names}",
            RuntimeWarning,
            stacklevel=2,
        )

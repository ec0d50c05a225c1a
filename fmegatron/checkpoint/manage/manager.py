"""Manager: saves the steps of a run, applies retention, and finds the step to restore.

with Manager("runs/a/checkpoints", keep=Keep(last=2, every=1000), world=world) as manager:
    if manager.latest() is not None:
        start, state, metadata = manager.restore_latest(layouts)
    ...
    report = manager.save(step, state, layouts, metrics={"heldout_loss": 1.7})
    log(step, report.record())
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Unpack

from fmegatron.checkpoint.background.async_save import AsyncSaver
from fmegatron.checkpoint.calls.arguments import check_step, known_ranks, ranks_of
from fmegatron.checkpoint.calls.ranks import Ranks, close_on_exit, compared, together
from fmegatron.checkpoint.dicts.described import described
from fmegatron.checkpoint.files import leases
from fmegatron.checkpoint.files.commit import Store
from fmegatron.checkpoint.manage.deletion import Deleter
from fmegatron.checkpoint.manage.line import Line, newest_good
from fmegatron.checkpoint.manage.others import newer_temporary, others
from fmegatron.checkpoint.manage.pending import Background
from fmegatron.checkpoint.manage.progress import progress
from fmegatron.checkpoint.manage.report import Report, state_bytes
from fmegatron.checkpoint.manage.retention import Keep, is_count, to_delete, with_metrics
from fmegatron.checkpoint.manage.steps import Steps
from fmegatron.checkpoint.manage.tracker import LATEST, Latest, write_latest
from fmegatron.checkpoint.manage.walk import Found, Search
from fmegatron.checkpoint.reading.read import RestoreOptions
from fmegatron.checkpoint.writing.saving import save
from fmegatron.tree import structure

_REPORTS = 100  # kept for a program that does not poll


class Manager:
    """The checkpoints of a run: `directory`/step_00000100 and so on. A context manager, or call `close`.

    world: the ranks that call its methods together (`collectives.connect`); None for one process.
    keep: which complete steps stay after a save: a number n for the n newest, a `Keep`, or None for all.
    show_progress: a bar on stderr, of rank 0, for what takes longer than 2 s; None: where stderr is a terminal.
    saver: for saves in the background (wait=False), which its maker closes; None: made when it is needed, for one
    save in memory at a time, and closed by `close`.
    on_failure: of a save in the background: "warn" (rank 0; training goes on, the next save tries again) or "raise".
    last: the Report of the newest save or restore that ended.

    The directory is the only state, so any number of Managers and tools may read it at any time; one run saves into it
    (`checkpoint.claim` enforces that), and its steps only go up. Steps that another process reads, that are
    pinned, or that are the newest good one are not deleted by rules. Deletion goes on in the background; what goes
    wrong there, or with the tracker file `latest`, is warned about and never raised into training.
    """

    def __init__(
        self,
        directory: str | os.PathLike | Store,
        keep: int | Keep | None = None,
        *,
        world: Ranks | None = None,
        show_progress: bool | None = None,
        saver: AsyncSaver | None = None,
        on_failure: str = "warn",
    ):
        if not is_count(keep) and keep is not None and not isinstance(keep, Keep):
            got = f"keep={keep!r:.60} ({type(keep).__name__})"
            raise ValueError(
                f"Manager: got {got}, wanted a whole number of at least 1, a Keep, or None to keep all; pass keep=2"
            )
        self.directory, self.world, self.show_progress = directory, known_ranks(world), show_progress
        self._given = world
        self.keep = keep if keep is None or isinstance(keep, Keep) else Keep(last=keep)
        self._warned = False  # of content that is not ours
        self._shown = show_progress if self.world.rank == 0 else False
        self.last: Report | None = None
        self._steps = Steps(directory)
        self._line, self._deleter = Line(self._steps), Deleter()
        self._background = Background(self.world, saver, on_failure)
        self._reports: deque[Report] = deque(maxlen=_REPORTS)  # of saves that ended, for the next `poll`
        self._failures: list[str] = []  # of saves in the background, still to be raised

    # ---- what there is
    def __repr__(self) -> str:
        return f"Manager({str(self.directory)!r}, keep={self.keep}): {self._steps.in_words()}"

    def path(self, step: int) -> str:
        """The directory (or URL) of a step."""
        check_step(step)
        return self._steps.place(step).text

    def steps(self) -> list[int]:
        """All complete steps (saved to their end; what is in them is verified when it is read), in rising order."""
        return self._steps.complete()

    def latest(self) -> int | None:
        """The newest complete step, or None: what rank 0 sees, on all ranks.

        It warns, once, of what the directory holds instead: foreign checkpoints, copies not finished, newer steps that
        an older release kept apart."""
        ranks = self.world

        def look() -> int | None:
            if ranks.rank != 0:
                return None
            newest = found[-1] if (found := self.steps()) else None
            texts = (
                () if self._warned else (newer_temporary(self._steps, newest), None if found else others(self._steps))
            )
            for text in filter(None, texts):
                self._warned = True
                warnings.warn(text, RuntimeWarning, stacklevel=4)
            return newest

        newest = together(ranks, f"looking for checkpoints in {self._steps.store.text}", look)
        text = ranks.broadcast_text("" if newest is None else str(newest))
        return int(text) if text else None

    def finite(self, step: int) -> bool | None:
        """Whether loss and gradient norm of a complete step were finite, as its save reported; None: it did not.

        None, too, for a step whose manifest is damaged, or that is not there. Raises OSError for what cannot be read.
        """
        check_step(step)
        return self._steps.facts(step).finite

    def pin(self, step: int) -> None:
        """Exempt a step from retention until `unpin`; for all Managers of the directory. One rank is enough."""
        check_step(step)
        steps = self.steps()
        if step not in steps:
            raise ValueError(f"Manager.pin: got step {step}, wanted one of {steps}")
        leases.pin(self._steps.notes, self._steps.name(step))

    def unpin(self, step: int) -> None:
        """Leave a step to the rules again, and what was set aside of it to `gc`."""
        check_step(step)
        leases.unpin(self._steps.notes, self._steps.name(step))

    def delete(self, step: int) -> None:
        """Delete a step, complete or not, independent of retention. One rank is enough; the files go in the background.

        Raises ValueError when there is none, or when it is being saved, read, or pinned; OSError.
        """
        check_step(step)
        of = self._steps
        if of.name(step) not in of.store.children():
            raise ValueError(f"Manager.delete: got step {step}, wanted one of {of.complete()}")
        if (held := of.other(step)) is not None:
            raise ValueError(
                f"Manager.delete: got step {step}, whose folder holds step {held}, wanted a step; {of.mend(step, held)}"
            )
        removal = "it is being saved" if step in self._busy() else of.withdraw(step)
        if isinstance(removal, str):
            raise ValueError(
                f"Manager.delete: got step {step} ({removal}), wanted one not in use or pinned; wait, or unpin it"
            )
        self._deleter.add(of.place(step).text, removal)
        self._attempt("the tracker could not be written", self._track)

    def rewind(self, step: int) -> None:
        """Report that training goes on from `step`, so that saves may be older than the newest one: all ranks call it.

        What is newer now is set aside by the next save: it is no step any more, is never resumed, is listed by `ls` and
        removed by `gc`. `restore_latest` does this itself, and so does `restore` of an older step.
        """
        self._went_back(step, sure=True)

    def _went_back(self, step: int, sure: bool) -> None:
        def note() -> None:
            check_step(step)
            if self.world.rank == 0:
                self._line.went_back(step, self._busy(), sure)

        together(self.world, f"going back to step {step} in {self._steps.store.text}", note)

    # ---- save

    def save(
        self,
        step: int,
        state: structure.Tree,
        layouts: structure.Tree = None,
        metadata: dict[str, Any] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        finite: bool | None = None,
        wait: bool = True,
    ) -> Report:
        """`checkpoint.save` under the step's name, then tracker and retention. Errors are those of `save`.

        metrics: numbers by which `Keep(best=...)` chooses; they are stored as metadata["metrics"].
        finite: whether loss and gradient norm of this step are finite, None if that is not known; False on one
        rank counts for all. `restore_latest` prefers the others, and retention keeps the newest of them.
        wait: until it is durable; False: only until the state may change again (the report has `durable=False`), and
        `poll`, `save` or `close` report how it ended. Leftovers of killed saves, of any step, are removed first.

        Raises ValueError (RuntimeError on ranks other than 0) for a step below the newest one, before anything is
        written, unless training went back (`restore`, `restore_latest`, `rewind`): then what is newer is set aside.
        The same for finite=False in the place of a good save of this step, which stays.
        """
        ranks, of, began = ranks_of(self.world), self._steps, time.perf_counter()
        what = f"saving into {of.store.text}"

        def prepare():
            check_step(step)
            words = with_metrics(metadata, metrics)
            return *described(state, layouts, self._given, words), of.place(step)

        def go_on() -> None:
            if ranks.rank == 0 and (aside := self._line.begin(step, said_finite)):
                warnings.warn(aside, RuntimeWarning, stacklevel=4)

        (state, layouts, metadata, place), (all_say,) = compared(ranks, what, prepare, lambda _: [finite is False], 1)
        said_finite = all_say and finite is not False
        if any(begun.step > step for _, begun in self._background.pending):
            self._note(self._background.finish(self._bar))  # then it is on the disk what is newer
        self._note(self._background.finish(self._bar, only=place.text))  # this step again: one after the other
        together(ranks, what, go_on)
        if ranks.rank == 0:
            self._attempt("what killed saves left could not be removed", self._clean)
        report = Report("save", step, place.text, state_bytes(layouts), 0.0, 0.0, durable=wait)
        if not wait:
            return self._background.begin(place, state, layouts, metadata, finite, report)
        with progress(f"saving step {step}", report.bytes, of.so_far(step), self._shown):
            save(place, state, layouts, ranks, metadata, step=step, finite=finite)
        seconds = time.perf_counter() - began
        self.last = replace(report, seconds=seconds, stall_seconds=seconds)
        self._reports.append(self.last)
        if ranks.rank == 0:
            self._when_durable(step)
        return self.last

    def poll(self) -> tuple[Report, ...]:
        """Reports of the saves that have ended since the last call. All ranks call it once a step.

        Never waits for the disk; one small all-reduce while a save is pending, and nothing otherwise. When a save in
        the background has become durable, tracker and retention follow here. Raises RuntimeError on all ranks, once for
        each save in the background that has failed, with on_failure="raise"; otherwise its Report has an `error`.
        """
        self._note(self._background.poll())
        self._raise()
        reports, self._reports = self._reports, deque(maxlen=_REPORTS)
        return tuple(reports)

    def _note(self, reports: list[Report]) -> None:
        """Saves in the background have ended, on all ranks."""
        for report in reports:
            self._reports.append(report)
            if report.durable:
                self.last = report
                if self.world.rank == 0:
                    self._when_durable(report.step)
            elif self._background.on_failure == "raise":
                self._failures.append(report.error or "")

    def _raise(self) -> None:
        if self._failures:
            raise RuntimeError(self._failures.pop(0))

    def _clean(self) -> None:
        going = [text.rpartition("/")[2] for text in self._deleter.waiting()]
        self._steps.clean([self._steps.name(step) for step in self._busy()] + going)

    def _busy(self) -> set[int]:
        """Steps that are being saved."""
        return {begun.step for _, begun in self._background.pending}

    def _bar(self, what: str, total: int, so_far: Callable[[], int | None]):
        return progress(what, total, so_far, self._shown)

    def _when_durable(self, step: int) -> None:
        """Rank 0: tracker and retention. Nothing that goes wrong here is an error of the run."""
        self._attempt("the tracker could not be written", self._track)
        self._attempt("old checkpoints could not be deleted", lambda: self._retain(step))
        self._tell()

    def _tell(self) -> None:
        for failure in self._deleter.failures():
            warnings.warn(failure, RuntimeWarning, stacklevel=4)

    def _retain(self, step: int) -> None:
        of, keep = self._steps, self.keep
        if keep is None:
            return
        saved = [of.saved(s, keep.best is not None) for s in of.complete()]
        # "Now" is when this step was saved, by the clock that gave the others their times.
        now = next((s.saved_at for s in saved if s.step == step), None) or time.time()
        if old := to_delete(saved, keep, {step} | self._busy(), now):
            of.check(step)  # another process may have destroyed it, against all signs; then the older ones stay
            good = newest_good(of)
            of.make_durable([s.step for s in saved if s.step not in old])
            self._delete([s for s in old if s != good])

    def _delete(self, steps: list[int]) -> None:
        of = self._steps
        for step in steps:
            if self._deleter.full:
                return  # a slow disk; the next save tries again
            with contextlib.suppress(FileNotFoundError):  # another run has deleted it
                if not isinstance(removal := of.withdraw(step), str):
                    self._deleter.add(of.place(step).text, removal)

    def _track(self) -> None:
        notes, found = self._steps.notes, self.steps()
        if not found:
            return notes.remove(LATEST)
        write_latest(notes, Latest(found[-1], self._steps.name(found[-1]), time.time()))

    def _attempt(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # of any kind: the step is durable, and what others have left there ends no run
            warnings.warn(f"{self._steps.store.text}: {what}: {error}", RuntimeWarning, stacklevel=4)

    # ---- restore

    def restore_latest(
        self,
        target: structure.Tree = None,
        *,
        rank: int | None = None,
        prefer_finite: bool = True,
        **options: Unpack[RestoreOptions],
    ) -> tuple[int, Any, dict[str, Any]]:
        """(step, state, metadata) of the newest step that is complete on all ranks; arguments are those of `restore`.

        A step that is damaged is skipped with a warning that names the damage, and
        so is, as long as there is a better one, a step saved with a loss or gradient norm that was not finite
        (prefer_finite=False takes it). The next save sets aside what is newer than the step returned.

        Raises CheckpointError when no step is good, ValueError when the target does not fit a good one, RuntimeError on
        all ranks when files cannot be looked at: what is there is then unknown, and no older step is taken for it.
        """
        search = Search(self._steps, target, self.world, rank, {**options}, self.show_progress, prefer_finite)
        found = self._timed(search.newest)
        self._went_back(found.step, sure=True)
        return found.step, found.state, found.metadata

    def restore(
        self, step: int, target: structure.Tree = None, *, rank: int | None = None, **options: Unpack[RestoreOptions]
    ) -> tuple[Any, dict[str, Any]]:
        """(state, metadata) of this step and no other; arguments and errors are those of `checkpoint.restore`.

        Training that goes on from an older step than the newest may save: see `rewind`. What is newer need not be seen
        for this. To only look at a step while a run goes on, use `checkpoint.restore(manager.path(step), ...)`.
        """
        together(self.world, f"restoring from {self._steps.store.text}", lambda: check_step(step))
        search = Search(self._steps, target, self.world, rank, {**options}, self.show_progress)
        found = self._timed(lambda: search.one(step))
        self._went_back(found.step, sure=False)
        return found.state, found.metadata

    def _timed(self, work: Callable[[], Found]) -> Found:
        began = time.perf_counter()
        found, seconds = work(), time.perf_counter() - began
        self.last = Report("restore", found.step, self.path(found.step), found.nbytes, seconds, seconds)
        return found

    # ---- life

    def close(self, wait: bool = True, wait_s: float = 60.0) -> None:
        """End what goes on in the background. All ranks call it; without `wait` it needs no other rank.

        wait: first finish the pending saves; else abandon them. Deletions that take longer than `wait_s` seconds are
        left to a later run. Raises RuntimeError as `poll` does, when all is closed. The Manager can be used again.
        """
        try:
            if wait:
                self._note(self._background.finish(self._bar))
        finally:
            try:
                self._background.close()
            finally:
                self._deleter.close(wait_s)
                self._tell()
                self._deleter = Deleter()
        self._raise()

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, kind, *_) -> None:
        """Finish the pending saves; after an error, only where that needs no other rank; after Ctrl-C none."""
        close_on_exit(kind, self.close, self.world)

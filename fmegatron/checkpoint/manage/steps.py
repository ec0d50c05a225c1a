"""A directory of steps: which are complete, their metadata for retention, and the removal of one."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from fmegatron.checkpoint.files import leases
from fmegatron.checkpoint.files.commit import Store
from fmegatron.checkpoint.files.format import MANIFEST, MARKER, CheckpointError
from fmegatron.checkpoint.files.manifest import step_of_head, step_of_marker
from fmegatron.checkpoint.files.saved import SavedAgain, again, save_at
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.manage.retention import Saved
from fmegatron.checkpoint.reading.sample import read_back
from fmegatron.checkpoint.writing.part import check_written
from fmegatron.files import disk

_HEAD_BYTES = 4096  # of a marker, all
_LOOKS = 20  # at a directory in which steps come and go


@dataclass(frozen=True)
class Facts:
    """Facts from the manifest of a complete step. problem: why they cannot be read, or None.

    finite: of loss and gradient norm of the step, None if the run did not report it.
    """

    problem: str | None = None
    finite: bool | None = None
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether a run can go on from here, as far as the manifest shows."""
        return self.problem is None and self.finite is not False


class Steps:
    """Checkpoints named step_00000100 and so on, of one directory, URL or Store, which need not exist yet.

    What cannot be looked at is an OSError, and never taken for something that is not there.
    """

    def __init__(self, directory: str | os.PathLike | Store):
        self.store = open_store(directory)
        self.notes = self.store.notes()
        self.watch = leases.Watch()
        self._facts: dict[int, tuple[Any, Facts]] = {}
        self._markers: dict[int, tuple[Any, int | None]] = {}
        self._durable: dict[int, Any] = {}

    def name(self, step: int) -> str:
        """Name of a step in the directory."""
        return leases.step_name(step)

    def place(self, step: int) -> Store:
        """Where a step is, or will be."""
        return self.store.child(self.name(step))

    def in_words(self) -> str:
        """The complete steps as text; where they cannot be looked at, the reason: for a repr, which does not fail."""
        try:
            steps = [str(step) for step in self.complete()]
        except (OSError, ValueError) as error:
            return str(error)
        return f"steps {', '.join([*steps[:2], '...', steps[-1]] if len(steps) > 4 else steps) or 'none'}"

    def complete(self, above: int = -1) -> list[int]:
        """All complete steps (saved to their end; what is in them is verified when it is read), in rising order.

        above: only those with a larger number; the others are not looked at.
        """
        found: list[int] = []
        for _ in range(_LOOKS):
            names = self.store.children()
            steps = self._steps(names, above)
            there = [step for step in steps if self.place(step).is_complete()]
            found = [step for step in there if self.other(step) is None]
            # A step may have been deleted between the two looks, and a newer one saved before: then there is another.
            if len(there) == len(steps) or self.store.children() == names:
                break
        return found

    def incomplete(self, above: int = -1) -> list[int]:
        """Steps with a larger number than `above` that are there, neither complete nor of a save that is under way or
        was killed: they are damaged, or copies that are not finished; in rising order.
        """
        found = [s for s in self._steps(self.store.children(), above) if self._is_broken(self.place(s))]
        # They may have been deleted or saved again between the two looks.
        return [s for s in found if self._is_broken(self.place(s))]

    def _is_broken(self, place: Store) -> bool:
        return not place.is_complete() and not place.is_begun()

    def misnamed(self) -> list[int]:
        """Numbers in the names of checkpoints that were saved as another step (after `cp` or `mv`), rising.

        They are no steps: not listed, not deleted, in no save's way.
        """
        return [step for step in self._steps(self.store.children(), -1) if self.other(step) is not None]

    def other(self, step: int) -> int | None:
        """The other step that this checkpoint was saved as; None: it is of this one, or of none, or is not there, or is
        damaged: a marker alone may be that of another save, which a read reports."""
        named = self._named(step)
        return None if named in (None, step) or self.facts(step).problem is not None else named

    def _named(self, step: int) -> int | None:
        """The step of a complete checkpoint, by its pointer, or its marker, or (until 2026-11-27) its manifest; None:
        none has it."""
        place = self.place(step)
        try:
            pointer = place.pointer() or {}
            if type(named := pointer.get("step")) is int:
                return named
            stamp, known = place.stamp(), self._markers.get(step)
            if known is None or known[0] != stamp:
                files = place.locate()
                named = step_of_marker(disk.look(lambda: files.read(MARKER, 0, _HEAD_BYTES)))
                if named is None:
                    named = step_of_head(disk.look(lambda: files.read(MANIFEST, 0, _HEAD_BYTES)))
                known = self._markers[step] = stamp, named
        except (OSError, CheckpointError):  # then it stays a step: a read of it reports what is wrong
            return None
        return known[1]

    def misnaming(self, step: int) -> str | None:
        """That a checkpoint is of another step, and what mends it, as a text; None for one that is not."""
        held = self.other(step)
        at = self.place(step).text
        return None if held is None else f"{at}: it holds step {held}, and not {step}; {self.mend(step, held)}"

    def mend(self, step: int, held: int) -> str:
        """What gives a checkpoint the name of the step that it is of; where that is there, one that is no step's."""
        place, right = self.place(step), self.place(held)
        if right.is_complete():
            return f"{place.how_to_move(f'{place.text}.copy')} ({self.name(held)} is there, too)"
        return place.how_to_move(right.text)

    def _steps(self, names: Collection[str], above: int) -> list[int]:
        matches = (leases.STEP.fullmatch(name) for name in names)
        # step_000000007, made by another program, is not the name of step 7
        steps = (int(m[1]) for m in matches if m and m[0] == self.name(int(m[1])))
        return sorted(step for step in steps if step > above)

    def facts(self, step: int) -> Facts:
        """Facts from the manifest of a complete step; read once, and again when the step was saved again."""
        stamp = self.place(step).stamp()
        if (known := self._facts.get(step)) is None or known[0] != stamp:
            try:
                manifest = save_at(self.place(step)).manifest
                metrics = manifest.metadata.get("metrics")
                facts = Facts(None, manifest.finite, metrics if isinstance(metrics, dict) else {})
            except (CheckpointError, SavedAgain) as error:
                facts = Facts(str(error))
            known = self._facts[step] = stamp, facts
        return known[1]

    def check(self, step: int) -> None:
        """Read the manifest and a sample of a step back from the disk, and see that all its files are there.

        Raises CheckpointError.

        (Not from what is known: the files may have been destroyed since.)
        """

        def work() -> None:
            saved = save_at(self.place(step))
            try:
                check_written(saved.storage, saved.manifest)
            except RuntimeError as error:
                missing = CheckpointError(str(error))
                saved.check_there(missing)  # no damage if another run has saved it again meanwhile
                raise missing from None
            read_back(saved)

        self._facts.pop(step, None)
        again(work)

    def make_durable(self, steps: Collection[int]) -> None:
        """A power cut does not take these complete steps any more: who saved one may have died before its last fsync.

        For who deletes others because these are there. Raises OSError.
        """
        for step in steps:
            place = self.place(step)
            if self._durable.get(step) != (stamp := place.stamp()):
                place.durable()
                self._durable[step] = stamp

    def saved(self, step: int, with_metrics: bool = False) -> Saved:
        """What the rules of retention must know of a complete step."""
        return Saved(step, self.place(step).saved_at(), self.facts(step).metrics if with_metrics else {})

    def so_far(self, step: int) -> Callable[[], int | None]:
        """Bytes of a save of this step that is under way, for a progress bar; None where that cannot be seen."""
        place = self.place(step)

        def looked() -> int | None:
            with contextlib.suppress(OSError):  # files come and go while we look
                return place.bytes_begun()
            return None

        return looked

    def why_held(self, step: int) -> str | None:
        """Why a complete step must stay: it is pinned, or being read now. (`withdraw` looks again.)"""
        return leases.why_held(self.notes, self.name(step), self.watch)

    def withdraw(self, step: int) -> Callable[[threading.Event], None] | str:
        """Take a step away, in one step, unless it is being read or pinned: then why not.

        Otherwise returns what then removes its files, until the event is set. Raises OSError.
        """
        with leases.leaving(self.notes, self.name(step), self.watch) as held:
            if held is not None:
                return held
            return self.place(step).withdraw().delete

    def set_aside(self, step: int, wait_s: float = 0.0) -> str:
        """Take a complete step from the list, in one step, and keep its files; returns where they are.

        wait_s: for its readers. Raises ValueError when one remains, OSError.
        """
        end = time.monotonic() + wait_s
        while True:
            with leases.leaving(self.notes, self.name(step), self.watch, pins=False) as held:
                if held is None:
                    at = self.place(step).set_aside()
                    with contextlib.suppress(OSError):  # the new step of this number is then pinned, too
                        leases.move_pin(self.notes, self.name(step), at.rpartition("/")[2])
                    return at
            if time.monotonic() >= end:
                text = f"got a step that is in use ({held}), wanted one to set aside; wait until that has ended"
                raise ValueError(f"{self.place(step).text}: {text}")
            time.sleep(min(1.0, max(end - time.monotonic(), 0.01)))

    def clean(self, busy: Collection[str] = ()) -> None:
        """Remove what dead saves, deletions and readers left; `busy`: names of what is being saved or deleted now."""
        self.store.clean(leases.STEP.pattern, busy, self.watch)
        leases.clean(self.notes, self.watch)
        self.notes.clean()

"""A directory of steps: which are complete, what retention must know of them, and how one of them goes."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Collection

from fmegatron.checkpoint.files import leases
from fmegatron.checkpoint.files.commit import resolve
from fmegatron.checkpoint.files.describe import metadata
from fmegatron.checkpoint.files.format import MARKER, CheckpointError
from fmegatron.checkpoint.files.notes import Notes
from fmegatron.checkpoint.files.storage import Store, open_store
from fmegatron.checkpoint.manage.deletion import remove_tree
from fmegatron.checkpoint.manage.progress import written_below
from fmegatron.checkpoint.manage.retention import Saved


class Steps:
    """Checkpoints named step_00000100 and so on, of one directory, URL or Store, which need not exist yet."""

    def __init__(self, directory: str | os.PathLike | Store):
        self.store = open_store(directory)
        self.notes = self.store.notes()
        self.renames = isinstance(self.notes, Notes)  # a file system: what is withdrawn has another name
        self._metrics: dict[int, dict] = {}

    def name(self, step: int) -> str:
        """Name of a step in the directory."""
        return f"step_{step:08d}"

    def place(self, step: int) -> Store:
        """Where a step is, or will be."""
        return self.store.child(self.name(step))

    def complete(self) -> list[int]:
        """All complete steps (saved to their end; what is in them is verified when it is read), in rising order."""
        found = [
            int(m[1]) for name in self.store.children() if (m := leases.STEP.fullmatch(name)) and self._canonical(m)
        ]
        return sorted(step for step in found if self.place(step).is_complete())

    def _canonical(self, m: re.Match) -> bool:
        return m[0] == self.name(int(m[1]))  # step_000000007, made by somebody else, is not the name of step 7

    def saved(self, step: int, with_metrics: bool) -> Saved:
        """What retention must know of a complete step. Metrics are read once; those of a damaged step are unknown."""
        at = None
        with contextlib.suppress(OSError, ValueError):
            if self.renames:
                at = os.stat(os.path.join(resolve(self.place(step).path), MARKER)).st_mtime
            else:
                at = float(self.notes.read(self._stamp(step)) or "nan")
        if with_metrics and step not in self._metrics:
            try:
                found = metadata(self.place(step)).get("metrics")
            except (CheckpointError, OSError, RuntimeError):  # (RuntimeError: it is saved again and again)
                found = None
            self._metrics[step] = found if isinstance(found, dict) else {}
        return Saved(step, at, self._metrics.get(step, {}))

    def note_saved(self, step: int) -> None:
        """This step was just saved: what was known of it is old. An object store does not tell times, so we note it."""
        self._metrics.pop(step, None)
        if not self.renames:
            self.notes.write(self._stamp(step), str(time.time()).encode())

    def _stamp(self, step: int) -> str:
        return f".{self.name(step)}.saved"

    def so_far(self, step: int) -> Callable[[], int | None]:
        """Bytes of a save of this step that is under way, for a progress bar; None where that cannot be seen."""
        return written_below(self.place(step).path) if self.renames else lambda: None

    def protected(self) -> set[int]:
        """Complete steps that are pinned, or read by somebody now. (`withdraw` looks again.)"""
        return {step for step in self.complete() if leases.is_held(self.notes, self.name(step))}

    def withdraw(self, step: int) -> Callable[[threading.Event], None] | None:
        """Take a complete step away, in one step, unless somebody reads it or it is pinned: then None.

        Returns what then removes its files, until the event is set. Raises OSError.
        """
        with leases.leaving(self.notes, self.name(step)) as free:
            if not free:
                return None
            gone = self.place(step).withdraw()
        self._metrics.pop(step, None)
        if self.renames:
            return lambda stop: remove_tree(gone.root, stop)

        def remove(stop: threading.Event) -> None:
            gone.delete()
            self.notes.remove(self._stamp(step))

        return remove

    def clean(self, busy: Collection[str] = ()) -> None:
        """Remove what killed saves, deletions and readers left; `busy`: names of what is being saved or deleted now.

        Finishes a re-save that was killed between its two renames.
        """
        self.store.clean(leases.STEP.pattern, busy)
        leases.clean(self.notes)
        self.notes.clean()

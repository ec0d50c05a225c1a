"""A directory of steps: which are complete, what retention must know of them, and how one of them goes."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Collection

from fmegatron.checkpoint import leases
from fmegatron.checkpoint.deletion import remove_tree
from fmegatron.checkpoint.describe import metadata
from fmegatron.checkpoint.folder import FolderStore
from fmegatron.checkpoint.format import MARKER, CheckpointError
from fmegatron.checkpoint.retention import Saved
from fmegatron.checkpoint.storage import Store, open_store

_STEP = re.compile(r"step_(\d{8,})")


class Steps:
    """Checkpoints named step_00000100 and so on, of one directory, URL or Store, which need not exist yet."""

    def __init__(self, directory: str | os.PathLike | Store):
        self.store = open_store(directory)
        self.notes = self.store.notes()
        self._metrics: dict[int, dict] = {}

    def name(self, step: int) -> str:
        """Name of a step in the directory."""
        return f"step_{step:08d}"

    def place(self, step: int) -> Store:
        """Where a step is, or will be."""
        return self.store.child(self.name(step))

    def complete(self) -> list[int]:
        """All complete steps (saved to their end; what is in them is verified when it is read), in rising order."""
        found = [int(m[1]) for name in self.store.children() if (m := _STEP.fullmatch(name)) and self._canonical(m)]
        return sorted(step for step in found if self.place(step).is_complete())

    def _canonical(self, m: re.Match) -> bool:
        return m[0] == self.name(int(m[1]))  # step_000000007, made by somebody else, is not the name of step 7

    def saved(self, step: int, with_metrics: bool) -> Saved:
        """What retention must know of a complete step. Metrics are read once; those of a damaged step are unknown."""
        at = None
        if isinstance(self.store, FolderStore):
            with contextlib.suppress(OSError):
                at = os.stat(os.path.join(self.place(step).locate().root, MARKER)).st_mtime
        if with_metrics and step not in self._metrics:
            try:
                found = metadata(self.place(step)).get("metrics")
            except (CheckpointError, OSError):
                found = None
            self._metrics[step] = found if isinstance(found, dict) else {}
        return Saved(step, at, self._metrics.get(step, {}))

    def forget(self, step: int) -> None:
        """This step was just saved, or deleted: what was known of it is old."""
        self._metrics.pop(step, None)

    def protected(self) -> set[int]:
        """Steps that are pinned, or read by somebody now. (`withdraw` looks again.)"""
        return {step for step in self.complete() if leases.is_held(self.notes, self.name(step))}

    def withdraw(self, step: int) -> Callable[[threading.Event], None] | None:
        """Take a complete step away, in one step, unless somebody reads it or it is pinned: then None.

        Returns what then removes its files, until the event is set. Raises OSError.
        """
        with leases.leaving(self.notes, self.name(step)) as free:
            if not free:
                return None
            gone = self.place(step).withdraw()
        self.forget(step)
        if isinstance(self.store, FolderStore):
            return lambda stop: remove_tree(gone.root, stop)
        return lambda stop: gone.delete()

    def clean(self, busy: Collection[int] = ()) -> None:
        """Remove what killed saves, deletions and readers left, but nothing of the `busy` steps, which are being saved.

        Finishes a re-save that was killed between its two renames.
        """
        if not self.store.children() and not self.notes.names():
            return
        besides = "|".join(self.name(step) for step in busy)
        self.store.clean(rf"(?!(?:{besides})$)step_\d{{8,}}" if besides else _STEP.pattern)
        leases.clean(self.notes)
        self.notes.clean()

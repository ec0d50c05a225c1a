"""One save, held open, so that every read is of that save while others are written to the same place.

A save never changes files of another: it takes the other's place and then removes its files. So a reader that holds the
files of one save (an open directory, the keys of one token) reads those, or finds them gone. Gone files of a save that
has been replaced are no damage: `again` begins anew, with the save that is there now.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fmegatron.checkpoint.files.commit import Store
from fmegatron.checkpoint.files.format import MARKER, CheckpointError, Manifest
from fmegatron.checkpoint.files.manifest import read_manifest
from fmegatron.checkpoint.files.storage import Storage

_TRIES = 8  # how often a reader begins anew because the checkpoint was saved again


class SavedAgain(RuntimeError):
    """A checkpoint was saved again, or deleted, while it was read: what was read of it is of no use."""


@dataclass(frozen=True)
class Save:
    """One save at `store`: its files and its manifest."""

    store: Store
    storage: Storage
    manifest: Manifest

    def check_there(self, error: CheckpointError) -> None:
        """Raise SavedAgain if the save is not at its place any more, which explains an error in reading it."""
        _check(self.store, self.storage, error)

    def check_unchanged(self) -> None:
        """Raise SavedAgain if the files were overwritten in place, as a copying program does: where no digest is looked
        at, nothing else shows that. One small file is read."""
        with contextlib.suppress(OSError):  # gone: then it is on its way out, and what was read is of this save
            if self.manifest.digest.encode() not in self.storage.read(MARKER, 0, 4096):
                raise SavedAgain(_text(self.store))


def save_at(store: Store) -> Save:
    """The save that is at a place now. Raises CheckpointError."""

    def look() -> Save:
        storage = store.locate()
        try:
            return Save(store, storage, read_manifest(storage))
        except CheckpointError as error:
            _check(store, storage, error)
            raise

    return again(look)


def again(work: Callable[[], Any]) -> Any:
    """`work()`, begun anew, a bounded number of times, when a checkpoint was saved again while it was read."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(SavedAgain):
            return work()
    return work()


def _check(store: Store, storage: Storage, error: CheckpointError) -> None:
    """Raise SavedAgain if `storage` is not what is at `store` now."""
    with contextlib.suppress(OSError, CheckpointError):  # where that cannot be seen, the error stands
        if _identity(storage) != _identity(store.locate()):
            raise SavedAgain(_text(store)) from error


def _identity(storage: Storage) -> Any:
    """None where nothing is."""
    try:
        return storage.identity()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _text(store: Store) -> str:
    return (
        f"{store.text}: was saved again, or deleted, while it was read; read it again when no other job saves there, or"
        " restore another step"
    )

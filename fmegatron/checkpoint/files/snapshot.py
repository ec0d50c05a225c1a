"""Snapshots: one save, held open, so that every read is of that save while others are written to the same place.

    with open_snapshot(path) as saved:
        config = checkpoint.metadata(saved)["config"]
        state = checkpoint.restore(saved, layouts_of(config), world=world)

A save never changes files of another: it takes the other's place and then removes its files. So a reader that holds the
files of one save (an open directory, the keys of one token) reads those, or finds them gone. Gone files of a save that
has been replaced are no damage: `again` begins anew, with the save that is there now.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fmegatron.checkpoint.files.format import MARKER, CheckpointError, Manifest
from fmegatron.checkpoint.files.manifest import read_manifest
from fmegatron.checkpoint.files.open_store import holding, open_store
from fmegatron.checkpoint.files.storage import Storage, Store
from fmegatron.checkpoint.files.targets import Target
from fmegatron.layout import Box

_TRIES = 8  # how often a reader begins anew because the checkpoint was saved again


class SavedAgain(RuntimeError):
    """A checkpoint was saved again, or deleted, while it was read: what was read of it is of no use."""


class ForeignReader(Protocol):
    """How the elements of a checkpoint of another system are read; its leaves have neither arrays nor pieces."""

    @property
    def kind(self) -> str:
        """What it is, in words."""
        ...

    @property
    def verifies(self) -> bool:
        """Whether the files have checksums, which `fill` compares."""
        ...

    def check(self, wanted: Mapping[str, Sequence[Box]]) -> None:
        """Raise CheckpointError unless these regions, by stored path, are in the files; nothing is allocated."""

    def fill(self, wanted: Mapping[str, Sequence[Target]], verify: bool) -> None:
        """Fill the targets, by stored path. Raises CheckpointError naming tensor and file."""

    def reads(self, path: str, box: Box) -> Iterator[tuple[str, int]]:
        """(file, bytes) that `fill` reads for a region of a leaf."""
        ...


@dataclass(frozen=True)
class Foreign:
    """A checkpoint of another system as the source of a restore; `fmegatron.interop.source` makes it. It is opened when
    it is read, by `look`, so that what is wrong with it is an error of all ranks. text: the path.
    """

    text: str
    look: Callable[[], Snapshot]


@dataclass(frozen=True)
class Snapshot:
    """One save at `store`: its files and its manifest. Functions that take a path take a Snapshot as well.

    reader: of a checkpoint of another system.
    """

    store: Store
    storage: Storage
    manifest: Manifest
    reader: ForeignReader | None = None

    @property
    def text(self) -> str:
        """Path or URL of the files, for messages."""
        return self.storage.text

    @property
    def digest(self) -> int:
        """63 bits that saves have in common only if they hold the same: elements, metadata, step and layouts."""
        return int(self.manifest.digest, 16) >> 1

    def check(self, error: CheckpointError) -> None:
        """Raise SavedAgain if the save is not at its place any more, which explains an error in reading it."""
        if self.reader is None:
            _check(self.store, self.storage, error)

    def check_unchanged(self) -> None:
        """Raise SavedAgain if the files were overwritten in place, as a copying program does: where no digest is looked
        at, nothing else shows that. One small file is read."""
        with contextlib.suppress(OSError):  # gone: then it is on its way out, and what was read is of this save
            if self.manifest.digest.encode() not in self.storage.read(MARKER, 0, 4096):
                raise SavedAgain(_text(self.store))


Saved = str | os.PathLike | Store | Snapshot | Foreign  # whatever names a checkpoint that is read


@contextlib.contextmanager
def open_snapshot(path: str | os.PathLike | Store | Foreign) -> Iterator[Snapshot]:
    """The save that is at a path, URL, Store or foreign source now, for any number of `restore`, `metadata`, `layouts`,
    `describe`.

    A step of a Manager is not deleted within this block. If it is saved again there, what is read is still of this
    save; once its files are gone, reading them raises RuntimeError. Raises CheckpointError as `restore`.
    """
    if isinstance(path, Foreign):
        yield path.look()
        return
    store = open_store(path)
    with holding(store):
        yield snapshot_of(store)


def snapshot_of(path: Saved) -> Snapshot:
    """The save that is at a path now; a Snapshot as it is. Raises CheckpointError."""
    if isinstance(path, Snapshot):
        return path
    if isinstance(path, Foreign):
        return path.look()
    store = open_store(path)

    def look() -> Snapshot:
        storage = store.locate()
        try:
            return Snapshot(store, storage, read_manifest(storage))
        except CheckpointError as error:
            _check(store, storage, error)
            raise

    return again(look)


def on_snapshot(path: Saved, work: Callable[[Snapshot], Any], first: Snapshot | None = None) -> Any:
    """`work(snapshot)` of the save at a path; with the next one, a bounded number of times, when it is saved again.

    first: a snapshot to begin with.  A Snapshot as the path is the only one. Raises CheckpointError, SavedAgain.
    """
    if isinstance(path, Snapshot):
        return work(path)
    if first is not None:
        with contextlib.suppress(SavedAgain):
            return work(first)
    return again(lambda: work(snapshot_of(path)))


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

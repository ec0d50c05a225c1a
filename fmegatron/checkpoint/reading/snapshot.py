"""Snapshots: our own source of leaves, one save at a path, URL or Store that is held open.

with open_snapshot(path) as saved:
    config = checkpoint.metadata(saved)["config"]
    state = checkpoint.restore(saved, layouts_of(config), world=world)
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from fmegatron.checkpoint.files.commit import Store
from fmegatron.checkpoint.files.format import FORMAT, Array, CheckpointError, StoredLeaf, digest_text
from fmegatron.checkpoint.files.manifest import layout_from_json
from fmegatron.checkpoint.files.saved import Save, SavedAgain, again, save_at
from fmegatron.checkpoint.files.stores import holding, open_store
from fmegatron.checkpoint.files.targets import Target
from fmegatron.checkpoint.reading.bands import cells
from fmegatron.checkpoint.reading.digests import stored_digests
from fmegatron.checkpoint.reading.fetch import Fetch
from fmegatron.checkpoint.reading.source import Digests, Foreign, Grain, Source
from fmegatron.layout import Box, Layout


@dataclass(frozen=True)
class Snapshot(Save, Source):
    """One save at `store`: its files and its manifest. Functions that take a path take a Snapshot as well."""

    @property
    def kind(self) -> str:
        """Our format's name."""
        return FORMAT

    @property
    def text(self) -> str:
        """Path or URL of the files, for messages."""
        return self.storage.text

    @property
    def digest(self) -> int:
        """63 bits that saves have in common only if they hold the same: elements, metadata, step and layouts."""
        return int(self.manifest.digest, 16) >> 1

    @property
    def named(self) -> str:
        """By the digest in its marker."""
        return f"manifest.json {self.manifest.digest}"

    @property
    def leaves(self) -> Mapping[str, StoredLeaf]:
        """Those of the manifest."""
        return self.manifest.leaves

    def fill(self, wanted: Mapping[str, Sequence[Target]], verify: bool = True) -> None:
        """Fill the targets: every band that they need is read once, on a few threads. Raises as `Fetch`."""
        with Fetch(self, verify) as fetch:
            for path, targets in wanted.items():
                fetch.add(self.manifest.leaves[path], targets)

    @property
    def step(self) -> int | None:
        """As it was passed to the save."""
        return self.manifest.step

    @property
    def finite(self) -> bool | None:
        """As it was passed to the save."""
        return self.manifest.finite

    @property
    def metadata(self) -> dict[str, Any]:
        """As it was passed to the save, with the plain values of a state that was saved without layouts."""
        return self.manifest.metadata

    @property
    def version(self) -> int:
        """Of the format that it is stored in."""
        return self.manifest.version

    @property
    def meshes(self) -> Sequence[Mapping[str, Any]]:
        """Those of the manifest."""
        return self.manifest.meshes

    def layout_of(self, path: str) -> Layout:
        """The layout under which a leaf was written. Raises CheckpointError where it cannot be read."""
        return layout_from_json(self.manifest.leaves[path], self.manifest.meshes)

    def cells(self, path: str, box: Box) -> Iterator[tuple[tuple[Grain, ...], Box]]:
        """A box cut along the bands of the files."""
        return cells(self.manifest, self.manifest.leaves[path], box)

    def grid(self, path: str) -> tuple[tuple[int, ...], ...]:
        """Chunks and bands of a leaf that is in an array."""
        array, skip = self._array(path), len(self.leaves[path].at)
        return () if array is None else (array.chunk[skip:], array.band[skip:])

    @property
    def verifies(self) -> bool:
        """Every band has a digest."""
        return True

    def digests(self, path: str) -> Digests | None:
        """Those of a leaf that is in an array; of a stack all differ where one does."""
        array, at = self._array(path), self.leaves[path].at
        if array is None:
            return None

        def table() -> np.ndarray:
            try:
                found = stored_digests(self, array, path)
                return found.reshape(*array.shape[: len(at)], -1, found.shape[1])[at] if at else found
            except CheckpointError as error:
                self.check_there(error)
                raise

        combined = f"{array.digest} {at}" if at else array.digest
        return Digests(array.chunk[len(at) :], array.band[len(at) :], combined, table)

    def digest_of(self, path: str) -> str | None:
        """Of the digests of all arrays that the leaf has elements in."""
        leaf = self.manifest.leaves[path]
        names = [leaf.array] if leaf.array is not None else [piece.array for piece in leaf.pieces]
        found = [leaf.layout, leaf.at, *(self.manifest.arrays[name].digest for name in names)]
        return digest_text(json.dumps(found, sort_keys=True).encode())

    def pinned(self) -> AbstractContextManager[None]:
        """A step of a Manager is not deleted within this block."""
        return holding(self.store)

    def _array(self, path: str) -> Array | None:
        name = self.manifest.leaves[path].array
        return None if name is None else self.manifest.arrays[name]


Saved = str | os.PathLike | Store | Source | Foreign  # whatever names a checkpoint that is read


@contextlib.contextmanager
def open_snapshot(path: Saved) -> Iterator[Source]:
    """The save that is at a path, URL, Store or foreign source now, for any number of `restore`, `metadata`, `layouts`,
    `describe`; an open one as it is.

    A step of a Manager is not deleted within this block. If it is saved again there, what is read is still of this
    save; once its files are gone, reading them raises RuntimeError. Raises CheckpointError as `restore`.
    """
    if isinstance(path, Foreign | Source):
        with (found := snapshot_of(path)).pinned():
            yield found
        return
    store = open_store(path)
    with holding(store):
        yield snapshot_of(store)


def snapshot_of(path: Saved) -> Source:
    """The save that is at a path now; a Source as it is. Raises CheckpointError."""
    if isinstance(path, Source):
        return path
    return path.look() if isinstance(path, Foreign) else snapshot_at(open_store(path))


def snapshot_at(store: Store) -> Snapshot:
    """The save of ours that is at a place now. Raises CheckpointError."""
    save = save_at(store)
    return Snapshot(save.store, save.storage, save.manifest)


def on_snapshot(path: Saved, work: Callable[[Source], Any], first: Source | None = None) -> Any:
    """`work(source)` of the save at a path; with the next one, a bounded number of times, when it is saved again.

    first: what to begin with.  A Source as the path is the only one. Raises CheckpointError, SavedAgain.
    """
    if isinstance(path, Source):
        return work(path)
    if isinstance(path, Foreign):
        with (found := first or path.look()).pinned():
            return work(found)
    if first is not None:
        with contextlib.suppress(SavedAgain):
            return work(first)
    return again(lambda: work(snapshot_of(path)))

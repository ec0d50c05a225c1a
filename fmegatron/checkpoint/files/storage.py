"""Storage interfaces: a `Store` is a location for one checkpoint, a `Storage` its files; both are values.

    store = open_store(path_or_url)     # a directory, or s3://bucket/prefix, gs://..., memory://..., file:///...
    storage = store.locate()            # the files of the complete checkpoint that is there: read_manifest, Fetch
    storage = store.begin()             # a save in progress; other ranks: store.draft(storage.root); write_part
    store.publish(storage, marker)      # now it is the checkpoint, in one step; then always store.end(storage)
    store_from_json(store.to_json())    # the same in another process

Names of files inside a checkpoint are relative, e.g. "arrays/w/c.0.0". A test that wants failing reads or writes wraps
a Storage (and a Store that gives it out): everything that the room reads or writes goes through these two.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fmegatron.checkpoint.files.entries import Entry
from fmegatron.checkpoint.files.keyvalue import KeyNotes
from fmegatron.checkpoint.files.leases import Lease, Watch
from fmegatron.checkpoint.files.notes import Notes


class Reader(Protocol):
    """An open file of a known size."""

    def read_into(self, into: np.ndarray, offset: int) -> int:
        """Fill `into` (uint8) from the byte `offset` on; returns how many bytes came, 0 at the end. Raises OSError."""
        ...


class Storage(Protocol):
    """The files of one checkpoint, complete or being written."""

    @property
    def text(self) -> str:
        """Path or URL, for messages."""
        ...

    @property
    def root(self) -> str:
        """The name that distinguishes it from others of the same store."""
        ...

    @property
    def lease(self) -> Lease | None:
        """The lease of the save that writes it, in what `begin` returned."""
        ...

    @property
    def stated(self) -> dict[str, Any] | None:
        """The pointer that led here, where one was followed: its facts of the manifest must be so."""
        ...

    @property
    def readers(self) -> int:
        """The number of threads that read from it at full speed."""
        ...

    @property
    def writers(self) -> int:
        """The number of threads that write to it at full speed."""
        ...

    @property
    def streams(self) -> bool:
        """Whether a file is written while its blocks come; else all of it is in memory before."""
        ...

    @property
    def stays_open(self) -> bool:
        """Whether a file that is open can be read anywhere, again and again; else only what was asked for at once."""
        ...

    def at(self, name: str) -> str:
        """Path or URL of a file, for messages."""
        ...

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        """Bytes of a small file. Raises FileNotFoundError, OSError."""
        ...

    def open(self, name: str, size: int, ranges: Sequence[tuple[int, int]]) -> AbstractContextManager[Reader]:
        """A file for positioned reads; only the bytes in `ranges` (rising) will be asked for.

        Raises FileNotFoundError, and OSError if it has not exactly `size` bytes, or is no regular file.
        """
        ...

    def forget(self, name: str) -> None:
        """The next read of a file comes from its disk, not from this machine's memory, where that can be had."""

    def identity(self) -> Hashable:
        """What the files of one save have, and those of a later save at the same place have not. Raises OSError."""
        ...

    def inside(self, name: str) -> bool:
        """Whether the directory `name` is where its name states, and not a link to somewhere else."""
        ...

    def write(self, name: str, blocks: Iterable[Any], durable: bool = True) -> None:
        """Make a new file of these buffers, whose memory may be used again for the next one. Raises OSError.

        durable: its content is on the disk on return (its name after `sync`).
        """

    def remove(self, name: str) -> None:
        """Remove a file."""

    def names(self) -> list[str]:
        """All files, sorted."""
        ...

    def entries(self) -> Iterable[Entry]:
        """All that is there, directories too where there are any; sizes where they are listed."""
        ...

    def sync(self) -> None:
        """The names of all files, written by all ranks, are durable and can be read on return. Rank 0."""


class Withdrawn(Protocol):
    """What is left of a checkpoint whose pointer is gone."""

    def names(self) -> list[str]:
        """All files, sorted."""
        ...

    def delete(self, stop: threading.Event | None = None) -> None:
        """Remove all of it, until `stop`."""
        ...


@dataclass(frozen=True)
class Remnant:
    """A save at `place` that is not its checkpoint. kind: "tmp" (under way, or killed), "old" (replaced), "gone" (being
    deleted) or "aside".  token: "plain" for files in the place itself."""

    place: Store
    token: str
    kind: str
    files: Storage


class Store(Protocol):
    """A place where a checkpoint is, or will be; or a directory of such places."""

    @property
    def text(self) -> str:
        """Path or URL, for messages."""
        ...

    def locate(self) -> Storage:
        """The files of the complete checkpoint; if there is none, those that `read_manifest` will complain about.

        They are of one save, also when another takes its place while they are read: then some may be missing.
        """
        ...

    def is_complete(self) -> bool:
        """Whether a checkpoint was saved here to its end (its content is checked when it is read)."""
        ...

    def limits(self) -> tuple[int, int]:
        """Most bytes of a part of the name of a file of a checkpoint that is saved here, and of all of it."""
        ...

    def begin(self) -> Storage:
        """Rank 0: remove what killed saves left here, and start a new checkpoint. Raises ValueError, OSError."""
        ...

    def draft(self, root: str) -> Storage:
        """The Storage of this root (see `begin`), on any rank and in any process."""
        ...

    def publish(self, storage: Storage, marker: bytes) -> None:
        """Rank 0: `storage` is the checkpoint from now on; its marker is written first. Removes the one before."""

    def end(self, storage: Storage | None) -> None:
        """Rank 0, whatever happened: leave nothing of a save behind but the checkpoint."""

    def withdraw(self) -> Withdrawn:
        """This is no checkpoint any more, in one step; what remains is returned."""
        ...

    def child(self, name: str) -> Store:
        """The place `name` in this directory."""
        ...

    def children(self) -> list[str]:
        """Names in this directory where a checkpoint may be: look with child(name).is_complete()."""
        ...

    def set_aside(self) -> str:
        """This is no checkpoint any more, in one step, but its files stay, and it is listed; returns where.

        Raises OSError; ValueError where that is not possible.
        """
        ...

    def leftovers(self) -> list[Remnant]:
        """The saves that are here besides the checkpoint. Raises OSError."""
        ...

    def remove(self, left: Remnant) -> None:
        """Remove one of them, whoever owns it."""

    def is_meant(self) -> bool:
        """Whether this is a checkpoint, complete, damaged or half copied, and no directory of them."""
        ...

    def is_begun(self) -> bool:
        """Whether all that is here are such saves: what is neither that nor complete is damaged, or half a copy."""
        ...

    def files(self, token: str) -> Storage:
        """The files of a save; "": those at the place itself."""
        ...

    def content(self, name: str) -> bytes | None:
        """The first 4096 bytes of a file directly at the place; None: it is missing. Raises OSError."""
        ...

    def pointer(self) -> dict[str, Any] | None:
        """The JSON of the marker at the place; None: there is none; {}: it is damaged. Raises OSError."""
        ...

    def stamp(self) -> Hashable:
        """What differs when it was saved again, or a copy was put here. Raises OSError."""
        ...

    def saved_at(self) -> float | None:
        """When the checkpoint was saved, seconds since 1970, by one clock for all in a directory."""
        ...

    def bytes_begun(self) -> int | None:
        """Bytes of the files of saves that are under way; None where that cannot be seen."""
        ...

    def how_to_move(self, to: str) -> str:
        """What a person does to give the checkpoint another name."""
        ...

    def clean(self, pattern: str, keep: Collection[str], watch: Watch) -> None:
        """Remove what dead saves and deletions left of children whose full name matches the regular expression.

        keep: children that are being written or deleted now.  watch: what this process knows of the savers of others.
        """

    def above(self) -> Store:
        """The directory that this place is in."""
        ...

    def around(self) -> Store | None:
        """The checkpoint among whose files this place would be, so that a save of that one would remove it."""
        ...

    def notes(self) -> Notes | KeyNotes:
        """Small files beside the checkpoints of this directory, each complete or not there."""
        ...

    def to_json(self) -> dict[str, Any]:
        """JSON from which `store_from_json` makes the same Store in another process."""
        ...

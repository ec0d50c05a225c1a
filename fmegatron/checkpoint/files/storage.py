"""A `Storage`: the files of one checkpoint, under names such as "arrays/w/c.0.0"; a value.

A test that wants failing reads or writes wraps a Storage (and the Store of `stores.py` that gives it out): everything
that the room reads or writes goes through these two.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from fmegatron.checkpoint.files.entries import Entry
from fmegatron.checkpoint.files.leases import Lease


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

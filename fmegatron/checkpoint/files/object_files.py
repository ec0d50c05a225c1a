"""The objects of one save in an object store, under the names that the files have in a directory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from fmegatron.checkpoint.files.entries import UNKNOWN, Entry
from fmegatron.checkpoint.files.keyvalue import KeyValues
from fmegatron.checkpoint.files.leases import Lease


@dataclass(frozen=True)
class Objects:
    """Objects whose keys begin with those of `values`: a Storage.

    root: the token of the save.  lease: that of the save that writes it, where it was begun.  stated: the pointer
    that names it, where one was followed.
    """

    values: KeyValues
    text: str
    root: str = ""
    lease: Lease | None = field(default=None, compare=False, repr=False)
    stated: dict[str, Any] | None = field(default=None, compare=False, repr=False)
    readers = 8  # each has up to 16 MiB in flight
    writers = 8
    streams = stays_open = False

    def at(self, name: str) -> str:
        """URL of an object."""
        return f"{self.text}/{name}"

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        """Bytes of an object."""
        return self.values.read(name, start, size)

    def open(self, name: str, size: int, ranges: Sequence[tuple[int, int]]) -> AbstractContextManager:
        """Ranges of an object."""
        return self.values.open(name, size, ranges)

    def identity(self) -> str:
        """The URL: every save has a token of its own there."""
        return self.text

    def forget(self, name: str) -> None:
        """Nothing is remembered: every read asks the store."""

    def inside(self, name: str) -> bool:
        """There are no links."""
        return True

    def write(self, name: str, blocks: Iterable[Any], durable: bool = True) -> None:
        """Put an object."""
        self.values.write(name, blocks)

    def remove(self, name: str) -> None:
        """Remove an object."""
        self.values.remove(name)

    def names(self) -> list[str]:
        """All objects, sorted."""
        return self.values.names()

    def entries(self) -> Iterator[Entry]:
        """Files only, without sizes and times."""
        return (Entry(name, "file", UNKNOWN, 0.0) for name in self.names())

    def sync(self) -> None:
        """An object that was put is durable."""

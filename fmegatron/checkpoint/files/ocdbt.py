"""Fewer files: the arrays of a checkpoint in an OCDBT database, beside plain marker, manifest and digests.

Every process writes a database of its own below `ocdbt.TOKEN/`; at the end rank 0 makes one that refers to them all, in
the directory of the checkpoint itself. Any tensorstore opens an array of it:

    {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": "file:///.../NAME/"}, "path": "arrays/w/"}
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import tensorstore as ts

from fmegatron.checkpoint.files.format import MARKER, MARKER_VERSION
from fmegatron.checkpoint.files.keyvalue import KeyValues, done

if TYPE_CHECKING:
    from fmegatron.checkpoint.files.storage import Storage, Store

_FOLDERS = ("arrays/", "packed/", "pieces/")  # what is in the database
_BATCH_BYTES = 64 << 20  # held in memory until it is written as one file
_MANIFEST = "manifest.ocdbt"


class Database:
    """A Storage that keeps the arrays in an OCDBT database inside `base`, and leaves everything else to it.

    Writes are held back until there are 64 MiB of them, or until `flush`: an error may come with a later write.
    """

    def __init__(self, base: Storage):
        self.base, self.text, self.root = base, base.text, base.root
        self.readers, self.writers = base.readers, 2
        self._own = f"ocdbt.{secrets.token_hex(6)}"
        self._lock, self._held, self._size = threading.Lock(), {}, 0

    @staticmethod
    def if_marked(storage: Storage) -> Storage:
        """The database inside a storage whose marker tells of one; otherwise the storage itself."""
        try:
            marker = json.loads(storage.read(MARKER, 0, 4096))
            marked = marker["version"] == MARKER_VERSION and marker["store"] == "ocdbt"
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return storage  # `read_manifest` tells what is wrong
        return Database(storage) if marked else storage

    @cached_property
    def _context(self) -> ts.Context:
        return self.base.context()  # one for all: only then can one database refer to another

    @cached_property
    def _read_from(self) -> KeyValues:
        return self._values("")

    @cached_property
    def _write_to(self) -> KeyValues:
        return self._values(self._own)

    def _values(self, folder: str) -> KeyValues:
        return KeyValues({"driver": "ocdbt", "base": self.base.kvstore(folder)}, self._context)

    def at(self, name: str) -> str:
        """Where the base would have the file; after a "|" inside the database."""
        return f"{self.base.at('')}|ocdbt:{name}" if name.startswith(_FOLDERS) else self.base.at(name)

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        """Bytes of a file."""
        return (self._read_from if name.startswith(_FOLDERS) else self.base).read(name, start, size)

    def open(self, name: str, size: int, ranges: Sequence[tuple[int, int]]) -> AbstractContextManager:
        """Ranges of a file."""
        return (self._read_from if name.startswith(_FOLDERS) else self.base).open(name, size, ranges)

    def inside(self, name: str) -> bool:
        """Whether the database is where it says."""
        return self.base.inside(_MANIFEST) and self.base.inside("d")

    def write(self, name: str, blocks: Iterable[Any], durable: bool = True) -> None:
        """Hold a file of the database back for the next batch; write others."""
        if not name.startswith(_FOLDERS):
            return self.base.write(name, blocks, durable)
        data, batch = b"".join(blocks), None
        with self._lock:
            self._held[name] = data
            self._size += len(data)
            if self._size >= _BATCH_BYTES:
                batch, self._held, self._size = self._held, {}, 0
        if batch:
            self._commit(batch)

    def flush(self) -> None:
        """Write what is held back."""
        with self._lock:
            batch, self._held, self._size = self._held, {}, 0
        if batch:
            self._commit(batch)

    def _commit(self, batch: dict[str, bytes]) -> None:
        transaction = ts.Transaction()
        kv = self._write_to.kv.with_transaction(transaction)
        futures = [kv.write(name, data) for name, data in batch.items()]
        _all_done([transaction.commit_async(), *futures])

    def remove(self, name: str) -> None:
        """Remove a file beside the database."""
        self.base.remove(name)

    def names(self) -> list[str]:
        """What is in the database and beside it, sorted; not the files of the database itself."""
        beside = (n for n in self.base.names() if n != _MANIFEST and not n.startswith(("d/", "ocdbt.")))
        return sorted([*beside, *self._read_from.names()])

    def sync(self) -> None:
        """One database that refers to what all processes have written; then all is made durable."""
        self.flush()
        parts = {name.partition("/")[0] for name in self.base.names() if name.endswith(f"/{_MANIFEST}")}
        for part in sorted(parts):
            _all_done([self._values(part).kv.experimental_copy_range_to(self._read_from.kv)])
        self.base.sync()

    def delete(self) -> None:
        """Remove all of it."""
        self.base.delete()

    def kvstore(self, name: str = "") -> dict[str, Any]:
        """The tensorstore kvstore spec of a directory in the database."""
        return {**self._read_from.spec, "path": f"{name}/" if name else ""}

    def context(self) -> ts.Context:
        """That of the base."""
        return self._context


def database_marker(marker: bytes) -> bytes:
    """The marker that tells of a database, from that of plain files."""
    return json.dumps({**json.loads(marker), "version": MARKER_VERSION, "store": "ocdbt"}).encode()


@dataclass(frozen=True)
class DatabaseStore:
    """A Store whose new checkpoints are OCDBT databases; `inner` is the place."""

    inner: Store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # what is not below does not care

    def begin(self) -> Database:
        """A new database."""
        return Database(self.inner.begin())

    def draft(self, root: str) -> Database:
        """The database of this root."""
        return Database(self.inner.draft(root))

    def publish(self, storage: Database, marker: bytes) -> None:
        """The marker tells of the database."""
        self.inner.publish(storage.base, database_marker(marker))

    def end(self, storage: Database | None) -> None:
        """As the place does."""
        self.inner.end(storage and storage.base)

    def child(self, name: str) -> DatabaseStore:
        """The place `name` in this directory."""
        return DatabaseStore(self.inner.child(name))

    def to_json(self) -> dict[str, Any]:
        """The place, and that it is a database."""
        return {**self.inner.to_json(), "ocdbt": True}


def _all_done(futures: list) -> None:
    """`done` for each; after an error, too, nothing is written any more: the directory is about to be removed."""
    try:
        for future in futures:
            done(future)
    finally:
        for future in futures:
            future.exception()

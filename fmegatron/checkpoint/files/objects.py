"""Checkpoints in object stores, which cannot rename: a marker object, put last, switches to the new one in one step.

    NAME/TOKEN/...          the files of one save, its own marker among them: a checkpoint by itself
    NAME/COMPLETE           a pointer: the marker, and `root`: the TOKEN that is the checkpoint NAME. Put last
    .checkpoints/NAME       empty; so that the checkpoints of a directory are found without a walk through their chunks
    .notes/...              what a Manager leaves beside its checkpoints: which is newest, who reads which

Tokens that NAME/COMPLETE does not name are leftovers of killed saves (or in the making); the next save removes them.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import tensorstore as ts

from fmegatron.checkpoint.files.format import MARKER, MARKER_VERSION, CheckpointError
from fmegatron.checkpoint.files.keyvalue import KeyNotes, KeyValues

_TOKEN = re.compile(r"[0-9a-f]{12}")
_INDEX, _NOTES = ".checkpoints/", ".notes/"
_DRIVERS = MappingProxyType({"s3": "s3", "gs": "gcs", "memory": "memory"})


def _context() -> ts.Context:
    limits = {"max_retries": 8, "initial_delay": "100ms", "max_delay": "10s"}  # by default 32, for a quarter of an hour
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},
            "s3_request_retries": limits,
            "gcs_request_retries": limits,
        }
    )


@dataclass(frozen=True)
class Objects:
    """Objects whose keys begin with those of `values`: a Storage.

    root: the token of the save.  index: a key of the directory above that is removed last by `delete`.
    """

    values: KeyValues
    text: str
    root: str = ""
    index: tuple[KeyValues, str] | None = None
    readers = 8  # each has up to 16 MiB in flight
    writers = 8

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

    def sync(self) -> None:
        """An object that was put is durable."""

    def delete(self) -> None:
        """Remove all objects, the marker first."""
        self.values.remove(MARKER)
        self.values.delete()
        if self.index is not None:
            self.index[0].remove(self.index[1])


@dataclass(frozen=True)
class ObjectStore:
    """The place of a checkpoint in an object store: a Store.

    url: s3://bucket/prefix/NAME, gs://..., memory://...  options: more members of the tensorstore kvstore spec, e.g.
    {"endpoint": "http://127.0.0.1:9000", "aws_region": "...", "aws_credentials": {"type": "environment"}}.
    context: what holds the connections (and the content of memory://); shared by all that come from this value.
    """

    url: str
    options: dict[str, Any] = field(default_factory=dict)
    context: ts.Context = field(default_factory=_context, compare=False, repr=False)

    def __post_init__(self):
        match = re.fullmatch(r"([a-z0-9]+)://([^/?#]*)((?:/[^?#]*)?)", self.url)
        if match is None or match[1] not in _DRIVERS or (not match[2] and match[1] != "memory"):
            raise ValueError(
                f"{self.url}: no URL of an object store; write s3://bucket/prefix, gs://... or memory://..."
            )
        if any(part in ("", ".", "..") for part in match[3].split("/")[1:] if match[3].strip("/")[:1]):
            raise ValueError(f"{self.url}: got an empty or dotted part; write s3://bucket/prefix/name")

    @property
    def text(self) -> str:
        """The URL."""
        return self.url.rstrip("/")

    @property
    def values(self) -> KeyValues:
        """All objects of this checkpoint."""
        scheme, _, rest = self.text.partition("://")
        bucket, _, path = rest.partition("/")
        where = {"bucket": bucket} if scheme != "memory" else {}
        path = rest if scheme == "memory" else path
        return KeyValues(
            {"driver": _DRIVERS[scheme], **where, **self.options, "path": f"{path}/" if path else ""}, self.context
        )

    @property
    def _index(self) -> tuple[KeyValues, str] | None:
        above, _, name = self.text.partition("://")[2].rpartition("/")
        if not above:
            return None
        values = self.values
        path = values.spec["path"].removesuffix(f"{name}/")
        return KeyValues({**values.spec, "path": path + _INDEX}, self.context), name

    def locate(self) -> Objects:
        """The objects that the pointer names, or those at the URL itself (a directory that was copied there)."""
        storage = Objects(self.values, self.text)
        pointer = self._pointer()
        if pointer is not None and "root" in pointer:
            root = pointer["root"]
            if pointer.get("version") != MARKER_VERSION or type(root) is not str or not _TOKEN.fullmatch(root):
                raise CheckpointError(
                    f"{storage.at(MARKER)}: got root {root!r:.40} in version {pointer.get('version')!r:.20}, wanted 12"
                    f" hex digits in version {MARKER_VERSION}; restore another step"
                )
            storage = self._draft(root)
        return storage

    def is_complete(self) -> bool:
        """Whether there is a marker."""
        return self._marker() is not None

    def begin(self) -> Objects:
        """A new token, after the leftovers of killed saves are gone."""
        keys, current = self.values.names(), (self._pointer() or {}).get("root")
        if strange := [k for k in keys if k != MARKER and not _TOKEN.fullmatch(k.partition("/")[0])]:
            if MARKER not in keys:
                raise ValueError(
                    f"{self.text}: holds {strange[0]} and is no checkpoint; choose another URL, or empty it"
                )
        self._remove_tokens(keys, {current})
        if self._index is not None:
            index, name = self._index
            index.write(name, [b""])
        return self._draft(secrets.token_hex(6))

    def draft(self, root: str) -> Objects:
        """The objects of this token."""
        return self._draft(root)

    def publish(self, storage: Objects, marker: bytes) -> None:
        """Put the marker beside the data, then the pointer; then remove what the pointer named before."""
        storage.write(MARKER, [marker])
        pointer = {**json.loads(marker), "version": MARKER_VERSION, "root": storage.root}
        self.values.write(MARKER, [json.dumps(pointer).encode()])
        for name in sorted({k.partition("/")[0] for k in self.values.names()} - {MARKER, storage.root}):
            self.values.below(f"{name}/").delete()
            self.values.remove(name)

    def end(self, storage: Objects | None) -> None:
        """Remove the objects of a save that did not become the checkpoint."""
        if storage is None or (pointer := self._pointer() or {}).get("root") == storage.root:
            return
        storage.delete()
        if not pointer and self._index is not None and not self.values.names():
            self._index[0].remove(self._index[1])

    def withdraw(self) -> Objects:
        """Remove the marker."""
        self.values.remove(MARKER)
        return Objects(self.values, self.text, "", self._index)

    def child(self, name: str) -> ObjectStore:
        """The place `name` in this directory."""
        slash = "" if self.url.endswith("/") else "/"
        return ObjectStore(f"{self.url}{slash}{name}", self.options, self.context)

    def children(self) -> list[str]:
        """Names of which a save has begun."""
        return self.values.below(_INDEX).names()

    def clean(self, pattern: str, keep: Collection[str] = ()) -> None:
        """Remove tokens that no marker names, of such children."""
        for name in self.children():
            if re.fullmatch(pattern, name) and name not in keep:
                store = self.child(name)
                if store.is_complete():
                    store._remove_others((store._pointer() or {}).get("root"))
                else:
                    store.withdraw().delete()

    def above(self) -> ObjectStore:
        """The directory that it is in."""
        scheme, _, rest = self.text.partition("://")
        return ObjectStore(f"{scheme}://{rest.rpartition('/')[0]}", self.options, self.context)

    def notes(self) -> KeyNotes:
        """Objects below `.notes/`."""
        return KeyNotes(self.values.below(_NOTES))

    def to_json(self) -> dict[str, Any]:
        """URL and options; what lies in memory:// is in this process only."""
        return {"url": self.url, "options": self.options}

    # ----

    def _draft(self, root: str) -> Objects:
        return Objects(self.values.below(f"{root}/"), f"{self.text}/{root}", root)

    def _marker(self) -> bytes | None:
        try:
            return self.values.read(MARKER, 0, 4096)
        except FileNotFoundError:
            return None

    def _pointer(self) -> dict[str, Any] | None:
        """The content of NAME/COMPLETE: None if missing, {} if it is not JSON (which `read_manifest` will say)."""
        data = self._marker()
        if data is None:
            return None
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    def _remove_others(self, current: str | None) -> None:
        self._remove_tokens(self.values.names(), {current})

    def _remove_tokens(self, keys: list[str], keep: set[str | None]) -> None:
        if None in keep and MARKER in keys:
            return  # the checkpoint lies at the URL itself, or its marker is damaged: nothing is a leftover for sure
        for token in sorted({k.partition("/")[0] for k in keys if "/" in k} - keep):
            if _TOKEN.fullmatch(token):
                self._draft(token).delete()

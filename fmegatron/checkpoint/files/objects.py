"""Checkpoints in object stores, which cannot rename: a marker object, written last, commits the save.

    NAME/TOKEN/...          the files of one save, its own marker among them: a checkpoint by itself
    NAME/COMPLETE           a pointer: the marker, and `root`: the TOKEN that is the checkpoint NAME. Put last
    NAME/ASIDE-TOKEN        the same of a checkpoint that a run has left behind when it went on from an older step
    .checkpoints/NAME       empty; so that the checkpoints of a directory are found without a walk through their chunks
    .notes/...              what a Manager leaves beside its checkpoints: which is newest, who reads which

Tokens that no pointer names are in the making, which a note of a living owner shows (leases.py), or leftovers of killed
saves: the next save removes them. What is deleted object by object has a note without an owner meanwhile.
"""

from __future__ import annotations

import errno
import json
import re
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import tensorstore as ts

from fmegatron.checkpoint.files.commit import new_token
from fmegatron.checkpoint.files.format import MANIFEST, MARKER, MARKER_VERSION, CheckpointError, digest_text
from fmegatron.checkpoint.files.keyvalue import KeyNotes, KeyValues
from fmegatron.checkpoint.files.leases import (
    LEASE_S,
    NOBODYS,
    Holder,
    Lease,
    Watch,
    alive,
    saving_note,
    say_doubts,
    settling,
)
from fmegatron.checkpoint.files.object_files import Objects
from fmegatron.checkpoint.files.storage import Storage

_TOKEN = re.compile(r"[0-9a-f]{12}")
_ASIDE = re.compile(r"ASIDE-([0-9a-f]{12})")
_SETTLE_S = 10.0  # for a process that cleans to read a pointer
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
                f"{self.url}: got no URL of an object store, wanted s3://bucket/prefix, gs://... or memory://..."
            )
        if any(part in ("", ".", "..") for part in match[3].split("/")[1:] if match[3].strip("/")[:1]):
            raise ValueError(f"{self.url}: got an empty or dotted part, wanted names: s3://bucket/prefix/name")

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
            storage = replace(self._draft(root), stated=f"{pointer.get('manifest_xxh3_64')}")
        return storage

    def is_complete(self) -> bool:
        """Whether there is a marker. Raises OSError if that cannot be seen."""
        return self._marker() is not None

    def limits(self) -> tuple[int, int]:
        """Keys of S3 and Google's store have at most 1024 bytes, with the token of the save."""
        whole = 1024 - len(self.values.spec["path"].encode()) - 13
        return whole, whole

    def begin(self) -> Objects:
        """A new token, after the leftovers of dead saves are gone. Its note is there first, so it has an owner."""
        keys = self._keys()
        strange = [k for k in keys if k != MARKER and not _ASIDE.fullmatch(k) and not _TOKEN.fullmatch(_part(k))]
        if strange and MARKER not in keys:
            raise ValueError(
                f"{self.text}: got a place that holds {strange[0]}, wanted an empty one, or a checkpoint;"
                " choose another URL, or empty it"
            )
        say_doubts(self.text, self._clear(Watch()), "if they have died, delete these objects")
        token = new_token()
        lease = Lease(self._notes, self._note(token), exclusive=True)
        if self._index is not None:
            index, name = self._index
            index.write(name, [b""])
        return replace(self._draft(token), lease=lease)

    def draft(self, root: str) -> Objects:
        """The objects of this token."""
        return self._draft(root)

    def publish(self, storage: Storage, marker: bytes) -> None:
        """Put the marker beside the data, then the pointer; then remove what the pointer named before."""
        before = self._marker()
        storage.write(MARKER, [marker])
        pointer = {**json.loads(marker), "version": MARKER_VERSION, "root": storage.root}
        if self._index is not None:  # another process may have removed it with the last of an older checkpoint
            self._index[0].write(self._index[1], [b""])
        try:
            self.values.write(MARKER, [json.dumps(pointer).encode()])
        except OSError:
            # The answer may be lost, and not the put. What cannot be decided counts as failed.
            if (self._pointer() or {}).get("root") != storage.root:
                raise
        # Who cleans marks the note and then reads the pointer. So one of the two sees the other.
        if self._is_gone(storage.root):
            self._take_back(storage, before)
            raise OSError(errno.ESTALE, "was deleted by another process, which took this save for dead", storage.text)
        with suppress(OSError):  # the new one is the checkpoint; the next save tries again
            self._clear(Watch(), (storage.root,))

    def end(self, storage: Storage | None) -> None:
        """Remove the objects of a save that did not become the checkpoint, and the note of the save."""
        if storage is None:
            return
        superseded = False
        with settling(storage.lease):
            if (self._pointer() or {}).get("root") != storage.root:
                storage.delete()
                superseded = True
        if superseded:
            with suppress(OSError):
                self._forget_if_empty()

    def withdraw(self) -> WithdrawnObjects:
        """Remove the marker."""
        root = (self._pointer() or {}).get("root")
        if type(root) is not str or not _TOKEN.fullmatch(root):
            root = None
        else:
            self._mark_gone(root)
            self.values.remove(f"ASIDE-{root}")
        self.values.remove(MARKER)
        return WithdrawnObjects(self, root)

    def set_aside(self) -> str:
        """Put the pointer under another key, to stay; returns the URL of the files."""
        data, root = self._marker(), (self._pointer() or {}).get("root")
        if data is None or type(root) is not str or not _TOKEN.fullmatch(root):
            raise ValueError(
                f"{self.text}: got a copy that other means made here, wanted what was saved here to set aside;"
                " move or delete it"
            )
        self.values.write(f"ASIDE-{root}", [data])
        self.values.remove(MARKER)
        return self._draft(root).text

    def asides(self) -> list[tuple[str, Objects]]:
        """Checkpoints of children that were set aside: (name of the child, its files)."""
        found = []
        for name in self.children():
            child = self.child(name)
            for key in child.values.names():
                if m := _ASIDE.fullmatch(key):
                    found.append((name, child._draft(m[1])))
        return found

    def delete_aside(self, storage: Storage) -> None:
        """Remove the files of a checkpoint of this name that was set aside."""
        self.values.remove(f"ASIDE-{storage.root}")
        self.delete_token(storage.root)
        self._forget_if_empty()

    def child(self, name: str) -> ObjectStore:
        """The place `name` in this directory."""
        slash = "" if self.url.endswith("/") else "/"
        return ObjectStore(f"{self.url}{slash}{name}", self.options, self.context)

    def children(self) -> list[str]:
        """Names of which a save has begun."""
        return self.values.below(_INDEX).names()

    def clean(self, pattern: str, keep: Collection[str], watch: Watch) -> None:
        """Remove tokens that no pointer names and no process writes, of such children."""
        for name in self.children():
            if re.fullmatch(pattern, name) and name not in keep:
                self.child(name)._clear(watch)

    def above(self) -> ObjectStore:
        """The directory that it is in."""
        scheme, _, rest = self.text.partition("://")
        return ObjectStore(f"{scheme}://{rest.rpartition('/')[0]}", self.options, self.context)

    def around(self) -> None:
        """No checkpoint: each name has its own objects, and a save deletes tokens of its own name alone."""

    def notes(self) -> KeyNotes:
        """Objects below `.notes/`."""
        return KeyNotes(self.values.below(_NOTES))

    def to_json(self) -> dict[str, Any]:
        """URL and options; what is in memory:// is in this process only."""
        return {"url": self.url, "options": self.options}

    # ----

    def _draft(self, root: str) -> Objects:
        return Objects(self.values.below(f"{root}/"), f"{self.text}/{root}", root)

    def _marker(self, below: str = "") -> bytes | None:
        try:
            return self.values.read(below + MARKER, 0, 4096)
        except FileNotFoundError:
            return None

    def _pointer(self) -> dict[str, Any] | None:
        """The content of NAME/COMPLETE: None if missing, {} if it is not JSON (which `read_manifest` will report)."""
        return _parsed(self._marker())

    def _keys(self) -> list[str]:
        """All that belongs to this checkpoint (a bucket has its notes inside)."""
        return [key for key in self.values.names() if not key.startswith((_INDEX, _NOTES))]

    @property
    def _notes(self) -> KeyNotes:
        return self.notes() if self._index is None else self.above().notes()

    def _note(self, token: str) -> str:
        return saving_note(self.text.rpartition("/")[2], token)

    def _clear(self, watch: Watch, keep: Collection[str] = ()) -> list[tuple[str, Holder]]:
        """Remove what no pointer names and no process writes. Returns what savers that may live have left."""
        keys = self._keys()
        tokens = {_part(k) for k in keys if "/" in k and _TOKEN.fullmatch(_part(k))}
        savers = {token: self._saver(token, keys, watch) for token in sorted(tokens.difference(keep))}
        # Who publishes takes its note back after the pointer is put. So the pointer is read after the notes.
        pointer = self._pointer()
        if pointer is not None and type(pointer.get("root")) is not str:
            return []  # the checkpoint is at the URL itself, or its marker is damaged: nothing is a leftover for sure
        named = {m[1] for k in keys if (m := _ASIDE.fullmatch(k))} | {(pointer or {}).get("root")}
        savers = {token: saver for token, saver in savers.items() if token not in named}
        doubts = [(self._draft(t).text, saver) for t, saver in savers.items() if saver is not None and not saver.sure]
        free = [token for token, saver in savers.items() if saver is None]
        if free and pointer is not None and self._marker(f"{pointer['root']}/") is None:
            return doubts  # that one was deleted while it was published; its saver may still put the pointer back
        for token in free:
            note = self._notes.read(self._note(token))
            self._mark_gone(token)
            if (self._pointer() or {}).get("root") == token:  # its owner came back to life, just in time
                self._notes.write(self._note(token), note) if note else self._notes.remove(self._note(token))
            else:
                self.delete_token(token)
        plain = [k for k in keys if k != MARKER and not _ASIDE.fullmatch(k) and _part(k) not in tokens]
        if plain and (pointer is not None or watch.quiet_s(self.text, repr(plain).encode()) >= LEASE_S):
            for key in plain:  # of a checkpoint that was copied here, and was saved again or deleted
                self.values.remove(key)
        for note in self._savers():  # of such that died before they put an object
            if note.removeprefix(self._note("")) not in tokens and not alive(self._notes, note, watch):
                self._notes.remove(note)
        self._forget_if_empty()
        return doubts

    def _is_gone(self, token: str) -> bool:
        """Whether another process has taken the saver for dead; waits while it is about to state it."""
        end = time.monotonic() + _SETTLE_S
        while (note := self._notes.read(self._note(token))) == NOBODYS and time.monotonic() < end:
            time.sleep(0.02)
        return note in (None, NOBODYS)

    def _take_back(self, storage: Storage, before: bytes | None) -> None:
        """The pointer is what it was before, unless that is gone by now, or another save has put its own."""
        if (self._pointer() or {}).get("root") == storage.root:
            root = (_parsed(before) or {}).get("root")
            if before is not None and (MANIFEST if root is None else f"{root}/{MARKER}") in self._keys():
                self.values.write(MARKER, [before])
            else:
                self.values.remove(MARKER)

    def _saver(self, token: str, keys: list[str], watch: Watch) -> Holder | None:
        """Who may still write the objects of a token. One with a marker and no note was the checkpoint once."""
        note = self._note(token)
        if self._notes.read(note) is not None:
            return alive(self._notes, note, watch)
        if f"{token}/{MARKER}" in keys:
            return None
        stamp = digest_text(repr([k for k in keys if k.startswith(token)]).encode()).encode()
        return Holder() if watch.quiet_s(f"{self.text}/{token}", stamp) < LEASE_S else None

    def _mark_gone(self, token: str) -> None:
        self._notes.write(self._note(token), NOBODYS)

    def delete_token(self, token: str) -> None:
        """Delete the objects of a save; if this is killed half-way, the next save sees that they have no owner."""
        self._mark_gone(token)
        self._draft(token).delete()
        self._notes.remove(self._note(token))

    def _forget_if_empty(self) -> None:
        if self._index is not None and not self._keys() and not self._savers():
            self._index[0].remove(self._index[1])

    def _savers(self) -> list[str]:
        """The notes of those who write, or have died while they wrote, this checkpoint."""
        return [note for note in self._notes.names() if note.startswith(self._note(""))]


@dataclass(frozen=True)
class WithdrawnObjects:
    """What is left of a checkpoint whose marker is gone. token: its objects; None: those at the URL itself."""

    store: ObjectStore
    token: str | None

    def names(self) -> list[str]:
        """All objects, sorted."""
        return self.store._keys() if self.token is None else self.store._draft(self.token).names()

    def delete(self) -> None:
        """Remove the objects, and the name if nothing else is there."""
        if self.token is not None:
            self.store.delete_token(self.token)
        else:
            for key in self.names():
                if not _ASIDE.fullmatch(key) and not _TOKEN.fullmatch(_part(key)):
                    self.store.values.remove(key)
        self.store._forget_if_empty()


def _parsed(marker: bytes | None) -> dict[str, Any] | None:
    if marker is None:
        return None
    try:
        value = json.loads(marker)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _part(key: str) -> str:
    """The first part of a key."""
    return key.partition("/")[0]

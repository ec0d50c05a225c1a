"""Checkpoints in object stores, which cannot rename: a `move` is a put and a look (see commit.py for the protocol).

.checkpoints/NAME       empty, beside NAME; so that the checkpoints of a directory are found without a walk through
                        their chunks
.notes/...              what a Manager leaves beside its checkpoints: which is newest, who reads which
"""

from __future__ import annotations

import errno
import re
import threading
import time
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import tensorstore as ts

from fmegatron.checkpoint.files.commit import Store, is_ours
from fmegatron.checkpoint.files.format import MARKER
from fmegatron.checkpoint.files.keyvalue import KeyNotes, KeyValues
from fmegatron.checkpoint.files.leases import Lease, Watch
from fmegatron.checkpoint.files.object_files import Objects
from fmegatron.checkpoint.files.slots import FILE_BYTES

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
class ObjectStore(Store[Objects]):
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

    # ---- what `Store` asks for

    def content(self, name: str) -> bytes | None:
        """One request."""
        try:
            return self.values.read(name, 0, FILE_BYTES)
        except FileNotFoundError:
            return None

    def is_there(self, name: str) -> bool:
        """One request."""
        return self.content(name) is not None

    def inside(self, start: str = "") -> list[str]:
        """First parts of keys, sorted (a bucket has its notes inside)."""
        keys = (key for key in self.values.names(start) if not key.startswith((_INDEX, _NOTES)))
        return sorted({key.partition("/")[0] for key in keys})

    def make(self, token: str) -> None:
        """The name in the directory, and the draft."""
        self._enlist()
        self.values.write(f".COMPLETE-{token}", [b""])

    def fill(self, name: str, data: bytes) -> None:
        """Put it, if it is there."""
        if self.content(name) is None:
            raise FileNotFoundError(errno.ENOENT, "is missing", f"{self.text}/{name}")
        self._enlist()  # another process may have removed it with the last of an older checkpoint
        self.values.write(name, [data])

    def put(self, name: str, data: bytes) -> None:
        """An answer may be lost, and not the put. What cannot be decided counts as failed."""
        try:
            self.values.write(name, [data])
        except OSError:
            if self.content(name) != data:
                raise

    def move(self, name: str, to: str) -> None:
        """A put and a removal, in this order; who publishes, or deletes, then looks for the other (`Store`)."""
        if (data := self.content(name)) is None:
            raise FileNotFoundError(errno.ENOENT, "is missing", f"{self.text}/{name}")
        self.put(to, data)
        self.values.remove(name)

    def drop(self, name: str) -> None:
        """Remove an object."""
        self.values.remove(name)

    def delete(self, name: str, stop: threading.Event | None) -> None:
        """Remove the object, or the marker below it and then all, at once."""
        self.values.remove(name)
        self.values.remove(f"{name}/{MARKER}")
        self.values.below(f"{name}/").delete()

    def durable(self, below: str = "") -> None:
        """What was put is."""

    def files(
        self, token: str, lease: Lease | None = None, stated: dict[str, Any] | None = None, hold: bool = False
    ) -> Objects:
        """The objects of a token, or those at the URL itself (a directory that was copied there)."""
        values, text = (self.values.below(f"{token}/"), f"{self.text}/{token}") if token else (self.values, self.text)
        return Objects(values, text, token, lease, stated)

    def published(self, token: str) -> None:
        """An object store does not report times, so we note it."""
        if self._index is not None:
            self.saver_notes.write(self._stamp, str(time.time()).encode())

    def saved_at(self) -> float | None:
        """As noted, by the clock of who saved it."""
        try:
            return None if (text := self.saver_notes.read(self._stamp)) is None else float(text)
        except ValueError:
            return None

    def is_link(self) -> bool:
        """There are none."""
        return False

    def unlink(self) -> None:
        """There are none."""

    def tidy(self) -> None:
        """Remove the name from the directory."""
        if self._index is not None and not self.values.names():
            self.saver_notes.remove(self._stamp)
            self._index[0].remove(self._index[1])

    def prepare(self) -> None:
        """Raise ValueError for a place that holds something else."""
        names = self.inside()
        strange = [name for name in names if not is_ours(name)]
        if strange and MARKER not in names and "ASIDE-plain" not in names:
            raise ValueError(
                f"{self.text}: got a place that holds {strange[0]}, wanted an empty one, or a checkpoint;"
                " choose another URL, or empty it"
            )

    def clean_old(self, watch: Watch) -> None:
        """Of older versions there are tokens only, which a pointer beside them makes leftovers."""

    def stamp(self) -> tuple[float | None, str]:
        """The pointer: what has a token is saved once."""
        return None, repr(self.pointer())

    # ---- the rest of a Store

    def limits(self) -> tuple[int, int]:
        """Keys of S3 and Google's store have at most 1024 bytes, with the token of the save."""
        whole = 1024 - len(self.values.spec["path"].encode()) - 13
        return whole, whole

    def child(self, name: str) -> ObjectStore:
        """The place `name` in this directory."""
        slash = "" if self.url.endswith("/") else "/"
        return ObjectStore(f"{self.url}{slash}{name}", self.options, self.context)

    def children(self) -> list[str]:
        """Names of which a save has begun."""
        return self.values.below(_INDEX).names()

    def above(self) -> ObjectStore:
        """The directory that it is in."""
        scheme, _, rest = self.text.partition("://")
        return ObjectStore(f"{scheme}://{rest.rpartition('/')[0]}", self.options, self.context)

    def around(self) -> None:
        """No checkpoint: each name has its own objects, and a save deletes tokens of its own name alone."""

    def notes(self) -> KeyNotes:
        """Objects below `.notes/`."""
        return KeyNotes(self.values.below(_NOTES))

    @property
    def saver_notes(self) -> KeyNotes:
        """Beside it; those of a bucket are inside."""
        return self.notes() if self._index is None else self.above().notes()

    def bytes_begun(self) -> None:
        """Sizes are not listed."""

    def how_to_move(self, to: str) -> str:
        """In words."""
        return f"move its objects to {to}"

    def to_json(self) -> dict[str, Any]:
        """URL and options; what is in memory:// is in this process only."""
        return {"url": self.url, "options": self.options}

    @property
    def _stamp(self) -> str:
        return f".{self.text.rpartition('/')[2]}.saved"

    def _enlist(self) -> None:
        if self._index is not None:
            self._index[0].write(self._index[1], [b""])

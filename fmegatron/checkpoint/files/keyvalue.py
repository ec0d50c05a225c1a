"""Objects of a tensorstore key-value store: concurrent byte-range reads, and atomic writes."""

from __future__ import annotations

import errno
import io
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tensorstore as ts

from fmegatron.checkpoint.calls.arguments import check_process

_REQUEST_BYTES = 8 << 20  # most bytes of one read
_GAP_BYTES = 128 << 10  # a gap that is cheaper to read than to ask twice


@dataclass(frozen=True)
class KeyValues:
    """The values under a kvstore spec (its path ends in "/", or is empty). Every failure is an OSError.

    Reads and writes are those of a `Storage`. What the server reports of a request is in the error's text.
    """

    spec: dict[str, Any]
    context: ts.Context

    @cached_property
    def kv(self) -> ts.KvStore:
        """The open store, which has threads of its own: none of them is in a fork of this process."""
        check_process()
        return done(ts.KvStore.open(self.spec, context=self.context))

    def below(self, folder: str) -> KeyValues:
        """The values of a directory, `folder` with its "/"."""
        return KeyValues({**self.spec, "path": self.spec.get("path", "") + folder}, self.context)

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        """Bytes of a value. Raises FileNotFoundError."""
        if start == 0 and size is None:
            return _found(done(self.kv.read(name)), name)
        try:
            return _found(
                done(self.kv.read(name, byte_range=slice(start, None if size is None else start + size))), name
            )
        except ShortValue:
            return self.read(name)[start:]  # shorter than what was allowed

    @contextmanager
    def open(self, name: str, size: int, ranges: Sequence[tuple[int, int]]) -> Iterator[_RangesReader]:
        """All ranges are asked for at once. A value that is too long is seen where its end is read."""
        futures = []
        for lo, hi in _requests(ranges):
            part = None if (lo, hi) == (0, size) else slice(lo, None if hi == size else hi)
            futures.append((lo, hi, self.kv.read(name, byte_range=part)))
        parts = []
        for lo, hi, future in futures:
            value = _found(done(future), name)
            if len(value) != hi - lo:
                raise OSError(errno.EINVAL, f"has {lo + len(value)} bytes, wanted {size}")
            parts.append((lo, value))
        yield _RangesReader(tuple(parts))

    def write(self, name: str, blocks: Iterable[Any]) -> None:
        """Put a value; durable on return as far as the driver knows."""
        data = io.BytesIO()  # the memory of a block may be that of the next one
        for block in blocks:
            data.write(block)
        future = self.kv.write(name, data.getvalue())  # tensorstore has a copy of its own
        data.close()
        done(future)

    def remove(self, name: str) -> None:
        """Remove a value; one that is not there is none."""
        done(self.kv.write(name, None))

    def names(self, start: str = "") -> list[str]:
        """All keys that begin so, sorted."""
        lo = start.encode()
        span = ts.KvStore.KeyRange(lo, lo[:-1] + bytes([lo[-1] + 1]) if lo else b"")
        return sorted(key.decode() for key in done(self.kv.list(span)))

    def delete(self) -> None:
        """Remove all values."""
        done(self.kv.delete_range(ts.KvStore.KeyRange()))


class KeyNotes:
    """The `Notes` of a directory in an object store: a put replaces in one step, and leaves nothing behind."""

    def __init__(self, values: KeyValues):
        self.values = values

    def names(self) -> list[str]:
        """Names of all notes."""
        return self.values.names()

    def read(self, name: str, most: int = 1 << 20) -> bytes | None:
        """The content of a note, None where there is none. Raises OSError."""
        try:
            return self.values.read(name, 0, most)
        except FileNotFoundError:
            return None

    def stamp(self, name: str) -> bytes | None:
        """Bytes that differ after every `renew` with other content, None where there is no such note."""
        return self.read(name)

    def write(self, name: str, data: bytes, durable: bool = False) -> None:
        """Put a note, or replace it."""
        self.values.write(name, [data])

    def renew(self, name: str, data: bytes) -> None:
        """`write`."""
        self.write(name, data)

    def remove(self, name: str) -> None:
        """Remove a note if it is there."""
        self.values.remove(name)

    def clean(self) -> None:
        """Nothing is left behind."""

    def is_left(self, name: str) -> bool:
        """Nothing is."""
        return False

    def now(self) -> float:
        """The time; the store has no clock of its own."""
        return time.time()


class ShortValue(OSError):
    """A value ends before the bytes that were asked for."""


@dataclass(frozen=True)
class _RangesReader:
    """Parts of a value that have been read: (offset, bytes)."""

    parts: tuple[tuple[int, bytes], ...]

    def read_into(self, into: np.ndarray, offset: int) -> int:
        for lo, data in self.parts:
            if lo <= offset < lo + len(data):
                n = min(into.nbytes, lo + len(data) - offset)
                into[:n] = np.frombuffer(data, np.uint8, n, offset - lo)
                return n
        return 0


def _requests(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Rising ranges of bytes as requests of moderate size; small gaps are read, too."""
    lo = hi = -1  # no request yet
    for start, stop in ranges:
        if lo >= 0 and start - hi <= _GAP_BYTES and stop - lo <= _REQUEST_BYTES:
            hi = max(hi, stop)
            continue
        if lo >= 0:
            yield lo, hi
        lo, hi = start, stop
    if lo >= 0:
        yield lo, hi


def done(future: ts.Future) -> Any:
    """The result; an error of the driver as an OSError with its text."""
    try:
        return future.result()
    except (ValueError, RuntimeError) as error:
        text = str(error)[:1000]
        if text.startswith("OUT_OF_RANGE"):
            raise ShortValue(errno.EINVAL, f"is too short: {text}") from None
        raise OSError(errno.EIO, text) from None


def _found(result: ts.KvStore.ReadResult, name: str) -> bytes:
    if result.state != "value":
        raise FileNotFoundError(errno.ENOENT, "is missing", name)
    return result.value

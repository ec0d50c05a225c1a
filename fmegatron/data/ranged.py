"""Arrays in objects of a store, read in blocks that stay in memory for a while."""

from __future__ import annotations

import errno
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from threading import Lock
from types import MappingProxyType

import numpy as np
import tensorstore as ts

_BLOCK = 1 << 20  # bytes of one read; a window of 8,192 tokens is one or two
_DRIVERS = MappingProxyType({"s3": "s3", "gs": "gcs"})


class Ranged:
    """`count` entries of a dtype from byte `offset` of an object on: `len(x)`, `x[i]`, `x[a:b]` -> numpy arrays.

    Read in blocks of 1 MiB, of which at most `cache_bytes` stay in memory, the last used ones. Threads may share it.
    Raises OSError where the store fails or the object ends too early.
    """

    def __init__(self, store: ts.KvStore, key: str, dtype: str, offset: int, count: int, cache_bytes: int) -> None:
        self._store, self._key, self._dtype = store, key, np.dtype(dtype)
        self._offset, self._count = offset, count
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._most, self._lock = max(1, cache_bytes // _BLOCK), Lock()

    @classmethod
    def opener(cls, store: ts.KvStore, key: str, cache_bytes: int) -> Callable[[str, int, int], Ranged]:
        """(dtype, offset, count) -> these entries of the object."""
        return lambda dtype, offset, count: cls(store, key, dtype, offset, count, cache_bytes)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int | slice) -> np.ndarray:
        if not isinstance(index, slice):
            index = range(self._count)[index]
            return self[index : index + 1][0]
        start, stop, step = index.indices(self._count)
        if step != 1:
            return self[min(start, stop + 1) : max(stop, start + 1)][:: abs(step)][:: 1 if step > 0 else -1]
        size = self._dtype.itemsize
        first, last = self._offset + start * size, self._offset + max(start, stop) * size
        blocks = [self._block(n) for n in range(first // _BLOCK, -(-last // _BLOCK))] if last > first else []
        data, begin = b"".join(blocks), first // _BLOCK * _BLOCK
        return np.frombuffer(data[first - begin : last - begin], self._dtype)

    def pieces(self, starts: Sequence[int], count: int) -> list[np.ndarray]:
        """`count` entries from each of these on, asked for all at once and not kept: for places that are far apart."""
        size = self._dtype.itemsize
        places = [self._offset + start * size for start in starts]
        asked = [self._store.read(self._key, byte_range=slice(a, a + count * size)) for a in places]
        found = [_value(one, self._key, a, count * size) for one, a in zip(asked, places, strict=True)]
        return [np.frombuffer(data, self._dtype) for data in found]

    def _block(self, number: int) -> bytes:
        with self._lock:
            if number in self._blocks:
                self._blocks.move_to_end(number)
                return self._blocks[number]
        end = self._offset + self._count * self._dtype.itemsize
        data = ranged(self._store, self._key, number * _BLOCK, min(_BLOCK, end - number * _BLOCK))
        with self._lock:
            self._blocks[number] = data
            while len(self._blocks) > self._most:
                self._blocks.popitem(last=False)
        return data


def ranged(store: ts.KvStore, key: str, start: int, size: int) -> bytes:
    """Bytes of an object. Raises OSError where there are fewer, FileNotFoundError where there is no object."""
    return _value(store.read(key, byte_range=slice(start, start + size)), key, start, size)


def whole_object(store: ts.KvStore, key: str) -> bytes | None:
    """An object, None where there is none. Raises OSError where the store fails."""
    try:
        found = store.read(key).result()
    except (ValueError, RuntimeError) as error:
        raise OSError(errno.EIO, f"cannot be read: {str(error)[:500]}", key) from None
    return found.value if found.state == "value" else None


def _value(asked: ts.Future, key: str, start: int, size: int) -> bytes:
    try:
        found = asked.result()
    except (ValueError, RuntimeError) as error:
        raise OSError(errno.EIO, f"bytes {start} to {start + size} cannot be read: {str(error)[:500]}", key) from None
    if found.state != "value":
        raise FileNotFoundError(errno.ENOENT, "is missing", key)
    if len(found.value) != size:
        raise OSError(errno.EIO, f"bytes {start} to {start + size} cannot be read: got {len(found.value)}", key)
    return found.value


def exact_size(store: ts.KvStore, key: str, sizes: Collection[int]) -> int | None:
    """Which of these sizes in bytes an object has; None: another. (A store answers ranges, and no question of size.)"""
    for size in sorted(set(sizes), reverse=True):
        try:
            ranged(store, key, size, 1)
            return None
        except FileNotFoundError:
            raise
        except OSError:
            pass  # it does not reach beyond
        try:
            if size:
                ranged(store, key, size - 1, 1)
            return size
        except OSError:
            continue
    return None


def open_url(url: str, options: dict | None = None) -> tuple[ts.KvStore, str]:
    """(store of the bucket, key) of a URL: s3://bucket/key or gs://bucket/key. options: more members of its spec."""
    match = re.fullmatch(r"([a-z0-9]+)://([^/?#]+)/([^?#]+)", url)
    if match is None or match[1] not in _DRIVERS:
        raise ValueError(f"{url}: got no URL of an object, wanted s3://bucket/prefix or gs://bucket/prefix")
    spec = {"driver": _DRIVERS[match[1]], "bucket": match[2], **(options or {})}
    return ts.KvStore.open(spec).result(), match[3]

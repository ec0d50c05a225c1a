"""IndexedTokens: Megatron's pair of files PREFIX.bin and PREFIX.idx, mapped or read in ranges from an object store.

PREFIX.idx, little endian: `MMIDIDX` and two NUL bytes; u64 version 1; u8 code of the dtype; u64 N, the number of
sequences; u64 D, that of entries of the document index; i32 x N lengths of sequences in tokens; i64 x N their offsets
in PREFIX.bin in bytes; i64 x D the sequence with which each document begins, and N; perhaps i8 x N modes. PREFIX.bin:
the tokens of all sequences, one after the other. Source: Megatron-LM, core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np
import tensorstore as ts

from fmegatron.data.open_tokenizer import Tokenizer, tokenizer_from
from fmegatron.data.ranged import Ranged, exact_size, open_url, ranged, whole_object
from fmegatron.files import disk

MAGIC = b"MMIDIDX\x00\x00"
HEADER = 34
CODES = MappingProxyType({1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"})
_ALL = 1 << 20  # entries of an index that are all checked when it is opened; of more, those of `checked_places`
_PLACES, _PLACE = 64, 64


class _Entries(Protocol):
    """A mapped array, or one in an object store."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int | slice, /) -> np.ndarray: ...


class IndexedTokens:
    """The tokens of PREFIX.bin in order: `len(tokens)`, `tokens[a:b]` -> numpy array, no copy where it is mapped.

    It knows its documents: `documents`, `document(i)`, `bounds(start, stop)`. Nothing is read when it is opened but the
    header, and the index as far as it is checked: all of a million entries, of more 64 places evenly spaced, which
    takes milliseconds for any size; what is read later is checked then.

    Args:
        prefix: path without the suffix (or with one of them), or a URL: s3://bucket/prefix, gs://...
        options: more members of the tensorstore kvstore spec of a URL.
        store: an open tensorstore KvStore in which `prefix` is a key, in place of a URL.
        cache_bytes: of blocks of an object store that stay in memory.
        verify: check the full index.

    Raises ValueError for files that do not fit together, with what was found and wanted; OSError where they cannot be
    read.
    """

    def __init__(
        self,
        prefix: str | os.PathLike,
        *,
        options: dict | None = None,
        store: ts.KvStore | None = None,
        cache_bytes: int = 256 << 20,
        verify: bool = False,
    ) -> None:
        self.prefix = bare(prefix)
        if store is None and "://" in self.prefix:
            store, key = open_url(self.prefix, options)
        else:
            key = self.prefix
        idx, data = f"{key}.idx", f"{key}.bin"
        if store is None:
            size = os.path.getsize(idx)
            with open(idx, "rb") as file:
                head = file.read(HEADER)
        else:
            size, head = None, ranged(store, idx, 0, HEADER)
        self._store, self._key, self.is_local = store, key, store is None
        dtype, N, D = _header(head, f"{self.prefix}.idx")
        want = HEADER + 12 * N + 8 * D
        got = exact_size(store, idx, (want, want + N)) if store is not None else size
        if got not in (want, want + N):
            raise ValueError(
                f"{self.prefix}.idx: got a file of {'another size' if got is None else f'{got:,} bytes'}, wanted "
                f"{want:,}, or with modes {want + N:,}, for the {N:,} sequences and {D:,} document entries of its "
                "header; it was cut off or damaged: write it again"
            )
        opened = _mapped(idx) if store is None else Ranged.opener(store, idx, cache_bytes // 8)
        self.dtype = np.dtype(dtype).newbyteorder("=")
        self.lengths: _Entries = opened("<i4", HEADER, N)
        self._offsets: _Entries = opened("<i8", HEADER + 4 * N, N)
        self._documents: _Entries = opened("<i8", HEADER + 12 * N, D)
        self.modes: _Entries | None = opened("i1", want, N) if N and got == want + N else None
        self._count = 0 if N == 0 else self._end(N - 1)
        wanted = self._count * self.dtype.itemsize
        size = os.path.getsize(data) if store is None else exact_size(store, data, (wanted,))
        if size != wanted:
            raise ValueError(
                f"{self.prefix}.bin: got {'another size' if size is None else f'{size:,} bytes'}, wanted {wanted:,} for"
                f" the {self._count:,} tokens of {self.dtype.name} that {self.prefix}.idx names; the pair was cut off "
                "or is of two corpora: write it again"
            )
        bin_ = _mapped(data) if store is None else Ranged.opener(store, data, cache_bytes)
        self.ids: _Entries = bin_(dtype, 0, self._count)
        self._check(full=verify)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int | slice) -> np.ndarray:
        return self.ids[index]

    def __repr__(self) -> str:
        return f"IndexedTokens({self.prefix!r}, {len(self):,} x {self.dtype.name}, {self.documents:,} documents)"

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self._documents) - 1

    @property
    def sequences(self) -> int:
        """Number of sequences: the parts of documents that were written one by one."""
        return len(self.lengths)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that PREFIX.json names, which `prepare` writes; None where there is no such file."""
        stated = self._beside(".json")
        found = None if stated is None else json.loads(stated).get("tokenizer")
        if found is None:
            return None
        if self._store is not None and (saved := self._beside(".tokenizer.json")) is not None:
            found = {**json.loads(saved), "digest": found.get("digest")}  # another file beside the data is an error
        return tokenizer_from(found, self.prefix)

    def _beside(self, suffix: str) -> bytes | None:
        """The file or object PREFIX + suffix, None where there is none."""
        if self._store is not None:
            return whole_object(self._store, self._key + suffix)
        return disk.content_of(self._key + suffix)

    def pieces(self, starts: Sequence[int], count: int) -> list[np.ndarray]:
        """`count` tokens from each of these on; of an object store all are asked for at once."""
        if isinstance(self.ids, Ranged):
            return self.ids.pieces(starts, count)
        return [self.ids[start : start + count] for start in starts]

    def document(self, number: int) -> tuple[int, int]:
        """(start, stop): the tokens of a document. IndexError for one that there is not."""
        if not 0 <= number < self.documents:
            raise IndexError(f"{self.prefix}: got document {number}, wanted 0 to {self.documents - 1}")
        return self._start(number), self._start(number + 1)

    def bounds(self, start: int, stop: int) -> np.ndarray:
        """int64, rising: where documents begin, strictly between the tokens `start` and `stop`; empty ones once."""
        low, high = 0, self.documents  # the first document that begins behind `start`: low..high
        while low < high:
            middle = (low + high) // 2
            if self._start(middle) > start:
                high = middle
            else:
                low = middle + 1
        found, before = [], start
        for number in range(low, self.documents):
            here = self._start(number)
            if here >= stop:
                break
            if here < before:
                raise self._broken(f"document {number} begins at token {here}, before the one in front of it")
            if here > before:
                found.append(here)
            before = here
        return np.array(found, dtype=np.int64)

    def document_starts(self) -> np.ndarray:
        """int64 [documents + 1]: the token with which each document begins, and the number of tokens."""
        ends = np.zeros(self.sequences + 1, dtype=np.int64)
        np.cumsum(self.lengths[:], out=ends[1:], dtype=np.int64)
        return ends[self._documents[:]]

    def _start(self, document: int) -> int:
        """The first token of a document."""
        sequence = int(self._documents[document])
        if sequence == self.sequences:
            return self._count
        if not 0 <= sequence < self.sequences:
            raise self._broken(f"document {document} begins with sequence {sequence} of {self.sequences}")
        offset = int(self._offsets[sequence])
        if offset % self.dtype.itemsize or not 0 <= offset <= self._count * self.dtype.itemsize:
            raise self._broken(f"sequence {sequence} begins at byte {offset}")
        return offset // self.dtype.itemsize

    def _end(self, sequence: int) -> int:
        offset, length = int(self._offsets[sequence]), int(self.lengths[sequence])
        if offset < 0 or length < 0 or offset % self.dtype.itemsize:
            raise self._broken(f"sequence {sequence} has {length} tokens from byte {offset} on")
        return offset // self.dtype.itemsize + length

    def _check(self, full: bool) -> None:
        """ValueError where sequences do not follow one another, or documents do not."""
        N, D = self.sequences, self.documents + 1
        if int(self._documents[0]) != 0 or int(self._documents[D - 1]) != N:
            raise self._broken(f"its documents begin with sequence {int(self._documents[0])} and end before "
                               f"{int(self._documents[D - 1])}, wanted 0 and {N}")  # fmt: skip
        if N and int(self._offsets[0]) != 0:
            raise self._broken(f"its first sequence begins at byte {int(self._offsets[0])}")
        for a, b in checked_places(N, full):
            lengths, offsets = self.lengths[a:b].astype(np.int64), self._offsets[a:b]
            after = offsets[:-1] + lengths[:-1] * self.dtype.itemsize
            if (lengths < 0).any() or (after != offsets[1:]).any():
                raise self._broken(f"sequences {a} to {b - 1} do not follow one another in the .bin")
        for a, b in checked_places(D, full):
            part = self._documents[a:b]
            if (part[1:] < part[:-1]).any() or part[0] < 0 or part[-1] > N:
                raise self._broken(f"documents {a} to {b - 1} do not follow one another")

    def _broken(self, what: str) -> ValueError:
        return ValueError(
            f"{self.prefix}.idx: got an index in which {what}, wanted sequences without gaps; write it again"
        )


def checked_places(count: int, full: bool = False) -> list[tuple[int, int]]:
    """Ranges of the entries of an index that are looked at when it is opened; neighbours share an entry."""
    if full or count <= _ALL:
        return [(a, min(a + _ALL, count - 1) + 1) for a in range(0, max(count - 1, 0), _ALL)]
    return [(i * (count - _PLACE) // (_PLACES - 1), i * (count - _PLACE) // (_PLACES - 1) + _PLACE)
            for i in range(_PLACES)]  # fmt: skip


def bare(prefix: str | os.PathLike) -> str:
    """The path without one of the two suffixes."""
    return os.fspath(prefix).removesuffix(".idx").removesuffix(".bin")


def _header(head: bytes, name: str) -> tuple[str, int, int]:
    """(dtype, N, D)."""
    if len(head) < HEADER or head[:9] != MAGIC:
        raise ValueError(f"{name}: got {head[:9]!r}, wanted an index that begins with {MAGIC!r}; write one with "
                         "data.write_indexed, or python -m fmegatron.data prepare")  # fmt: skip
    version, code = int.from_bytes(head[9:17], "little"), head[17]
    N, D = (int.from_bytes(head[i : i + 8], "little") for i in (18, 26))
    if version != 1 or code not in CODES or D < 1:
        raise ValueError(
            f"{name}: got version {version}, dtype code {code} and {D} document entries, wanted version 1, a code of 1 "
            "to 8 and one entry or more; the header is damaged: write it again"
        )
    return CODES[code], N, D


def _mapped(path: str | Path) -> Callable[[str, int, int], np.ndarray]:
    """(dtype, offset, count) -> these entries of a file, mapped read-only."""

    def entries(dtype: str, offset: int, count: int) -> np.ndarray:
        if count == 0:
            return np.zeros(0, dtype=dtype)  # mmap refuses to map nothing
        return np.asarray(np.memmap(path, dtype, "r", offset, (count,)))

    return entries

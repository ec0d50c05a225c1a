"""A file of tokens: written once, atomically, then mapped into memory by every rank.

Layout of the file: 8 bytes magic, 8 bytes little-endian length of the JSON that follows, the JSON (dtype, count, xxh3
digest of the data, what made the ids), zeros up to a multiple of 4096, then `count` little-endian ids. One file, so
there is no pair that can come apart, and the data starts on a page.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import xxhash

from fmegatron.data.open_tokenizer import Tokenizer, keep_beside, tokenizer_from
from fmegatron.data.tokenizers import smallest_dtype
from fmegatron.files.whole import whole_file

_MAGIC = b"fmtokens"
_PAGE = 4096
_DTYPES = ("uint8", "uint16", "uint32")


def write_tokens(
    path: str | os.PathLike,
    ids: np.ndarray | Iterable[np.ndarray],
    dtype: str | np.dtype | type | None = None,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Write ids to a token file and return its path. The file appears complete or not at all (temporary file, fsync,
    rename).

    `ids` is one integer array or tensor [count], or an iterable of such arrays (so that a corpus larger than memory can
    be streamed). `dtype` is uint8, uint16 or uint32; without it, the narrowest that holds the tokenizer's vocabulary,
    else the largest id of the array. `tokenizer` is recorded in the file. ValueError for ids that are no integers or do
    not fit.
    """
    path = Path(path)
    whole = np.asarray(ids) if hasattr(ids, "__array__") else None  # numpy arrays and torch tensors
    if dtype is None:
        if tokenizer is not None:
            dtype = smallest_dtype(tokenizer.vocab_size)
        elif whole is not None:
            dtype = smallest_dtype(int(whole.max(initial=0)) + 1)
        else:
            raise ValueError(
                f"{path}: got a stream of ids and no dtype, wanted one beforehand; give dtype= or tokenizer="
            )
    dtype = np.dtype(dtype)
    if dtype.name not in _DTYPES:
        raise ValueError(f"{path}: got dtype {dtype.name}, wanted one of {', '.join(_DTYPES)}")
    limit = tokenizer.vocab_size if tokenizer else int(np.iinfo(dtype).max) + 1
    header = {
        "dtype": dtype.name,
        "count": 0,
        "digest": "0" * 32,
        "tokenizer": tokenizer.describe() if tokenizer else None,
    }
    start = _data_start(header)
    with whole_file(path) as file:
        file.seek(start)
        digest, count = xxhash.xxh3_128(), 0
        for part in ids if whole is None else [whole]:
            data = _stored(part, dtype, limit, path).data.cast("B")
            file.write(data)
            digest.update(data)
            count += len(data) // dtype.itemsize
        file.seek(0)
        file.write(_header_bytes(header | {"count": count, "digest": digest.hexdigest()}, start))
        file.truncate(start + count * dtype.itemsize)
        keep_beside(tokenizer, path)
    return path


class TokenArray:
    """The ids of a token file, mapped read-only: `len(tokens)`, `tokens[a:b]` -> numpy array without a copy.

    Opening checks the header and the size of the file, and reads no ids; `verify=True` also reads all of them to
    compare the digest. ValueError names the file, what was found, what was wanted and the fix.
    """

    def __init__(self, path: str | os.PathLike, verify: bool = False) -> None:
        self.path = Path(path)
        header, start = _read_header(self.path)
        self.dtype = np.dtype(header["dtype"])
        self.digest: str = header["digest"]
        self._description: dict | None = header["tokenizer"]
        count = header["count"]
        got, want = self.path.stat().st_size, start + count * self.dtype.itemsize
        if got != want:
            raise ValueError(
                f"{self.path}: got a file of {got:,} bytes, wanted {want:,} for the {count:,} ids of "
                f"{self.dtype.name} that its header names; it was {'cut off' if got < want else 'appended to'} after "
                "it was written: write it again"
            )
        empty = np.zeros(0, dtype=self.dtype)  # mmap refuses to map nothing
        self.ids = np.memmap(self.path, self.dtype.newbyteorder("<"), "r", start, (count,)) if count else empty
        if verify:
            self.verify()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int | slice) -> np.ndarray:
        return self.ids[index]

    def __repr__(self) -> str:
        return f"TokenArray({str(self.path)!r}, {len(self):,} x {self.dtype.name})"

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that made the ids, or None when the file does not state it."""
        return None if self._description is None else tokenizer_from(self._description, self.path)

    def verify(self) -> None:
        """Read all ids and compare them with the digest in the header; ValueError when they differ."""
        got = xxhash.xxh3_128(self.ids.data.cast("B")).hexdigest()
        if got != self.digest:
            raise ValueError(
                f"{self.path}: got ids with xxh3 {got}, wanted {self.digest}, which the header has; the data changed:"
                " write it again"
            )


def _stored(part: np.ndarray, dtype: np.dtype, limit: int, path: Path) -> np.ndarray:
    part = np.asarray(part)
    if part.ndim != 1 or part.dtype.kind not in "iu":
        raise ValueError(f"{path}: got ids {part.dtype}{list(part.shape)}, wanted integers [count]")
    if part.size and (part.min() < 0 or part.max() >= limit):
        raise ValueError(
            f"{path}: got ids from {part.min()} to {part.max()}, wanted 0 to {limit - 1}; use the tokenizer that made"
            " them, or a wider dtype"
        )
    return np.ascontiguousarray(part, dtype=dtype.newbyteorder("<"))


def _header_bytes(header: dict, start: int) -> bytes:
    text = json.dumps(header).encode()
    return (_MAGIC + len(text).to_bytes(8, "little") + text).ljust(start, b"\0")


def _data_start(header: dict) -> int:
    widest = len(_header_bytes(header | {"count": 2**63}, 0))  # the count is known only after the data has been written
    return -(-widest // _PAGE) * _PAGE


def _read_header(path: Path) -> tuple[dict, int]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(16)
        if len(head) < 16 or head[:8] != _MAGIC:
            raise ValueError(
                f"{path}: got no token file, wanted one that starts with {_MAGIC!r}; write one with"
                " write_tokens(path, ids)"
            )
        length = int.from_bytes(head[8:], "little")
        text = file.read(min(length, size))
    try:
        header = json.loads(text)
        valid = (
            len(text) == length and header["dtype"] in _DTYPES and header["count"] >= 0 and len(header["digest"]) == 32
        )
    except (ValueError, KeyError, TypeError):
        valid = False
    if not valid:
        raise ValueError(
            f"{path}: got a damaged header, or one cut off, wanted what write_tokens(path, ids) writes; write the "
            "file again"
        )
    return header, _data_start(header)

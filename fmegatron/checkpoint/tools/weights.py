"""Writers of weight files of other programs, in one pass over streamed elements.

A writer gets the list of tensors first (names, dtypes, shapes) and then their bytes in that order, so that no file
needs more memory than a portion. Nothing here needs the packages whose formats these are.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch

from fmegatron.checkpoint.files.format import dtype_text
from fmegatron.checkpoint.files.torch_private import rebuild_tensor

_SAFETENSORS = (
    *(("bool", "BOOL"), ("uint8", "U8"), ("int8", "I8"), ("uint16", "U16"), ("int16", "I16"), ("float16", "F16")),
    *(("bfloat16", "BF16"), ("uint32", "U32"), ("int32", "I32"), ("float32", "F32"), ("uint64", "U64")),
    *(("int64", "I64"), ("float64", "F64"), ("complex64", "C64"), ("float8_e4m3fn", "F8_E4M3")),
    *(("float8_e5m2", "F8_E5M2"), ("float8_e8m0fnu", "F8_E8M0")),
)
_ALIGN = 64  # of tensors in zip files, as torch has them


@dataclass(frozen=True)
class Entry:
    """One tensor of a file to be."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


# Bytes of one tensor after the other; each is an iterator of portions, to be used up before the next one is taken.
Contents = Iterable[tuple[Entry, Iterable[np.ndarray]]]


def check_safetensors(entry: Entry) -> None:
    """Raise ValueError for a dtype that the safetensors format does not have."""
    if dtype_text(entry.dtype) not in dict(_SAFETENSORS):
        raise ValueError(
            f"{entry.name}: safetensors has no {dtype_text(entry.dtype)}; cast it (--cast), or export to npz or torch"
        )


def write_safetensors(out: BinaryIO, entries: Sequence[Entry], contents: Contents, metadata: dict[str, str]) -> None:
    """A safetensors file: size of the header, header, elements. metadata: strings."""
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for e in entries:
        check_safetensors(e)
        kind = dict(_SAFETENSORS)[dtype_text(e.dtype)]
        header[e.name] = {"dtype": kind, "shape": list(e.shape), "data_offsets": [at, at + e.nbytes]}
        at += e.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)
    for _, portions in contents:
        for portion in portions:
            out.write(portion)


def write_npz(out: BinaryIO, entries: Sequence[Entry], contents: Contents, metadata: dict[str, str]) -> None:
    """A numpy archive. Types that numpy lacks are stored as integers of their width.

    The entry `__metadata__` is a JSON text: the metadata, and under "dtypes" the torch names of all dtypes.
    """
    known = {**metadata, "dtypes": json.dumps({e.name: dtype_text(e.dtype) for e in entries})}
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        text = io.BytesIO()
        np.save(text, np.array(json.dumps(known)), allow_pickle=False)
        _put(archive, "__metadata__.npy", [text.getvalue()])
        for e, portions in contents:
            header = io.BytesIO()
            descr = np.lib.format.dtype_to_descr(_numpy_type(e.dtype))
            row = {"descr": descr, "fortran_order": False, "shape": e.shape}
            np.lib.format.write_array_header_1_0(header, row)
            _put(archive, f"{e.name}.npy", _after(header.getvalue(), portions))


def write_torch(out: BinaryIO, entries: Sequence[Entry], contents: Contents, metadata: dict[str, str]) -> None:
    """What torch.save writes of a dict of tensors, and torch.load(weights_only=True) reads. metadata: an entry of it.

    The elements are never held together: the pickle names storages, and their bytes follow as files of the archive.
    """
    text = io.BytesIO()
    tensors: dict[str, Any] = {e.name: _Tensor(str(i), e) for i, e in enumerate(entries)}
    _Pickler(text, protocol=2).dump({**tensors, "__metadata__": dict(metadata)})
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        _put(archive, "archive/data.pkl", [text.getvalue()])
        _put(archive, "archive/byteorder", [b"little"])
        for i, (_, portions) in enumerate(contents):
            _put(archive, f"archive/data/{i}", portions)
        _put(archive, "archive/version", [b"3\n"])


WRITERS: tuple[tuple[str, str, Callable[..., None]], ...] = (
    ("safetensors", ".safetensors", write_safetensors),
    ("npz", ".npz", write_npz),
    ("torch", ".pt", write_torch),
)


@dataclass(frozen=True)
class _Tensor:
    key: str
    entry: Entry


@dataclass(frozen=True)
class _Storage:
    key: str
    nbytes: int


class _Pickler(pickle.Pickler):
    """Writes placeholders as torch.save writes tensors."""

    def persistent_id(self, obj: Any) -> Any:
        return ("storage", torch.UntypedStorage, obj.key, "cpu", obj.nbytes) if isinstance(obj, _Storage) else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, _Tensor):
            return NotImplemented
        e = obj.entry
        strides = torch.empty(e.shape, device="meta").stride()
        rest = (0, tuple(e.shape), strides, False, OrderedDict(), e.dtype)
        # By name only: the one that torch.save writes for newer dtypes, and that torch.load allows (2.1 and later).
        return rebuild_tensor, (_Storage(obj.key, e.nbytes), *rest)


def _numpy_type(dtype: torch.dtype) -> np.dtype:
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        return np.dtype(f"u{dtype.itemsize}")


def _after(first: bytes, portions: Iterable[Any]) -> Iterator[Any]:
    yield first
    yield from portions


def _put(archive: zipfile.ZipFile, name: str, portions: Iterable[Any]) -> None:
    """Add a file of any length, whose bytes begin at a multiple of 64, as torch.load(mmap=True) wants them."""
    info = zipfile.ZipInfo(name)  # dated 1980: the same elements make the same file
    zip64 = 20  # bytes that force_zip64 adds to the header
    pad = -(archive.start_dir + 30 + len(name.encode()) + zip64 + 4) % _ALIGN
    info.extra = b"FB" + pad.to_bytes(2, "little") + b"\0" * pad
    with archive.open(info, "w", force_zip64=True) as f:
        for portion in portions:
            f.write(portion)

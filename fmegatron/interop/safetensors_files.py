"""Folders of safetensors files: their names and types, and how they are written; no other package is needed.

A file is 8 bytes (the header's size, little endian), a header in JSON (name -> dtype, shape, data_offsets), elements.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch

from fmegatron.files import whole

T = TypeVar("T")
DTYPES = MappingProxyType(
    {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
        "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "C64": torch.complex64,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    }
)  # fmt: skip
ENDING = ".safetensors"
FILE_BYTES = 5 << 30  # of elements in a file that is written, unless it is one tensor
INDEX = f"model{ENDING}.index.json"


class Entry(NamedTuple):
    """A tensor that is written: its name in the file, dtype, shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def grouped(items: Iterable[T], nbytes: Callable[[T], int], most: int = FILE_BYTES) -> list[list[T]]:
    """Consecutive items of at most `most` bytes together, or one that has more: what each file holds.

    >>> grouped([3, 3, 9, 1], lambda n: n, most=6)
    [[3, 3], [9], [1]]
    """
    groups: list[list[T]] = [[]]
    held = 0
    for item in items:
        if groups[-1] and held + nbytes(item) > most:
            groups.append([])
            held = 0
        groups[-1].append(item)
        held += nbytes(item)
    return groups


class File(NamedTuple):
    """A file that is written: its name, what is before the elements, the bytes of all, and each tensor's first byte."""

    name: str
    head: bytes
    nbytes: int
    places: dict[str, int]


def planned(groups: Sequence[Sequence[Entry]], metadata: Mapping[str, str]) -> list[File]:
    """The files of these groups of tensors, all of dtypes in `DTYPES`. metadata: texts for each file."""
    n, files = len(groups), []
    for i, entries in enumerate(groups):
        head, at, places = _header(entries, metadata), 0, {}
        for entry in entries:
            places[entry.name] = len(head) + at
            at += entry.nbytes
        name = "model" + ENDING if n == 1 else f"model-{i + 1:05d}-of-{n:05d}{ENDING}"
        files.append(File(name, head, len(head) + at, places))
    return files


def index_text(files: Sequence[File], metadata: Mapping[str, str]) -> bytes:
    """What `INDEX` holds: the file of each tensor."""
    total = sum(file.nbytes - len(file.head) for file in files)
    weights = {name: file.name for file in files for name in file.places}
    return json.dumps({"metadata": {**metadata, "total_size": total}, "weight_map": weights}, indent=1).encode()


def write(
    folder: str,
    groups: Sequence[Sequence[Entry]],
    contents: Iterable[Iterable[Any]],
    metadata: Mapping[str, str],
    index: bool,
) -> list[str]:
    """One new file for each group of tensors, on the disk when it returns; the names of the files.

    Args:
        folder: is there.
        groups: the tensors of each file, all of dtypes in `DTYPES`.
        contents: for each group the bytes of its elements, one tensor after another, as buffers of any size.
        metadata: texts for each file.
        index: whether a file that maps the names of tensors to those of files stands beside them.
    """
    files = planned(groups, metadata)
    for file, data in zip(files, contents, strict=True):
        put(os.path.join(folder, file.name), itertools.chain([file.head], data))
    if index:
        put(os.path.join(folder, INDEX), [index_text(files, metadata)])
    return [file.name for file in files]


def _header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """What is before the elements of a file: the header's size, and the header."""
    texts = {dtype: text for text, dtype in DTYPES.items()}
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for entry in entries:
        offsets = [at, at + entry.nbytes]
        header[entry.name] = {"dtype": texts[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        at += entry.nbytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head


def put(path: str, data: Iterable[Any]) -> None:
    """Write a new file of these buffers, on the disk when it returns."""
    with open(path, "xb") as out:
        out.writelines(data)
        whole.sync_file(out)

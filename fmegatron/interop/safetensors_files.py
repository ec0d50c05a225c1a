"""Folders of safetensors files, read a region at a time and written; no other package is needed.

A file is 8 bytes (the header's size, little endian), a header in JSON (name -> dtype, shape, data_offsets), elements.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from fmegatron.checkpoint import CheckpointError
from fmegatron.checkpoint.files.look import is_there
from fmegatron.layout import Box, row_major_strides

_DTYPES = MappingProxyType(
    {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
        "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16, "U32": torch.uint32,
        "U64": torch.uint64,
    }
)  # fmt: skip
_INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 100 << 20  # bytes, as the safetensors package has it


class Place(NamedTuple):
    """Where a tensor is: file, dtype, shape, first byte."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


def places(folder: str) -> dict[str, Place]:
    """Every tensor of a folder by its name. Raises CheckpointError for files that are not there or not complete."""
    index, files = os.path.join(folder, _INDEX), ["model.safetensors"]
    try:
        if is_there(index):
            with open(index, encoding="utf-8") as text:
                files = sorted(set(json.load(text)["weight_map"].values()))
        found: dict[str, Place] = {}
        for name in files:
            if os.path.basename(name) != name:
                raise CheckpointError(f"{index}: names the file {name!r:.80}; only names without folders are read")
            found |= _places_of(os.path.join(folder, name))
        return found
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error}; give a folder with model.safetensors") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: not safetensors: {error!r:.200}; download it again") from None


def _places_of(path: str) -> dict[str, Place]:
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        n = int.from_bytes(file.read(8), "little")
        if not 2 <= n <= min(size - 8, _LARGEST_HEADER):
            raise CheckpointError(f"{path}: a header of {n} bytes in a file of {size}; download it again")
        entries = json.loads(file.read(n))
    found, end = {}, 0
    entries.pop("__metadata__", None)
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        if first != end or last - first != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(f"{path}: {name}: bytes {first} to {last} are not its own; download it again")
        found[name], end = Place(path, dtype, shape, 8 + n + first), last
    if 8 + n + end != size:
        raise CheckpointError(f"{path}: {size} bytes where the header has {8 + n + end}; download it again")
    return found


def read(place: Place, box: Box) -> torch.Tensor:
    """A region of a tensor, contiguous. Raises CheckpointError when the file ends before it."""
    shape, width = place.shape, place.dtype.itemsize
    whole = len(shape)  # dims from here on are read in full
    while whole and box.shape[whole - 1] == shape[whole - 1]:
        whole -= 1
    run = math.prod(box.shape[max(whole - 1, 0) :])  # elements that follow each other
    outer = [range(a, a + n) for a, n in zip(box.start, box.shape, strict=True)][: max(whole - 1, 0)]
    strides = row_major_strides(shape)
    out = bytearray(math.prod(box.shape) * width)
    with open(place.file, "rb", buffering=0) as file:
        for i, at in enumerate(itertools.product(*outer)):
            first = (*at, *box.start[len(at) :])
            offset = place.start + sum(a * s for a, s in zip(first, strides, strict=True)) * width
            piece = memoryview(out)[i * run * width : (i + 1) * run * width]
            file.seek(offset)
            while piece:
                got = file.readinto(piece)
                if not got:
                    raise CheckpointError(f"{place.file}: ended at byte {offset}; download it again")
                piece, offset = piece[got:], offset + got
    flat = torch.frombuffer(out, dtype=place.dtype) if out else torch.empty(0, dtype=place.dtype)
    return flat.view(box.shape)


def write(folder: str, groups: Iterable[Mapping[str, torch.Tensor]], files: int) -> None:
    """One file for each group of tensors, `files` in all, and with several the index that maps names to files."""
    names: dict[str, str] = {}
    total = 0
    for i, tensors in enumerate(groups):
        file = "model.safetensors" if files == 1 else f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        with open(os.path.join(folder, file), "xb") as out:
            out.writelines(_bytes_of(tensors))
            out.flush()
            os.fsync(out.fileno())
        names |= dict.fromkeys(tensors, file)
        total += sum(x.nbytes for x in tensors.values())
    if files > 1:
        with open(os.path.join(folder, _INDEX), "x", encoding="utf-8") as out:
            json.dump({"metadata": {"total_size": total}, "weight_map": names}, out, indent=1)


def _bytes_of(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    text = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, x in tensors.items():
        header[name] = {"dtype": text[x.dtype], "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    yield len(head).to_bytes(8, "little") + head
    for x in tensors.values():
        yield x.contiguous().view(-1).view(torch.uint8).numpy().data

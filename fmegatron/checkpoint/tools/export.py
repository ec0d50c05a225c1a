"""export: the elements of a checkpoint as safetensors files, in bounded memory."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from fmegatron.checkpoint.files.commit import checkpoint_around, hidden, new_token, sync_directory
from fmegatron.checkpoint.files.format import Leaf, dtype_of, dtype_text, raw
from fmegatron.checkpoint.files.look import is_there
from fmegatron.checkpoint.tools.source import PORTION_BYTES, Source, stream
from fmegatron.layout import dtype_from_name

SHARD_BYTES = 5 << 30
_ENDING = ".safetensors"
_OTHERS = (".npz", ".pt", ".pth", ".bin")  # names of files that are no safetensors
_SAFETENSORS = MappingProxyType(
    {
        "bool": "BOOL",
        "uint8": "U8",
        "int8": "I8",
        "uint16": "U16",
        "int16": "I16",
        "uint32": "U32",
        "int32": "I32",
        "uint64": "U64",
        "int64": "I64",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "float8_e8m0fnu": "F8_E8M0",
        "float16": "F16",
        "bfloat16": "BF16",
        "float32": "F32",
        "float64": "F64",
        "complex64": "C64",
    }
)


@dataclass(frozen=True)
class Exported:
    """The files that were written, their tensors, and the bytes of elements."""

    files: tuple[str, ...]
    tensors: int
    nbytes: int


def parse_renames(texts: Sequence[str]) -> tuple[tuple[re.Pattern, str], ...]:
    """`REGEX=REPLACEMENT` texts. Raises ValueError.

    >>> [(p.pattern, r) for p, r in parse_renames(["^blocks/=layers."])]
    [('^blocks/', 'layers.')]
    """
    rules = []
    for text in texts:
        pattern, found, replacement = text.partition("=")
        if not found or not pattern:
            raise ValueError(f"got the rename {text!r}, wanted REGEX=REPLACEMENT, e.g. ^params/=")
        try:
            rules.append((re.compile(pattern), replacement))
            rules[-1][0].sub(replacement, "")
        except re.error as error:
            raise ValueError(f"got the rename {text!r}, wanted a regular expression: {error}") from None
    return tuple(rules)


def parse_dtype(text: str) -> torch.dtype:
    """A dtype by torch's name or ours: `bfloat16` or `bf16`. Raises ValueError."""
    found = getattr(torch, text, None)
    return found if isinstance(found, torch.dtype) else dtype_from_name(text)


def export(
    source: Source,
    path: str,
    pattern: str | None = None,
    *,
    renames: Sequence[tuple[re.Pattern, str]] = (),
    cast: torch.dtype | None = None,
    shard: int = SHARD_BYTES,
    most: int = PORTION_BYTES,
) -> Exported:
    """Write the leaves of a checkpoint as safetensors, with its step and metadata; verified while they are read.

    Args:
        source: the checkpoint.
        path: a file (its name ends in .safetensors); or a directory of files of at most `shard` bytes (or one tensor),
            with `model.safetensors.index.json`, which maps each tensor to its file.
        pattern: regular expression; only leaves whose path has a match. None: all.
        renames: regular expressions on the paths, applied one after another.
        cast: floating leaves to this dtype; all others keep their bits.
        shard: bytes.
        most: bytes that are held in memory at a time.

    Raises ValueError when `path` exists, is inside a checkpoint or names another format, two leaves get one name,
    safetensors has no such dtype, or `cast` is none that floating leaves can have; CheckpointError for damage; OSError.
    Then nothing is left.
    """
    path = os.path.abspath(path)
    if is_there(path):
        raise ValueError(f"{path}: got a path that exists already, wanted a new one; choose another name, or remove it")
    if path.endswith(_OTHERS):
        raise ValueError(f"{path}: got another format by its name, wanted a name with {_ENDING}, or of a directory")
    if (around := checkpoint_around(path)) is not None:
        raise ValueError(f"{path}: got a path inside the checkpoint {around}, wanted one outside; choose one beside it")
    leaves = source.leaves(pattern)
    entries = _entries(leaves, renames, cast)
    single = path.endswith(_ENDING)
    shards = [leaves] if single else _shards(leaves, entries, shard)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}{_ENDING}" for i in range(len(shards))]
    names = names if len(shards) > 1 else ["model" + _ENDING]
    metadata = {
        "format": "pt",
        "fmegatron.step": json.dumps(source.manifest.step),
        "fmegatron.metadata": json.dumps(source.manifest.metadata),
    }
    parent = os.path.dirname(path)
    os.makedirs(parent, exist_ok=True)
    draft = hidden(path, "tmp", new_token())
    os.mkdir(draft)
    try:
        for file, part in zip(names, shards, strict=True):
            with open(os.path.join(draft, file), "xb") as out:
                out.write(_header([entries[x.path] for x in part], metadata))
                for data in _elements(source, part, entries, most):
                    out.write(data.data)
                out.flush()
                os.fsync(out.fileno())
        total = sum(e.nbytes for e in entries.values())
        if not single:
            weights = {entries[x.path].name: f for f, part in zip(names, shards, strict=True) for x in part}
            index = {"metadata": {**metadata, "total_size": total}, "weight_map": weights}
            with open(os.path.join(draft, f"model{_ENDING}.index.json"), "x") as out:
                json.dump(index, out, indent=1)
                out.flush()
                os.fsync(out.fileno())
        sync_directory(draft)
        os.rename(os.path.join(draft, names[0]) if single else draft, path)
        sync_directory(parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    files = (path,) if single else tuple(os.path.join(path, file) for file in names)
    return Exported(files, len(leaves), total)


@dataclass(frozen=True)
class _Entry:
    """One tensor of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _header(entries: Sequence[_Entry], metadata: dict[str, str]) -> bytes:
    """What is before the elements of a safetensors file: the header's size, and the header."""
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for e in entries:
        kind = _SAFETENSORS[dtype_text(e.dtype)]
        header[e.name] = {"dtype": kind, "shape": list(e.shape), "data_offsets": [at, at + e.nbytes]}
        at += e.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _elements(source: Source, leaves: Sequence[Leaf], entries: dict[str, _Entry], most: int) -> Iterator[np.ndarray]:
    """The bytes of leaves one after another, in portions."""
    for _, x in stream(source, leaves, most, {leaf.path: entries[leaf.path].dtype for leaf in leaves}):
        yield raw(x.reshape(-1)).view(np.uint8)


def _entries(
    leaves: Sequence[Leaf], renames: Sequence[tuple[re.Pattern, str]], cast: torch.dtype | None
) -> dict[str, _Entry]:
    """By path what a leaf becomes. Raises ValueError when two get one name."""
    if cast is not None and not cast.is_floating_point:
        raise ValueError(f"cast: got {dtype_text(cast)}, wanted a floating dtype, e.g. bfloat16; other leaves stay")
    entries, taken = {}, {"__metadata__": "the metadata"}
    for leaf in leaves:
        name, dtype = leaf.path, dtype_of(leaf.dtype)
        becomes = cast if cast is not None and dtype.is_floating_point else dtype
        if not _can_become(dtype, becomes):
            raise ValueError(
                f"{leaf.path}: got cast={dtype_text(becomes)}, wanted a dtype that torch casts {leaf.dtype} to; choose"
                " other leaves by a pattern, or another dtype"
            )
        if dtype_text(becomes) not in _SAFETENSORS:
            raise ValueError(
                f"{leaf.path}: got {dtype_text(becomes)}, wanted a dtype that safetensors has; cast floating leaves"
                " (--cast), or choose other leaves by a pattern"
            )
        for regex, replacement in renames:
            name = regex.sub(replacement, name)
        if name in taken or not name:
            of = taken.get(name, "nothing")
            raise ValueError(
                f"{leaf.path}: got the new name {name!r}, the name of {of}, wanted another; change --rename"
            )
        taken[name] = leaf.path
        entries[leaf.path] = _Entry(name, leaf.shape, becomes)
    return entries


@lru_cache(maxsize=64)
def _can_become(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether torch casts one dtype to the other."""
    try:
        return torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype).to(other).dtype is other
    except RuntimeError:
        return False


def _shards(leaves: Sequence[Leaf], entries: dict[str, _Entry], most: int) -> list[list[Leaf]]:
    """Consecutive leaves of at most `most` bytes together, or one."""
    shards: list[list[Leaf]] = [[]]
    held = 0
    for leaf in leaves:
        nbytes = entries[leaf.path].nbytes
        if shards[-1] and held + nbytes > most:
            shards.append([])
            held = 0
        shards[-1].append(leaf)
        held += nbytes
    return shards

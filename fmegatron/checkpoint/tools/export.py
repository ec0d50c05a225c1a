"""export: the elements of a checkpoint as safetensors files, in bounded memory."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from fmegatron.checkpoint.files.commit import checkpoint_around, hidden, new_token, sync_directory
from fmegatron.checkpoint.files.format import Leaf, dtype_of, dtype_text, raw
from fmegatron.checkpoint.files.look import is_there
from fmegatron.checkpoint.files.safetensors_files import DTYPES, ENDING, FILE_BYTES, Entry, grouped, write
from fmegatron.checkpoint.tools.source import PORTION_BYTES, Source, stream
from fmegatron.layout import dtype_from_name

_OTHERS = (".npz", ".pt", ".pth", ".bin")  # names of files that are no safetensors


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
    shard: int = FILE_BYTES,
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
        raise ValueError(f"{path}: got another format by its name, wanted a name with {ENDING}, or of a directory")
    if (around := checkpoint_around(path)) is not None:
        raise ValueError(f"{path}: got a path inside the checkpoint {around}, wanted one outside; choose one beside it")
    leaves = source.leaves(pattern)
    entries = _entries(leaves, renames, cast)
    single = path.endswith(ENDING)
    shards = [leaves] if single else grouped(leaves, lambda leaf: entries[leaf.path].nbytes, shard)
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
        groups = [[entries[leaf.path] for leaf in part] for part in shards]
        contents = (_elements(source, part, entries, most) for part in shards)
        names = write(draft, groups, contents, metadata, index=not single)
        sync_directory(draft)
        os.rename(os.path.join(draft, names[0]) if single else draft, path)
        sync_directory(parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    files = (path,) if single else tuple(os.path.join(path, file) for file in names)
    return Exported(files, len(leaves), sum(entry.nbytes for entry in entries.values()))


def _elements(source: Source, leaves: Sequence[Leaf], entries: dict[str, Entry], most: int) -> Iterator[np.ndarray]:
    """The bytes of leaves one after another, in portions."""
    for _, x in stream(source, leaves, most, {leaf.path: entries[leaf.path].dtype for leaf in leaves}):
        yield raw(x.reshape(-1)).view(np.uint8)


def _entries(
    leaves: Sequence[Leaf], renames: Sequence[tuple[re.Pattern, str]], cast: torch.dtype | None
) -> dict[str, Entry]:
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
        if becomes not in DTYPES.values():
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
        entries[leaf.path] = Entry(name, becomes, leaf.shape)
    return entries


@lru_cache(maxsize=64)
def _can_become(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether torch casts one dtype to the other."""
    try:
        return torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype).to(other).dtype is other
    except RuntimeError:
        return False

"""export: the elements of a checkpoint as safetensors, npz or torch files, in bounded memory."""

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
from fmegatron.checkpoint.tools.source import PORTION_BYTES, Source, stream
from fmegatron.checkpoint.tools.weights import WRITERS, Entry, check_safetensors
from fmegatron.layout import dtype_from_name

SHARD_BYTES = 5 << 30


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
    kind: str = "safetensors",
    pattern: str | None = None,
    *,
    renames: Sequence[tuple[re.Pattern, str]] = (),
    cast: torch.dtype | None = None,
    shard: int = SHARD_BYTES,
    most: int = PORTION_BYTES,
) -> Exported:
    """Write the leaves that match a pattern as files that other programs read; verified on the way.

    path: a file (its name ends in .safetensors, .npz or .pt), or else a directory: then in shards of at most `shard`
    bytes (or one tensor), with `model.safetensors.index.json` that says which tensor is where.  kind: "safetensors",
    "npz" or "torch".  renames: regular expressions on the paths, one after another.  cast: floating leaves to this
    dtype; all others keep their bits.  The step and the metadata of the checkpoint go along.

    Raises ValueError when `path` exists or lies inside a checkpoint, two leaves get one name, the format has no such
    dtype, or `cast` is none that floating leaves can have; CheckpointError for damage; OSError. Then nothing is left.
    """
    found = {name: (ending, writer) for name, ending, writer in WRITERS}
    if kind not in found:
        raise ValueError(f"got the format {kind!r}, wanted one of {', '.join(found)}")
    ending, writer = found[kind]
    path = os.path.abspath(path)
    if is_there(path):
        raise ValueError(f"{path}: exists already; choose another name, or remove it")
    if (around := checkpoint_around(path)) is not None:
        raise ValueError(f"{path}: lies inside the checkpoint {around}; choose a path beside it")
    leaves = source.leaves(pattern)
    entries = _entries(leaves, renames, cast)
    if kind == "safetensors":
        for entry in entries.values():
            check_safetensors(entry)
    single = path.endswith(ending)
    shards = [leaves] if single else _shards(leaves, entries, shard)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}{ending}" for i in range(len(shards))]
    names = names if len(shards) > 1 else ["model" + ending]
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
                writer(out, [entries[x.path] for x in part], _contents(source, part, entries, most), metadata)
                out.flush()
                os.fsync(out.fileno())
        total = sum(e.nbytes for e in entries.values())
        if not single:
            weights = {entries[x.path].name: f for f, part in zip(names, shards, strict=True) for x in part}
            index = {"metadata": {**metadata, "total_size": total}, "weight_map": weights}
            with open(os.path.join(draft, f"model{ending}.index.json"), "x") as out:
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
            text = f"torch has no cast from {leaf.dtype} to {dtype_text(becomes)}"
            raise ValueError(f"{leaf.path}: {text}; choose other leaves by a pattern, or another dtype")
        for regex, replacement in renames:
            name = regex.sub(replacement, name)
        if name in taken or not name:
            raise ValueError(
                f"{leaf.path}: renamed to {name!r}, the name of {taken.get(name, 'nothing')}; change --rename"
            )
        taken[name] = leaf.path
        entries[leaf.path] = Entry(name, leaf.shape, becomes)
    return entries


@lru_cache(maxsize=64)
def _can_become(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether torch casts one dtype to the other."""
    try:
        return torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype).to(other).dtype is other
    except RuntimeError:
        return False


def _shards(leaves: Sequence[Leaf], entries: dict[str, Entry], most: int) -> list[list[Leaf]]:
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


def _contents(
    source: Source, leaves: Sequence[Leaf], entries: dict[str, Entry], most: int
) -> Iterator[tuple[Entry, Iterator[np.ndarray]]]:
    """The elements of leaves, each as an iterator of portions, which is used up before the next one is taken."""
    blocks = stream(source, leaves, most, {leaf.path: entries[leaf.path].dtype for leaf in leaves})

    def portions() -> Iterator[np.ndarray]:
        for block, x in blocks:
            yield raw(x.reshape(-1)).view(np.uint8)
            if block.last:
                return

    for leaf in leaves:
        yield entries[leaf.path], portions()

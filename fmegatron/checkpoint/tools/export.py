"""export: the elements of a checkpoint as safetensors files, in bounded memory."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch

from fmegatron.checkpoint.files.commit import checkpoint_around, hidden, new_token
from fmegatron.checkpoint.files.format import Array, Leaf, bits, dtype_of, dtype_text, raw
from fmegatron.checkpoint.files.safetensors_files import DTYPES, ENDING, FILE_BYTES, Entry, grouped, write
from fmegatron.checkpoint.files.targets import Target
from fmegatron.checkpoint.reading.mapping import Rule, apply_rules
from fmegatron.checkpoint.reading.request import subtree
from fmegatron.checkpoint.reading.rounds import in_rounds
from fmegatron.checkpoint.reading.view import Fill, View, check_parts, regions
from fmegatron.checkpoint.tools.source import PORTION_BYTES, Source, cut
from fmegatron.files.look import is_file, is_there, names_in
from fmegatron.files.whole import sync_directory, take_name
from fmegatron.layout import Box, dtype_from_name, row_major_strides

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pth")  # endings, not copied
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
    rules: Sequence[Rule] = (),
    prefix: str = "",
    like: str | os.PathLike | None = None,
) -> Exported:
    """Write the leaves of a checkpoint as safetensors, with its step and metadata; verified while they are read.

    Memory is bounded, whatever the rules do: each tensor is written in blocks of rows, for which what they are made
    of is read.

    Args:
        source: the checkpoint.
        path: a file (its name ends in .safetensors); or a directory of files of at most `shard` bytes (or one tensor),
            with `model.safetensors.index.json`, which maps each tensor to its file.
        pattern: regular expression; only leaves whose path has a match. None: all.
        renames: regular expressions on the paths, applied one after another.
        cast: floating leaves to this dtype; all others keep their bits.
        shard: bytes.
        most: bytes that are held in memory at a time.
        rules: what becomes of names and shapes before that, as in a restore: `checkpoint.unstack`, `split`, `transpose`,
            `take(..., range(n))` for the rows without padding.
        prefix: the stored subtree that is meant.
        like: a folder whose files besides weights (config.json, tokenizers) are copied; for a directory.

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
    single = path.endswith(ENDING)
    if single and like is not None:
        raise ValueError(f"{path}: got a file and like=, wanted a directory for the files beside it; give one")
    stored = subtree(source.manifest, prefix)
    views = apply_rules(rules, {name: leaf.shape for name, leaf in stored.items()})
    wanted = source.matching(pattern, list(views))
    tensors = [Exporting(name, views[name], stored, source.manifest.arrays) for name in wanted]
    entries = _entries(tensors, renames, cast)
    shards = [tensors] if single else grouped(tensors, lambda one: entries[one.path].nbytes, shard)
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
        groups = [[entries[one.path] for one in part] for part in shards]
        contents = (_elements(source, part, entries, most) for part in shards)
        names = write(draft, groups, contents, metadata, index=not single)
        if like is not None:
            copy_others(like, draft, {entry.dtype for entry in entries.values()})
        sync_directory(draft)
        take_name(os.path.join(draft, names[0]) if single else draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    files = (path,) if single else tuple(os.path.join(path, file) for file in names)
    return Exported(files, len(tensors), sum(entry.nbytes for entry in entries.values()))


@dataclass(frozen=True)
class Exporting:
    """A tensor that is written: its path, and the view of stored leaves that it is.

    stored: leaves by the view's names.  arrays: of the checkpoint.
    """

    path: str
    view: View
    stored: Mapping[str, Leaf]
    arrays: Mapping[str, Array]

    @cached_property
    def dtype(self) -> torch.dtype:
        """As stored. Raises ValueError where its parts have several, or are not stored."""
        found = {self.stored[name].dtype for name in self.view.sources}
        if len(found) != 1 or any(part.source is Fill.FRESH for part in self.view.parts):
            raise ValueError(f"{self.path}: got parts of {sorted(found)}, wanted one stored dtype; change the rules")
        check_parts(self.view)
        return dtype_of(found.pop())

    def blocks(self, most: int) -> Iterator[Rows]:
        """It in row-major order, in blocks of rows of at most `most` bytes (or one element)."""
        for start, shape in cut(self.view.shape, most // self.dtype.itemsize, self._steps()):
            yield Rows(self, start, shape)

    def _steps(self) -> tuple[tuple[int, ...], ...]:
        """Where blocks end best: where chunks do, of a leaf as it is stored."""
        part = self.view.parts[0] if len(self.view.parts) == 1 else None
        leaf = self.stored[part.source] if part is not None and isinstance(part.source, str) else None
        if part is None or leaf is None or leaf.array is None or part.dims != tuple(range(len(leaf.shape))):
            return ()
        return (self.arrays[leaf.array].chunk, self.arrays[leaf.array].band) if leaf.shape == self.view.shape else ()


class Rows(NamedTuple):
    """Some rows of a tensor that is written."""

    of: Exporting
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return math.prod(self.shape) * self.of.dtype.itemsize

    def wants(self, x: torch.Tensor) -> Iterator[tuple[Leaf, Target]]:
        """What is read to fill `x`; what nothing is stored for is zero."""
        for part, piece in regions(self.of.view, Box(self.start, self.shape, 0, row_major_strides(self.shape))):
            place = piece.view(x)
            if not isinstance(part.source, str):
                bits(place).zero_()
                continue
            leaf = self.of.stored[part.source]
            box = part.source_box(piece.start, piece.shape)
            yield leaf, Target(self.of.path, box, part.as_source(place), dtype_of(leaf.dtype))


def _elements(
    source: Source, tensors: Sequence[Exporting], entries: dict[str, Entry], most: int
) -> Iterator[np.ndarray]:
    """The bytes of tensors one after another, in portions."""
    for group in in_rounds((rows for one in tensors for rows in one.blocks(most)), most):
        memory, wanted = [], {}
        for rows in group:
            x = torch.empty(rows.shape, dtype=entries[rows.of.path].dtype)
            memory.append(x)
            for leaf, target in rows.wants(x) if x.numel() else ():
                wanted.setdefault(leaf.path, (leaf, []))[1].append(target)
        source.fetch(wanted.values())
        memory.reverse()
        while memory:
            yield raw(memory.pop().reshape(-1)).view(np.uint8)


def copy_others(like: str | os.PathLike, folder: str, dtypes: Collection[torch.dtype] = ()) -> None:
    """Copy the files of a folder of Hugging Face besides its weights. Raises OSError.

    dtypes: of the weights that are written: where the floating ones are one, config.json states it, as transformers
    loads weights in the dtype that it finds there.
    """
    for name in names_in(os.fspath(like)):
        if is_file(at := os.path.join(like, name)) and not name.endswith(_WEIGHTS):
            shutil.copy(at, os.path.join(folder, name))
    floating = {dtype_text(dtype) for dtype in dtypes if dtype.is_floating_point}
    if len(floating) == 1 and is_file(path := os.path.join(folder, "config.json")):
        _state_dtype(path, floating.pop())


def _state_dtype(path: str, dtype: str) -> None:
    """Let a configuration that states a dtype state this one."""
    with open(path, encoding="utf-8") as text:
        try:
            found = json.load(text)
        except ValueError:  # reported by who opens it
            return
    stated = [key for key in ("dtype", "torch_dtype") if isinstance(found, dict) and key in found]
    if any(found[key] != dtype for key in stated):
        with open(path, "w", encoding="utf-8") as text:
            json.dump(found | dict.fromkeys(stated, dtype), text, indent=2)
            text.write("\n")


def _entries(
    tensors: Sequence[Exporting], renames: Sequence[tuple[re.Pattern, str]], cast: torch.dtype | None
) -> dict[str, Entry]:
    """By path what a leaf becomes. Raises ValueError when two get one name."""
    if cast is not None and not cast.is_floating_point:
        raise ValueError(f"cast: got {dtype_text(cast)}, wanted a floating dtype, e.g. bfloat16; other leaves stay")
    entries, taken = {}, {"__metadata__": "the metadata"}
    for leaf in tensors:
        name, dtype = leaf.path, leaf.dtype
        becomes = cast if cast is not None and dtype.is_floating_point else dtype
        if not _can_become(dtype, becomes):
            raise ValueError(
                f"{leaf.path}: got cast={dtype_text(becomes)}, wanted a dtype that torch casts {dtype_text(dtype)} to;"
                " choose other leaves by a pattern, or another dtype"
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
        entries[leaf.path] = Entry(name, becomes, leaf.view.shape)
    return entries


@lru_cache(maxsize=64)
def _can_become(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether torch casts one dtype to the other."""
    try:
        return torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype).to(other).dtype is other
    except RuntimeError:
        return False

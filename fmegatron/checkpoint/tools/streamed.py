"""What rules make of the leaves of a source, streamed in row-major order and bounded memory: for writers of files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from fmegatron.checkpoint.files.format import Leaf, bits
from fmegatron.checkpoint.files.targets import Target, bytes_of
from fmegatron.checkpoint.reading.mapping import Rule, apply_rules
from fmegatron.checkpoint.reading.request import subtree
from fmegatron.checkpoint.reading.rounds import in_rounds
from fmegatron.checkpoint.reading.source import Source
from fmegatron.checkpoint.reading.view import Fill, View, check_parts, regions
from fmegatron.checkpoint.tools.source import PORTION_BYTES, cut, matching
from fmegatron.layout import Box, boxes


@dataclass(frozen=True)
class Streamed:
    """A tensor that rules make. view: what it is of stored leaves, by the names that the rules saw."""

    source: Source
    path: str
    view: View
    stored: Mapping[str, Leaf]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all of it."""
        return self.view.shape

    @cached_property
    def dtype(self) -> torch.dtype:
        """As stored. Raises ValueError where its parts have several, or are not stored."""
        found = {self.stored[name].dtype for name in self.view.sources}
        if len(found) != 1 or any(part.source is Fill.FRESH for part in self.view.parts):
            raise ValueError(f"{self.path}: got parts of {sorted(found)}, wanted one stored dtype; change the rules")
        check_parts(self.view)
        return self.stored[min(self.view.sources)].torch_dtype

    def blocks(self, most: int) -> Iterator[_Rows]:
        """It in row-major order, in blocks of rows of at most `most` bytes (or one element)."""
        for start, shape in cut(self.view.shape, most // self.dtype.itemsize, self._steps()):
            yield _Rows(self, start, shape)

    def _steps(self) -> tuple[tuple[int, ...], ...]:
        """Where blocks end best: where those of the source do, of a leaf as it is stored."""
        part = self.view.parts[0] if len(self.view.parts) == 1 else None
        leaf = self.stored[part.source] if part is not None and isinstance(part.source, str) else None
        if part is None or leaf is None or part.dims != tuple(range(len(leaf.shape))) or leaf.shape != self.view.shape:
            return ()
        return self.source.grid(leaf.path)


class _Rows(NamedTuple):
    """Some rows of a tensor."""

    of: Streamed
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return math.prod(self.shape) * self.of.dtype.itemsize

    def wants(self, x: torch.Tensor) -> Iterator[tuple[str, Target]]:
        """What is read to fill `x`; what nothing is stored for is zero."""
        for part, piece in regions(self.of.view, Box(self.start, self.shape, 0, boxes.row_major_strides(self.shape))):
            place = piece.view(x)
            if not isinstance(part.source, str):
                bits(place).zero_()
                continue
            leaf = self.of.stored[part.source]
            box = part.source_box(piece.start, piece.shape)
            yield leaf.path, Target(self.of.path, box, part.as_source(place), leaf.torch_dtype)


def tensors(source: Source, rules: Sequence[Rule] = (), prefix: str = "", pattern: str | None = None) -> list[Streamed]:
    """What rules make of the stored subtree below a path, where its own path has a match of a regular expression.

    Raises ValueError as a restore, and for a pattern without a match.
    """
    stored = subtree(source.leaves, prefix)
    views = apply_rules(rules, {name: leaf.shape for name, leaf in stored.items()})
    return [Streamed(source, name, views[name], stored) for name in matching(source, pattern, list(views))]


def elements(
    tensors: Sequence[Streamed], dtypes: Mapping[str, torch.dtype], most: int = PORTION_BYTES
) -> Iterator[np.ndarray]:
    """The bytes of tensors one after another, uint8, in portions. dtypes: what each becomes, by path.

    most: stored bytes that are held at a time. All is verified; raises CheckpointError naming leaf and file.
    """
    for group in in_rounds((rows for one in tensors for rows in one.blocks(most)), most):
        memory: list[torch.Tensor] = []
        wanted: dict[str, list[Target]] = {}
        for rows in group:
            x = torch.empty(rows.shape, dtype=dtypes[rows.of.path])
            memory.append(x)
            for path, target in rows.wants(x) if x.numel() else ():
                wanted.setdefault(path, []).append(target)
        group[0].of.source.fill(wanted)
        memory.reverse()
        while memory:
            yield bytes_of(memory.pop())

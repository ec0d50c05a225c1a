"""The chunk files that a reshard writes: which elements are at which bytes of which file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fmegatron.checkpoint.files.format import ALIGN_BYTES, Array, Leaf, dtype_of, dtype_text, packed_name, piece_name
from fmegatron.checkpoint.reading.fetch import Target
from fmegatron.checkpoint.tools.source import Source
from fmegatron.checkpoint.writing.part import grid_array, one_chunk
from fmegatron.checkpoint.writing.plan import LeafPlan
from fmegatron.layout import Box, row_major_strides


@dataclass(frozen=True)
class OutFile:
    """One chunk's file to be. content: (leaf, offset in bytes, boxes counted from there); zeros elsewhere.

    rank: who would write it in a save.  in_grid: a chunk of an array in global shape; else the only one of its array.
    """

    array: Array
    index: tuple[int, ...]
    rank: int
    in_grid: bool
    content: tuple[tuple[Leaf, int, tuple[Box, ...]], ...]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return math.prod(self.array.chunk) * self.array.itemsize

    def targets(self, lo: int, hi: int, into: np.ndarray) -> Iterator[tuple[Leaf, Target]]:
        """What to fetch for the bytes [lo, hi) of the file, which `into` (uint8, a multiple of 64 long) is to hold.

        lo and hi are multiples of 64 (or the file's end), so that no element is cut.
        """
        for leaf, offset, boxes in self.content:
            stored = dtype_of(leaf.dtype)
            width = stored.itemsize
            first, last = (lo - offset) // width, -(-(hi - offset) // width)
            typed = torch.from_numpy(into).view(stored)
            for box in boxes:
                for part in within(box, first, last):
                    here = part._replace(offset=part.offset - first)
                    yield leaf, Target(leaf.path, part, here.view(typed), stored)


def out_files(source: Source, plans: Sequence[LeafPlan]) -> Iterator[OutFile]:
    """All chunk files of a plan, of all ranks."""
    packed: dict[int, list[tuple[Leaf, int, tuple[Box, ...]]]] = {}
    ends: dict[int, int] = {}
    for p in plans:
        leaf = source.manifest.leaves[p.path]
        if p.home == "grid":
            array = grid_array(p)
            for index in np.ndindex(array.grid):
                start = tuple(i * c for i, c in zip(index, array.chunk, strict=True))
                shape = tuple(min(c, n - a) for a, c, n in zip(start, array.chunk, leaf.shape, strict=True))
                box = Box(start, shape, 0, row_major_strides(array.chunk))
                yield OutFile(array, index, 0, True, ((leaf, 0, (box,)),))
            continue
        for rank in _writers(p) if p.home != "empty" else ():
            boxes, n = p.layout.boxes(rank), math.prod(p.layout.local_shape(rank))
            if p.home == "piece":
                array = one_chunk(piece_name(p.path, rank), n, dtype_text(p.layout.dtype))
                yield OutFile(array, (0,), rank, False, ((leaf, 0, boxes),))
            else:
                at = ends.get(rank, 0)
                packed.setdefault(rank, []).append((leaf, at, boxes))
                ends[rank] = -(-(at + n * p.layout.dtype.itemsize) // ALIGN_BYTES) * ALIGN_BYTES
    for rank, content in sorted(packed.items()):
        yield OutFile(one_chunk(packed_name(rank), ends[rank], "uint8"), (0,), rank, False, tuple(content))


def _writers(p: LeafPlan) -> list[int]:
    """The ranks that write a leaf without a grid: one of each shard that holds something."""
    layout = p.layout
    shards = itertools.product(*(range(n) for n in layout.shard_counts))
    return sorted(layout.rank_of(s, p.turn % layout.replicas) for s in shards if layout.shard_boxes(s))


def within(box: Box, lo: int, hi: int) -> Iterator[Box]:
    """The parts of a box whose elements lie in [lo, hi) of the local storage.

    >>> list(within(Box((0, 0), (3, 4), 0, (4, 1)), 3, 9))
    [Box([1:2, 0:4] at 4, strides (4, 1)), Box([0:1, 3:4] at 3, strides (4, 1)), Box([2:3, 0:1] at 8, strides (4, 1))]
    """
    span = 1 + sum((n - 1) * s for n, s in zip(box.shape, box.strides, strict=True))
    if box.offset >= hi or box.offset + span <= lo:
        return
    if lo <= box.offset and box.offset + span <= hi:
        yield box
        return
    dim = max((d for d, n in enumerate(box.shape) if n > 1), key=lambda d: box.strides[d])
    n, stride = box.shape[dim], box.strides[dim]
    inner = span - (n - 1) * stride  # from first to last element of one index
    first = max(0, (lo - box.offset - inner) // stride + 1)
    last = min(n, -(-(hi - box.offset) // stride))
    whole = range(max(first, -(-(lo - box.offset) // stride)), min(last, (hi - box.offset - inner) // stride + 1))

    def rows(a: int, b: int) -> Box:
        start = (*box.start[:dim], box.start[dim] + a, *box.start[dim + 1 :])
        return Box(start, (*box.shape[:dim], b - a, *box.shape[dim + 1 :]), box.offset + a * stride, box.strides)

    if whole:
        yield rows(whole.start, whole.stop)
    for i in range(first, last):
        if i not in whole:
            yield from within(rows(i, i + 1), lo, hi)


def band_sizes(array: Array) -> tuple[int, ...]:
    """Bytes of each band of a chunk. Whole trailing dims: in their order they are the file from first byte to last."""
    sizes = [array.itemsize]
    for c, b in zip(array.chunk, array.band, strict=True):
        lengths = [min(b, c - at) for at in range(0, c, b)]
        sizes = [size * n for size in sizes for n in lengths]
    return tuple(sizes)

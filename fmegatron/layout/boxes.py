"""Boxes: rectangular pieces of a global array and their offsets in a rank's local storage."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from fmegatron.layout.split import Cut, Segment, nested_chunk, padded_chunk, rooms, segments

Shard = tuple[int, ...]  # the index of a piece of an array along the axes of each dim, then along the flat axes


class Box(NamedTuple):
    """The global indices [start, start + shape), and their place in a contiguous local tensor.

    start, shape: per dim of the global array.  offset, strides: in elements of the local tensor's storage; `view`
    gives that piece. The local tensor may be flat: strides need not be those of its own shape.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the last global index, per dim."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices of the global array."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def view(self, local: torch.Tensor) -> torch.Tensor:
        """The box inside a contiguous local tensor, as a view of shape `self.shape` (writes go through)."""
        if not local.is_contiguous():
            raise ValueError(f"got a local tensor with strides {local.stride()}, wanted a contiguous one")
        return local.as_strided(self.shape, self.strides, local.storage_offset() + self.offset)

    def intersect(self, start: Sequence[int], stop: Sequence[int]) -> Box | None:
        """The part of the box inside [start, stop), or None when it is empty."""
        at, shape, offset = [], [], self.offset
        for a, n, stride, lo, hi in zip(self.start, self.shape, self.strides, start, stop, strict=True):
            low = a if a > lo else lo
            high = a + n if a + n < hi else hi
            if low >= high:
                return None
            at.append(low)
            shape.append(high - low)
            offset += (low - a) * stride
        return Box(tuple(at), tuple(shape), offset, self.strides)

    def __repr__(self) -> str:
        where = ", ".join(f"{a}:{a + n}" for a, n in zip(self.start, self.shape, strict=True))
        return f"Box([{where}] at {self.offset}, strides {self.strides})"


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous array."""
    strides, stride = [], 1
    for n in reversed(shape):
        strides.append(stride)
        stride *= n
    return tuple(reversed(strides))


def range_boxes(shape: Sequence[int], start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The row-major range [start, stop) of an array, as (start, shape) of at most 2·ndim - 1 boxes, in order.

    >>> range_boxes((3, 4), 2, 9)
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if start >= stop:
        return []
    ndim, strides = len(shape), row_major_strides(shape)

    def box(dim: int, at: int, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """`count` steps of `dim` from the linear index `at`, later dims in full."""
        index = tuple(at // strides[d] % shape[d] for d in range(dim + 1)) + (0,) * (ndim - dim - 1)
        return index, (1,) * dim + (count,) + tuple(shape[dim + 1 :])

    if ndim == 0:
        return [((), ())]
    head: list = []
    tail: list = []
    for dim in range(ndim - 1, 0, -1):  # climb: cut ragged ends until both are on full steps of the dim above
        step, above = strides[dim], strides[dim - 1]
        up, down = -(-start // above) * above, stop // above * above
        if up > down:  # both ends inside one step of the dim above
            head.append(box(dim, start, (stop - start) // step))
            return head + tail[::-1]
        if start < up:
            head.append(box(dim, start, (up - start) // step))
        if down < stop:
            tail.append(box(dim, down, (stop - down) // step))
        start, stop = up, down
        if start == stop:
            return head + tail[::-1]
    head.append(box(0, start, (stop - start) // strides[0]))
    return head + tail[::-1]


def segment_boxes(
    pieces: Sequence[Sequence[Segment]],
    strides: tuple[int, ...],
    base: int,
    start: Sequence[int],
    stop: Sequence[int],
) -> Iterator[Box]:
    """Global boxes of the local block [start, stop) of a rank whose dims consist of these pieces.

    strides: of the local block.  base: subtracted from every offset (the start of a flat range).
    """
    per_dim = []
    for found, lo, hi in zip(pieces, start, stop, strict=True):
        cut = []
        for g, at, n in found:
            low = at if at > lo else lo
            high = at + n if at + n < hi else hi
            if low < high:
                cut.append((g + low - at, low, high - low))
        if not cut:
            return
        per_dim.append(cut)
    for combination in itertools.product(*per_dim):
        at, local, shape = zip(*combination, strict=True) if combination else ((), (), ())
        yield Box(at, shape, sum(map(operator.mul, local, strides)) - base, strides)


def block_of(cuts: Sequence[Cut], shard: Shard, padded: bool) -> tuple[list[tuple[Segment, ...]], tuple[int, ...]]:
    """The segments of every dim at a shard, and the shape of the block that they make."""
    # The shard may have a flat index behind.
    per_dim = [segments(cut, i, padded) for cut, i in zip(cuts, shard, strict=False)]
    return per_dim, tuple(cut.length(i, padded) for cut, i in zip(cuts, shard, strict=False))


@lru_cache(maxsize=65536)
def boxes_of(
    cuts: tuple[Cut, ...], flat_counts: tuple[int, ...], shard: Shard, padded: int, flat_from: int
) -> tuple[Box, ...]:
    """The boxes of a shard of any layout that is cut like this."""
    per_dim, block = block_of(cuts, shard, bool(padded))
    if not flat_counts:
        return tuple(segment_boxes(per_dim, row_major_strides(block), 0, (0,) * len(block), block))
    before, flat = block[:flat_from], block[flat_from:]
    size = math.prod(flat)
    start, length = nested_chunk(size, flat_counts, shard[-1])
    if padded:
        start, length = padded_chunk(size, flat_counts, shard[-1], padded)
    room = rooms(size, flat_counts, padded)[-1] if padded else length
    strides = (*row_major_strides((*before, room))[:-1], *row_major_strides(flat))
    return tuple(
        box
        for at, shape in range_boxes(flat, start, start + length)
        for box in segment_boxes(
            per_dim,
            strides,
            start,
            (0,) * flat_from + at,
            (*before, *(a + n for a, n in zip(at, shape, strict=True))),
        )
    )

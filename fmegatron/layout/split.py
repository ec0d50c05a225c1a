"""How one dim is cut over mesh axes: torch's chunk rule, several axes, interleaved parts. Integers only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


@dataclass(frozen=True)
class Split:
    """A dim made of consecutive parts, each split over `axes` on its own (an interleaved split).

    A rank's local piece is its pieces of all parts, concatenated. Fused QKV: `Split("tp", parts=(q, k, v))`; gate and
    up halves: `Split("tp", parts=2)`; virtual pipeline stages: `Split("pp", parts=stages_per_rank)`.

    axes: one axis or several, major first.  parts: sizes that sum to the dim, or a number of equal parts.
    """

    axes: str | tuple[str, ...]
    parts: int | tuple[int, ...]

    def __post_init__(self):
        if not isinstance(self.axes, str):
            object.__setattr__(self, "axes", tuple(self.axes))
        if not isinstance(self.parts, int):
            object.__setattr__(self, "parts", tuple(self.parts))

    @property
    def names(self) -> tuple[str, ...]:
        """The axes as a tuple."""
        return (self.axes,) if isinstance(self.axes, str) else self.axes

    def sizes(self, dim_size: int) -> tuple[int, ...]:
        """Sizes of the parts of a dim. Raises ValueError when they do not make up the dim."""
        if isinstance(self.parts, int):
            if self.parts < 1 or dim_size % self.parts:
                raise ValueError(
                    f"{self}: got {self.parts} parts of a dim of size {dim_size}, wanted a number that divides it;"
                    " give the sizes of the parts instead, e.g. parts=(512, 128, 128)"
                )
            return (dim_size // self.parts,) * self.parts
        if sum(self.parts) != dim_size or any(part < 0 for part in self.parts):
            raise ValueError(
                f"{self}: got parts that sum to {sum(self.parts)}, wanted the size of the dim, {dim_size};"
                " give one size (0 or more) for each part"
            )
        return self.parts


class Segment(NamedTuple):
    """`length` consecutive indices of a dim: from `start` in the global dim, from `local` in the rank's piece."""

    start: int
    local: int
    length: int


def chunk(size: int, count: int, index: int) -> tuple[int, int]:
    """(start, length) of chunk `index` of `count`, as torch.chunk cuts: ceil(size/count) each, the last ones less or 0.

    >>> [chunk(5, 4, i) for i in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    step = -(-size // count)
    start = min(index * step, size)
    return start, min(step, size - start)


def nested_chunk(size: int, counts: tuple[int, ...], index: int) -> tuple[int, int]:
    """`chunk` applied axis after axis, major first: what torch's DTensor does when several axes split a dim.

    index: joint index, row-major over `counts`.
    """
    if len(counts) == 1:
        return chunk(size, counts[0], index)
    indices = []
    for count in reversed(counts):
        index, i = divmod(index, count)
        indices.append(i)
    start = 0
    for count, i in zip(counts, reversed(indices), strict=True):
        offset, size = chunk(size, count, i)
        start += offset
    return start, size


def rooms(size: int, counts: Sequence[int]) -> tuple[int, ...]:
    """The room of a padded dim and of its chunks, axis after axis: each the one before divided by a count, rounded up.

    >>> rooms(10, (2, 3))
    (10, 5, 2)
    """
    found = [size]
    for count in counts:
        found.append(-(-found[-1] // count))
    return tuple(found)


def padded_chunk(size: int, counts: tuple[int, ...], index: int) -> tuple[int, int]:
    """(start, true length) of a chunk that has the same room, rooms(size, counts)[-1], on all ranks.

    An inner axis cuts the room of the outer chunk, also of the last one, whose true length may be shorter: that is the
    only difference to `nested_chunk`, and there is none where all outer axes divide.

    >>> [padded_chunk(7, (2, 2), i) for i in range(4)]
    [(0, 2), (2, 2), (4, 2), (6, 1)]
    """
    start, stop = 0, size
    below = math.prod(counts)
    for count, room in zip(counts, rooms(size, counts)[1:], strict=True):
        below //= count
        start += index // below * room
        stop, index = min(stop, start + room), index % below
    start = min(start, stop, size)
    return start, stop - start


def overlapping_chunks(
    size: int, counts: tuple[int, ...], start: int, stop: int, padded: bool = False
) -> list[tuple[int, int, int]]:
    """All (joint index, chunk start, chunk length) of `nested_chunk` that share an index with [start, stop).

    padded: of `padded_chunk`; the lengths are then those of rooms, but for the last of a single axis.
    Costs what it returns: no chunk outside the range is looked at.
    """
    if start >= stop:
        return []
    if not counts:
        return [(0, 0, size)]
    count, inner = counts[0], counts[1:]
    step = -(-size // count)
    if not inner:
        return [(i, i * step, min(step, size - i * step)) for i in range(start // step, (stop - 1) // step + 1)]
    found, below = [], 1
    for n in inner:
        below *= n
    for i in range(start // step, (stop - 1) // step + 1):
        offset = i * step
        length = min(step, size - offset)
        room, last = step if padded else length, min(length, stop - offset)
        for j, at, n in overlapping_chunks(room, inner, max(0, start - offset), last, padded):
            found.append((i * below + j, offset + at, n))
    return found


def overlapping_indices(
    parts: tuple[int, ...], counts: tuple[int, ...], start: int, stop: int, padded: bool = False
) -> list[int]:
    """The joint indices over axes of sizes `counts` that hold something of [start, stop) of a dim made of `parts`."""
    if not counts:
        return [0] if start < stop else []
    found, base = set(), 0
    for part in parts:
        lo, hi = max(start - base, 0), min(stop - base, part)
        found.update(i for i, _, _ in overlapping_chunks(part, counts, lo, hi, padded))
        base += part
    return sorted(found)


@lru_cache(maxsize=65536)
def segments(parts: tuple[int, ...], counts: tuple[int, ...], index: int, padded: bool = False) -> tuple[Segment, ...]:
    """The pieces of a dim (made of `parts`) that position `index` over axes of sizes `counts` holds; none is empty.

    padded: every part has its room, of which the end may be padding.
    """
    found: list[Segment] = []
    base = local = 0
    for part in parts:
        start, length = 0, part
        if counts:
            start, length = (padded_chunk if padded else nested_chunk)(part, counts, index)
        if length:
            last = found[-1] if found else None
            if last and last.start + last.length == base + start and last.local + last.length == local:
                found[-1] = Segment(last.start, last.local, last.length + length)  # neighbours in both numberings
            else:
                found.append(Segment(base + start, local, length))
        base += part
        local += rooms(part, counts)[-1] if padded else length
    return tuple(found)

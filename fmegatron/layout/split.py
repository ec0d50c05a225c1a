"""How one dim is cut over mesh axes: torch's chunk rule, several axes, interleaved parts. Integers only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple


@dataclass(frozen=True, repr=False)
class Split:
    """A dim made of consecutive parts, each split over `axes` on its own (an interleaved split), or, with `sizes` or
    `order`, of consecutive pieces that are assigned to the ranks as they are.

    A rank's local piece is its pieces of all parts, concatenated. Fused QKV: `Split("tp", parts=(q, k, v))`; gate and
    up halves: `Split("tp", parts=2)`; virtual pipeline stages: `Split("pp", parts=stages_per_rank)`.

    axes: one axis or several, major first.  parts: sizes that sum to the dim, or a number of equal parts.
    sizes: of the pieces, 0 or more, that sum to the dim: `Split("pp", sizes=(3, 4, 4, 1))` are four stages of so many
    layers.  order: for each piece the rank (its index along the axes) that holds it; a rank has its pieces in the order
    of the dim. A V of eight stages: `Split("pp", order=(0, 1, 2, 3, 3, 2, 1, 0))`; a loop: `order=(0, 1, 2, 3) * 2`.
    Without sizes all pieces are equal, without an order each rank holds one. Where ranks hold more or less, shapes
    differ from rank to rank; a step, which has one graph for all, wants them padded (`Layout.padded`).

    Raises ValueError for parts beside sizes or an order, and for an order of more or fewer pieces than sizes.
    """

    axes: str | tuple[str, ...]
    parts: int | tuple[int, ...] = 1
    sizes: tuple[int, ...] = field(default=(), kw_only=True)
    order: tuple[int, ...] = field(default=(), kw_only=True)

    def __post_init__(self):
        for name in ("axes", "parts", "sizes", "order"):
            if not isinstance(value := getattr(self, name), (str, int)):
                object.__setattr__(self, name, tuple(value))
        if self.assigned and self.parts != 1:
            raise ValueError(
                f"{self}: got parts, of which every rank has a share, and pieces, of which each has one rank, wanted "
                "parts, or sizes and order"
            )
        if self.sizes and self.order and len(self.sizes) != len(self.order):
            raise ValueError(
                f"{self}: got {len(self.sizes)} sizes and the ranks of {len(self.order)} pieces, wanted both of every "
                "piece"
            )

    def __repr__(self) -> str:
        if not self.assigned:
            return f"Split(axes={self.axes!r}, parts={self.parts!r})"
        sizes = f", sizes={self.sizes}" if self.sizes else ""
        return f"Split({self.axes!r}{sizes}{f', order={self.order}' if self.order else ''})"

    @property
    def names(self) -> tuple[str, ...]:
        """The axes as a tuple."""
        return (self.axes,) if isinstance(self.axes, str) else self.axes

    @property
    def assigned(self) -> bool:
        """Whether it has sizes or an order: each piece then is one rank's."""
        return bool(self.sizes or self.order)

    def over(self, axes: str | tuple[str, ...]) -> Split:
        """The same split over other axes."""
        return replace(self, axes=axes)

    def lengths(self, dim_size: int) -> tuple[int, ...]:
        """Lengths of the parts, or pieces, of a dim. Raises ValueError when they do not make up the dim."""
        what, given = ("sizes", self.sizes) if self.assigned else ("parts", self.parts)
        if self.assigned and not self.sizes:
            given = len(self.order)
        if isinstance(given, int):
            if given < 1 or dim_size % given:
                raise ValueError(
                    f"{self}: got {given} {'pieces' if self.assigned else 'parts'} of a dim of size {dim_size}, wanted "
                    f"a number that divides it; give the sizes of the parts instead, e.g. {what}=(512, 128, 128)"
                )
            return (dim_size // given,) * given
        if sum(given) != dim_size or any(part < 0 for part in given):
            raise ValueError(
                f"{self}: got {what} that sum to {sum(given)}, wanted the size of the dim, {dim_size};"
                f" give one size (0 or more) for each {'piece' if self.assigned else 'part'}"
            )
        return given


class Cut(NamedTuple):
    """How a dim is cut over axes of sizes `counts`, of which a rank has a joint index.

    parts: their lengths.  order: for each part the index that holds it in full; (): each is cut over all of them.
    """

    parts: tuple[int, ...]
    counts: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    @staticmethod
    def of(split: Split, dim_size: int, counts: tuple[int, ...]) -> Cut:
        """Of a split over axes of these sizes. Raises ValueError for sizes or an order that do not fit."""
        parts, ranks = split.lengths(dim_size), math.prod(counts)
        if not split.assigned:
            return Cut(parts, counts)
        names = "·".join(split.names)
        if not split.order and len(parts) != ranks:
            raise ValueError(
                f"{split}: got {len(parts)} sizes for {ranks} rank{'s' * (ranks > 1)} of {names}, wanted one for each "
                "(0 where a rank holds nothing), or order=, the rank of each piece"
            )
        if wrong := [rank for rank in split.order if not 0 <= rank < ranks]:
            raise ValueError(f"{split}: got rank {wrong[0]} in order, wanted 0 to {ranks - 1}, the ranks of {names}")
        return Cut(parts, counts, split.order or tuple(range(ranks)))

    def equal_parts(self) -> int:
        """Into how many parts it is cut where what each rank holds is its share of so many equal parts; else 0."""
        ranks = math.prod(self.counts)
        if self.order and not any(self.parts):
            return 1
        turns, rest = divmod(len(self.order), ranks)
        if ranks > 1 and (rest or len(set(self.parts)) > 1 or self.order != tuple(range(ranks)) * turns):
            return 0
        return turns

    def shares(self) -> dict[int, int]:
        """Of a dim that is assigned, how much each index that holds a piece has, in the order of the indices."""
        found = dict.fromkeys(sorted(set(self.order)), 0)
        for part, holder in zip(self.parts, self.order, strict=False):
            found[holder] += part
        return found

    @property
    def equal_shares(self) -> bool:
        """Whether all ranks hold as much of a dim that is assigned; True of another one."""
        shares = self.shares()  # who is not in it holds nothing; the ranks themselves may be very many
        held = {*shares.values(), *([0] if len(shares) < math.prod(self.counts) else [])}
        return not self.order or len(held) == 1

    def length(self, index: int, padded: bool) -> int:
        """What a rank has room for, padding included."""
        if self.order:
            shares = self.shares()
            return max(shares.values()) if padded else shares.get(index, 0)
        if padded:
            return sum(rooms(part, self.counts)[-1] for part in self.parts)
        found = segments(self, index, False)
        return found[-1].local + found[-1].length if found else 0


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


def rooms(size: int, counts: Sequence[int], unit: int = 1) -> tuple[int, ...]:
    """The room of a padded dim and of its chunks, axis after axis: each the one before divided by a count, rounded up.

    unit: of which the rooms of chunks are multiples.

    >>> rooms(10, (2, 3)), rooms(10, (2, 3), 4)
    ((10, 5, 2), (10, 8, 4))
    """
    found, units = [size], -(-size // unit)
    for count in counts:
        units = -(-units // count)
        found.append(units * unit)
    return tuple(found)


def padded_chunk(size: int, counts: tuple[int, ...], index: int, unit: int = 1) -> tuple[int, int]:
    """(start, true length) of a chunk that has the same room, rooms(size, counts, unit)[-1], on all ranks.

    An inner axis cuts the room of the outer chunk, also of the last one, whose true length may be shorter: that is the
    only difference to `nested_chunk`, and there is none where all outer axes divide.

    >>> [padded_chunk(7, (2, 2), i) for i in range(4)]
    [(0, 2), (2, 2), (4, 2), (6, 1)]
    """
    start, stop = 0, size
    below = math.prod(counts)
    for count, room in zip(counts, rooms(size, counts, unit)[1:], strict=True):
        below //= count
        start += index // below * room
        stop, index = min(stop, start + room), index % below
    start = min(start, stop, size)
    return start, stop - start


def overlapping_chunks(
    size: int, counts: tuple[int, ...], start: int, stop: int, padded: int = False
) -> list[tuple[int, int, int]]:
    """All (joint index, chunk start, chunk length) of `nested_chunk` that share an index with [start, stop).

    padded: of `padded_chunk` with this unit (True: 1); the lengths are then those of rooms, but for the last of a
    single axis.
    Costs what it returns: no chunk outside the range is looked at.
    """
    if start >= stop:
        return []
    if not counts:
        return [(0, 0, size)]
    inner = counts[1:]
    step = rooms(size, counts[:1], padded or 1)[-1]
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


def overlapping_indices(cut: Cut, start: int, stop: int, padded: bool = False) -> list[int]:
    """The joint indices that hold something of [start, stop) of a dim."""
    if not cut.counts:
        return [0] if start < stop else []
    found, base = set(), 0
    for i, part in enumerate(cut.parts):
        lo, hi = max(start - base, 0), min(stop - base, part)
        if cut.order:
            found.update([cut.order[i]] if lo < hi else [])
        else:
            found.update(i for i, _, _ in overlapping_chunks(part, cut.counts, lo, hi, padded))
        base += part
    return sorted(found)


@lru_cache(maxsize=65536)
def segments(cut: Cut, index: int, padded: bool = False) -> tuple[Segment, ...]:
    """The pieces of a dim that a joint index holds; none is empty.

    padded: every part has its room, of which the end may be padding.
    """
    found: list[Segment] = []
    base = local = 0
    for i, part in enumerate(cut.parts):
        start, length = 0, part
        if cut.order:
            length = part if cut.order[i] == index else 0
        elif cut.counts:
            start, length = (padded_chunk if padded else nested_chunk)(part, cut.counts, index)
        if length:
            last = found[-1] if found else None
            if last and last.start + last.length == base + start and last.local + last.length == local:
                found[-1] = Segment(last.start, last.local, last.length + length)  # neighbours in both numberings
            else:
                found.append(Segment(base + start, local, length))
        base += part
        local += rooms(part, cut.counts)[-1] if padded and not cut.order else length
    return tuple(found)

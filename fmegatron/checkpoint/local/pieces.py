"""What every rank wants of which shard of a set, by integer arithmetic that gives the same on all ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fmegatron.checkpoint.files.format import ALIGN_BYTES, bits
from fmegatron.checkpoint.files.targets import Target
from fmegatron.checkpoint.reading.read import destinations
from fmegatron.checkpoint.reading.request import Request
from fmegatron.checkpoint.reading.rounds import in_rounds
from fmegatron.checkpoint.reading.source import rows
from fmegatron.layout import Box, Layout
from fmegatron.layout.boxes import row_major_strides


@dataclass(frozen=True)
class Piece:
    """A part of what a rank wants that one shard holds.

    want: its number among what the rank wants.  box: global indices, and their place in the tensor of the shard.
    layout: of that leaf when it was saved.
    """

    path: str
    want: int
    box: Box
    layout: Layout

    @property
    def nbytes(self) -> int:
        """What it takes in a portion."""
        return -(-self.box.size * self.layout.dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES

    def cut(self, most: int) -> Iterator[Piece]:
        """The same in blocks of rows of about `most` bytes of the shard, what is between them counted."""
        box, width = self.box, self.layout.dtype.itemsize
        sparse = max(1, (1 + sum((n - 1) * s for n, s in zip(box.shape, box.strides, strict=True))) // box.size)
        for block in rows(box, width * sparse, most):
            yield Piece(self.path, self.want, block, self.layout)

    def direct(self, view: torch.Tensor) -> bool:
        """Whether its elements are read straight into a view of the shape of the box: they are in the same order."""
        lead = len(self.box.shape) if not self.layout.flat else self.layout.flat_from
        return lead == len(self.box.shape) or (
            self._span() == math.prod(self.box.shape[lead:]) and view.is_contiguous()
        )

    def target(self, rank: int, view: torch.Tensor) -> tuple[Target, torch.Tensor]:
        """What to read of the shard of a rank, and where the box is then: the view, or other memory of its shape."""
        shape, box, dtype = self.layout.local_shape(rank), self.box, self.layout.dtype
        index, strides = [], row_major_strides(shape)
        offset = box.offset
        for stride in strides:
            at, offset = divmod(offset, stride)
            index.append(at)
        if not self.layout.flat:
            return Target(self.path, Box(tuple(index), box.shape, 0, strides), view, dtype), view
        lead = len(shape) - 1
        inside = Box(tuple(index), (*box.shape[:lead], self._span()), 0, strides)
        if self.direct(view):
            return Target(self.path, inside, view.view(inside.shape), dtype), view
        memory = torch.empty(inside.shape, dtype=dtype)
        there = memory.as_strided(box.shape, (*memory.stride()[:lead], *box.strides[lead:]))
        return Target(self.path, inside, memory, dtype), there

    def _span(self) -> int:
        """Elements from the first to the last along the dims that were flattened."""
        lead = self.layout.flat_from
        return 1 + sum((n - 1) * s for n, s in zip(self.box.shape[lead:], self.box.strides[lead:], strict=True))


class Pieces:
    """Who wants what of which shard.

    Args:
        request: what all ranks want.
        layouts: under which the set was saved, by path.
        holders: per shard the ranks that have a copy.
    """

    def __init__(self, request: Request, layouts: Mapping[str, Layout], holders: Sequence[Sequence[int]]):
        self._request, self._layouts, self._holders = request, layouts, [tuple(ranks) for ranks in holders]
        self.of = functools.cache(self._of)

    def _of(self, rank: int) -> dict[int, list[Piece]] | None:
        """By shard, what the rank takes of it; None where some of what it wants is in no shard that there is.

        Of shards that hold the same: one on its own disk before others, that of its own number before others.
        """
        found: dict[int, list[Piece]] = {}
        here = [shard for shard, ranks in enumerate(self._holders) if rank in ranks]
        here.sort(key=lambda shard: shard != rank)
        for i, want in enumerate(destinations(self._request, rank, device="meta")[1]):
            path, box, layout = want.leaf.path, want.target.box, self._layouts[want.leaf.path]
            for shard, boxes in layout.overlapping(box.start, box.stop):
                best = next((one for one in here if layout.shard(one) == shard), None)
                if best is None:
                    alike = (layout.rank_of(shard, k) for k in range(layout.replicas))
                    there = [one for one in alike if self._holders[one]]
                    if not there:
                        return None
                    best = rank if rank in there else there[rank % len(there)]
                found.setdefault(best, []).extend(Piece(path, i, part, layout) for part in boxes)
        return found

    def portions(self, rank: int, shard: int, most: int) -> list[list[Piece]]:
        """What a rank takes of a shard, in portions of about `most` bytes that are sent one by one."""
        found = self.of(rank)
        assert found is not None, "it is asked for what it takes when all find what they want"
        return list(in_rounds((block for piece in found[shard] for block in piece.cut(most)), most))


def into_portion(portion: Sequence[Piece], memory: torch.Tensor) -> list[tuple[Piece, torch.Tensor]]:
    """The pieces of a portion with their places in its memory, contiguous."""
    found, at = [], 0
    for piece in portion:
        n = piece.box.size * piece.layout.dtype.itemsize
        found.append((piece, memory[at : at + n].view(piece.layout.dtype).view(piece.box.shape)))
        at += piece.nbytes
    return found


def part_of(target: Target, box: Box) -> torch.Tensor:
    """The view that a box of a target goes to."""
    at = zip(box.start, target.box.start, box.shape, strict=True)
    return target.view[tuple(slice(a - b, a - b + n) for a, b, n in at)]


def put(memory: torch.Tensor, view: torch.Tensor) -> None:
    """Copy elements bit by bit."""
    bits(view).copy_(bits(memory))

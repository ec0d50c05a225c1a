"""The layout of a tensor whose shards follow a foreign sharding plan: any boxes, on any ranks, each once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch

from fmegatron.checkpoint.writing.plan import LeafPlan, home_of, is_small
from fmegatron.layout import Box, Layout, Mesh, boxes


@dataclass(frozen=True)
class Scattered:
    """What the writers of a checkpoint need of a Layout, for boxes of no regular order.

    held: (rank, start, shape) of every box. A rank's local tensor is its boxes' elements, box after box. To readers the
    leaf is described as one full array: where its boxes are on disk is described apart from that.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    held: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]

    mesh, flat, replicas, replicated, padded, flat_from = Mesh(), (), 1, (), False, 0

    @property
    def spec(self) -> tuple[None, ...]:
        """No dim is split by an axis."""
        return (None,) * len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the full array."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def most_nbytes(self) -> int:
        """Bytes of the boxes of the rank that holds most."""
        held: dict[int, int] = {}
        for rank, _, shape in self.held:
            held[rank] = held.get(rank, 0) + math.prod(shape)
        return max(held.values(), default=0) * self.dtype.itemsize

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """The rank's boxes in its local tensor."""
        found, at = [], 0
        for holder, start, shape in self.held:
            if holder == rank and 0 not in shape:
                found.append(Box(start, shape, at, boxes.row_major_strides(shape)))
                at += math.prod(shape)
        return tuple(found)

    def owner(self, rank: int, turn: int = 0) -> bool:
        """Every box has one holder, which writes it."""
        return True

    def replica(self, rank: int) -> int:
        """The first and only one."""
        return 0

    def to_json(self) -> dict:
        """As one full array."""
        return Layout(self.shape, self.dtype, self.mesh).to_json()

    def plan(self, path: str, pack: bool) -> LeafPlan:
        """Where the leaf goes: by the rules of `checkpoint.writing.plan`. pack: whether small ones are too many."""
        layout = cast("Layout", self)  # it has all that writing asks of a layout; restoring asks for more
        local = max((math.prod(shape) for _, _, shape in self.held), default=0) * self.dtype.itemsize
        if pack and is_small(self.shape, self.nbytes):
            return LeafPlan(path, layout, "packed")
        return LeafPlan(path, layout, *home_of(self.shape, self.dtype.itemsize, self.unit(), local, self.mesh.size))

    def unit(self) -> tuple[int, ...]:
        """Per dim the step of which every cut is a multiple, see `cut_unit`."""
        return tuple(_gcd(self._cuts(dim), n) for dim, n in enumerate(self.shape))

    def _cuts(self, dim: int) -> Iterable[int]:
        for _, start, shape in self.held:
            yield start[dim]
            yield start[dim] + shape[dim]


def _gcd(cuts: Iterable[int], n: int) -> int:
    """The greatest step of which all cuts inside a dim of size n are multiples; n if there is none."""
    return math.gcd(*(cut for cut in cuts if cut < n)) or n

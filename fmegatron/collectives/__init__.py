"""Collectives over named axes: differentiable, typed, with a symbolic and a real binding.

The only room that calls torch.distributed (start-up and checkpoint agreements included, in `World`).
"""

from fmegatron.collectives.axes import Axes, Axis
from fmegatron.collectives.ops import (
    all_gather,
    all_to_all,
    axis_index,
    declare,
    enter,
    pmax,
    ppermute,
    psum,
    reduce_scatter,
    shard,
)
from fmegatron.collectives.reshard import Move, reshard, reshard_moves
from fmegatron.collectives.symbolic import is_symbolic
from fmegatron.collectives.world import World, connect

__all__ = [
    "Axes",
    "Axis",
    "Move",
    "World",
    "all_gather",
    "all_to_all",
    "axis_index",
    "connect",
    "declare",
    "enter",
    "is_symbolic",
    "pmax",
    "ppermute",
    "psum",
    "reduce_scatter",
    "reshard",
    "reshard_moves",
    "shard",
]

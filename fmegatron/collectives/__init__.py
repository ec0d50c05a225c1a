"""Collectives over named axes: differentiable, typed, with a symbolic and a real binding.

The only room that calls torch.distributed (start-up and checkpoint agreements included, in `World`).
"""

from fmegatron.collectives.axes import Axes, Axis
from fmegatron.collectives.coalesced import all_gather_many, all_to_all_many, psum_many, reduce_scatter_many
from fmegatron.collectives.interrupt import held_interrupt
from fmegatron.collectives.meet import meet
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
from fmegatron.collectives.place import FLAT, Place
from fmegatron.collectives.precision import Precision
from fmegatron.collectives.random_words import positions, random_words
from fmegatron.collectives.reshard import Move, reshard, reshard_moves, whole_parts
from fmegatron.collectives.reshard_many import reshard_many
from fmegatron.collectives.symbolic import is_symbolic, require_mesh_of_graph
from fmegatron.collectives.wire import Wire, largest_of
from fmegatron.collectives.world import FailedOnRank, World, connect

__all__ = [
    "Axes",
    "Axis",
    "FLAT",
    "FailedOnRank",
    "Move",
    "Place",
    "Precision",
    "Wire",
    "World",
    "all_gather",
    "all_gather_many",
    "all_to_all",
    "all_to_all_many",
    "axis_index",
    "connect",
    "declare",
    "enter",
    "held_interrupt",
    "is_symbolic",
    "largest_of",
    "meet",
    "pmax",
    "positions",
    "ppermute",
    "psum",
    "psum_many",
    "random_words",
    "require_mesh_of_graph",
    "reduce_scatter",
    "reduce_scatter_many",
    "reshard",
    "reshard_many",
    "reshard_moves",
    "shard",
    "whole_parts",
]

"""Collectives over named axes: differentiable, typed, with a symbolic and a real binding.

The only room that calls torch.distributed (start-up and checkpoint agreements included, in `World`).
"""

from fmegatron.collectives.axes import Axes, Axis
from fmegatron.collectives.collective import (
    REPLICATED,
    Collective,
    Own,
    Partial,
    Permuted,
    RankIndex,
    Replicated,
    Sharded,
    collective_of,
    require_mesh_of_graph,
)
from fmegatron.collectives.interrupt import held_interrupt
from fmegatron.collectives.meet import absent, meet
from fmegatron.collectives.ops import (
    all_gather,
    all_gather_many,
    all_to_all,
    all_to_all_many,
    all_to_all_rows,
    axis_index,
    declare,
    enter,
    pmax,
    ppermute,
    psum,
    psum_many,
    reduce_scatter,
    reduce_scatter_many,
    shard,
)
from fmegatron.collectives.place import FLAT, Place
from fmegatron.collectives.precision import Precision
from fmegatron.collectives.product_forms import in_product_form
from fmegatron.collectives.random_words import positions, random_words
from fmegatron.collectives.real import Group
from fmegatron.collectives.reshard import reshard, reshard_many, whole_parts
from fmegatron.collectives.reshard_plan import Move, reshard_moves
from fmegatron.collectives.slurm import adopt_slurm, ranks_of_slurm
from fmegatron.collectives.table import (
    ALL_TO_ALL_ROWS,
    AXIS_INDEX,
    COLLECTIVES,
    CUT,
    DECLARE,
    PPERMUTE,
    PSUM,
    REDUCE_SCATTER,
)
from fmegatron.collectives.torch_private import flight_record
from fmegatron.collectives.wire import Wire, largest_of
from fmegatron.collectives.world import FailedOnRank, World, connect

__all__ = [
    "ALL_TO_ALL_ROWS",
    "AXIS_INDEX",
    "Axes",
    "Axis",
    "COLLECTIVES",
    "CUT",
    "Collective",
    "DECLARE",
    "FLAT",
    "FailedOnRank",
    "Group",
    "Move",
    "Own",
    "PPERMUTE",
    "PSUM",
    "Partial",
    "Permuted",
    "Place",
    "Precision",
    "REDUCE_SCATTER",
    "REPLICATED",
    "RankIndex",
    "Replicated",
    "Sharded",
    "Wire",
    "World",
    "absent",
    "adopt_slurm",
    "all_gather",
    "all_gather_many",
    "all_to_all",
    "all_to_all_many",
    "all_to_all_rows",
    "axis_index",
    "collective_of",
    "connect",
    "declare",
    "enter",
    "flight_record",
    "held_interrupt",
    "in_product_form",
    "largest_of",
    "meet",
    "pmax",
    "positions",
    "ppermute",
    "psum",
    "psum_many",
    "random_words",
    "ranks_of_slurm",
    "reduce_scatter",
    "reduce_scatter_many",
    "require_mesh_of_graph",
    "reshard",
    "reshard_many",
    "reshard_moves",
    "shard",
    "whole_parts",
]

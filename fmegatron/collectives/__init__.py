"""Collectives over named axes: differentiable, typed, with a symbolic and a real binding.

The only room that calls torch.distributed (start-up and checkpoint agreements included, in `World`).
"""

from fmegatron.collectives.axes import Axes
from fmegatron.collectives.ops import (
    all_gather,
    all_to_all,
    axis_index,
    enter,
    pmax,
    ppermute,
    psum,
    reduce_scatter,
    shard,
)
from fmegatron.collectives.precision import Precision
from fmegatron.collectives.resharding import reshard
from fmegatron.collectives.world import World, connect
from fmegatron.moved import no_name as _no_name

__all__ = [
    "Axes",
    "Precision",
    "World",
    "all_gather",
    "all_to_all",
    "axis_index",
    "connect",
    "enter",
    "pmax",
    "ppermute",
    "psum",
    "reduce_scatter",
    "reshard",
    "shard",
]

globals()["__getattr__"] = _no_name(__name__)

"""Separate process groups for gathers, so that reductions do not queue behind them."""

from __future__ import annotations

from torch import fx

from fmegatron.collectives import World
from fmegatron.step.overlap.roles import is_start, kind

__all__ = ["separate_groups"]


def separate_groups(graph: fx.Graph, world: World) -> None:
    """Every gather of a lowered graph goes over a second group of the same ranks, "fmegatron:fsdp#gather".

    All ranks must call this for the same graph: groups are made here.
    """
    for node in graph.nodes:
        if is_start(node) and kind(node) == "gather":
            *rest, group = node.args
            node.args = (*rest, world.group_name(world.axes_of(group), "gather"))

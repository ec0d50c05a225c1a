"""The passes of `jit(..., overlap=...)` on a lowered graph, in their order."""

from __future__ import annotations

import torch

from fmegatron.collectives import World
from fmegatron.step.lower import copy_module
from fmegatron.step.overlap.ends import join_ends
from fmegatron.step.overlap.groups import separate_groups
from fmegatron.step.overlap.merge import merge_reductions
from fmegatron.step.overlap.order import reordered, sort_by
from fmegatron.step.overlap.roles import is_start
from fmegatron.step.overlap.setting import Overlap
from fmegatron.step.overlap.turn import keep_last

__all__ = ["overlapped"]


def overlapped(
    graph_module: torch.fx.GraphModule, setting: Overlap | None, world: World | None = None
) -> torch.fx.GraphModule:
    """A copy of a lowered graph whose collectives are merged and ordered as `setting` says; it computes the same.

    A graph without collectives is returned as it is.
    """
    if setting is None or not any(map(is_start, graph_module.graph.nodes)):
        return graph_module
    module = copy_module(graph_module)
    graph = module.graph
    if setting.keep_last:
        keep_last(graph)
    if setting.bucket_bytes:
        merge_reductions(graph, setting.bucket_bytes)
    if setting.join_ends:
        join_ends(graph)
    if setting.reorders:
        sort_by(graph, reordered(graph, setting))
    if setting.separate_groups and world is not None:
        separate_groups(graph, world)
    graph.lint()
    module.recompile()
    return module

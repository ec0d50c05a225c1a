"""The passes of `jit(..., overlap=...)` on a lowered graph, in their order."""

from __future__ import annotations

import torch

from fmegatron.collectives import World
from fmegatron.step.lower import copy_module
from fmegatron.step.overlap.alive import peak_bytes
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
    limited = setting.reorders and setting.peak is not None
    limit = int(setting.peak * peak_bytes(graph_module.graph)) if limited else None
    module = _ordered(graph_module, setting, limit)
    if setting.join_ends and limited and peak_bytes(module.graph) > limit:
        # The shard of the embedding's gradient arrives with that of the first block, before all blocks' are stacked.
        apart = _ordered(graph_module, setting, limit, join_backward=False)
        module = min(module, apart, key=lambda m: peak_bytes(m.graph))
    if setting.separate_groups and world is not None:
        separate_groups(module.graph, world)
    module.graph.lint()
    module.recompile()
    return module


def _ordered(
    graph_module: torch.fx.GraphModule, setting: Overlap, limit: int | None, join_backward: bool = True
) -> torch.fx.GraphModule:
    module = copy_module(graph_module)
    graph = module.graph
    if setting.keep_last:
        keep_last(graph)
    if setting.bucket_bytes:
        merge_reductions(graph, setting.bucket_bytes)
    if setting.join_ends:
        join_ends(graph, join_backward)
    if setting.reorders:
        sort_by(graph, reordered(graph, setting, limit))
    return module

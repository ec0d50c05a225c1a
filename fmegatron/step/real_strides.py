"""Views that fall back to a copy: strides of fake tensors are not always those of real ones.

For some ops (the backward of elu and its like) torch records dense strides, where its kernels give those of an
argument. A view that was recorded for the one cannot be made of the other. Where a graph runs op by op, such a view is
a copy, as it is in torch's own backward; Inductor lays values out itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fmegatron.step.graph.memory import memory_of, memory_written
from fmegatron.step.graph.nodes import node_of
from fmegatron.step.lower import copy_module
from fmegatron.step.torch_private import UNSAFE_VIEW

__all__ = ["that_copies", "with_copying_views"]

_RESHAPED = (torch.ops.aten.view.default, UNSAFE_VIEW)


def with_copying_views(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The same graph, whose views may be copies where nothing writes into their memory."""
    copy = copy_module(graph_module)
    memory = memory_of(copy.graph.nodes)
    written = {place for node in copy.graph.nodes for place in memory_written(node, memory)}
    for node in copy.graph.nodes:
        if memory[node] not in written:
            node.target, more = that_copies(node)
            node.kwargs = node.kwargs | more
    copy.recompile()
    return copy


def that_copies(node: fx.Node) -> tuple[Any, dict[str, Any]]:
    """(what to run in the place of a view, so that it is a copy where it has to be, its further arguments by name); of
    any other node its target."""
    if node.target in _RESHAPED:
        return torch.ops.aten.reshape.default, {}
    if node.target is torch.ops.aten.as_strided.default:
        return _as_strided, {"recorded": node_of(node.args[0]).meta["val"].stride()}
    return node.target, {}


def _as_strided(
    x: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
    *,
    recorded: Sequence[int],
) -> torch.Tensor:
    """as_strided of a tensor that has the strides of the trace, recorded."""
    if x.stride() != tuple(recorded):
        x = torch.empty_strided(x.shape, recorded, dtype=x.dtype, device=x.device).copy_(x)
    return x.as_strided(size, stride, storage_offset)

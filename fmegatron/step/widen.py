"""fp64: the graph of a step with torch.float64 in place of every floating-point dtype, so that rounding is small."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from fmegatron.step import opaque, tracing

__all__ = ["wide_column", "widened"]


def widened(traced: tracing.Traced) -> tracing.Traced:
    """The same step with all its floating-point arithmetic in torch.float64; its layers are inlined.

    Raises ValueError, naming the line, for an op that reads the bits of a number as those of another dtype, unless
    these are the bits of an fp64, which stay what they are (`nn.normal`).
    """
    graph = opaque.inline_layers(traced.graph_module.graph)
    for node in graph.nodes:
        if node.target is torch.ops.aten.view.dtype and _changes(node.args[0].meta["val"].dtype, node.args[1]):
            raise ValueError(
                f"fp64: {node.meta.get('at', '?')}: got a view of bits as {node.args[1]}, wanted a step without one, "
                "as its numbers have other bits in torch.float64; compare it without fp64, with a tolerance"
            )
        node.args, node.kwargs = map_aggregate((node.args, node.kwargs), _wide)
    return dataclasses.replace(traced, graph_module=fx.GraphModule(torch.nn.Module(), graph))


def wide_column(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor of each rank in torch.float64 where it has a floating-point dtype; ranks that share it still do."""
    done = {id(x): x.to(torch.float64) if x.is_floating_point() else x for x in values}
    return [done[id(x)] for x in values]


def _changes(*dtypes: torch.dtype) -> bool:
    return any(dtype.is_floating_point and dtype != torch.float64 for dtype in dtypes)


def _wide(x: Any) -> Any:
    return torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x

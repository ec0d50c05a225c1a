"""Decomposition of ops without a rule, by torch's own decompositions."""

from __future__ import annotations

from typing import Any

import torch

from fmegatron.collectives.torch_private import schema_of
from fmegatron.step.check.scope import Scope, line_of
from fmegatron.step.torch_private import FakeTensorMode, decomposition_of, make_fx, outside_of_tracing

_DEEPEST = 6  # so often an op of a decomposition is taken apart again
# What a decomposition raises for arguments that it does not take: then the op stays one.
_REFUSALS = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, LookupError)


def pieces_of(scope: Scope, node: torch.fx.Node) -> torch.fx.Graph | None:
    """The graph of a node's op, one step of torch's decompositions, each of its nodes at the line of the node.

    Its placeholders are `node.all_input_nodes`. None where torch has no decomposition, or for an op that writes.
    """
    schema = schema_of(node.target)
    if schema is None or schema.is_mutable or scope.depth >= _DEEPEST:
        return None
    key = (node.target, line_of(node), repr((node.args, node.kwargs)), _metas(node))
    if key not in scope.pieces:
        scope.pieces[key] = _traced(node)
    return scope.pieces[key]


def _metas(node: torch.fx.Node) -> str:
    return repr([(tuple(n.meta["val"].shape), n.meta["val"].dtype) for n in node.all_input_nodes if _tensor(n)])


def _tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _traced(node: torch.fx.Node) -> torch.fx.Graph | None:
    sources = node.all_input_nodes
    apart = decomposition_of(node.target)
    if apart is None or not all(map(_tensor, sources)):
        return None

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        at = dict(zip(sources, tensors, strict=True))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: at[n])
        out = apart(*args, **kwargs)
        return list(out) if isinstance(out, (list, tuple)) else [out]

    try:
        with outside_of_tracing(), torch.no_grad(), FakeTensorMode() as mode, mode:
            metas = [n.meta["val"] for n in sources]
            fakes = [torch.empty_strided(m.shape, m.stride(), dtype=m.dtype, device=m.device) for m in metas]
            graph = make_fx(run)(*fakes).graph
    except _REFUSALS:
        return None
    if any(n.op == "get_attr" for n in graph.nodes) or any(n.target is node.target for n in graph.nodes):
        return None
    for made in graph.nodes:
        made.meta["at"] = line_of(node)
    return graph


def result_of(node: torch.fx.Node, values: list[Any]) -> Any:
    """What the walk of such a graph returned, in the form that the op has."""
    return values if isinstance(node.meta["val"], (list, tuple)) else values[0]

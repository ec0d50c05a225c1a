"""Rules for ops along dims: those that remove one (sum, amax), and those that need the whole of it (softmax, sort)."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch

from fmegatron.step.check import arithmetic
from fmegatron.step.check.scope import Rules, Scope, op_name
from fmegatron.step.check.values import Value

# How the parts of ranks make up the whole: sum and max can be reduced over ranks, the others need the whole dim.
KINDS = MappingProxyType(
    {"amax": "max", "any": "max", "amin": "min", "all": "min", "linalg_vector_norm": "norm"}
    | {k: k for k in "sum mean max argmax argmin prod var std min norm logsumexp".split()}
)
LINEAR = frozenset("cumsum flip roll".split())


def reduced(scope: Scope, node: torch.fx.Node, given: dict) -> Any:
    """sum, mean, amax, ...; max and min along a dim give (values, indices)."""
    x = given["self"]
    dims = given.get("dim", given.get("dims"))
    dims = [dims] if isinstance(dims, int) else dims
    kind = KINDS[op_name(node).removeprefix("_foreach_")]
    return _alike(node, arithmetic.reduction(scope, node, x, dims, given.get("keepdim", False), kind))


def along(scope: Scope, node: torch.fx.Node, given: dict) -> Any:
    """softmax, sort, topk, cumsum, ...: one dim, which must be whole, and every row on its own."""
    name = op_name(node)
    out = arithmetic.elementwise(scope, node, "same" if name in LINEAR else "function", [given["self"]])
    return _alike(node, _whole(scope, node, out, given))


def softmax_backward(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """Linear in the gradient; the dim must be whole."""
    out = arithmetic.elementwise(scope, node, "product", [given["grad_output"], given["output"]])
    return _whole(scope, node, out, given)


def _whole(scope, node, out, given):
    dims = given.get("dim", given.get("dims", -1))
    for dim in dims if isinstance(dims, (list, tuple)) else [dims]:
        out = arithmetic.along(scope, node, out, dim, op_name(node).strip("_"))
    return out


def _alike(node, out):
    return [out] * len(node.meta["val"]) if isinstance(node.meta["val"], (list, tuple)) else out


RULES: Rules = MappingProxyType(
    dict.fromkeys(KINDS, reduced)
    | dict.fromkeys(LINEAR, along)
    | dict.fromkeys("_softmax _log_softmax _safe_softmax cumprod sort topk".split(), along)
    | dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), softmax_backward)
)

"""Rules for ops that do several things at once: attention, norms, losses, grouped products, writes at indices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fmegatron.step.check import arithmetic
from fmegatron.step.check.lookups import accumulated
from fmegatron.step.check.scope import Scope
from fmegatron.step.check.values import Value, plain

Node = torch.fx.Node


# ---- attention -------------------------------------------------------------------------------------------------------
def attention(scope: Scope, node: Node, given: dict) -> list[Value | None]:
    """q[B, H, S, E], k and v[B, H, T, E] -> [output, logsumexp, ...]: heads, batch run along; T and E must be whole.

    The signatures of torch's CPU, flash, memory-efficient and cuDNN kernels agree in what matters here.
    """
    q, k, v = (scope.values[given[name]] for name in ("query", "key", "value"))
    for other, what in ((k, "keys"), (v, "values")):
        for dim in (2, 3):
            arithmetic.along(scope, node, other, dim, f"attention {what}")
    arithmetic.along(scope, node, q, 3, "attention queries")
    out = arithmetic.elementwise(scope, node, "function", [_heads(t) for t in (q, k, v)])
    full = replace(out, dims=(*out.dims[:2], q.dims[2], v.dims[3]))
    rows = replace(out, dims=(*out.dims[:2], q.dims[2]))
    rest = [
        Value(arithmetic.counted(m.shape).dims) if isinstance(m, torch.Tensor) else None for m in node.meta["val"][2:]
    ]
    return [full, rows, *rest]


def attention_backward(scope: Scope, node: Node, given: dict) -> list[Value | None]:
    """Gradients of q, k, v: linear in that of the output."""
    g = scope.values[given.get("grad_out", given.get("grad_out_"))]
    q, k, v = (scope.values[given[name]] for name in ("query", "key", "value"))
    rest = arithmetic.elementwise(scope, node, "function", [_heads(t) for t in (q, k, v)])
    out = arithmetic.elementwise(scope, node, "product", [_heads(g), rest])
    count = len(node.meta["val"])
    return [replace(out, dims=(*out.dims[:2], *t.dims[2:])) for t in (q, k, v)] + [None] * (count - 3)


def _heads(t: Value) -> Value:
    return t.with_dims((*t.dims[:2], (), ()))


# ---- norms -----------------------------------------------------------------------------------------------------------
def norm(scope: Scope, node: Node, given: dict) -> list[Value]:
    """native_layer_norm and _fused_rms_norm over the last dims, which must be whole -> (output, statistics...)."""
    x = _whole_end(scope, node, given)
    more = [scope.values[given[name]] for name in ("weight", "bias") if isinstance(given.get(name), Node)]
    out = arithmetic.elementwise(scope, node, "function", [x, *more])
    count = len(given["normalized_shape"])
    rows = out.with_dims(() if d >= len(out.dims) - count else dim for d, dim in enumerate(out.dims))
    return [out] + [rows] * (len(node.meta["val"]) - 1)


def norm_backward(scope: Scope, node: Node, given: dict) -> list[Value | None]:
    """Gradients of input, weight and bias: the last two are summed over all rows, so pending where rows are sharded."""
    g, x = scope.values[given["grad_out"]], _whole_end(scope, node, given)
    weight = scope.values[given["weight"]] if isinstance(given.get("weight"), Node) else None
    rows = list(range(len(x.dims) - len(given["normalized_shape"])))
    dx = arithmetic.elementwise(scope, node, "product", [g, x if weight is None else _of(scope, node, x, weight)])
    sums = []
    if rows:
        dw = arithmetic.elementwise(scope, node, "product", [g, x])
        sums = [arithmetic.reduction(scope, node, value, rows, False, "sum") for value in (dw, g)]
    found = [dx, *(sums or [dx, g])]
    return [v if isinstance(m, torch.Tensor) else None for v, m in zip(found, node.meta["val"], strict=False)]


def _of(scope: Scope, node: Node, *values: Value) -> Value:
    return arithmetic.elementwise(scope, node, "function", values)


def _whole_end(scope: Scope, node: Node, given: dict) -> Value:
    x = scope.values[given["input"]]
    for back in range(len(given["normalized_shape"])):
        x = arithmetic.along(scope, node, x, len(x.dims) - 1 - back, "a norm")
    return x


# ---- losses ----------------------------------------------------------------------------------------------------------
def nll_loss(scope: Scope, node: Node, given: dict) -> list[Value]:
    """log-probabilities [N, C] picked by labels [N], then none (0), mean (1) or sum (2) -> (loss, total weight)."""
    x, target = scope.values[given["self"]], scope.values[given["target"]]
    x = arithmetic.along(scope, node, x, len(x.dims) - 1, "nll_loss")
    picked = arithmetic.elementwise(scope, node, "same", [x.with_dims(x.dims[:-1])])
    labels = arithmetic.elementwise(scope, node, "function", [target])
    rows = arithmetic.elementwise(scope, node, "product", [picked, labels])
    if given["reduction"] == 0:
        return [rows, arithmetic.filled((), 0)]
    kind = "mean" if given["reduction"] == 1 else "sum"
    loss = arithmetic.reduction(scope, node, rows, None, False, kind)
    return [loss, replace(loss, partial=dict(loss.partial))]


def nll_loss_backward(scope: Scope, node: Node, given: dict) -> Value:
    """The gradient of the log-probabilities, linear in that of the loss."""
    g, x = scope.values[given["grad_output"]], scope.values[given["self"]]
    g = g.with_dims((*g.dims, ())) if g.dims else g
    return arithmetic.elementwise(scope, node, "product", [g, _of(scope, node, x)])


# ---- experts ---------------------------------------------------------------------------------------------------------
def grouped_product(scope: Scope, node: Node, given: dict) -> Value | None:
    """x[M, K] @ w[G, K, N], rows of a group with the matrix of the group. None for the forms of its gradients.

    Where the matrices are sharded (experts), so must be the rows: after an all_to_all, each rank has those of its own.
    """
    x, w = scope.values[given["self"]], scope.values[given["mat2"]]
    if (len(x.dims), len(w.dims)) != (2, 3):
        return None
    experts = frozenset().union(*(atom.sharded for atom in w.dims[0])) - w.tainted
    for axis in sorted(experts):
        if axis not in x.varying | x.tainted and 0 not in x.shards(axis):
            scope.find(node, axis, f"multiplies rows that are {x.state(axis)} by matrices that are sharded",
                       "all_to_all the rows to the ranks of their experts first")  # fmt: skip
            x = x.without([axis], tainted=[axis])
    w = w.without(experts)
    return arithmetic.contraction(scope, node, x, w.with_dims(w.dims[1:]), 0)


# ---- writes at indices -----------------------------------------------------------------------------------------------
def added_at(scope: Scope, node: Node, given: dict) -> Value:
    """scatter_add, index_add: self plus what is added up at indices along a dim."""
    source = scope.values[given.get("src", given.get("source"))]
    shape = tuple(node.meta["val"].shape)
    dim = given["dim"] % len(shape)
    added = accumulated(scope, node, shape, dim, scope.values[given["index"]], source, False)
    base = scope.values[given["self"]]
    return added if base.constant == 0 else arithmetic.elementwise(scope, node, "sum", [base, added])


def written_at(scope: Scope, node: Node, given: dict) -> Value | None:
    """scatter (also one_hot): elements replaced at indices along a dim that is whole. None where indices are sharded
    along that dim: each rank then writes its own, and what that means is not known."""
    base, index = scope.values[given["self"]], scope.values[given["index"]]
    dim = given["dim"] % len(base.dims)
    if any(atom.sharded for atom in index.dims[dim]):
        return None
    base = arithmetic.along(scope, node, base, dim, "a scatter")
    values = [base, index]
    if isinstance(given.get("src"), Node):
        values.append(scope.values[given["src"]])
    bare = [v.with_dims(() if d == dim else a for d, a in enumerate(v.dims)) for v in values]
    out = arithmetic.elementwise(scope, node, "function", bare)
    size = node.meta["val"].shape[dim]
    return out.with_dims(plain(size) if d == dim else a for d, a in enumerate(out.dims))


def table() -> dict[str, Any]:
    """name of an op -> rule(scope, node, arguments by name); a rule that returns None leaves the op unproven."""
    rules = {
        "native_layer_norm": norm,
        "native_layer_norm_backward": norm_backward,
        "_fused_rms_norm": norm,
        "_fused_rms_norm_backward": norm_backward,
        "nll_loss_forward": nll_loss,
        "nll_loss_backward": nll_loss_backward,
        "_grouped_mm": grouped_product,
        "scatter_add": added_at,
        "index_add": added_at,
        "scatter": written_at,
    }
    for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
        name = f"_scaled_dot_product_{kernel}"
        rules |= {name: attention, f"{name}_backward": attention_backward}
    return rules

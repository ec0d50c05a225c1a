"""Rules for ops that do several things at once: attention, norms, losses."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import torch

from fmegatron.step.check import arithmetic, reductions
from fmegatron.step.check.atoms import UNIFORM, Atom, over, size_of
from fmegatron.step.check.excess import raised
from fmegatron.step.check.made import counted
from fmegatron.step.check.scope import Rules, Scope
from fmegatron.step.check.values import Pending, Suspect, Value, filled

Node = torch.fx.Node


# ---- attention -------------------------------------------------------------------------------------------------------
def attention(scope: Scope, node: Node, given: dict) -> list[Value | None]:
    """q[B, H, S, E], k and v[B, H, T, E] -> [output, logsumexp, ...]: heads, batch run along; T and E must be whole.

    The signatures of torch's CPU, flash, memory-efficient and cuDNN kernels agree in what matters here.
    """
    q, k, v = _located(scope, node, given)
    parts = over(k.dims[2]) & over(v.dims[2])
    k, v = (_all_of(scope, node, t, (2, 3), what) for t, what in ((k, "attention keys"), (v, "attention values")))
    q = _all_of(scope, node, q, (3,), "attention queries")
    out = arithmetic.elementwise(scope, node, "function", [_heads(t, q) for t in (q, k, v)])
    full = replace(out, dims=(*out.dims[:2], q.dims[2], v.dims[3]))
    rows = replace(out, dims=(*out.dims[:2], q.dims[2]))
    known = [axis for axis in parts if rows.is_(axis, Suspect)]  # what combines the parts of ranks
    rows = rows.marked({axis: Pending("logsumexp", node) for axis in known})
    rest = [counted(m.shape) if isinstance(m, torch.Tensor) else None for m in node.meta["val"][2:]]
    return [full, rows, *rest]


def _located(scope: Scope, node: Node, given: dict) -> list[Value]:
    """Queries, keys and values; what one of them shows of dims that shapes leave open holds for the others."""
    q, k, v = (given[name] for name in ("query", "key", "value"))
    for _ in range(2):
        k, v = (arithmetic.settled(scope, node, t, 3, q, 3, 2) for t in (k, v))
        q = arithmetic.settled(scope, node, q, 3, k, 3, 2)
    return [q, k, v]


def _all_of(scope: Scope, node: Node, x: Value, dims: tuple[int, ...], what: str) -> Value:
    for dim in dims:
        x = reductions.along(scope, node, x, dim, what)
    return x


def attention_backward(scope: Scope, node: Node, given: dict) -> list[Value | None]:
    """Gradients of q, k, v: linear in that of the output."""
    g = given.get("grad_out", given.get("grad_out_"))
    q, k, v = _located(scope, node, given)
    rest = arithmetic.elementwise(scope, node, "function", [_heads(t, q) for t in (q, k, v)])
    out = arithmetic.elementwise(scope, node, "product", [_heads(g, q), rest])
    count = len(node.meta["val"])
    rows = over(q.dims[2]) - over(k.dims[2])  # each rank has queries of its own, and all keys
    grads = [replace(out, dims=t.dims).marked(out.marks) for t in (q, k, v)]
    pending = {axis: Pending("sum", node) for axis in rows if axis not in out.marks}
    return [grads[0], *(g.marked(pending) for g in grads[1:])] + [None] * (count - 3)


def _heads(t: Value, q: Value) -> Value:
    """Batch and heads; a head of keys that several heads of queries use is the same for all of these."""
    group = size_of(q.dims[1]) // size_of(t.dims[1])
    return t.with_dims((t.dims[0], (*t.dims[1], *((Atom(group, UNIFORM),) if group > 1 else ())), (), ()))


# ---- norms -----------------------------------------------------------------------------------------------------------
def norm(scope: Scope, node: Node, given: dict) -> list[Value]:
    """native_layer_norm and _fused_rms_norm over the last dims, which must be whole -> (output, statistics...)."""
    x = _whole_end(scope, node, given)
    more = [given[name] for name in ("weight", "bias") if given.get(name) is not None]
    out = arithmetic.elementwise(scope, node, "function", [x, *more])
    count = len(given["normalized_shape"])
    rows = out.with_dims(() if d >= len(out.dims) - count else dim for d, dim in enumerate(out.dims))
    return [out] + [rows] * (len(node.meta["val"]) - 1)


def norm_backward(scope: Scope, node: Node, given: dict) -> list[Value | None]:
    """Gradients of input, weight and bias: the last two are summed over all rows, so pending where rows are sharded."""
    g, x = given["grad_out"], _whole_end(scope, node, given)
    weight = given.get("weight")
    rows = list(range(len(x.dims) - len(given["normalized_shape"])))
    dx = arithmetic.elementwise(scope, node, "product", [g, x if weight is None else _of(scope, node, x, weight)])
    sums = []
    if rows:
        dw = arithmetic.elementwise(scope, node, "product", [g, x])
        sums = [reductions.reduction(scope, node, value, rows, False, "sum") for value in (dw, g)]
    found = [dx, *(sums or [dx, g])]
    return [v if isinstance(m, torch.Tensor) else None for v, m in zip(found, node.meta["val"], strict=False)]


def _of(scope: Scope, node: Node, *values: Value) -> Value:
    return arithmetic.elementwise(scope, node, "function", values)


def _whole_end(scope: Scope, node: Node, given: dict) -> Value:
    x = given["input"]
    for back in range(len(given["normalized_shape"])):
        x = reductions.along(scope, node, x, len(x.dims) - 1 - back, "a norm")
    return x


# ---- losses ----------------------------------------------------------------------------------------------------------
def nll_loss(scope: Scope, node: Node, given: dict) -> list[Value]:
    """log-probabilities [N, C] picked by labels [N], then none (0), mean (1) or sum (2) -> (loss, total weight)."""
    x, target = given["self"], given["target"]
    x = reductions.along(scope, node, x, len(x.dims) - 1, "nll_loss")
    picked = arithmetic.elementwise(scope, node, "same", [x.with_dims(x.dims[:-1])])
    labels = arithmetic.elementwise(scope, node, "function", [target])
    rows = arithmetic.elementwise(scope, node, "product", [picked, labels])
    if given["reduction"] == 0:
        return [rows, filled((), 0)]
    loss = reductions.reduction(scope, node, rows, None, False, "sum")
    if given["reduction"] == 1:
        loss = _mean_of_labels(scope, node, loss)
    return [loss, loss]


def _mean_of_labels(scope: Scope, node: Node, loss: Value) -> Value:
    """Each rank divides by the labels that it has and does not ignore; how many these are is data."""
    why = "the mean of a rank's own rows divides by the number of its labels that are not ignored"
    fix = 'reduction="sum" and a division by the psum of the number of labels is proven'
    means = [a for a in loss.having(Pending) if loss.marks[a].birth is node]
    (doubt,) = scope.unknown(node, why, fix).origins
    return raised(loss, means, 1, node, "mean over a sharded dim divides by the local size only", doubt=doubt)


def nll_loss_backward(scope: Scope, node: Node, given: dict) -> Value:
    """The gradient of the log-probabilities, linear in that of the loss."""
    g, x = given["grad_output"], given["self"]
    g = g.with_dims((*g.dims, ())) if g.dims else g
    return arithmetic.elementwise(scope, node, "product", [g, _of(scope, node, x)])


KERNELS = tuple(
    f"_scaled_dot_product_{kernel}"
    for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
)
RULES: Rules = MappingProxyType(
    dict.fromkeys(KERNELS, attention)
    | dict.fromkeys((f"{kernel}_backward" for kernel in KERNELS), attention_backward)
    | dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), norm)
    | dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), norm_backward)
    | {"nll_loss_forward": nll_loss, "nll_loss_backward": nll_loss_backward}
)

"""Rules for ops that do several things at once: attention, norms, losses."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import torch

from fmegatron.step.check import arithmetic
from fmegatron.step.check.made import counted, filled, fresh
from fmegatron.step.check.scope import Rules, Scope
from fmegatron.step.check.values import Value

Node = torch.fx.Node


# ---- attention -------------------------------------------------------------------------------------------------------
def attention(scope: Scope, node: Node, given: dict) -> list[Value | None]:
    """q[B, H, S, E], k and v[B, H, T, E] -> [output, logsumexp, ...]: heads, batch run along; T and E must be whole.

    The signatures of torch's CPU, flash, memory-efficient and cuDNN kernels agree in what matters here.
    """
    q, k, v = (given[name] for name in ("query", "key", "value"))
    for other, what in ((k, "keys"), (v, "values")):
        for dim in (2, 3):
            arithmetic.along(scope, node, other, dim, f"attention {what}")
    arithmetic.along(scope, node, q, 3, "attention queries")
    out = arithmetic.elementwise(scope, node, "function", [_heads(t) for t in (q, k, v)])
    full = replace(out, dims=(*out.dims[:2], q.dims[2], v.dims[3]))
    if given.get("dropout_p"):
        mask = fresh(scope, node, node.meta["val"][0].shape)
        full = arithmetic.elementwise(scope, node, "product", [full, mask])
    rows = replace(out, dims=(*out.dims[:2], q.dims[2]))
    rest = [counted(m.shape) if isinstance(m, torch.Tensor) else None for m in node.meta["val"][2:]]
    return [full, rows, *rest]


def attention_backward(scope: Scope, node: Node, given: dict) -> list[Value | None]:
    """Gradients of q, k, v: linear in that of the output."""
    g = given.get("grad_out", given.get("grad_out_"))
    q, k, v = (given[name] for name in ("query", "key", "value"))
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
        sums = [arithmetic.reduction(scope, node, value, rows, False, "sum") for value in (dw, g)]
    found = [dx, *(sums or [dx, g])]
    return [v if isinstance(m, torch.Tensor) else None for v, m in zip(found, node.meta["val"], strict=False)]


def _of(scope: Scope, node: Node, *values: Value) -> Value:
    return arithmetic.elementwise(scope, node, "function", values)


def _whole_end(scope: Scope, node: Node, given: dict) -> Value:
    x = given["input"]
    for back in range(len(given["normalized_shape"])):
        x = arithmetic.along(scope, node, x, len(x.dims) - 1 - back, "a norm")
    return x


# ---- losses ----------------------------------------------------------------------------------------------------------
def nll_loss(scope: Scope, node: Node, given: dict) -> list[Value]:
    """log-probabilities [N, C] picked by labels [N], then none (0), mean (1) or sum (2) -> (loss, total weight)."""
    x, target = given["self"], given["target"]
    x = arithmetic.along(scope, node, x, len(x.dims) - 1, "nll_loss")
    picked = arithmetic.elementwise(scope, node, "same", [x.with_dims(x.dims[:-1])])
    labels = arithmetic.elementwise(scope, node, "function", [target])
    rows = arithmetic.elementwise(scope, node, "product", [picked, labels])
    if given["reduction"] == 0:
        return [rows, filled((), 0)]
    kind = "mean" if given["reduction"] == 1 else "sum"
    loss = arithmetic.reduction(scope, node, rows, None, False, kind)
    return [loss, replace(loss, partial=dict(loss.partial))]


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

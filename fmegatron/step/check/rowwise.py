"""Rules for row-wise ops that need some dims in full: transforms, decompositions, pools, convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from fmegatron.step.check.arithmetic import contraction, elementwise
from fmegatron.step.check.atoms import over, plain, size_of
from fmegatron.step.check.reductions import along, reduction
from fmegatron.step.check.scope import Rule, Rules, Scope, op_name, shape_of
from fmegatron.step.check.values import Value

Node = torch.fx.Node


def worked(scope: Scope, node: Node, x: Value, dims: Sequence[int], kind: str) -> Value:
    """x after an op along dims: "same" for linear ones."""
    out = replace(elementwise(scope, node, kind, [x]), constant=None, ramp=False)
    for dim in dims:
        out = along(scope, node, out, dim, op_name(node).strip("_"))
    return out


def _shaped(out: Value, meta: Any, rows: int) -> Value | None:
    """A result whose first dims are the rows; its other dims as the graph has them."""
    if not isinstance(meta, torch.Tensor) or len(meta.shape) < rows:
        return None
    return out.with_dims((*out.dims[:rows], *map(plain, meta.shape[rows:])))


def on_last(count: int, kind: str = "function") -> Rule:
    """The rule of an op that works on the last `count` dims of its argument."""

    def rule(scope: Scope, node: Node, given: dict) -> Any:
        x = next(v for v in given.values() if isinstance(v, Value))
        rows = len(x.dims) - count
        out = worked(scope, node, x, range(rows, len(x.dims)), kind)
        metas = node.meta["val"]
        if isinstance(metas, (list, tuple)):
            return [_shaped(out, meta, rows) for meta in metas]
        return _shaped(out, metas, rows)

    return rule


def transformed(scope: Scope, node: Node, given: dict) -> Value:
    """Fourier transforms along their dims: linear."""
    x, dims = given["self"], [d % len(given["self"].dims) for d in given["dim"]]
    out = worked(scope, node, x, dims, "same")
    return out.with_dims(
        plain(n) if d in dims else dim for d, (dim, n) in enumerate(zip(out.dims, shape_of(node), strict=True))
    )


def parts_of_complex(scope: Scope, node: Node, given: dict) -> Value:
    """view_as_real: a new last dim of real and imaginary parts; view_as_complex takes it away."""
    x = given["self"]
    if op_name(node) == "view_as_real":
        return x.with_dims((*x.dims, plain(2)))
    return along(scope, node, x, -1, "complex numbers").with_dims(x.dims[:-1])


def solved(scope: Scope, node: Node, given: dict) -> Any:
    """Linear systems A X = B of whole matrices, each on its own."""
    a, b = [v for v in given.values() if isinstance(v, Value)][:2]
    rows = min(len(a.dims), len(b.dims)) - 2
    if rows < 0 or len(a.dims) != len(b.dims) or over(b.dims[-1]):
        return None  # columns of B are systems of their own: sharded ones are no mistake
    a, b = (worked(scope, node, x, (-2, -1), "function") for x in (a, b))
    bare = [x.with_dims(x.dims[:rows]) for x in (a, b)]
    out = elementwise(scope, node, "function", bare)
    metas = node.meta["val"]
    shaped = [_shaped(out, meta, rows) for meta in (metas if isinstance(metas, (list, tuple)) else [metas])]
    return shaped if isinstance(metas, (list, tuple)) else shaped[0]


def distances(scope: Scope, node: Node, given: dict) -> Value:
    """cdist: x1[..., P, M], x2[..., R, M] -> [..., P, R]."""
    a, b = (worked(scope, node, given[name], (-1,), "function") for name in ("x1", "x2"))
    pairs = [a.with_dims((*a.dims[:-1], ())), b.with_dims((*b.dims[:-2], (), b.dims[-2]))]
    return elementwise(scope, node, "function", pairs)


def distances_backward(scope: Scope, node: Node, given: dict) -> Value:
    """The gradient of x1[..., P, M] from that of the distances [..., P, R]: a sum over R."""
    g, b = given["grad"], worked(scope, node, given["x2"], (-1,), "function")
    a = worked(scope, node, given["x1"], (-1,), "function")
    others = elementwise(scope, node, "function", [given["cdist"], b.with_dims((*b.dims[:-2], (), b.dims[-2]))])
    pulls = elementwise(scope, node, "product", [g, others])
    rows = reduction(scope, node, pulls, [-1], False, "sum")
    return elementwise(scope, node, "product", [rows.with_dims((*rows.dims, ())), a])


def diagonal(scope: Scope, node: Node, given: dict) -> Value:
    """The diagonal of two dims, behind the others: a rank's part of one of them has another diagonal."""
    x = given["self"]
    dims = [given[name] % len(x.dims) for name in ("dim1", "dim2")]
    for dim in dims:
        x = along(scope, node, x, dim, "a diagonal")
    rest = [dim for d, dim in enumerate(x.dims) if d not in dims]
    return x.with_dims((*rest, plain(shape_of(node)[-1])))


# ---- convolutions ----------------------------------------------------------------------------------------------------
def convolved(scope: Scope, node: Node, given: dict) -> Value | None:
    """input[N, C, ...] with weight[O, C, ...] -> [N, O, ...]: a product over channels, at whole positions."""
    pair = _channels(scope, node, given["input"], given["weight"], given)
    if pair is None:
        return None
    x, w = pair
    out = contraction(scope, node, x, w if given["transposed"] else _turned(w), 0)
    out = _sized(out, shape_of(node))
    bias = given.get("bias")
    if bias is None:
        return out
    return elementwise(scope, node, "sum", [out, bias.with_dims((*bias.dims, *((),) * len(shape_of(node)[2:])))])


def convolved_backward(scope: Scope, node: Node, given: dict) -> list[Value | None] | None:
    """Gradients of input, weight and bias: the last two are sums over the rows."""
    x, g = given["input"], given["grad_output"]
    pair = _channels(scope, node, x, given["weight"], given)
    if pair is None:
        return None
    x2, w = pair
    g2 = _positions(scope, node, g)
    wanted = given["output_mask"]
    dx = contraction(scope, node, g2, _turned(w) if given["transposed"] else w, 0) if wanted[0] else None
    dw = contraction(scope, node, _turned(g2), x2, 0) if wanted[1] else None
    dw = _turned(dw) if dw is not None and given["transposed"] else dw
    db = reduction(scope, node, g, [d for d in range(len(g.dims)) if d != 1], False, "sum") if wanted[2] else None
    found = [v and _sized(v, meta.shape) for v, meta in zip((dx, dw), node.meta["val"], strict=False)]
    return [*found, db]


def _sized(x: Value, shape: Sequence[int]) -> Value:
    """A result of channels alone, with its positions; channels of groups are as many as the shape says."""
    ends = [dim if size_of(dim) == n else plain(n) for dim, n in zip(x.dims, shape, strict=False)]
    return x.with_dims((*ends, *map(plain, shape[2:])))


def _channels(scope: Scope, node: Node, x: Value, w: Value, given: dict) -> tuple[Value, Value] | None:
    """Input [N, C] and weight [O, C], without positions; None for groups whose channels are sharded."""
    if len(x.dims) != len(w.dims) or (given["groups"] != 1 and (over(x.dims[1]) or over((*w.dims[0], *w.dims[1])))):
        return None
    x, w = _positions(scope, node, x), _positions(scope, node, w)
    if given["groups"] != 1:  # every group has channels of its own; none of them is sharded
        x, w = x.with_dims((x.dims[0], ())), w.with_dims((w.dims[0], ()))
    return x, w


def _positions(scope: Scope, node: Node, x: Value) -> Value:
    for dim in range(2, len(x.dims)):
        x = along(scope, node, x, dim, "a convolution")
    return x.with_dims(x.dims[:2])


def _turned(x: Value) -> Value:
    return x.with_dims((x.dims[1], x.dims[0]))


_SQUARE = (
    "linalg_inv_ex linalg_cholesky_ex _linalg_eigh _linalg_svd linalg_lu_factor_ex linalg_ldl_factor_ex _linalg_det"
)
_SQUARE += " _linalg_slogdet linalg_matrix_exp cholesky_inverse linalg_eig linalg_qr"
_POOLS = "avg_pool2d _adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d"
_MAXIMA = "max_pool2d_with_indices adaptive_max_pool2d"
RULES: Rules = MappingProxyType(
    dict.fromkeys(_SQUARE.split(), on_last(2))
    | dict.fromkeys(_POOLS.split(), on_last(2, "same"))
    | dict.fromkeys(_MAXIMA.split(), on_last(2))
    | dict.fromkeys(("_fft_r2c", "_fft_c2r", "_fft_c2c"), transformed)
    | dict.fromkeys("_linalg_solve_ex linalg_solve_triangular triangular_solve cholesky_solve".split(), solved)
    | {
        "_cdist_forward": distances,
        "_cdist_backward": distances_backward,
        "diagonal": diagonal,
        "view_as_real": parts_of_complex,
        "view_as_complex": parts_of_complex,
        "convolution": convolved,
        "convolution_backward": convolved_backward,
    }
)

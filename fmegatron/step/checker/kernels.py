"""Rules for fused ops (norms, losses) and for ops that need some dims in full (transforms, pools)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from fmegatron.step.checker.arithmetic import contraction, elementwise, placed
from fmegatron.step.checker.context import Rule, Rules, Scope, op_name, shape_of
from fmegatron.step.checker.dims import UNIFORM, Atom, over, plain, size_of
from fmegatron.step.checker.marks import raised
from fmegatron.step.checker.reductions import along, reduction
from fmegatron.step.checker.values import Pending, Somewhere, Suspect, Value, filled
from fmegatron.step.graph.nodes import node_of

Node = torch.fx.Node
_SQUARE = (
    "linalg_inv_ex linalg_cholesky_ex _linalg_eigh _linalg_svd linalg_lu_factor_ex linalg_ldl_factor_ex _linalg_det"
)
_SQUARE += " _linalg_slogdet linalg_matrix_exp cholesky_inverse linalg_eig linalg_qr"
_POOLS = "avg_pool2d _adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d"
_MAXIMA = "max_pool2d_with_indices adaptive_max_pool2d"


# ---- norms -----------------------------------------------------------------------------------------------------------
def norm(scope: Scope, node: Node, given: dict) -> list[Value]:
    """native_layer_norm and _fused_rms_norm over the last dims, which must be full -> (output, statistics...)."""
    x = _whole_end(scope, node, given)
    more = [given[name] for name in ("weight", "bias") if given.get(name) is not None]
    out = elementwise(scope, node, "function", [x, *more])
    count = len(given["normalized_shape"])
    rows = out.with_dims(() if d >= len(out.dims) - count else dim for d, dim in enumerate(out.dims))
    return [out] + [rows] * (len(node.meta["val"]) - 1)


def norm_backward(scope: Scope, node: Node, given: dict) -> list[Value | None]:
    """Gradients of input, weight and bias: the last two are summed over all rows, so pending where rows are sharded."""
    g, x = given["grad_out"], _whole_end(scope, node, given)
    weight = given.get("weight")
    rows = list(range(len(x.dims) - len(given["normalized_shape"])))
    dx = elementwise(scope, node, "product", [g, x if weight is None else _of(scope, node, x, weight)])
    sums = []
    if rows:
        dw = elementwise(scope, node, "product", [g, x])
        sums = [reduction(scope, node, value, rows, False, "sum") for value in (dw, g)]
    found = [dx, *(sums or [dx, g])]
    return [v if isinstance(m, torch.Tensor) else None for v, m in zip(found, node.meta["val"], strict=False)]


def _of(scope: Scope, node: Node, *values: Value) -> Value:
    return elementwise(scope, node, "function", values)


def group_norm(scope: Scope, node: Node, given: dict) -> list[Value] | None:
    """native_group_norm of sharded channels: whether the number of groups is that of a rank or of all, no shape tells.
    None (it is taken apart) where channels are whole."""
    x = given["input"]
    axes = over(x.dims[1]) | x.may_shard(1)
    if not axes:
        return None
    more = [
        v.with_dims((*v.dims, *((),) * (len(x.dims) - 2))) for k in ("weight", "bias") if (v := given[k]) is not None
    ]
    for dim in range(2, len(x.dims)):
        x = along(scope, node, x, dim, "a group norm")
    why = "groups of sharded channels: whether their number is that of a rank cannot be told"
    out = elementwise(scope, node, "function", [x, *more])
    out = out.marked({axis: scope.vague(node, why) for axis in axes if axis not in out.marks})
    rows = out.with_dims((out.dims[0], plain(given["group"])))
    return [out, rows, rows]


def batch_norm(scope: Scope, node: Node, given: dict) -> None:
    """Taken apart. Of [1, rows * channels, ...], as an instance norm views it, the second dim is the sharded one: if it
    were the first, each rank would take statistics over what is a row of its own."""
    source = node_of(node.args[0])
    x = scope.values[source]
    for axis in x.having(Somewhere):
        mark = x.marks.get(axis)
        if isinstance(mark, Somewhere) and mark.dims == (0, 1) and not mark.reduced and size_of(x.dims[0]) == 1:
            x = scope.values[source] = placed(x, mark.group or (axis,), 1)


def shuffled(scope: Scope, node: Node, given: dict) -> Value | None:
    """pixel_shuffle, channel_shuffle of sharded channels, by a number that may not divide a rank's. None where they
    are whole."""
    x, at = given["self"], len(given["self"].dims) - 3 if op_name(node).startswith("pixel") else 1
    axes = over(x.dims[at]) | x.may_shard(at)
    if not axes:
        return None
    for dim in range(at + 1, len(x.dims)):
        x = along(scope, node, x, dim, op_name(node))
    why = "factors of sharded channels: whether they divide those of a rank cannot be told"
    out = elementwise(scope, node, "same", [x]).marked({a: scope.vague(node, why) for a in axes if a not in x.marks})
    return out.with_dims((*out.dims[:at], *map(plain, shape_of(node)[at:])))


def _whole_end(scope: Scope, node: Node, given: dict) -> Value:
    x = given["input"]
    for back in range(len(given["normalized_shape"])):
        x = along(scope, node, x, len(x.dims) - 1 - back, "a norm")
    return x


# ---- losses ----------------------------------------------------------------------------------------------------------
def nll_loss(scope: Scope, node: Node, given: dict) -> list[Value]:
    """log-probabilities [N, C] picked by labels [N], then none (0), mean (1) or sum (2) -> (loss, total weight)."""
    x, target = given["self"], given["target"]
    x = along(scope, node, x, len(x.dims) - 1, "nll_loss")
    picked = elementwise(scope, node, "same", [x.with_dims(x.dims[:-1])])
    labels = elementwise(scope, node, "function", [target])
    rows = elementwise(scope, node, "product", [picked, labels])
    if given["reduction"] == 0:
        return [rows, filled((), 0)]
    loss = reduction(scope, node, rows, None, False, "sum")
    if given["reduction"] == 1:
        loss = _mean_of_labels(scope, node, loss)
    return [loss, loss]


def _mean_of_labels(scope: Scope, node: Node, loss: Value) -> Value:
    """Each rank divides by the labels that it has and does not ignore; how many these are is data."""
    why = "the mean of a rank's own rows divides by the number of its labels that are not ignored"
    fix = 'reduction="sum" and a division by the psum of the number of labels is proven'
    means = [a for a in loss.having(Pending) if loss.birth(a) is node]
    (doubt,) = scope.unknown(node, why, fix).origins
    return raised(loss, means, 1, node, "mean over a sharded dim divides by the local size only", doubt=doubt)


def nll_loss_backward(scope: Scope, node: Node, given: dict) -> Value:
    """The gradient of the log-probabilities, linear in that of the loss."""
    g, x = given["grad_output"], given["self"]
    g = g.with_dims((*g.dims, ())) if g.dims else g
    rows = elementwise(scope, node, "function", [given["target"]])  # of the labels, which rows they are of
    x = elementwise(scope, node, "product", [_of(scope, node, x), rows.with_dims((*rows.dims, ()))])
    return elementwise(scope, node, "product", [g, x])


# ---- ops along some dims ---------------------------------------------------------------------------------------------
def _worked(scope: Scope, node: Node, x: Value, dims: Sequence[int], kind: str) -> Value:
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
        out = _worked(scope, node, x, range(rows, len(x.dims)), kind)
        metas = node.meta["val"]
        if isinstance(metas, (list, tuple)):
            return [_shaped(out, meta, rows) for meta in metas]
        return _shaped(out, metas, rows)

    return rule


def transformed(scope: Scope, node: Node, given: dict) -> Value:
    """Fourier transforms along their dims: linear."""
    x, dims = given["self"], [d % len(given["self"].dims) for d in given["dim"]]
    out = _worked(scope, node, x, dims, "same")
    return out.with_dims(
        plain(n) if d in dims else dim for d, (dim, n) in enumerate(zip(out.dims, shape_of(node), strict=True))
    )


def parts_of_complex(scope: Scope, node: Node, given: dict) -> Value:
    """view_as_real: a new last dim of real and imaginary parts; view_as_complex takes it away."""
    x = given["self"]
    if op_name(node) == "view_as_real":
        return x.with_dims((*x.dims, plain(2)))
    return along(scope, node, x, -1, "complex numbers").with_dims(x.dims[:-1])


_IN_B = frozenset(("linalg_solve_triangular",))


def solved(scope: Scope, node: Node, given: dict) -> Any:
    """Linear systems A X = B of full matrices, each on its own."""
    a, b = [v for v in given.values() if isinstance(v, Value)][:2]
    rows = min(len(a.dims), len(b.dims)) - 2
    by_columns = op_name(node) in ("linalg_solve_triangular", "_linalg_solve_ex") and given.get("left", True)
    if by_columns and rows >= 0 and len(a.dims) == len(b.dims) and over(b.dims[-1]):  # a system each
        a, b = _worked(scope, node, a, (-2, -1), "function"), _worked(scope, node, b, (-2,), "same")
        a = elementwise(scope, node, "function", [a])
        out = elementwise(scope, node, "product", [a.with_dims((*a.dims[:-2], (), ())), b])
        if op_name(node) == "linalg_solve_triangular":
            return out
        factors = elementwise(scope, node, "function", [a.with_dims(a.dims[:rows])])
        return [out, *(_shaped(factors, meta, rows) for meta in node.meta["val"][1:])]
    if rows < 0 or len(a.dims) != len(b.dims) or over(b.dims[-1]):
        return None  # columns of B are systems of their own: sharded ones are no mistake
    linear = op_name(node) in _IN_B
    a = elementwise(scope, node, "function", [_worked(scope, node, a, (-2, -1), "function")])
    b = _worked(scope, node, b, (-2, -1), "same" if linear else "function")
    out = elementwise(scope, node, "product" if linear else "function", [x.with_dims(x.dims[:rows]) for x in (a, b)])
    metas = node.meta["val"]
    shaped = [_shaped(out, meta, rows) for meta in (metas if isinstance(metas, (list, tuple)) else [metas])]
    return shaped if isinstance(metas, (list, tuple)) else shaped[0]


def solved_by_factors(scope: Scope, node: Node, given: dict) -> Value | None:
    """linalg_lu_solve: linear in B, whose columns are a system each."""
    a, b = given["LU"], given["B"]
    if not given["left"] or len(a.dims) != len(b.dims):
        return None
    pivots = _worked(scope, node, given["pivots"], (-1,), "function")
    a = _worked(scope, node, a, (-2, -1), "function")
    a = elementwise(
        scope, node, "function", [a.with_dims((*a.dims[:-2], ())), pivots.with_dims((*pivots.dims[:-1], ()))]
    )
    return elementwise(scope, node, "product", [a.with_dims((*a.dims, ())), _worked(scope, node, b, (-2,), "same")])


def distances(scope: Scope, node: Node, given: dict) -> Value:
    """cdist: x1[..., P, M], x2[..., R, M] -> [..., P, R]."""
    a, b = (_worked(scope, node, given[name], (-1,), "function") for name in ("x1", "x2"))
    pairs = [a.with_dims((*a.dims[:-1], ())), b.with_dims((*b.dims[:-2], (), b.dims[-2]))]
    return elementwise(scope, node, "function", pairs)


def distances_backward(scope: Scope, node: Node, given: dict) -> Value:
    """The gradient of x1[..., P, M] from that of the distances [..., P, R]: a sum over R."""
    g, b = given["grad"], _worked(scope, node, given["x2"], (-1,), "function")
    a = _worked(scope, node, given["x1"], (-1,), "function")
    others = elementwise(scope, node, "function", [given["cdist"], b.with_dims((*b.dims[:-2], (), b.dims[-2]))])
    pulls = elementwise(scope, node, "product", [g, others])
    rows = reduction(scope, node, pulls, [-1], False, "sum")
    return elementwise(scope, node, "product", [rows.with_dims((*rows.dims, ())), a])


def diagonal(scope: Scope, node: Node, given: dict) -> Value:
    """The diagonal of two dims, behind the others: a rank's part of one of them has another diagonal."""
    x = given["self"]
    dims = [given[name] % len(x.dims) for name in ("dim1", "dim2")]
    blocks = {a: scope.vague(m.node, m.what) for a, m in x.marks.items() if isinstance(m, Suspect) and m.pairs}
    x = x.marked(blocks)  # each row's pair with itself, where it is the diagonal of the two dims
    for dim in dims:
        x = along(scope, node, x, dim, "a diagonal")
    rest = [dim for d, dim in enumerate(x.dims) if d not in dims]
    return x.with_dims((*rest, plain(shape_of(node)[-1])))


def diagonal_backward(scope: Scope, node: Node, given: dict) -> Value:
    """Zeros around the gradient of a diagonal, whose dims are full."""
    shape, x = shape_of(node), given["grad_output"]
    if x.constant == 0:
        return filled(shape, 0)
    rest, at = iter(along(scope, node, x, len(x.dims) - 1, "a diagonal").dims[:-1]), {given["dim1"], given["dim2"]}
    at = {d % len(shape) for d in at}
    return x.with_dims(plain(n) if d in at else next(rest) for d, n in enumerate(shape))


# ---- convolutions ----------------------------------------------------------------------------------------------------
def convolved(scope: Scope, node: Node, given: dict) -> Value | None:
    """input[N, C, ...] with weight[O, C, ...] -> [N, O, ...]: a product over channels, at full positions."""
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
    """A result of channels alone, with its positions; channels of groups are as many as the shape states."""
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


def unfold(scope: Scope, node: Node, given: dict) -> Value:
    """Windows of a full dim, their positions in a new last dim."""
    x, dim = given["self"], given["dimension"] % len(given["self"].dims)
    x = along(scope, node, x, dim, "windows")
    dims = [plain(shape_of(node)[d]) if d == dim else own for d, own in enumerate(x.dims)]
    return x.with_dims((*dims, plain(given["size"])))


def unfold_backward(scope: Scope, node: Node, given: dict) -> Value:
    """Gradients of windows added up where the windows are."""
    g, dim = given["grad_in"], given["dim"] % len(given["input_sizes"])
    g = along(scope, node, along(scope, node, g, dim, "windows"), -1, "windows")
    return g.with_dims(plain(given["input_sizes"][d]) if d == dim else own for d, own in enumerate(g.dims[:-1]))


def triangle(scope: Scope, node: Node, given: dict) -> Value:
    """tril, triu of full matrices."""
    x = given["self"]
    for dim in (-2, -1):
        x = along(scope, node, x, dim, "a triangle")
    made = all(atom.axes is UNIFORM or atom.counted for dim in x.dims[-2:] for atom in dim)
    ends = [(Atom(size_of(dim), counted=made),) for dim in x.dims[-2:]]
    return replace(x, constant=0 if x.constant == 0 else None).with_dims((*x.dims[:-2], *ends))


RULES: Rules = MappingProxyType(
    dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), norm)
    | dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), norm_backward)
    | dict.fromkeys(
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional".split(), batch_norm
    )
    | {"native_group_norm": group_norm}
    | dict.fromkeys("pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle".split(), shuffled)
    | {"nll_loss_forward": nll_loss, "nll_loss_backward": nll_loss_backward}
    | dict.fromkeys(_SQUARE.split(), on_last(2))
    | dict.fromkeys(_POOLS.split(), on_last(2, "same"))
    | dict.fromkeys(_MAXIMA.split(), on_last(2))
    | dict.fromkeys(("_fft_r2c", "_fft_c2r", "_fft_c2c"), transformed)
    | dict.fromkeys("_linalg_solve_ex linalg_solve_triangular triangular_solve cholesky_solve".split(), solved)
    | {"linalg_lu_solve": solved_by_factors}
    | {
        "_cdist_forward": distances,
        "_cdist_backward": distances_backward,
        "diagonal": diagonal,
        "diagonal_backward": diagonal_backward,
        "view_as_real": parts_of_complex,
        "view_as_complex": parts_of_complex,
        "convolution": convolved,
        "convolution_backward": convolved_backward,
    }
    | dict.fromkeys(("tril", "triu"), triangle)
    | {"unfold": unfold, "unfold_backward": unfold_backward}
)

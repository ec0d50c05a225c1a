"""Rules for ops along dims: reductions, ops that need a full dim (softmax, sort), and products of matrices.

A sum, maximum or minimum over a sharded dim is pending over its axes, and exact. A mean is a pending sum that is n
times too large (`marks.py`). Proofs unless something corrects them before an output: variances, products and softmax
of a part, a scan that starts anew on each rank (its last element, a sum, would forgive it). Open: order within a part
(sort, a flip, a roll), which a step may use for its own rows, and which a sum over all elements does not see; the
largest k, or the position of a maximum, where another rank's may come in (`completion.py`). Findings of products are
proofs (`contraction`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from fmegatron.step.checker.arithmetic import contraction, elementwise
from fmegatron.step.checker.completion import may_be_completed
from fmegatron.step.checker.context import Rule, Rules, Scope, op_name, suspected
from fmegatron.step.checker.dims import UNIFORM, Dim, folds_of, over, plain, size_of, unfolded
from fmegatron.step.checker.marks import excess_after, raised
from fmegatron.step.checker.values import (
    First,
    Mark,
    Pending,
    Somewhere,
    Suspect,
    Unknown,
    Value,
    Varying,
    Wrong,
    portions,
)

Node = torch.fx.Node
# How the parts of ranks make up the whole; "order": what each rank states of its own part only.
_KINDS = MappingProxyType(
    {"amax": "max", "any": "max", "amin": "min", "all": "min", "linalg_vector_norm": "root", "norm": "root"}
    | {"argmax": "order", "argmin": "order", "median": "order", "nanmedian": "order", "mode": "order"}
    | {k: k for k in "sum mean max min prod var std logsumexp var_mean std_mean".split()}
)
_REDUCED = frozenset(("sum", "max", "min", "root", "logsumexp"))  # kinds of which the parts of ranks can be reduced
# What a reduction does to the scale of its argument, in the words of `elementwise`.
_SCALES = MappingProxyType(
    dict.fromkeys("sum mean max min root std".split(), "same") | {"var": "square", "order": "sign"}
)
_MEANING = "all_gather it, or work with pmax and psum as in vocabulary-parallel cross-entropy"
_LINEAR = frozenset("cumsum flip rev roll".split())  # rev: what a flip is after decomposition
_ORDER = frozenset("sort topk argsort kthvalue flip rev roll".split())
_TURNED = frozenset("flip rev roll".split())
_CHOSEN = frozenset("topk kthvalue median nanmedian mode argmax argmin".split())
_ORDER_VALUES = frozenset("sort topk kthvalue median nanmedian mode".split())


def reduction(scope: Scope, node: Node, x: Value, dims: Sequence[int] | None, keep: bool, kind: str) -> Value:
    """kind: of _KINDS' values. Findings: a function of a pending sum (its maximum, its variance), a sum of a pending
    maximum."""
    gone = {d % max(1, len(x.dims)) for d in dims} if dims else set(range(len(x.dims)))
    inside = [x.dims[d] for d in sorted(gone) if d < len(x.dims)]
    left = tuple([(() if d in gone else dim) for d, dim in enumerate(x.dims) if keep or d not in gone])
    if x.constant == 0 and kind in ("sum", "mean", "max", "min", "root", "prod"):
        return replace(x, dims=left)
    if x.constant is not None and kind in ("mean", "max", "min"):
        return replace(x, dims=left)
    terms = _counts(x, inside, kind)
    summed, folds = over(atom for dim in inside for atom in dim), [f for dim in inside for f in folds_of(dim)]
    if x.settled and not summed and not folds:
        portion = portions("same" if kind in ("sum", "mean") else kind, (x,))
        return Value(left, constant=_total(x, inside, kind), equal_terms=terms, portion=portion)
    marks: dict[str, Mark | None] = {}
    for axis in sorted(summed | set(x.marks)):
        marks[axis] = _over(scope, node, x, axis, gone, axis in summed, kind, keep)
    kept, more = excess_after(scope, node, _SCALES.get(kind, "function"), [x])
    portion = portions("same" if kind in ("sum", "mean") else kind, (x,))
    out = Value(left, excess=kept, equal_terms=terms, portion=portion)
    for fold in folds:
        out = _unfolded(scope, node, out, fold, kind, marks)
    out = out.marked(more | {a: m for a, m in marks.items() if m is not None or a in x.marks})
    if kind == "mean":
        crossed = [a for a in marks if a in summed or x.is_(a, Somewhere)]  # of a part of which rows are not told, too
        means = [a for a in crossed if isinstance(marks[a], Pending)]
        out = raised(out, means, 1, node, "mean over a sharded dim divides by the local size only")
    return out


def _over(scope, node, x: Value, axis: str, gone: set[int], crosses: bool, kind: str, keep: bool) -> Mark | None:
    mark = x.marks.get(axis)
    if isinstance(mark, (Wrong, Unknown, Suspect, Varying)):
        return mark._replace(pairs=False) if isinstance(mark, Suspect) and mark.pairs else mark
    if isinstance(mark, Somewhere):
        among = set(range(len(x.dims))) if mark.dims is None else set(mark.dims)
        if not among & gone and not (mark.or_sum or mark.reduced):
            return mark._replace(dims=tuple(d if keep else d - sum(g < d for g in gone) for d in sorted(among)))
        before = "sum" if mark.or_sum else mark.reduced
        all_of_it = among <= gone
        if (kind not in _REDUCED and not (kind == "mean" and all_of_it and not before)) or (before and before != kind):
            return scope.vague(node, f"{kind} over a dim that may be sharded: shapes do not tell")
        if not all_of_it:
            left = sorted(among - gone)
            if not keep:
                left = [d - sum(g < d for g in gone) for d in left]
            return mark._replace(dims=tuple(left), or_sum=False, reduced=kind)
        crosses = True
    elif isinstance(mark, First):
        return Varying()
    elif mark is not None:
        return _of_pending(scope, node, x, axis, mark, kind)
    if not crosses:
        return None
    if kind in _REDUCED:
        return Pending(kind, node)
    if kind == "mean":
        return Pending("sum", node)
    if kind == "order":
        why = f"{op_name(node)} over a sharded dim tells of a rank's own part only"
        if op_name(node) in _CHOSEN and not node.meta.get("backward") and not may_be_completed(scope, node, axis):
            return suspected(node, why, _MEANING)
        return scope.unknown(node, why, own=op_name(node) in _ORDER_VALUES)
    return suspected(node, f"{kind} over a sharded dim", f"all_gather the dim over {axis!r} first")


def _of_pending(scope, node, x: Value, axis: str, mark: Pending, kind: str) -> Mark | None:
    if kind in ("sum", "mean") and mark.kind == "sum":
        return mark
    if kind == mark.kind and kind in ("max", "min", "root"):
        return mark
    what = f"{kind} of a pending {mark.kind}"
    if mark.kind != "sum" or x.excess.get(axis) or kind in ("max", "min"):
        return suspected(node, what, "reduce over the ranks first", mark.birth)
    return Wrong(node, what, "reduce over the ranks first", mark.birth)


def _unfolded(scope, node, out: Value, fold, kind: str, marks: dict) -> Value:
    """A dim that holds one rank's part beside the other is reduced as its kind states: the value of one rank."""
    n = scope.mesh[fold.axis]
    if kind == fold.kind or (fold.kind == "copies" and kind in ("max", "min", "mean")):
        return out
    if fold.kind == "sum" and kind == "mean":
        return raised(out, [fold.axis], -1, node, "a mean of the ranks' terms of a sum")
    if fold.kind == "copies" and kind == "sum":
        return raised(out, [fold.axis], 1, fold.node, f"{n} equal values are added up", sure=True)
    marks[fold.axis] = suspected(node, f"{kind} of what {op_name(fold.node)} brought together, which is a "
                                 f"{fold.kind} of terms", f"{fold.kind} along the dim")  # fmt: skip
    return out


def _counts(x: Value, inside: Sequence[Dim], kind: str) -> bool:
    """Whether a sum runs along a dim on which x is constant, and which may therefore be a part of a larger one."""
    return x.equal_terms or (kind == "sum" and any(atom.axes is UNIFORM for dim in inside for atom in dim))


def _total(x: Value, inside: Sequence[Dim], kind: str) -> float | None:
    if x.constant is None or kind not in ("sum", "max", "min", "mean"):
        return None
    count = 1
    for dim in inside:
        count *= size_of(dim)
    return x.constant * count if kind == "sum" else x.constant


def along(scope: Scope, node: Node, x: Value, dim: int, what: str, order: bool = False) -> Value:
    """An op that needs all of a dim (softmax, sort, scan): of a sharded one it gives each rank's own. A suspect; open
    where it only orders (`order`)."""
    atoms = x.dims[dim] if x.dims else ()
    marks = {}
    for axis in sorted(over(atoms)):
        what_of = f"{what} over a sharded dim"
        own = op_name(node) in _ORDER_VALUES
        marks[axis] = scope.unknown(node, what_of, own=own) if order else suspected(node, what_of, _MEANING)
    for axis, mark in x.marks.items():
        if isinstance(mark, Somewhere) and mark.dims == (dim % len(x.dims),):
            marks[axis] = suspected(node, f"{what} over a sharded dim", _MEANING)
        elif isinstance(mark, Somewhere) and mark.may_be(dim % len(x.dims)):
            marks[axis] = scope.vague(node, f"{what} over a dim that may be sharded: shapes do not tell")
    for fold in folds_of(atoms):
        if fold.kind != "copies":
            marks[fold.axis] = suspected(
                node, f"{what} of what {op_name(fold.node)} brought together", "reduce it first"
            )
    if not marks:
        return x
    if order and not node.meta.get("backward"):
        marks |= _without_completion(scope, node, x, dim, marks)
    out = x.marked(marks)
    dims = list(out.dims)
    dims[dim] = unfolded(dims[dim])
    return replace(out, dims=tuple(dims))


def _without_completion(scope: Scope, node: Node, x: Value, dim: int, marks: Mapping[str, Mark]) -> dict[str, Mark]:
    """Of what only orders: the largest k of fewer than all that a rank has are no largest k of all, if no other rank's
    come in; what turns a part round in itself is noted, as another may meet it."""
    found: dict[str, Mark] = {}
    results = node.meta["val"]
    shape = tuple((results[0] if isinstance(results, (list, tuple)) else results).shape)
    fewer = op_name(node) in _CHOSEN and (len(shape) < len(x.dims) or shape[dim] < size_of(x.dims[dim]))
    for axis in over(x.dims[dim]):
        mark = marks.get(axis)
        if not isinstance(mark, Unknown):
            continue
        if fewer and not may_be_completed(scope, node, axis):
            found[axis] = suspected(node, f"{op_name(node)} over a sharded dim", _MEANING)
        elif op_name(node) in _TURNED:
            scope.reordered |= dict.fromkeys(mark.origins, node)
    return found


# ---- rules -----------------------------------------------------------------------------------------------------------
def reduced(scope: Scope, node: Node, given: dict) -> Any:
    """sum, mean, amax, ...; max and min along a dim give (values, positions in this rank's part)."""
    x, op = given["self"], op_name(node).removeprefix("_foreach_")
    dims = given.get("dim", given.get("dims"))
    dims = [dims] if isinstance(dims, int) else dims
    kind = _KINDS[op]
    if kind == "root":
        x, kind = _norm(scope, node, x, given.get("ord", 2))
    out = reduction(scope, node, x, dims, given.get("keepdim", False), kind)
    results = node.meta["val"]
    if not isinstance(results, (list, tuple)) or op_name(node).startswith("_foreach_"):
        return out
    if op in ("max", "min"):
        return [out, reduction(scope, node, _of_values(scope, node, x), dims, given.get("keepdim", False), "order")]
    return [out] + [_indices(out)] * (len(results) - 1)


def _indices(x: Value) -> Value:
    """Positions that come with values of one order: they may be as many on all ranks, or the same."""
    own = {a: m._replace(own=False) for a, m in x.marks.items() if isinstance(m, Unknown) and m.own}
    return x.marked(own)


def _of_values(scope: Scope, node: Node, x: Value) -> Value:
    """What a position depends on: not on how large the values are, but on what they are."""
    marks = {a: scope.unknown(node, "the position of a rank's own maximum") for a in x.having(Pending)}
    return replace(x.marked(marks), constant=None)


def _norm(scope: Scope, node: Node, x: Value, order: Any) -> tuple[Value, str]:
    """(what a norm reduces, how): a root of a sum of squares, a maximum, a sum."""
    kinds = {float("inf"): "max", float("-inf"): "min", 1: "sum", 0: "sum", 2: "root"}
    kind = kinds.get(order, "prod")  # other orders have no form that could be reduced
    return elementwise(scope, node, "abs" if kind != "sum" or order == 1 else "function", [x]), kind


def ordered(scope: Scope, node: Node, given: dict) -> Any:
    """softmax, sort, topk, cumsum, ...: one dim of which all must be there, and every row on its own."""
    name, x = op_name(node), given["self"] if "self" in given else given["a"]  # prims call it a
    out = elementwise(scope, node, "same" if name in _LINEAR else "function", [x])
    out = replace(out, constant=None, ramp=False)
    if out.marks and name not in _ORDER:
        out = out.marked(
            {a: m._replace(pairs=False) for a, m in out.marks.items() if isinstance(m, Suspect) and m.pairs}
        )
    return _results(node, _all_of(scope, node, out, given), given)


def softmax_backward(scope: Scope, node: Node, given: dict) -> Value:
    """Linear in the gradient; the dim must be whole."""
    out = elementwise(scope, node, "product", [given["grad_output"], given["output"]])
    return _all_of(scope, node, out, given)


def _all_of(scope, node, out, given):
    dims = given.get("dim", given.get("dims", -1))
    for dim in (dims if isinstance(dims, (list, tuple)) else [dims]) or range(len(out.dims)):
        out = along(scope, node, out, dim, op_name(node).strip("_"), _orders(node))
    return out


def _orders(node: Node) -> bool:
    """Whether an op depends on the order in a part: sorts, and counts of rows (their places in a rank's own part)."""
    first = node.all_input_nodes[0].meta["val"]
    return op_name(node) in _ORDER or (op_name(node) == "cumsum" and not first.is_floating_point())


def _results(node: Node, out: Value, given: dict) -> Any:
    """As many results as the op has; a dim that it makes shorter (topk) has the new size, a removed one is gone."""
    results = node.meta["val"]
    shape = tuple((results[0] if isinstance(results, (list, tuple)) else results).shape)
    if len(shape) == len(out.dims) - 1:  # one element of the dim is left (kthvalue)
        at = given.get("dim", -1) % len(out.dims)
        out = out.with_dims(d for i, d in enumerate(out.dims) if i != at)
    if shape != tuple(map(size_of, out.dims)) and len(shape) == len(out.dims):
        out = out.with_dims(d if size_of(d) == n else plain(n) for d, n in zip(out.dims, shape, strict=True))
    return [out] + [_indices(out)] * (len(results) - 1) if isinstance(results, (list, tuple)) else out


def product_of(a: str, b: str, batch: int = 0) -> Rule:
    """The rule of a[..batch, m, k] @ b[..batch, k, n], to which `self` is added where it is neither."""

    def rule(scope: Scope, node: Node, given: dict) -> Value:
        both = contraction(scope, node, given[a], given[b], batch)
        return both if "self" in (a, b) else elementwise(scope, node, "sum", [given["self"], both])

    return rule


def scaled_matrices(scope: Scope, node: Node, given: dict) -> Value | None:
    """_scaled_mm: (self[m, k] scale_a) @ (mat2[k, n] scale_b) + bias, with scales of tensors, rows or columns.

    Scales must be equal on all ranks that hold parts of one row: taken from a local maximum they are a pending max.
    """
    out = contraction(scope, node, given["self"], given["mat2"], 0)
    for name in ("scale_a", "scale_b"):
        scale = given[name]
        if len(scale.dims) in (0, 2) and all(dim in ((), *out.dims) for dim in scale.dims):
            out = elementwise(scope, node, "product", [out, scale])
        elif not scale.settled or scale.sharded:  # blocks: equal on all ranks, or nothing is known
            return None
    bias = given["bias"]
    return out if bias is None else elementwise(scope, node, "sum", [out, bias])


# ---- experts ---------------------------------------------------------------------------------------------------------
def grouped(scope: Scope, node: Node, given: dict) -> Value | None:
    """_grouped_mm (nn.grouped_matmul): rows of a group with the matrix of the group, and the forms of its gradients.

        self[M, K] @ mat2[G, K, N] -> [M, N]       offs[G]: where the rows of each group end
        self[K, M] @ mat2[M, N] -> [G, K, N]       gradient of the matrices: sums over the rows of each group
        self[G, M, K] @ mat2[K, N] -> [M, N]       columns in groups
        self[G, M, K] @ mat2[G, K, N] -> [G, M, N] the same as bmm

    Where the matrices are sharded (experts), so must be the rows: after an all_to_all, each rank has those of its own.
    """
    a, b, offs = given["self"], given["mat2"], given["offs"]
    forms = {(2, 3): _rows_by_groups, (2, 2): _groups_of_rows, (3, 3): lambda s, n, a, b, o: contraction(s, n, a, b, 1)}
    rule = forms.get((len(a.dims), len(b.dims)))
    return None if rule is None else rule(scope, node, a, b, offs)


def _rows_by_groups(scope, node, x, w, offs):
    experts = over(w.dims[0])
    for axis in sorted(experts):
        if not x.is_(axis, Varying, Wrong, Unknown) and 0 not in x.shards(axis):
            wrong = Wrong(node, f"multiplies rows that are {x.state(axis)} by matrices that are sharded",
                       "all_to_all the rows to the ranks of their experts first")  # fmt: skip
            x = x.marked({axis: wrong})
    w = w.without(experts)
    return contraction(scope, node, x, w.with_dims(w.dims[1:]), 0)


def _groups_of_rows(scope, node, a, b, offs):
    """Over axes whose ranks have groups of their own (offs is sharded) the groups are sharded; over others that shard
    the rows the result is pending; where offs depends on data that differs between ranks, only `declare` decides."""
    out = contraction(scope, node, a, b, 0)
    groups = offs.sharded
    unknown = {axis: Varying() for axis in offs.marks if not offs.is_(axis, Unknown, Wrong)}
    marks = {axis: mark for axis, mark in out.marks.items() if axis not in groups and axis not in unknown}
    first = plain(node.meta["val"].shape[0], tuple(a for a in scope.mesh.names if a in groups))
    return Value((first, *out.dims), marks, out.excess).marked(
        unknown | {a: offs.marks[a] for a in offs.marks if a not in unknown}
    )


RULES: Rules = MappingProxyType(
    dict.fromkeys(_KINDS, reduced)
    | dict.fromkeys(_LINEAR, ordered)
    | dict.fromkeys("_softmax _log_softmax _safe_softmax cumprod logcumsumexp cummax cummin".split(), ordered)
    | dict.fromkeys(_ORDER, ordered)
    | dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), softmax_backward)
    | {
        "mm": product_of("self", "mat2"),
        "bmm": product_of("self", "mat2", batch=1),
        "mv": product_of("self", "vec"),
        "dot": product_of("self", "tensor"),
        "addmm": product_of("mat1", "mat2"),
        "baddbmm": product_of("batch1", "batch2", batch=1),
        "_int_mm": product_of("self", "mat2"),
        "_scaled_mm": scaled_matrices,
        "_grouped_mm": grouped,
        "grouped_mm": grouped,
    }
)

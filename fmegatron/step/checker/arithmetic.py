"""Rules of arithmetic on values: elementwise ops and contractions, which the rules of ops are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fmegatron.step.checker.context import Scope, op_name, suspected
from fmegatron.step.checker.dims import UNIFORM, Atom, Dim, canonical, folds_of, met, over, size_of, unfolded
from fmegatron.step.checker.marks import excess_after, pending_after, strongest
from fmegatron.step.checker.values import (
    NOTHING,
    Excess,
    First,
    Mark,
    Pending,
    Somewhere,
    Suspect,
    Unknown,
    Value,
    Varying,
    Wrong,
    filled,
    portions,
)

Node = torch.fx.Node
_COUNTED = "positions that each rank counts from 0 meet a value that is sharded"
_LINEAR = frozenset(("sum", "beside", "same", "product", "quotient"))


def elementwise(scope: Scope, node: Node, kind: str, values: Sequence[Value]) -> Value:
    """kind: "sum" (all or none are pending), "beside" (the same, put side by side), "product", "quotient" (one is),
    "select" (condition, then two terms), "same" (one operand as it is), "max", "min" (of two), "rising", "falling"
    (monotone functions), "sqrt", "square", "inverse", "abs", "sign", "nan", "finite", "compare", or "function".

    A finding where operands are sharded in different ways: one rank could not compute it, shapes would differ.
    """
    rank = max([len(v.dims) for v in values])
    dims: list[Dim] = [()] * rank
    clash = counted = unclear = frozenset()
    for v in values:
        for d, dim in enumerate(v.dims, rank - len(v.dims)):
            meeting = met(dims[d], dim)
            dims[d] = meeting.dim
            if meeting.clash or meeting.counted or meeting.unclear:
                clash |= meeting.clash
                counted |= meeting.counted
                unclear |= meeting.unclear
    if any([v.constant == 0 for v in values]) and _is_zero(node, kind, values):
        return filled([size_of(dim) for dim in dims], 0)
    terms = _are_terms(node, kind, values)
    folded = any([atom.fold for dim in dims for atom in dim])
    portion = portions(values, kind in ("same", "beside"), kind == "sum") if kind in _LINEAR else NOTHING
    if not (clash or counted or unclear or folded) and all([v.settled for v in values]):
        return Value(tuple(dims), equal_terms=terms, portion=portion)
    out = Value(tuple(dims), equal_terms=terms, portion=portion)
    marks: dict[str, Mark | None] = {}
    for axis in sorted(set().union(clash, counted, unclear, *(v.marks for v in values))):
        marks[axis] = _over(scope, node, kind, values, out, axis, axis in clash, axis in counted, axis in unclear)
    if folded:
        dims, spoiled = _folds(scope, node, kind, values, dims)
        marks |= {axis: mark for axis, mark in spoiled.items() if not isinstance(marks.get(axis), Wrong)}
        out = replace(out, dims=tuple(dims))
    known = frozenset(axis for axis, mark in marks.items() if mark is None)
    out = out.marked({axis: mark for axis, mark in marks.items() if axis not in known})
    for mark in marks.values():
        if isinstance(mark, Somewhere) and mark.group and mark.dims is not None and len(mark.dims) == 1:
            out = placed(out, mark.group, mark.dims[0])
    kept, more = excess_after(scope, node, kind, values)
    return replace(out, excess=_of_known(out, kept)).marked(
        {a: m for a, m in more.items() if not out.is_(a, Wrong, Unknown, Suspect)}
    )


def _are_terms(node: Node, kind: str, values: Sequence[Value]) -> bool:
    """Whether of equal terms it makes equal terms: linear ops, a choice that all ranks make alike, and what makes
    c f(x) of c x for c > 0. One of equal terms and a complete value make a complete value."""
    if not any([v.equal_terms for v in values]):
        return False
    if kind == "select" and (values[0].sharded or values[0].marks):
        return False
    if kind in ("sum", "beside", "select"):
        return all([v.equal_terms or v.constant == 0 for v in (values[1:] if kind == "select" else values)])
    return kind in _LINEAR or kind == "abs" or op_name(node) in ("relu", "leaky_relu")


def _over(scope, node, kind, values, out, axis, clashes, counted, unclear) -> Mark | None:
    """The mark of the result over one axis; None where its dims are enough."""
    given = [v.marks.get(axis) for v in values]
    mark = strongest(scope, node, values, axis, kind == "sum")
    if mark is not None:
        return mark
    if any(isinstance(m, Pending) for m in given):
        return pending_after(scope, node, kind, values, axis)
    if any(isinstance(m, First) for m in given):
        return _first(node, kind, values, axis)
    if any(isinstance(m, Varying) for m in given):
        return Varying()
    if unclear:
        return scope.unknown(node, "dims that are made of other factors; which elements meet cannot be told")
    vague = [m for m in given if isinstance(m, Somewhere)]
    if clashes and not vague:
        states = " and ".join(sorted({v.state(axis) for v in values if v.dims}))
        states += "" if " and " in states else ", but in another order of axes"
        return Wrong(node, f"combines values that are {states}", "gather the one, or shard the other")
    if counted:
        return suspected(node, _COUNTED, "add axis_index * the local size: positions in the whole array")
    if not vague or out.shards(axis):
        return None
    return _narrowed(scope, node, vague, values, out, axis)


def _narrowed(scope, node, vague: list[Somewhere], values: Sequence[Value], out: Value, axis: str) -> Mark:
    """Sharded on a dim that all operands allow: one along which a replicated operand is as large is none of them. Of
    one element on each rank it may be: there a replicated one is broadcast."""
    shifts = [len(out.dims) - len(v.dims) for v in values if v.is_(axis, Somewhere)]
    allowed = [{d + s for d in m.dims} for m, s in zip(vague, shifts, strict=True) if m.dims is not None]
    whole = [v for v in values if v.replicated(axis)]
    if not allowed:
        as_large = any(_as_large(v, out) for v in whole)
        left = {d for d, dim in enumerate(out.dims) if size_of(dim) == 1} if as_large else set()
        lost = as_large and not left
    else:
        filled_by = {d for v in whole for d in range(len(out.dims)) if _fills(v, d, out)}
        left = set.intersection(*allowed) - filled_by
        lost = not left
    if lost and any(m.or_sum for m in vague):
        return scope.unknown(node, "combines a replicated value and one that is sharded or a pending sum")
    if lost:
        return Wrong(node, "combines values that are replicated and sharded", "gather the one, or shard the other")
    dims = tuple(sorted(left)) if left else None
    return vague[0]._replace(dims=dims, or_sum=all(m.or_sum for m in vague), reduced=any(m.reduced for m in vague))


def _fills(value: Value, d: int, out: Value) -> bool:
    """Whether a value is as large as the result along a dim, and not constant along it."""
    own = d - len(out.dims) + len(value.dims)
    return (
        own >= 0
        and size_of(value.dims[own]) == size_of(out.dims[d]) > 1
        and all(atom.axes is not UNIFORM for atom in value.dims[own])
    )


def _first(node: Node, kind: str, values: Sequence[Value], axis: str) -> Mark:
    """A condition that is true on the first rank only, times a value: that value once, a term of a sum."""
    others = [v for v in values if not v.is_(axis, First)]
    if all(v.replicated(axis) for v in others):
        if kind in ("same", "rising") or (kind == "min" and len(others) == 1):
            return First()
        zero = kind == "select" and values[0].is_(axis, First) and values[2].constant == 0
        if zero or (kind == "product" and len(others) == 1):
            return Pending("sum", node)
    return Varying()


def _folds(scope, node, kind, values, dims) -> tuple[list[Dim], dict[str, Mark]]:
    """Dims that are to be reduced: what an op may do to one rank's parts that are side by side."""
    spoiled = {}
    for fold in {fold for dim in dims for fold in folds_of(dim)}:
        have = [any(fold in folds_of(dim) for dim in v.dims) for v in values]
        live = [h for h, v in zip(have, values, strict=True) if v.constant != 0]
        fits = {
            "sum": kind == "same" or (kind in ("sum", "beside") and all(live))
            or (kind == "product" and sum(have) == 1) or (kind == "quotient" and have == [True, False]),
            "max": kind in ("same", "rising", "max"), "min": kind in ("same", "rising", "min"), "copies": True,
        }[fold.kind]  # fmt: skip
        if not fits:
            spoiled[fold.axis] = suspected(node, f"what {op_name(fold.node)} brought together is used before it is "
                                           "reduced", f"reduce it along the dim first ({fold.kind})")  # fmt: skip
    for axis in spoiled:
        dims = [unfolded(dim, axis) for dim in dims]
    return dims, spoiled


def _is_zero(node: Node, kind: str, values: Sequence[Value]) -> bool:
    """Whether it is 0 whatever the other factors are: the gradient of an unused parameter, squared or scaled."""
    factors = {"product": values, "quotient": values[:1]}.get(kind, ())
    if kind in ("same", "abs", "square", "sqrt", "sum"):
        return all(v.constant == 0 for v in values)
    if kind == "select":
        return all(v.constant == 0 for v in values[1:])
    if op_name(node) == "pow" and isinstance(node.args[1], (int, float)) and node.args[1] > 0:
        factors = values[:1]
    return any(v.constant == 0 for v in factors)


def _as_large(value: Value, out: Value) -> bool:
    """Whether no dim of it is broadcast (where one is, the shard may be on that dim) nor constant along itself."""
    if [size_of(d) for d in value.dims] != [size_of(d) for d in out.dims]:
        return False
    return not any(atom.axes is UNIFORM for dim in value.dims for atom in dim)


# ---- contractions ----------------------------------------------------------------------------------------------------
def contraction(scope: Scope, node: Node, a: Value, b: Value, batch: int) -> Value:
    """a[..batch, m, k] @ b[..batch, k, n]; a or b may lack m or n (vectors).

    A finding where k is sharded in one operand only, where both are pending, or one is and the other is not replicated.
    """
    a = settled(scope, node, a, len(a.dims) - 1, b, batch, batch)
    b = settled(scope, node, b, batch, a, len(a.dims) - 1, batch)
    k = met(a.dims[-1], b.dims[batch])
    lead = [met(a.dims[d], b.dims[d]) for d in range(batch)]
    clash = k.clash.union(*(m.clash for m in lead))
    counted, unclear = (getattr(k, what).union(*(getattr(m, what) for m in lead)) for what in ("counted", "unclear"))
    dims = (*(m.dim for m in lead), *a.dims[batch:-1], *b.dims[batch + 1 :])
    out = Value(dims, equal_terms=a.equal_terms or b.equal_terms, portion=portions((a, b)))
    summed = over(atom for dim in (k.dim, a.dims[-1], b.dims[batch]) for atom in dim)
    folds = folds_of(a.dims[-1]) + folds_of(b.dims[batch])
    if not (clash or counted or unclear or summed or folds or a.marks or b.marks or a.excess or b.excess):
        twice = [axis for axis in (a.sharded & b.sharded) if len(out.shards(axis)) > 1]
        if not twice:
            return out
    marks: dict[str, Mark | None] = {}
    for axis in sorted(a.axes() | b.axes() | counted | {fold.axis for fold in folds}):
        if any(fold.axis == axis for fold in folds):
            marks[axis] = suspected(
                node, "contracts what a collective brought together", "reduce it along the dim first"
            )
            continue
        mark = _contracted(scope, node, a, b, batch, out, axis, clash, counted, unclear, summed)
        if mark is not None or axis in a.marks or axis in b.marks:
            marks[axis] = mark
    kept, more = excess_after(scope, node, "product", [a, b])
    out = out.marked({axis: mark for axis, mark in marks.items() if mark is not None})
    return replace(out, excess=_of_known(out, kept))


def _of_known(out: Value, kept: Mapping[str, Excess]) -> Mapping[str, Excess]:
    """An excess only holds for what is known up to it."""
    return {a: e for a, e in kept.items() if not out.is_(a, Wrong, Unknown, Suspect)}


def _contracted(scope, node, a, b, batch, out, axis, clash, counted, unclear, summed) -> Mark | None:
    mark = strongest(scope, node, (a, b), axis)
    if mark is not None:
        return mark
    given = [v.marks.get(axis) for v in (a, b)]
    pending = [m for m in given if isinstance(m, Pending)]
    if any(isinstance(m, (Varying, First)) for m in given):
        return scope.unknown(node, "multiplies a pending sum by a value that varies") if pending else Varying()
    if any(isinstance(m, Somewhere) for m in given) and not pending:
        # Known to be sharded on the dim that is summed, or (without a batch dim) both must be sharded there.
        if axis in summed or (batch == 0 and {a.state(axis), b.state(axis)} == {"sharded"}):
            return Pending("sum", node)
        return Somewhere(or_sum=all(isinstance(m, Somewhere) for m in given))
    if axis in clash:
        what = f"contracts values that are {a.state(axis)} and {b.state(axis)}"
        return Wrong(node, what, f"all_gather the sharded one over {axis!r}, or shard the other")
    if axis in unclear:
        return scope.unknown(node, "contracts dims of which it cannot be told which elements meet")
    if axis in counted:
        return suspected(node, _COUNTED, "add axis_index * the local size: positions in the whole array")
    if pending:
        others = [v.state(axis) for v in (a, b) if not v.pending(axis)]
        if len(pending) == 1 and others == ["replicated"] and pending[0].kind == "sum":
            return pending[0]
        what = f"multiplies a pending {pending[0].kind} by a value that is not replicated"
        if pending[0].kind != "sum" or any(v.excess.get(axis) for v in (a, b)):
            return suspected(node, what, "reduce first", pending[0].birth)
        return Wrong(node, what, "reduce first", pending[0].birth)
    if axis in summed:
        return Pending("sum", node)
    if len(out.shards(axis)) > 1:
        return Wrong(node, "both operands are sharded over the same axis, on dims that both stay",
                   f"all_gather one of them over {axis!r} first")  # fmt: skip
    return None


def settled(scope: Scope, node: Node, x: Value, k: int, other: Value, other_k: int, batch: int) -> Value:
    """x with the dim known on which it is sharded, where shapes left several and the other operand leaves one.

    A dim that meets one that is not sharded is not sharded either; one that meets a sharded one is. What has become
    known holds for the operand itself, for other ops that read it.
    """
    before = x
    meets = {d: d for d in range(batch)} | {k: other_k}
    for axis in x.having(Somewhere):
        mark = x.marks.get(axis)
        if not isinstance(mark, Somewhere) or mark.dims is None or other.marks.get(axis):
            continue
        left = [d for d in mark.dims if d not in meets or meets[d] in other.shards(axis)]
        sure = [d for d in left if d in meets]
        if len(sure or left) == 1:
            x = placed(x, mark.group, (sure or left)[0])
    if x is not before:
        for source in node.all_input_nodes:
            if scope.values.get(source) is before:
                scope.values[source] = x
    return x


def placed(x: Value, axes: tuple[str, ...], dim: int) -> Value:
    """x sharded over these axes, major first, on a dim."""
    x = x.without(axes)
    first, *rest = x.dims[dim] or (Atom(1),)
    dims = list(x.dims)
    dims[dim] = canonical((Atom(first.size, axes + (first.axes or ()), first.cuts, first.inner, first.runs), *rest))
    return replace(x, dims=tuple(dims))

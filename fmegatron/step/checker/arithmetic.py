"""Rules of arithmetic on values: elementwise ops and contractions, which the rules of ops are made of."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from fmegatron.step.checker.context import Scope, op_name, suspected
from fmegatron.step.checker.dims import (
    NOWHERE,
    UNIFORM,
    Atom,
    Dim,
    canonical,
    folds_of,
    met,
    numbers_along,
    over,
    size_of,
    unfolded,
)
from fmegatron.step.checker.marks import excess_after, pending_after, strongest
from fmegatron.step.checker.values import (
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
    portions,
)

Node = torch.fx.Node
COUNTED = "positions that each rank counts from 0 meet a value that is sharded"
_LINEAR = frozenset(("sum", "beside", "same", "product", "quotient"))


class _Meets(NamedTuple):
    """Axes over which dims meet: that are split in other ways, of which one counts positions of its own rank, of which
    it cannot be told which elements meet; over which products are summed."""

    clash: Collection[str]
    counted: Collection[str]
    unclear: Collection[str]
    summed: Collection[str] = ()


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
            if dims[d] == dim or not dim:  # as nearly always
                continue
            if not dims[d]:
                dims[d] = dim
                continue
            meeting = met(dims[d], dim)
            dims[d] = meeting.dim
            if meeting.clash or meeting.counted or meeting.unclear:
                clash |= meeting.clash
                counted |= meeting.counted
                unclear |= meeting.unclear
    if any([v.constant == 0 for v in values]) and _is_zero(node, kind, values):
        return Value(tuple(map(numbers_along, dims)), constant=0)
    terms = _are_terms(node, kind, values)
    folded = any([atom.fold for dim in dims for atom in dim])
    portion = portions(kind, values)
    twice = on_two_dims(dims)
    if not (clash or counted or unclear or folded or twice) and all([v.settled for v in values]):
        return Value(tuple(dims), equal_terms=terms, portion=portion)
    out = Value(tuple(dims), equal_terms=terms, portion=portion)
    marks: dict[str, Mark | None] = {}
    meets = _Meets(clash, counted, unclear)
    for axis in sorted(set().union(clash, counted, unclear, twice, *(v.marks for v in values))):
        mark = _over(scope, node, kind, values, out, axis, meets)
        marks[axis] = own_blocks(node, axis) if mark is None and axis in twice else mark
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


def on_two_dims(dims: Sequence[Dim]) -> frozenset[str]:
    """Axes that shard more than one of these dims: of all pairs of two parts each rank has those of its own."""
    some = 0  # counted first without a call, as this is asked of nearly all ops
    for dim in dims:
        for atom in dim:
            if atom.axes or atom.inner or atom.runs:
                some += 1
                break
    if some < 2:
        return NOWHERE
    sharding = [axes for dim in dims if (axes := over(dim))]
    return frozenset([a for a in frozenset().union(*sharding) if sum([a in axes for axes in sharding]) > 1])


def own_blocks(node: Node, axis: str) -> Suspect:
    """The mark of a value with one axis on two dims. A blockwise algorithm may add what the other blocks give."""
    what = f"both operands are sharded over {axis!r}, on dims that both stay: of all pairs a rank has those of its own"
    return suspected(node, what, f"all_gather one of them over {axis!r} first")._replace(blocks=True, pairs=True)


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


def _over(
    scope: Scope, node: Node, kind: str, values: Sequence[Value], out: Value, axis: str, meets: _Meets
) -> Mark | None:
    """The mark of the result over one axis; None where its dims are enough."""
    given = [v.marks.get(axis) for v in values]
    mark = strongest(scope, node, values, axis, kind in ("sum", "beside", "max"))
    if mark is not None and isinstance(mark, Suspect):
        if kind in ("nan", "finite"):  # of a part it says no more than of another's
            return scope.unknown(mark.node, mark.what)
        if mark.pairs and kind in ("product", "select") and _may_be_diagonal(node, kind, values):
            return scope.vague(mark.node, mark.what)
    if mark is not None:
        return mark
    if any(isinstance(m, Pending) for m in given):
        return pending_after(scope, node, kind, values, axis)
    if any(isinstance(m, First) for m in given):
        return _first(node, kind, values, axis)
    if any(isinstance(m, Varying) for m in given):
        return Varying()
    if axis in meets.unclear:
        return scope.vague(node, "dims that are made of other factors; which elements meet cannot be told")
    vague = any([isinstance(m, Somewhere) for m in given])
    if axis in meets.clash and not vague:
        states = " and ".join(sorted({v.state(axis) for v in values if v.dims}))
        states += "" if " and " in states else ", but in another order of axes"
        return Wrong(node, f"combines values that are {states}", "gather the one, or shard the other")
    if axis in meets.counted:
        return suspected(node, COUNTED, "add axis_index * the local size: positions in the whole array")
    return _narrowed(scope, node, kind, values, out, axis) if vague else None


def _may_be_diagonal(node: Node, kind: str, values: Sequence[Value]) -> bool:
    """Whether what is left of own blocks may be each row's pair with itself, of which a rank has all: all but that are
    left of what is filled where `eye` is true."""
    if not any(atom.counted for v in values for dim in v.dims for atom in dim):
        return False
    eye = kind == "select" and any(op_name(n) == "eye" for n in node.all_input_nodes)
    return not (eye and not values[1].having(Suspect))


def _narrowed(scope: Scope, node: Node, kind: str, values: Sequence[Value], out: Value, axis: str) -> Mark | None:
    """Of values of which shapes leave open which dim the axis shards, what all readings leave that one rank could
    compute: there a dim that is split here is as large as what it meets."""
    vague = [m for v in values if isinstance(m := v.marks.get(axis), Somewhere)]
    if any([m.or_sum or m.reduced for m in vague]):
        return _reduced_or_not(scope, node, kind, values, out, axis)
    outcomes = _outcomes(values, out, axis, scope.mesh[axis])
    if not outcomes:
        return Wrong(node, "combines values that are replicated and sharded", "gather the one, or shard the other")
    if all([len(dims) > 1 for dims in outcomes]):
        return own_blocks(node, axis)
    if any([len(dims) != 1 for dims in outcomes]):
        return scope.vague(node, "combines values on dims of which shapes do not tell whether both are sharded")
    found = tuple(sorted(set().union(*outcomes)))
    return None if out.shards(axis) == list(found) else vague[0]._replace(dims=found)


def _outcomes(values: Sequence[Value], out: Value, axis: str, ranks: int) -> set[frozenset[int]]:
    """The dims of the result that the axis shards, in each reading that one rank could compute; no dim: a broadcast
    of one element of each rank as if it were one element of all."""
    shifts = [len(out.dims) - len(v.dims) for v in values]
    options = [
        [None] if v.replicated(axis) else [d + shift for d in may_shard(v, axis)]
        for v, shift in zip(values, shifts, strict=True)
    ]
    found = set()
    for reading in itertools.product(*options):
        states = [
            [_at(v, d - shift, one == d) for v, shift, one in zip(values, shifts, reading, strict=True)]
            for d in range(len(out.dims))
        ]
        spread = [d for d, at in enumerate(states) if ("cut", 1) in at and ("whole", ranks) in at]
        mixed = [d for d, at in enumerate(states) if len({one for one in at if one[0] in ("cut", "whole")}) > 1]
        if not mixed:
            found.add(frozenset([d for d, at in enumerate(states) if any([state == "cut" for state, _ in at])]))
        elif mixed == spread:
            found.add(frozenset())
    return found


def may_shard(x: Value, axis: str) -> Sequence[int]:
    """The dims that an axis shards, or may shard."""
    mark = x.marks.get(axis)
    if not isinstance(mark, Somewhere):
        return x.shards(axis)
    return range(len(x.dims)) if mark.dims is None else mark.dims


def _at(x: Value, dim: int, cut: bool) -> tuple[str, int]:
    """What an operand has at a dim, and its local size: ranks' parts, all of it, or what fits anything."""
    size = 1 if dim < 0 else size_of(x.dims[dim])
    if cut:
        return "cut", size
    return ("any" if size == 1 or all([atom.axes is UNIFORM for atom in x.dims[dim]]) else "whole"), size


def _reduced_or_not(scope: Scope, node: Node, kind: str, values: Sequence[Value], out: Value, axis: str) -> Mark:
    """Of what may be a pending reduction, or sharded: linear ops with what all ranks have keep it. Two of them may be
    one of each, as each is of a view of its own."""
    vague, others = ([v for v in values if v.is_(axis, Somewhere) == is_] for is_ in (True, False))
    first = vague[0].marks[axis]
    assert isinstance(first, Somewhere), "one of them is vague"
    alone = len(vague) == 1 and all([v.replicated(axis) for v in others])
    sums = first.or_sum or first.reduced == "sum"
    kept = kind == "same" or (sums and kind == "product" and alone)
    kept |= sums and kind == "quotient" and alone and values[0] is vague[0]
    kept |= sums and kind in ("sum", "beside") and alone and all([v.constant == 0 for v in others])
    where = _outcomes(values, out, axis, scope.mesh[axis]) if kept else set()
    if where and all([len(dims) == 1 for dims in where]):
        return first._replace(dims=tuple(sorted(frozenset().union(*where))))
    return scope.vague(node, "uses a value that is sharded or a pending reduction: shapes do not tell which")


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
    out = Value(dims, equal_terms=a.equal_terms or b.equal_terms, portion=portions("product", (a, b)))
    summed = over(atom for dim in (k.dim, a.dims[-1], b.dims[batch]) for atom in dim)
    folds = folds_of(a.dims[-1]) + folds_of(b.dims[batch])
    if not (clash or counted or unclear or summed or folds or a.marks or b.marks or a.excess or b.excess):
        if not on_two_dims(dims):
            return out
    marks: dict[str, Mark | None] = {}
    meets = _Meets(clash, counted, unclear, summed)
    for axis in sorted(a.axes() | b.axes() | counted | {fold.axis for fold in folds}):
        if any(fold.axis == axis for fold in folds):
            marks[axis] = suspected(
                node, "contracts what a collective brought together", "reduce it along the dim first"
            )
            continue
        mark = _contracted(scope, node, a, b, batch, out, axis, meets)
        if mark is not None or axis in a.marks or axis in b.marks:
            marks[axis] = mark
    kept, more = excess_after(scope, node, "product", [a, b])
    out = out.marked({axis: mark for axis, mark in marks.items() if mark is not None})
    return replace(out, excess=_of_known(out, kept))


def _of_known(out: Value, kept: Mapping[str, Excess]) -> Mapping[str, Excess]:
    """An excess only holds for what is known up to it."""
    return {a: e for a, e in kept.items() if not out.is_(a, Wrong, Unknown, Suspect)}


def _contracted(
    scope: Scope, node: Node, a: Value, b: Value, batch: int, out: Value, axis: str, meets: _Meets
) -> Mark | None:
    mark = strongest(scope, node, (a, b), axis)
    if mark is not None:
        return mark
    given = [v.marks.get(axis) for v in (a, b)]
    pending = [m for m in given if isinstance(m, Pending)]
    if any(isinstance(m, (Varying, First)) for m in given):
        return scope.unknown(node, "multiplies a pending sum by a value that varies") if pending else Varying()
    if any(isinstance(m, Somewhere) for m in given) and not pending:
        return _contracted_readings(scope, node, a, b, batch, out, axis)
    if axis in meets.clash:
        what = f"contracts values that are {a.state(axis)} and {b.state(axis)}"
        return Wrong(node, what, f"all_gather the sharded one over {axis!r}, or shard the other")
    if axis in meets.unclear:
        return scope.vague(node, "contracts dims of which it cannot be told which elements meet")
    if axis in meets.counted:
        return suspected(node, COUNTED, "add axis_index * the local size: positions in the whole array")
    if pending:
        others = [v.state(axis) for v in (a, b) if not v.pending(axis)]
        if len(pending) == 1 and others == ["replicated"] and pending[0].kind == "sum":
            return pending[0]
        what = f"multiplies a pending {pending[0].kind} by a value that is not replicated"
        if pending[0].kind != "sum" or any(v.excess.get(axis) for v in (a, b)):
            return suspected(node, what, "reduce first", pending[0].birth)
        return Wrong(node, what, "reduce first", pending[0].birth)
    if axis in meets.summed:
        return _of_one_element(a, b, batch, axis) or Pending("sum", node)
    return own_blocks(node, axis) if len(out.shards(axis)) > 1 else None


def _contracted_readings(
    scope: Scope, node: Node, a: Value, b: Value, batch: int, out: Value, axis: str
) -> Mark | None:
    """What the readings leave that one rank could compute: the dim that is summed is split in both, or in neither."""
    for x, other in ((a, b), (b, a)):
        mark = x.marks.get(axis)
        if isinstance(mark, Somewhere) and (mark.or_sum or mark.reduced):
            if other.replicated(axis) and (mark.or_sum or mark.reduced == "sum"):
                return mark._replace(dims=None)
            return scope.vague(node, "multiplies a value that is sharded or a pending reduction")
    k = len(a.dims) - 1
    meets = {d: d for d in range(batch)} | {k: batch}
    rest = range(batch + 1, len(b.dims))
    of_b = {d: batch + len(a.dims[batch:-1]) + i for i, d in enumerate(rest)}  # where dims of b are in the result
    outcomes: set[tuple[int, ...] | str] = set()
    for one, other in itertools.product(*[[None] if x.replicated(axis) else may_shard(x, axis) for x in (a, b)]):
        shared = {
            d for d, e in meets.items() if (one == d) != (other == e) and not _fits_any(a, b, d, e, one == d, axis)
        }
        if shared:
            continue
        dims = {one} if one is not None and one != k else set()
        dims |= {other if other < batch else of_b[other]} if other is not None and other != batch else set()
        outcomes.add("sum" if one == k or other == batch else tuple(sorted(dims)))
    if not outcomes:
        return Wrong(node, f"contracts values that are {a.state(axis)} and {b.state(axis)}",
                     f"all_gather the sharded one over {axis!r}, or shard the other")  # fmt: skip
    if outcomes == {"sum"} or (batch == 0 and "sum" in outcomes and {a.state(axis), b.state(axis)} == {"sharded"}):
        return _of_one_element(a, b, batch, axis) or Pending("sum", node)
    if all([one != "sum" and len(one) > 1 for one in outcomes]):
        return own_blocks(node, axis)
    if any([one != "sum" and len(one) > 1 for one in outcomes]):
        return scope.vague(node, "multiplies values on dims of which shapes do not tell whether both are sharded")
    dims = tuple(sorted({one[0] for one in outcomes if isinstance(one, tuple) and isinstance(one[0], int)}))
    if "sum" not in outcomes and out.shards(axis) == list(dims):
        return None
    groups = {m.group for x in (a, b) if isinstance(m := x.marks.get(axis), Somewhere)}
    group = groups.pop() if len(groups) == 1 else ()
    return Somewhere(None if "sum" in outcomes else dims, group, or_sum="sum" in outcomes)


def _of_one_element(a: Value, b: Value, batch: int, axis: str) -> Mark | None:
    """Where what an axis shards is one element, behind others of the dim that is summed: einsum sums along a dim of one
    element that it has to keep, and brings it back as a dim of its own."""
    sharded = [k for v, k in ((a, a.dims[-1]), (b, b.dims[batch])) if axis not in v.marks]
    behind = [len(k) > 1 and axis not in k[0].sharded and _one_each(k, axis) for k in sharded]
    return Somewhere(None, (axis,), or_sum=True) if behind and all(behind) else None


def _fits_any(a: Value, b: Value, d: int, e: int, a_is_cut: bool, axis: str) -> bool:
    """Whether the operand that is not split at a dim that both have is constant along it, or may be: along one element
    of each rank."""
    cut, dim = (a.dims[d], b.dims[e]) if a_is_cut else (b.dims[e], a.dims[d])
    return bool(dim) and (all([atom.axes is UNIFORM for atom in dim]) or _one_each(cut, axis))


def _one_each(dim: Dim, axis: str) -> bool:
    """Whether what the axis shards in a dim is one element on each rank, which leaves no trace in sizes."""
    sharded = [atom.size for atom in dim if axis in atom.sharded]
    return bool(sharded) and max(sharded) == 1


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
        told = len(left) == 1 or not any([_one_each(other.dims[meets[d]], axis) for d in sure])
        if len(sure) == 1 and told:  # as the other one is, whatever factors it is made of
            x = x.without(mark.group or (axis,))
            d = sure[0]
            dims = [met(dim, other.dims[meets[d]]).dim if e == d else dim for e, dim in enumerate(x.dims)]
            x = x.with_dims(dims)
        elif len(left) == 1:
            x = placed(x, mark.group, left[0])
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


def not_on(x: Value, dim: int, axes: Iterable[str]) -> Value:
    """x with what it leaves open of these axes less one dim, which it is known not to be."""
    for axis in axes:
        if not isinstance(mark := x.marks.get(axis), Somewhere) or mark.dims is None:  # any, or placed by now
            continue
        if len(left := tuple(d for d in mark.dims if d != dim)) == 1 and mark.group:
            x = placed(x, mark.group, left[0])
        else:
            x = replace(x, marks={**x.marks, axis: mark._replace(dims=left or None)})
    return x


def as_numbered(view: Node, x: Value, shape: tuple[int, ...]) -> Value:
    """What a view gives, where shapes leave several dims, and the size of one is a number divided by that of ranks: on
    one rank just that is as many times as large."""
    for axis in x.having(Somewhere):
        mark = x.marks.get(axis)
        if not isinstance(mark, Somewhere) or mark.or_sum or mark.reduced:  # or placed by now
            continue
        axes = mark.group or (axis,)
        given = [(n, made) for n, made in view.meta["made"] if made and not made[0] and not made[2]]
        numbers = {n for n, (_, ranks, _) in given if dict(ranks) == dict.fromkeys(axes, -1) and shape.count(n) == 1}
        at = [d for d, n in enumerate(shape) if n in numbers and mark.may_be(d)]
        x = placed(x, axes, at[0]) if len(at) == 1 else x
    return x

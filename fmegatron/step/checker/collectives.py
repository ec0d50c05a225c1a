"""The rule for all collectives, from the types that their entries state: partial, sharded, replicated.

A type before of None states nothing of the operand, and what is stated after is taken without proof: of `declare`, and
of collectives whose result is another value than their operand (a broadcast).

Proofs: a collective over an axis that shards another dim, a pending maximum that is summed, a sum of a pending sum of
another kind. A sum of replicas is n times too large until it is divided by n (`marks.py`). Open: a sum of what depends
on the rank's index without a `declare`. Parts that are brought together although they are terms of a sum (all_gather
of a pending sum, psum of shards) mean something once they are reduced along the dim (`dims.Fold`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import torch

from fmegatron.collectives import kinds, places, table
from fmegatron.layout import split
from fmegatron.step.checker.arithmetic import COUNTED
from fmegatron.step.checker.completion import in_any_order
from fmegatron.step.checker.context import Scope, op_name, suspected
from fmegatron.step.checker.dims import (
    UNIFORM,
    Atom,
    Dim,
    Fold,
    beside,
    canonical,
    constant_along,
    cut,
    filled_in,
    folds_of,
    interleaved,
    joined,
    order_of,
    over,
    pieces_of,
    plain,
    said,
    same_pieces,
    size_of,
    stripped,
)
from fmegatron.step.checker.marks import raised
from fmegatron.step.checker.movement import elsewhere, reshaped
from fmegatron.step.checker.sent import by_counts, permuted, rows_sent
from fmegatron.step.checker.statements import OPEN, axes_on, declared, equal_over, left_of, made, starts_of, terms
from fmegatron.step.checker.turns import turned
from fmegatron.step.checker.values import (
    NOTHING,
    OWED,
    First,
    Mark,
    Pending,
    Somewhere,
    Suspect,
    Value,
    Varying,
    Wrong,
    filled,
)

Node = torch.fx.Node
_SCANS = frozenset("cumsum cumprod logcumsumexp cummax cummin".split())
# What a sum over the ranks is, of parts that are ..., and of which nothing is known of it.
_SUM_OF: Mapping[str | None, str] = MappingProxyType(
    dict.fromkeys(("number", "maybe", "equal", "owed, of a mean"), "mean")
)
_NO_SUM = frozenset(("exact", "either", "part", "mixed"))
_DECLARE = 'declare(x, axis, forward="partial") says that its terms make up a sum; declare it where it is made'


def rule(scope: Scope, node: Node, given: dict) -> list[Value]:
    """What a collective leaves of each tensor of its list."""
    collective, axes, xs = kinds.collective_of(node.target), tuple(given["axes"]), given["xs"]
    assert collective is not None and collective.type is not None, "`_rule_of` has found one"
    own = collective.each(node.args[3:], len(xs))
    if collective not in (table.PSUM, table.PMAX):
        xs = [_carried(scope, x, axes) for x in xs]
    if isinstance(stated := collective.type(*own[0])[1], kinds.Terms):
        return terms(scope, node, xs, axes, stated)
    shapes = [result.shape for result in node.meta["val"]]
    out = [
        _after(scope, node, x, axes, *collective.type(*mine), shape)
        for x, mine, shape in zip(xs, own, shapes, strict=True)
    ]
    if collective is table.PPERMUTE:
        turned(scope, node, axes, own[0][0], xs)
    counts = [scope.values[n] for n in node.args[3:] if isinstance(n, Node)]
    if collective is table.CUT:
        return [_by_index(scope, node, x, axes, counts[0]) for x in out]
    return [by_counts(node, x, axes, counts) for x in out] if counts else out


def summed(scope: Scope, node: Node, x: Value, axis: str) -> Value:
    """What a psum over one axis makes of a value."""
    return equal_over((axis,), _zeros(_reduced(scope, node, x, (axis,), "sum")))


def _carried(scope: Scope, x: Value, axes: tuple[str, ...]) -> Value:
    """Of a scan of each rank's part, or of a product with weights by places in it, which a collective brings to the
    others: what it carries on may be its end."""
    marks: dict[str, Mark | None] = {
        axis: scope.unknown(mark.node, f"{mark.what}, whose ends are brought together: whether they are carried on")
        for axis in axes
        if isinstance(mark := x.marks.get(axis), Suspect) and (op_name(mark.node) in _SCANS or mark.what == COUNTED)
    }
    return x.marked(marks) if marks else x


def _taken_back(scope: Scope, node: Node, x: Value, axes: tuple[str, ...], place: places.Place) -> Value | None:
    """Of what stood beside the parts of other ranks, along another dim than that on which it is split, each rank takes
    back what is its own: open, as what is beside it may have been mixed with it. None where nothing did."""
    suspects = [mark for axis in axes if isinstance(mark := x.marks.get(axis), Suspect)]
    if len(suspects) < len(axes) or len(dims := {*place.dims}) > 1 or places.FLAT in dims:
        return None
    for mark in suspects:
        gather = kinds.collective_of(mark.node.target)
        before = gather.type(*gather.each(mark.node.args[3:], 1)[0])[0] if gather and gather.type else None
        if not isinstance(before, kinds.Sharded) or {*before.place.dims} != dims:
            return None
    d = dims.pop()
    first = x.dims[d][:1]
    if first != (Atom(scope.mesh.extent(axes), ()),):
        return None
    why = f"{suspects[0].what}; whether nothing has mixed the ranks' parts is not known"
    own = x.with_dims(dim[1:] if e == d else dim for e, dim in enumerate(x.dims))
    return own.marked({axis: scope.unknown(node, why) for axis in axes})


def _after(scope: Scope, node: Node, x: Value, axes: tuple[str, ...], before: Any, after: Any, shape: Any) -> Value:
    match _over(axes, before), _over(axes, after):
        case kinds.Partial(kind), kinds.Replicated():
            return equal_over(axes, _zeros(_reduced(scope, node, x, axes, kind)))
        case kinds.Partial(kind), kinds.Sharded(place):
            if (back := _taken_back(scope, node, x, axes, place)) is not None:
                return back
            return _zeros(_cut(scope, node, _reduced(scope, node, x, axes, kind, scatters=True), axes, place))
        case kinds.Sharded(place), kinds.Replicated():
            whole = equal_over(axes, _gathered(scope, node, x, axes, place))
            left = {axis: one for axis, one in whole.portion.items() if axis not in axes}
            return replace(whole, portion=left) if len(left) < len(whole.portion) else whole
        case kinds.Replicated(), kinds.Sharded(place):
            return _zeros(_cut(scope, node, _replicated(node, x, axes), axes, place))
        case kinds.Sharded(places.Place((concat, *_) as concats)), kinds.Sharded(
            places.Place((split, *_) as splits)
        ) if len({*concats}) == len({*splits}) == 1:
            return _exchanged(scope, node, x, axes, concat_dim=concat, split_dim=split)
        case kinds.Own(), kinds.Own():
            return rows_sent(node, x, axes, shape[0])
        case None, kinds.RankIndex():
            return Value((), dict.fromkeys(axes, Varying()), index_of=axes)
        case None, kinds.Permuted():
            return permuted(node, x, axes)
        case None, kinds.Replicated() | kinds.Partial() | kinds.Sharded() | kinds.Own() as stated:
            if kinds.collective_of(node.target) is table.DECLARE:
                return declared(scope, node, x, axes, stated)
            return made(scope, node, x, axes, stated, shape)
    open_ = scope.unknown(node, f"its type is {before} -> {after}, for which the check has no rule")
    return Value(tuple(plain(n) for n in shape)).marked(dict.fromkeys((*axes, *sorted(x.axes())), open_))


def _over(axes: tuple[str, ...], type_: Any) -> Any:
    """A type over these axes: a place of one dim is that of all of them."""
    if not isinstance(type_, kinds.Sharded) or len(type_.place.dims) != 1:
        return type_
    return kinds.Sharded(replace(type_.place, dims=type_.place.dims * len(axes)))


def _replicated(node: Node, x: Value, axes: tuple[str, ...]) -> Value:
    """What must be the same on all ranks of the axes, of which each then keeps its part."""
    marks: dict[str, Mark | None] = {}
    for axis in axes:
        if not x.replicated(axis) and not x.is_(axis, *OPEN):
            what = f"{op_name(node)} takes a part of a value that is {x.state(axis)}"
            marks[axis] = Wrong(node, what, f"reduce or gather it over {axis!r} first", x.birth(axis))
    return x.marked(marks)


def _by_index(scope: Scope, node: Node, x: Value, axes: tuple[str, ...], index: Value) -> Value:
    """The part of a value that each rank keeps by its index along the axes."""
    if index.index_of == axes and index.scale == 1:
        return x
    why = f"{op_name(node)} by a number that is not the rank's index over {'+'.join(axes)}"
    return x.marked({axis: scope.unknown(node, why) for axis in axes if not x.is_(axis, *OPEN)})


def _zeros(x: Value) -> Value:
    """Of zeros a sum and a part are zeros, whatever the axes."""
    return filled([size_of(dim) for dim in x.dims], 0) if x.constant == 0 else x


def _reduced(scope: Scope, node: Node, x: Value, axes: tuple[str, ...], wanted: str, scatters: bool = False) -> Value:
    """What a reduction over these axes leaves. scatters: of it each rank takes a part then."""
    name = op_name(node)
    marks: dict[str, Mark | None] = {}
    replicas, folds = [], []
    for axis in axes:
        mark = x.marks.get(axis)
        marks[axis] = left_of(mark)
        if isinstance(mark, (*OPEN, First)) or x.pending(axis, wanted) or x.constant == 0:
            continue
        if isinstance(mark, Somewhere) and mark.or_sum and wanted == "sum":
            continue
        if mark is None and not x.shards(axis):
            if wanted == "sum" and x.equal_terms and x.constant is None:
                why = f"{name} of what is a term of every rank, or complete already: it was added up as often as copied"
                marks[axis] = scope.unknown(node, why)
            elif wanted == "sum" and x.portion.get(axis) == "mixed":
                marks[axis] = scope.unknown(node, f"{name} of gradients that are to be summed, and of what is complete")
            elif wanted == "sum" and not (x.equal_terms or x.portion.get(axis) in ("exact", "either", *OWED)):
                replicas.append(axis)
        elif mark is None and not scatters:
            folds.append(axis)
        elif isinstance(mark, (Varying, Somewhere)) or (isinstance(mark, Pending) and wanted == "max"
                                                         and mark.kind == "logsumexp"):  # fmt: skip
            what = "on the rank's index" if isinstance(mark, Varying) else "on the rank"
            marks[axis] = scope.unknown(node, f"{name} of a value that depends {what}", _DECLARE)
        else:
            state, birth = x.state(axis), mark.birth if isinstance(mark, Pending) else None
            marks[axis] = Wrong(node, f"{name} of a value that is {state}",
                       f"only a pending {wanted} may be reduced over {axis!r}; wrong axis?", birth)  # fmt: skip
    out = _folded(x, folds, wanted, node).marked(marks)
    if x.constant is not None and wanted == "sum":
        ranks = {axis: Fraction(1) for axis in axes if scope.mesh[axis] > 1} if x.constant == 1 else NOTHING
        out = replace(out, constant=x.constant * int(scope.mesh.extent(axes)), ranks=ranks)
    # Equal terms that were summed over some axes are such terms over the others still: counts, axis by axis. What is no
    # count may as well be complete.
    still = [a for a in scope.mesh.names if x.equal_terms and scope.mesh[a] > 1 and out.replicated(a)]
    portion = {**dict.fromkeys(still, "rows" if x.constant is None else "exact"), **out.portion}
    portion = {a: p for a, p in portion.items() if a not in axes}
    if wanted == "sum" and x.constant is None and not x.equal_terms:
        sums = [a for a in axes if x.pending(a, "sum") and a not in x.excess and marks[a] is None]
        portion |= {a: _SUM_OF.get(x.portion.get(a), "total") for a in sums if x.portion.get(a) not in _NO_SUM}
    out = replace(out, equal_terms=False, portion=portion)
    for axis in replicas:
        what = f"{name} of a value that is already replicated: {scope.mesh[axis]} times too large"
        maybe = x.portion.get(axis) in ("maybe", "equal", "rows")
        out = raised(out, [axis], 1, node, what, sure=not maybe, loose=maybe)
    return replace(out, constant=0) if x.constant == 0 else out


def _folded(x: Value, axes: list[str], kind: str, node: Node) -> Value:
    """Shards that were reduced element by element: their dim is still to be reduced in the same way."""
    if not axes:
        return x
    dims = list(x.dims)
    for axis in axes:
        for d in x.shards(axis):
            fold = Fold(kind, axis, node)
            dims[d] = tuple(a._replace(fold=fold) if axis in a.sharded else a for a in dims[d])
    return replace(replace(x, dims=tuple(dims)).without(axes), data=False)


def _cut(scope: Scope, node: Node, x: Value, axes: tuple[str, ...], place: places.Place) -> Value:
    """What is left when each rank keeps the part of a place."""
    true = dict(place.true)
    for dim in range(len(x.dims)):
        names = axes_on(axes, place, dim)
        if names:
            if place.assigned:
                x = _in_pieces(scope, node, x, dim, names, place)
                continue
            parts = place.parts if dim == place.interleaved else ()
            rooms = _rooms(scope, names, true.get(dim), 1 if place.block else place.unit)
            x = _dim_cut(scope, node, x, dim, names, parts, rooms)
    if not place.block:
        return x
    first = place.first
    flattened = size_of(tuple(atom for dim in x.dims[first:] for atom in dim))
    x = reshaped(scope, node, x, (*map(size_of, x.dims[:first]), flattened))
    flat = axes_on(axes, place, places.FLAT)
    rooms = _rooms(scope, flat, true.get(places.FLAT), place.unit)
    return _dim_cut(scope, node, x, first, flat, (), rooms, ranges=True) if flat else x


def _in_pieces(
    scope: Scope, node: Node, x: Value, dim: int, axes: tuple[str, ...], place: places.Place
) -> Value:  # fmt: skip
    """What each rank keeps of a dim that is assigned in pieces."""
    before, dims = x.dims[dim], list(x.dims)
    why = f"{op_name(node)} into pieces of a dim that is sharded otherwise, or to be reduced"
    marks: dict[str, Mark | None] = {fold.axis: scope.unknown(node, why) for fold in folds_of(before)}
    marks |= {axis: scope.unknown(node, why) for axis in sorted(over(before))}
    dims[dim] = (Atom(place.shard_shape(tuple(map(size_of, dims)), ())[dim], axes, pieces_of(*place.assigned)),)
    return replace(x.with_dims(dims), constant=x.constant if x.constant == 0 else None).marked(marks)


def _rooms(scope: Scope, axes: tuple[str, ...], true: tuple[int, ...] | None, unit: int) -> list[int] | None:
    """Sizes of the parts of a dim where what is left is padded, in multiples of `unit`; None where it is not."""
    sizes = [scope.mesh[axis] for axis in axes]
    return None if true is None else [split.rooms(part, sizes, unit)[-1] for part in true]


def _dim_cut(
    scope: Scope, node: Node, x: Value, dim: int, axes: tuple[str, ...], parts: tuple[int, ...],
    rooms: Sequence[int] | None = None, ranges: bool = False,
) -> Value:  # fmt: skip
    """rooms: sizes of the parts of the dim where what is left is padded. ranges: of a flattened block."""
    atoms, n = x.dims[dim], int(scope.mesh.extent(axes))
    folds = folds_of(atoms)
    for fold in folds:
        what = f"takes parts of what {op_name(fold.node)} brought together"
        x = x.marked({fold.axis: suspected(node, what, "reduce it along the dim first")})
    whole = joined(canonical(tuple(Atom(atom.size, ()) if atom.axes is UNIFORM else atom for atom in atoms)))
    dims = list(x.dims)
    if rooms is not None:
        first = whole[0] if len(whole) == 1 and not whole[0].runs else None
        if first is None or folds or ranges:
            dims[dim] = (Atom(sum(rooms), axes, frozenset(), () if folds else whole),)
        else:
            cuts = starts_of(rooms)
            dims[dim] = (Atom(sum(rooms), (*(first.axes or ()), *axes), cuts, first.inner),)
        return replace(x.with_dims(dims), constant=x.constant if x.constant == 0 else None)
    if folds:
        dims[dim] = plain(size_of(atoms) // n)
    elif parts and len(whole) == 1 and whole[0].plain:
        dims[dim] = (Atom(whole[0].size // n, (*(whole[0].axes or ()), *axes), starts_of(parts)),)
    else:
        dims[dim] = cut(whole, axes, n)
    return x.with_dims(dims)


def _gathered(scope: Scope, node: Node, x: Value, axes: tuple[str, ...], place: places.Place) -> Value:
    """A value in full over the axes. Where the place describes what a dim consists of, they must shard just that."""
    true = dict(place.true)
    if place.block:
        first, flat = place.first, axes_on(axes, place, places.FLAT)
        x = _dim_gathered(scope, node, x, first, flat, None, False, "the flattened block")
        x = _without_padding(x, first, math.prod(place.block[first:]), (), true.get(places.FLAT))
        x = _unflattened(scope, node, x, place.block, first)
    for dim in range(len(x.dims)):
        names, here = axes_on(axes, place, dim), dim == place.interleaved
        if names:
            parts = place.parts if here else ()
            if not (place.block or true or place.assigned) and _beside_others(x, names, dim) and in_any_order(node):
                n, x = int(scope.mesh.extent(names)), x.without(names)
                x = x.with_dims((Atom(n, ()), *one) if d == dim else one for d, one in enumerate(x.dims))
                continue
            if place.assigned:
                sizes, order = place.assigned
                x = _dim_gathered(scope, node, x, dim, names, pieces_of(sizes, order), False, f"dim {dim}")
                x = _without_padding(x, dim, sum(sizes), (), sizes)
                continue
            x = _dim_gathered(scope, node, x, dim, names, starts_of(parts), here and not parts, f"dim {dim}")
            sizes = true.get(dim, ())
            x = _without_padding(x, dim, sum(sizes), sizes, true.get(dim))
    return x


def _beside_others(x: Value, axes: tuple[str, ...], dim: int) -> bool:
    """Whether these axes shard other dims: what ranks have is brought together, and not where it was."""
    return all([axis not in x.marks and x.shards(axis) and dim not in x.shards(axis) for axis in axes])


def _unflattened(scope: Scope, node: Node, x: Value, block: tuple[int, ...], first: int) -> Value:
    """The last dim as the dims of a block from `first` on; those before stay, also of size 1."""
    before = x.dims[:first]
    x = reshaped(scope, node, x.with_dims(x.dims[first:]), block[first:])
    return elsewhere(x, range(first, len(block))).with_dims((*before, *x.dims))


def _without_padding(x: Value, dim: int, size: int, parts: tuple[int, ...], true: tuple[int, ...] | None) -> Value:
    """A gathered dim, of which a place with padding (`true`) leaves out all but `size`."""
    atoms = joined(x.dims[dim])
    if true is None or size_of(atoms) == size:
        return x
    first = atoms[0] if len(atoms) == 1 else Atom(size, order_of(atoms))
    cuts = starts_of(parts) if first.axes else frozenset()
    return x.with_dims((first._replace(size=size, cuts=cuts),) if d == dim else one for d, one in enumerate(x.dims))


def _dim_gathered(
    scope: Scope, node: Node, x: Value, dim: int, axes: tuple[str, ...], starts: frozenset[int] | None, loose: bool,
    what: str,
) -> Value:  # fmt: skip
    """starts: where parts begin in the shard (`Atom.cuts`); None where that does not matter. loose: whatever the ranks
    have is put side by side."""
    if not axes:
        return x
    atoms, n = interleaved(x.dims[dim]), int(scope.mesh.extent(axes))
    first = atoms[0] if atoms else Atom(1, ())
    own = first.axes or ()
    left, minor = tuple(a for a in own if a not in axes), own[len(own) - len(axes) :] == axes
    constant = constant_along(atoms)
    marks: dict[str, Mark | None] = {}
    terms: dict[str, Fold] = {}
    vague = False
    for axis in axes:
        mark = x.marks.get(axis)
        marks[axis] = left_of(mark)
        if isinstance(mark, OPEN) or (mark is None and (constant or axis in (over(atoms) if loose else own))):
            continue
        if isinstance(mark, Varying) or (isinstance(mark, Somewhere) and mark.or_sum):
            fix = 'declare(x, axis, forward=("sharded", dim)) says that its parts are shards'
            marks[axis] = scope.unknown(node, "all_gather of a value that depends on the rank's index", fix)
        elif isinstance(mark, Somewhere):  # on one of its dims, of which a shard of one element leaves no trace
            vague = True
            if mark.reduced:
                marks[axis] = scope.vague(node, f"all_gather of {what} of what may be a pending {mark.reduced}")
            elif not mark.may_be(dim):
                text = f"all_gather of {what} of a value that is sharded on one of the dims {mark.dims}"
                marks[axis] = Wrong(node, text, "gather the dim that the axis shards")
        elif loose and isinstance(mark, Pending) and mark.kind in ("sum", "max", "min"):
            terms[axis] = Fold(mark.kind, axis, node)
        elif loose and mark is None and not x.shards(axis):
            terms[axis] = Fold("copies", axis, node)
        elif loose and isinstance(mark, Pending):
            marks[axis] = scope.unknown(node, f"all_gather of a pending {mark.kind}")
        elif mark is None and x.shards(axis):
            text = f"all_gather of {what} of a value that is {x.state(axis)}"
            marks[axis] = suspected(node, text, "remove it, or gather the axis that shards it, on its dim")
        elif mark is None or isinstance(mark, Pending):
            text, birth = f"all_gather of {what} of a value that is {x.state(axis)}", mark.birth if mark else None
            marks[axis] = Wrong(node, text, "remove it, or gather the axis that shards it, on its dim", birth)
    known = not (any(marks.values()) or terms or constant or vague)
    if known and not minor and (first.plain and set(axes) <= set(own) or not loose):
        wrong = Wrong(node, f"all_gather over {'+'.join(axes)} of {what}, sharded over {'+'.join(own)}",
                   "gather the minor axes first, or all in their order")  # fmt: skip
        marks = dict.fromkeys(axes, wrong)
    fits = starts is None or (starts <= first.cuts and (starts or not first.cuts) and same_pieces(starts, first.cuts))
    if known and not loose and not fits:
        wrong = Wrong(node, f"all_gather of {what} in parts that begin at {said(starts or frozenset())}, those of the "
                   f"value begin at {said(first.cuts)}", "give the parts that the layout has")  # fmt: skip
        marks = dict.fromkeys(axes, wrong)
    if terms:
        after: Dim = (*beside(scope.mesh, axes, terms), *stripped(atoms, axes))
    elif constant:  # the same everywhere: of the parts of a dim, too
        after = (Atom(size_of(atoms) * n, UNIFORM),)
    elif vague or (any(marks.values()) and not loose):  # rank by rank
        after = (Atom(n, ()), *stripped(atoms, axes))
    elif first.inner and not left:
        after = first.inner
    elif minor and (first.inner or (first.cuts and not loose)):
        cuts = frozenset(c * n for c in first.cuts) if left else frozenset()
        after = (Atom(first.size * n, left, cuts, first.inner), *atoms[1:])
    elif first.plain and not first.cuts and set(axes) <= set(own):
        after = (*filled_in(own, axes, scope.mesh, first.size), *atoms[1:])
    else:  # rank by rank
        after = (Atom(n, ()), *stripped(atoms, axes))
    out = x.marked(marks)
    dims = list(out.dims)
    dims[dim] = tuple(after)
    return replace(out, constant=None if loose else out.constant).with_dims(dims)


def _exchanged(scope: Scope, node: Node, x: Value, axes: tuple[str, ...], *, split_dim: int, concat_dim: int) -> Value:
    """all_to_all over `axes`: one dim is gathered, another cut. Of a pending sum the parts of all ranks are beside each
    other then, to be summed."""
    n = int(scope.mesh.extent(axes))
    marks: dict[str, Mark | None] = {}
    terms: dict[str, Fold] = {}
    for axis in axes:
        mark, held = x.marks.get(axis), any(axis in (atom.axes or ()) for atom in joined(x.dims[concat_dim])[:1])
        marks[axis] = left_of(mark)
        constant = mark is None and constant_along(x.dims[concat_dim])
        if isinstance(mark, Varying):
            marks[axis] = mark
        if isinstance(mark, Somewhere) and (mark.or_sum or mark.reduced):
            marks[axis] = scope.vague(node, "all_to_all of a value that is sharded or a pending reduction")
        vague = isinstance(mark, Somewhere) and (mark.or_sum or mark.reduced or mark.may_be(concat_dim))
        if isinstance(mark, (*OPEN, Varying)) or vague or held or constant:
            continue
        if isinstance(mark, Pending) and mark.kind in ("sum", "max", "min") and split_dim != concat_dim:
            terms[axis] = Fold(mark.kind, axis, node)
            continue
        birth = mark.birth if isinstance(mark, Pending) else None
        marks[axis] = Wrong(node, f"all_to_all gathers dim {concat_dim} of a value that is {x.state(axis)}",
                   "gather the dim that the axis shards; a pending sum goes through reduce_scatter", birth)  # fmt: skip
    whole = replace(x.without(axes), data=False)
    dims = list(whole.dims)
    if terms:
        dims[concat_dim] = (*beside(scope.mesh, axes, terms), *x.dims[concat_dim])
    else:
        dims[concat_dim] = canonical(_whole_again(joined(x.dims[concat_dim]), axes, n))
    out = _dim_cut(scope, node, whole.with_dims(dims), split_dim, axes, ())
    marks = {axis: mark for axis, mark in marks.items() if mark is not None}
    return out.marked(marks)


def _whole_again(atoms, axes, n):
    """A dim after an exchange that gathers it: what was cut before, if it is known."""
    first = atoms[0] if atoms else Atom(1, ())
    left = tuple(a for a in (first.axes or ()) if a not in axes)
    if first.inner and not left:
        return first.inner
    inner = first.inner if first.axes == left + axes else ()
    return (Atom(first.size * n, left, frozenset(), inner), *atoms[1:])

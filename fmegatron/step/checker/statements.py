"""What is stated of the result of a collective and taken without proof: of `declare`, and of types without a before."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch

from fmegatron.collectives import kinds, places
from fmegatron.step.checker import sizes
from fmegatron.step.checker.context import Scope, op_name
from fmegatron.step.checker.dims import Atom, canonical, joined, plain, size_of
from fmegatron.step.checker.marks import too_large
from fmegatron.step.checker.shares import is_share
from fmegatron.step.checker.values import OWED, Excess, Mark, Pending, Suspect, Unknown, Value, Varying, Wrong

Node = torch.fx.Node
OPEN = (Wrong, Unknown, Suspect)  # marks that a collective leaves as they are


def left_of(mark: Mark | None) -> Mark | None:
    """What a collective over its axis leaves of such a mark: another rank may have the same now."""
    if isinstance(mark, Unknown):
        return mark._replace(own=False, equal=False)
    return mark if isinstance(mark, OPEN) else None


def equal_over(axes: tuple[str, ...], x: Value) -> Value:
    """A value that all ranks of these axes have, whatever it is."""
    known = {a: mark._replace(equal=True) for a in axes if isinstance(mark := x.marks.get(a), Unknown)}
    return replace(x, marks={**x.marks, **known}) if known else x


def axes_on(names: tuple[str, ...], place: places.Place, dim: int) -> tuple[str, ...]:
    """The axes, of those of a collective, that a place has on a dim."""
    return tuple(names[j] for j in place.axes_on(dim))


def starts_of(parts: Iterable[int]) -> frozenset[int]:
    """Where parts of these sizes begin, but for the first."""
    return frozenset(itertools.accumulate(tuple(parts)[:-1]))


def made(scope: Scope, node: Node, x: Value, axes: tuple[str, ...], stated: Any, shape: Any) -> Value:
    """The result of a collective that states what it is over its axes, of whatever operand. Of another shape than the
    operand, nothing is known of it over other axes over which the operand is not replicated."""
    marks = {axis: left_of(x.marks.get(axis)) for axis in axes}
    out = x.marked(marks)
    if tuple(map(size_of, out.dims)) != tuple(shape):
        why = f"{op_name(node)} of a value that is sharded or pending over an axis that is none of its own"
        rest = {a: x.marks[a] if x.is_(a, *OPEN) else scope.unknown(node, why) for a in out.axes() if a not in axes}
        excess = {axis: one for axis, one in out.excess.items() if axis not in rest}
        out = Value(tuple(plain(n) for n in shape), {**{a: m for a, m in marks.items() if m}, **rest}, excess)
    out = replace(out, data=False, index_of=(), ramp=False, equal_terms=False)
    sound = tuple(axis for axis in axes if marks[axis] is None)
    match stated:
        case kinds.Partial(kind):
            return out.marked({axis: Pending(kind, node) for axis in sound})
        case kinds.Own():
            return out.marked(dict.fromkeys(sound, Varying()))
        case kinds.Sharded(place):
            dims = list(replace(out, constant=None).dims)
            for d in set(place.dims) - {places.FLAT}:
                names = tuple(axis for axis in axes_on(axes, place, d) if axis in sound)
                first = joined(dims[d])[:1]
                left = (first[0].axes or ()) if first else ()
                cuts = starts_of(place.parts) if d == place.interleaved else frozenset()
                dims[d] = (Atom(size_of(dims[d]), left + names, cuts),)
            out = replace(out, constant=None).with_dims(dims)
            if place.block:
                why = f"{op_name(node)} states a flattened block, for which the check has no rule"
                out = out.marked({axis: scope.unknown(node, why) for axis in sound})
    return out


def _is_more(mark: Mark) -> bool:
    """Whether a mark says more than what a `declare` is about."""
    return isinstance(mark, (Wrong, Suspect)) or (isinstance(mark, Unknown) and mark.factor)


def declared(scope: Scope, node: Node, x: Value, axes: tuple[str, ...], stated: Any) -> Value:
    """What `declare` leaves: what is stated of a value whose parts differ, and a finding where they cannot."""
    kind = type(stated).__name__.lower()
    out = x
    if kind == "own":
        return _own(node, x, axes)
    for axis in axes:
        if (
            kind != "replicated"
            and x.replicated(axis)
            and x.constant != 0
            and not (kind == "partial" and (x.equal_terms or is_share(x, axis)))
        ):
            wrong = Wrong(node, f"declared {kind}, but it does not depend on the rank",
                       "the axis_index in it belongs to another axis?")  # fmt: skip
            out = out.marked({axis: wrong})
        elif isinstance(mark := x.marks.get(axis), Unknown) and mark.equal and kind == "sharded":
            wrong = Wrong(node, "declared sharded, but it was summed or gathered: all ranks have the same",
                       "leave out the one or the other")  # fmt: skip
            out = out.marked({axis: wrong})
        elif axis not in x.marks and x.shards(axis) and _other_dim(x, axis, stated):
            wrong = Wrong(node, f"declared {kind}{_on_dim(stated)}, but it is {x.state(axis)}",
                       "leave it out, or say what changed: own, or another axis?")  # fmt: skip
            out = out.marked({axis: wrong})
    believed = tuple(a for a in axes if a in x.marks and not _is_more(out.marks.get(a, x.marks[a])))
    if kind == "replicated":
        return out.without(believed)
    if kind == "partial":
        return out.marked({a: Pending("sum", node) for a in believed if not x.pending(a, "sum")})
    if believed:
        dim = stated.place.dims[0]
        out = out.without(believed)
        dims, atoms = list(out.dims), joined(out.dims[dim])
        before = (atoms[0].axes or ()) if atoms else ()
        dims[dim] = canonical((Atom(size_of(atoms), before + believed),))
        out = out.with_dims(dims)
    return out


def terms(scope: Scope, node: Node, xs: Sequence[Value], axes: tuple[str, ...], stated: kinds.Terms) -> list[Value]:
    """What `as_terms` leaves of a term, xs[0], or of its gradient, behind which the term stands: where all ranks have
    the same, equal terms of a sum. Behind it may be the count."""
    total, counts = xs[stated.backward], xs[stated.backward + 1 :]
    marks: dict[str, Mark] = {}
    times: dict[str, Excess] = {}
    for axis in axes:
        if total.constant == 0 or not all(v.replicated(axis) for v in (xs[0], total, *counts)):
            continue
        if axis in total.excess and total.excess[axis].power:
            marks[axis] = too_large(scope, node, axis, total.excess[axis])
        elif counts and counts[0].constant is None and not counts[0].equal_terms:
            continue  # a sum over the ranks that is summed again
        elif is_share(total, axis) and sizes.is_shared_out(scope, node, axis):  # by as much as its count
            marks[axis] = Pending("sum", node)
        elif total.equal_terms or not (
            (stated.rows and not sizes.is_of_all(scope, node, axis)) or (counts and not _is_share(counts[0].constant))
        ):
            marks[axis] = Pending("sum", node)
            if stated.rows and not total.equal_terms and not stated.backward:  # by their number, with the count of all
                times[axis] = Excess(Fraction(1), node, _EQUAL)
        else:
            marks[axis] = scope.unknown(node, _ROWS, _COUNT_ONE)
    out = xs[0].marked(marks)
    out = replace(out, excess={**out.excess, **times}) if times else out
    portion = {axis: one for axis, one in out.portion.items() if axis not in marks or one in OWED}
    portion |= {axis: "number" for axis in marks if axis not in portion}  # a sum of as many equal terms, by their count
    return [replace(out, equal_terms=out.equal_terms and not marks, portion=portion), *xs[1:]]


_EQUAL = "a sum over the ranks of what all of them have"
_ROWS = "what all ranks have is divided by a count that may be of each one's rows, and then is another on every mesh"
_COUNT_ONE = "Divide it by what it is to be divided by, and count 1: step.mean(term, 1)"


def _is_share(count: float | None) -> bool:
    return count is not None and (count <= 1 or count != int(count))


def _other_dim(x: Value, axis: str, stated: Any) -> bool:
    return not isinstance(stated, kinds.Sharded) or stated.place.dims[0] not in x.shards(axis)


def _on_dim(stated: Any) -> str:
    return f" on dim {stated.place.dims[0]}" if isinstance(stated, kinds.Sharded) else ""


def _own(node: Node, x: Value, axes: tuple[str, ...]) -> Value:
    """Each rank's own part from here on: of what has parts."""
    marks: dict[str, Mark | None] = {}
    for axis in axes:
        mark = x.marks.get(axis)
        marks[axis] = mark if isinstance(mark, OPEN) else Varying()
        if mark is None and not x.shards(axis) and x.constant != 0:
            marks[axis] = Wrong(node, "declared each rank's own, but all ranks have the same", "wrong axis?")
        elif isinstance(mark, Pending):
            text = f"declared each rank's own part, but it is {mark.words}"
            marks[axis] = Wrong(node, text, f"reduce it over {axis!r} first", mark.birth)
    return x if x.constant == 0 else replace(x.marked(marks), data=False)

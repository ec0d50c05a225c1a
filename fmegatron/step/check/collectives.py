"""Rules for the collectives, and for `declare`, the one statement that is taken without proof.

Proofs: a collective over an axis that shards another dim, a pending maximum that is summed, a sum of a pending sum of
another kind. A sum of replicas is n times too large until it is divided by n (`excess.py`). Open: a sum of what depends
on the rank's index without a `declare`. Parts that are brought together although they are terms of a sum (all_gather
of a pending sum, psum of shards) mean something once they are reduced along the dim (`atoms.Fold`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

import torch

from fmegatron.layout import Mesh
from fmegatron.step.check.context import Rule, Rules, Scope, op_name, suspected
from fmegatron.step.check.dims import UNIFORM, Atom, Dim, Fold, canonical, cut, folds_of, over, plain, size_of, stripped
from fmegatron.step.check.marks import raised
from fmegatron.step.check.values import (
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
)

Node = torch.fx.Node
_OPEN = (Wrong, Unknown, Suspect)  # marks that a collective leaves as they are


def _left(mark: Mark | None) -> Mark | None:
    """What a collective over its axis leaves of such a mark: another rank may have the same now."""
    if isinstance(mark, Unknown) and mark.own:
        return mark._replace(own=False)
    return mark if isinstance(mark, _OPEN) else None


_DECLARE = 'declare(x, axis, forward="partial") says that its terms make up a sum; declare it where it is made'


def over_axes(rule: Callable) -> Rule:
    """A rule(scope, node, name, x, axes, other arguments) for the axes of size > 1; without any, a collective is the
    identity."""

    def collective(scope: Scope, node: Node, given: dict) -> Value:
        axes = tuple(a for a in given["axes"] if scope.mesh[a] > 1)
        return rule(scope, node, op_name(node), given["x"], axes, given) if axes else given["x"]

    return collective


def axis_index(scope: Scope, node: Node, given: dict) -> Value:
    """This rank's position: it differs between the ranks of these axes, in a way that indexing knows."""
    axes = tuple(a for a in given["axes"] if scope.mesh[a] > 1)
    return Value((), dict.fromkeys(axes, Varying()), index_of=axes)


def reduced(scope: Scope, node: Node, name: str, x: Value, axes: tuple[str, ...], given: dict) -> Value:
    """What a reduction over these axes leaves. A reduce_scatter takes its part, too."""
    wanted = "max" if name == "pmax" else "sum"
    marks: dict[str, Mark | None] = {}
    replicas, folds = [], []
    for axis in axes:
        mark = x.marks.get(axis)
        marks[axis] = _left(mark)
        if isinstance(mark, (*_OPEN, First)) or x.pending(axis, wanted) or x.constant == 0:
            continue
        if isinstance(mark, Somewhere) and mark.or_sum and wanted == "sum":
            continue
        if mark is None and not x.shards(axis):
            if wanted == "sum" and x.equal_terms and x.constant is None:
                why = f"{name} of what is a term of every rank, or complete already: it was added up as often as copied"
                marks[axis] = scope.unknown(node, why)
            elif wanted == "sum" and not (x.equal_terms or x.portion.get(axis) == "exact"):
                replicas.append(axis)
        elif mark is None and name in ("psum", "pmax", "psum_many"):
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
        out = replace(out, constant=x.constant * scope.mesh.extent(axes))
    out = replace(out, equal_terms=False, portion={a: p for a, p in out.portion.items() if a not in axes})
    for axis in replicas:
        what = f"{name} of a value that is already replicated: {scope.mesh[axis]} times too large"
        maybe = x.portion.get(axis) == "maybe"
        out = raised(out, [axis], 1, node, what, sure=not maybe, loose=maybe)
    if name == "reduce_scatter":
        out = _scattered(out, given["dim"], axes, scope.mesh.extent(axes), node)
    return filled([size_of(dim) for dim in out.dims], 0) if x.constant == 0 else out


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


def _scattered(x: Value, dim: int, axes: tuple[str, ...], n: int, node: Node) -> Value:
    """What is left when each rank keeps its part of a dim."""
    dims, atoms = list(x.dims), x.dims[dim]
    folds = folds_of(atoms)
    for fold in folds:
        what = f"takes parts of what {op_name(fold.node)} brought together"
        x = x.marked({fold.axis: suspected(node, what, "reduce it along the dim first")})
    whole = tuple(Atom(atom.size, ()) if atom.axes is UNIFORM else atom for atom in atoms)
    dims = list(x.dims)
    dims[dim] = plain(size_of(atoms) // n) if folds else cut(canonical(whole), axes, n)
    return x.with_dims(dims)


def _gathered(scope, node, name, x: Value, axes, given) -> Value:
    dim, n = given["dim"], scope.mesh.extent(axes)
    atoms = x.dims[dim]
    first = atoms[0] if atoms else Atom(1, ())
    marks: dict[str, Mark | None] = {}
    terms = []
    for axis in axes:
        mark, held = x.marks.get(axis), axis in over(atoms)
        marks[axis] = _left(mark)
        if isinstance(mark, _OPEN) or held or (mark is None and constant_along(atoms)):
            continue
        if isinstance(mark, Varying) or (isinstance(mark, Somewhere) and mark.or_sum):
            fix = 'declare(x, axis, forward=("sharded", dim)) says that its parts are shards'
            marks[axis] = scope.unknown(node, "all_gather of a value that depends on the rank's index", fix)
        elif isinstance(mark, Pending) and mark.kind in ("sum", "max", "min"):
            terms.append(Fold(mark.kind, axis, node))
        elif mark is None and not x.shards(axis):
            terms.append(Fold("copies", axis, node))
        elif isinstance(mark, Pending):
            marks[axis] = scope.unknown(node, f"all_gather of a pending {mark.kind}")
        elif mark is None:
            marks[axis] = Wrong(node, f"all_gather of dim {dim} of a value that is {x.state(axis)}",
                       "remove it, or gather the axis that shards the dim")  # fmt: skip
    own = first.axes or ()
    left = tuple(a for a in own if a not in axes)
    if set(axes) <= set(own) and own[len(own) - len(axes) :] != axes and first.plain:
        wrong = Wrong(node, f"all_gather over {'+'.join(axes)} of a dim that is sharded over {'+'.join(own)}",
                   "gather the minor axes first, or all in their order")  # fmt: skip
        marks |= dict.fromkeys(axes, wrong)
    if not terms and constant_along(atoms):  # the same everywhere: of the parts of a dim, too
        after = (Atom(size_of(atoms) * n, UNIFORM),)
    elif terms:
        after = (*_beside(scope.mesh, axes, {fold.axis: fold for fold in terms}), *stripped(atoms, axes))
    elif first.inner and not left:
        after = first.inner
    elif first.inner and own == left + axes:
        after = (Atom(first.size * n, left, frozenset(), first.inner),)
    elif first.plain and not first.cuts and set(axes) <= set(own):
        after = (*_filled_in(own, axes, scope.mesh, first.size), *atoms[1:])
    else:  # rank by rank
        after = (Atom(n, ()), *stripped(atoms, axes))
    out = replace(x.marked(marks), constant=None)
    dims = list(out.dims)
    dims[dim] = tuple(after)
    return out.with_dims(dims)


def constant_along(atoms: Dim) -> bool:
    """Whether a value is the same all along a dim: as well of all of the dim as of each rank's part."""
    return bool(atoms) and all(atom.axes is UNIFORM for atom in atoms)


def _beside(mesh: Mesh, axes: tuple[str, ...], folds: dict[str, Fold]) -> Dim:
    """The ranks' parts side by side: a factor for each axis, major first."""
    return tuple(Atom(mesh[axis], (), fold=folds.get(axis)) for axis in axes)


def _filled_in(own: tuple[str, ...], gathered: tuple[str, ...], mesh: Mesh, size: int) -> tuple[Atom, ...]:
    """Atoms of a dim of `size` sharded by `own` when some of these axes are gathered: each takes its place in order."""
    out, before = [], ()
    for axis in own:
        if axis in gathered:
            out.append(Atom(mesh[axis], before))
            before = ()
        else:
            before += (axis,)
    return (*out, Atom(size, before))


def exchanged(scope: Scope, node: Node, name: str, x: Value, axes: tuple[str, ...], given: dict) -> Value:
    """all_to_all over `axes`: one dim is gathered, another cut. Of a pending sum the parts of all ranks lie beside each
    other then, to be summed."""
    split_dim, concat_dim, n = given["split_dim"], given["concat_dim"], scope.mesh.extent(axes)
    marks: dict[str, Mark | None] = {}
    terms: dict[str, Fold] = {}
    for axis in axes:
        mark, held = x.marks.get(axis), any(axis in (atom.axes or ()) for atom in x.dims[concat_dim][:1])
        marks[axis] = _left(mark)
        constant = mark is None and constant_along(x.dims[concat_dim])
        if isinstance(mark, (*_OPEN, Varying, Somewhere)) or held or constant:
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
        dims[concat_dim] = (*_beside(scope.mesh, axes, terms), *x.dims[concat_dim])
    else:
        dims[concat_dim] = canonical(_whole_again(x.dims[concat_dim], axes, n))
    out = _scattered(whole.with_dims(dims), split_dim, axes, n, node)
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


def _permuted(scope, node, name, x: Value, axes, given) -> Value:
    # What is sharded lies elsewhere now: `declare` says what the sum of a ring means. Terms of a sum stay terms.
    moved = [a for a in axes if x.shards(a) or x.is_(a, Somewhere)]
    open_ = {a: _left(x.marks[a]) for a in axes if x.is_(a, Unknown)}
    out = x.marked(open_).marked(dict.fromkeys(moved, Varying()))
    return replace(out, data=False, index_of=(), ramp=False) if moved else out


def _is_more(mark: Mark) -> bool:
    """Whether a mark says more than what a `declare` is about."""
    return isinstance(mark, (Wrong, Suspect)) or (isinstance(mark, Unknown) and mark.factor)


def _declared(scope, node, name, x: Value, axes, given) -> Value:
    kind, dim = given["kind"], given["dim"]
    out = x
    for axis in axes:
        if (
            kind != "replicated"
            and x.replicated(axis)
            and x.constant != 0
            and not (kind == "partial" and (x.equal_terms or x.portion.get(axis) == "exact"))
        ):
            wrong = Wrong(node, f"declared {kind}, but it does not depend on the rank",
                       "the axis_index in it belongs to another axis?")  # fmt: skip
            out = out.marked({axis: wrong})
    believed = tuple(a for a in axes if a in x.marks and not _is_more(x.marks[a]))
    if kind == "replicated":
        return x.without(believed)
    if kind == "partial":
        return out.marked({a: Pending("sum", node) for a in believed if not x.pending(a, "sum")})
    if kind == "sharded" and believed:
        out = out.without(believed)
        dims, atoms = list(out.dims), out.dims[dim]
        before = (atoms[0].axes or ()) if atoms else ()
        dims[dim] = canonical((Atom(size_of(atoms), before + believed),))
        out = out.with_dims(dims)
    return out


RULES: Rules = MappingProxyType(
    dict.fromkeys(("psum", "pmax", "reduce_scatter"), over_axes(reduced))
    | {
        "all_gather": over_axes(_gathered),
        "all_to_all": over_axes(exchanged),
        "ppermute": over_axes(_permuted),
        "declare": over_axes(_declared),
        "axis_index": axis_index,
    }
)

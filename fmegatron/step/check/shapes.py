"""Rules of shapes on values: views, permutes, slices, concatenations, which the rules of ops are made of (`moves.py`).

A piece of every shard (a slice or an index of a sharded dim) is a suspect where it is all that is used, and open where
all pieces together are; of the batch, whose rows may be dealt in any order, pieces that together are all are rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fmegatron.step.check.arithmetic import elementwise, placed
from fmegatron.step.check.atoms import UNIFORM, Atom, Dim, canonical, interleaved, over, plain, size_of, viewed
from fmegatron.step.check.scope import Scope, suspected
from fmegatron.step.check.values import Somewhere, Value, Wrong

Node = torch.fx.Node


def reshaped(scope: Scope, node: Node, x: Value, shape: Sequence[int]) -> Value:
    """A view to another shape. Where sharded factors do not line up, it is sharded on a dim that is not known."""
    found = viewed(x.dims, shape)
    x = _elsewhere(x, None)
    if found is not None:
        return _lost(x.with_dims(found.dims), found.lost)
    axes = [axis for axis in scope.mesh.names if x.shards(axis)]
    return _lost(x.with_dims(plain(n) for n in shape), {(axis,): None for axis in axes})


def _lost(x: Value, lost: dict) -> Value:
    return (
        replace(x, marks={**x.marks, **{a: Somewhere(d, axes) for axes, d in lost.items() for a in axes}})
        if lost
        else x
    )


def _elsewhere(x: Value, places: Sequence[int] | None) -> Value:
    """A value of which dim d goes to places[d]; None: nobody knows where. Of axes whose dim is not known anyhow."""
    marks = {
        axis: mark._replace(dims=None if places is None else tuple(sorted(places[d] for d in mark.dims)))
        for axis, mark in x.marks.items()
        if isinstance(mark, Somewhere) and mark.dims is not None
    }
    return replace(x, marks={**x.marks, **marks}) if marks else x


def permuted(x: Value, order: Sequence[int]) -> Value:
    """Dims in another order."""
    places = [0] * len(order)
    for new, old in enumerate(order):
        places[old] = new
    return _elsewhere(x, places).with_dims(x.dims[d] for d in order)


def transposed(x: Value, a: int = 0, b: int = 1) -> Value:
    """Two dims exchanged."""
    order = list(range(len(x.dims)))
    if order:
        order[a], order[b] = order[b], order[a]
    return permuted(x, order)


def unsqueezed(x: Value, dim: int) -> Value:
    """A new dim of size 1."""
    dim %= len(x.dims) + 1
    places = [d + (d >= dim) for d in range(len(x.dims))]
    return replace(_elsewhere(x, places).with_dims((*x.dims[:dim], (), *x.dims[dim:])), ramp=x.ramp)


def squeezed(x: Value, dims: Sequence[int]) -> Value:
    """Dims of size 1 removed; one that a single shard makes up hands its axes to the dim that follows."""
    gone, out, carried = {d % max(1, len(x.dims)) for d in dims}, [], ()
    gone = {d for d in gone if d < len(x.dims) and size_of(x.dims[d]) == 1}
    known = not any(isinstance(m, Somewhere) and m.dims is not None and gone & set(m.dims) for m in x.marks.values())
    places = [d - sum(g < d for g in gone) for d in range(len(x.dims))]
    for d, dim in enumerate(x.dims):
        if d in gone:
            carried += dim
        else:
            out.append(canonical(_merged(carried, dim)))
            carried = ()
    if carried and out:
        out[-1] = canonical(out[-1] + carried)
    return replace(_elsewhere(x, places if known else None).with_dims(out), ramp=x.ramp)


def _merged(carried: Dim, dim: Dim) -> Dim:
    """A carried shard in front of a dim: of a whole dim it takes the major part, a sharded one is cut once more."""
    if not carried:
        return dim
    axes = tuple(a for atom in carried for a in atom.axes or ())
    if len(dim) == 1 and not dim[0].inner and not dim[0].fold and dim[0].axes is not UNIFORM:
        return (Atom(dim[0].size, axes + (dim[0].axes or ()), dim[0].cuts),)
    return (Atom(1, axes), *dim)


def expanded(x: Value, shape: Sequence[int]) -> Value:
    """Dims of size 1 repeated, and new ones in front: constant along them."""
    new = len(shape) - len(x.dims)
    dims = []
    for d, n in enumerate(shape):
        dim = x.dims[d - new] if d >= new else ()
        dims.append(dim if n == size_of(dim) else (*dim, Atom(n, UNIFORM)))
    return _elsewhere(x, [d + new for d in range(len(x.dims))]).with_dims(dims)


def sliced(
    scope: Scope, node: Node, x: Value, dim: int, start: int, stop: int, step: int = 1, covered: bool = False
) -> Value:
    """x[start:stop:step] of one dim. A sharded dim may be cut where its interleaved parts meet.

    covered: whether this and other slices take all of the dim together.
    """
    atoms = interleaved(x.dims[dim])
    size = size_of(atoms)
    if (start, stop, step) == (0, size, 1):
        return x
    count = max(0, -(-(stop - start) // step))
    x = replace(x, ramp=False)
    first = atoms[0] if atoms else Atom(1, ())
    folds = {atom.fold.axis: atom.fold for atom in atoms if atom.fold}
    if folds and atoms[0].fold and atoms[0].fold.kind == "copies" and step == 1:
        copy = size // atoms[0].size
        if count == copy and start % copy == 0:  # one of them
            return _with_dim(x, dim, atoms[1:])
    what = "takes a part of what a collective brought together"
    for axis, fold in folds.items():
        copies = fold.kind == "copies"
        x = x.marked({axis: suspected(node, what, "take one copy") if copies else scope.unknown(node, what)})
    if not any(atom.sharded for atom in atoms):
        uniform = all(a.axes is UNIFORM for a in atoms) and atoms
        counted = start == 0 and step == 1 and all(a.counted for a in atoms) and atoms
        return _with_dim(x, dim, canonical((Atom(count, UNIFORM if uniform else (), counted=bool(counted)),)))
    if first.runs and len(atoms) == 1 and step == 1:
        within, at = [], 0
        for run in first.runs:
            if start <= at and at + size_of(run) <= stop:
                within.append(run)
            at += size_of(run)
        if sum(map(size_of, within)) == count:
            return _with_dim(x, dim, within[0] if len(within) == 1 else (Atom(count, runs=tuple(within)),))
    if x.data and covered:
        return _with_dim(x, dim, (Atom(count, first.axes),))
    edges = {0, size} | first.cuts
    if step == 1 and len(atoms) == 1 and {start, stop} <= edges:
        inner_cuts = frozenset(c - start for c in first.cuts if start < c < stop)
        return _with_dim(x, dim, (Atom(count, first.axes, inner_cuts, first.inner),))
    what = f"takes [{start}:{stop}] of dim {dim}, which is sharded: a piece of every shard"
    return _with_dim(_piece(scope, node, x, atoms, what, dim, covered), dim, plain(count))


def _piece(scope: Scope, node: Node, x: Value, atoms: Dim, what: str, dim: int, covered: bool) -> Value:
    marks = {}
    for axis in sorted(over(atoms)):
        fix = f"all_gather the dim over {axis!r} first, or shard it in parts that meet there"
        marks[axis] = scope.unknown(node, what) if covered else suspected(node, what, fix)
    return x.marked(marks)


def _with_dim(x: Value, dim: int, atoms: Dim) -> Value:
    dims = list(x.dims)
    dims[dim] = atoms
    return x.with_dims(dims)


def pieces(scope: Scope, node: Node, x: Value, dim: int, sizes: Sequence[int], covered: bool) -> list[Value]:
    """A split of one dim."""
    out, at = [], 0
    for n in sizes:
        out.append(sliced(scope, node, x, dim, at, at + n, 1, covered))
        at += n
    return out


def selected(scope: Scope, node: Node, x: Value, dim: int, covered: bool = False) -> Value:
    """One index of a dim (the dim goes). covered: whether all of them are taken, here or elsewhere."""
    atoms, x = x.dims[dim], replace(x, ramp=False)
    for axis in x.having(Somewhere):  # of the dims that may be sharded, not the one that is indexed
        mark = x.marks.get(axis)
        left = tuple(d for d in mark.dims or () if d != dim) if mark is not None else ()
        if mark is not None and len(left) == 1 and mark.group:
            x = placed(x, mark.group, left[0])
        elif mark is not None and mark.dims is not None:
            x = replace(x, marks={**x.marks, axis: mark._replace(dims=left or None)})
    rest = [d for i, d in enumerate(x.dims) if i != dim]
    x = _elsewhere(x, [d - (d > dim) for d in range(len(x.dims))])
    marks = {}
    for atom in atoms:
        if atom.fold and atom.fold.kind != "copies":
            marks[atom.fold.axis] = scope.unknown(node, "takes one of what a collective brought together")
    what = f"takes one index of dim {dim}, which is sharded"
    for axis in sorted(over(atoms)):
        fix = f"all_gather the dim over {axis!r} first, or use axis_index and declare"
        marks[axis] = scope.unknown(node, what) if covered else suspected(node, what, fix)
    return x.marked(marks).with_dims(rest) if marks else x.with_dims(rest)


def padded(x: Value, shape: Sequence[int], dim: int, start: int, stop: int) -> Value:
    """The gradient of a slice: zeros around it along one dim (a new dim when x has one less)."""
    dims = list(x.dims)
    if len(shape) > len(dims):
        dims.insert(dim, ())
        x = _elsewhere(x, [d + (d >= dim) for d in range(len(x.dims))])
    atoms = interleaved(dims[dim])
    first = atoms[0] if atoms else Atom(1, ())
    if first.axes:
        cuts = ({start, stop} | {c + start for c in first.cuts}) - {0, shape[dim]}
        dims[dim] = (Atom(shape[dim], first.axes, frozenset(cuts)),)
    else:
        dims[dim] = plain(shape[dim])
    return replace(x.with_dims(dims), constant=x.constant if x.constant == 0 else None)


def concatenated(scope: Scope, node: Node, xs: Sequence[Value], dim: int, sizes: Sequence[int]) -> Value:
    """Values one after another along a dim; sharded pieces make an interleaved dim. A finding where one piece is
    sharded along the dim and another is not."""
    vague = frozenset().union(*(x.having(Somewhere) for x in xs))
    if vague:  # pieces that are sharded along the dim itself fit those of which it is not known
        along = [over(x.dims[dim]) & vague for x in xs]
        xs = [x.marked(dict.fromkeys(axes, Somewhere())) for x, axes in zip(xs, along, strict=True)]
    bare = [x.with_dims(() if d == dim else a for d, a in enumerate(x.dims)) for x in xs]
    heads = [x.dims[dim][0] if x.dims[dim] else Atom(1, ()) for x in xs]
    out = elementwise(scope, node, "beside", bare)
    labels = {(h.axes or ()) for h in heads}
    dims = list(out.dims)
    runs = tuple(x.dims[dim] for x in xs)
    mixed = any(len(run) > 1 and any(a.sharded for a in run) for run in runs)
    mixed |= len(labels) > 1 and all(h.axes is UNIFORM for h in heads if not h.axes)  # shards, zeros behind each
    if mixed or not all(h.plain for h in heads) or (len(xs[0].dims) == 1 and len(labels) > 1):
        dims[dim] = (Atom(sum(sizes), runs=runs),)
    elif len(labels) > 1:
        hurt = set().union(*map(set, labels)) - set.intersection(*map(set, labels)) - set(out.marks)
        what = "joins pieces of which one is sharded and another is not"
        out = out.marked(dict.fromkeys(hurt, Wrong(node, what, "gather the one, or shard the other")))
        dims = list(out.dims)
        dims[dim] = plain(sum(sizes))
    elif heads[0].axes:
        cuts, at = set(), 0
        for head, n in zip(heads, sizes, strict=True):
            cuts |= {at} | {at + c for c in head.cuts}
            at += n
        dims[dim] = (Atom(at, heads[0].axes, frozenset(cuts - {0})),)
    else:
        dims[dim] = plain(sum(sizes)) if len(xs) > 1 else runs[0]
    constants = {x.constant for x in xs}
    return replace(out.with_dims(dims), constant=0 if constants == {0} else None)


def stacked(scope: Scope, node: Node, xs: Sequence[Value], dim: int) -> Value:
    """Values along a new dim."""
    out = elementwise(scope, node, "beside", list(xs))
    out = unsqueezed(out, dim)
    out = _with_dim(out, dim % len(out.dims), plain(len(xs)))
    return replace(out, constant=0 if {x.constant for x in xs} == {0} else None)


def windows(x: Value, dim: int, count: int) -> Value:
    """An op that keeps the dims but for the size of one, whatever it does there (repeat, pad)."""
    return _with_dim(replace(x, ramp=False), dim, plain(count))

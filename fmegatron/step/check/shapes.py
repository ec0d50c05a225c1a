"""What views, permutes, slices and concatenations make of values. The rules of ops are made of these (`moves.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fmegatron.step.check.arithmetic import elementwise
from fmegatron.step.check.scope import Scope
from fmegatron.step.check.values import UNIFORM, Atom, Dim, Value, canonical, over, plain, size_of, viewed


def reshaped(scope: Scope, node: torch.fx.Node, x: Value, shape: Sequence[int]) -> Value:
    """A view to another shape. Where sharded factors do not line up, the result varies."""
    found = viewed(x.dims, shape)
    if found is not None:
        return replace(x.with_dims(found[0]), somewhere=x.somewhere | found[1])
    lost = frozenset(axis for axis in scope.mesh.names if x.shards(axis))
    return replace(x.with_dims(plain(n) for n in shape), somewhere=x.somewhere | lost)


def permuted(x: Value, order: Sequence[int]) -> Value:
    """Dims in another order."""
    return x.with_dims(x.dims[d] for d in order)


def transposed(x: Value, a: int = 0, b: int = 1) -> Value:
    """Two dims exchanged."""
    order = list(range(len(x.dims)))
    if order:
        order[a], order[b] = order[b], order[a]
    return permuted(x, order)


def unsqueezed(x: Value, dim: int) -> Value:
    """A new dim of size 1."""
    dim %= len(x.dims) + 1
    return x.with_dims((*x.dims[:dim], (), *x.dims[dim:]))


def squeezed(x: Value, dims: Sequence[int]) -> Value:
    """Dims of size 1 removed; one that a single shard makes up hands its axes to the dim that follows."""
    gone, out, carried = {d % max(1, len(x.dims)) for d in dims}, [], ()
    for d, dim in enumerate(x.dims):
        if d in gone and size_of(dim) == 1:
            carried += dim
        else:
            out.append(canonical(_merged(carried, dim)))
            carried = ()
    if carried and out:
        out[-1] = canonical(out[-1] + carried)
    return x.with_dims(out)


def _merged(carried: Dim, dim: Dim) -> Dim:
    """A carried shard in front of a dim: of a whole dim it takes the major part, a sharded one is cut once more."""
    if not carried:
        return dim
    axes = tuple(a for atom in carried for a in atom.axes or ())
    if len(dim) == 1 and not dim[0].inner and dim[0].axes is not UNIFORM:
        return (Atom(dim[0].size, axes + (dim[0].axes or ()), dim[0].cuts),)
    return (Atom(1, axes), *dim)


def expanded(x: Value, shape: Sequence[int]) -> Value:
    """Dims of size 1 repeated, and new ones in front: constant along them."""
    new = len(shape) - len(x.dims)
    dims = []
    for d, n in enumerate(shape):
        dim = x.dims[d - new] if d >= new else ()
        dims.append(dim if n == size_of(dim) else (*dim, Atom(n, UNIFORM)))
    return x.with_dims(dims)


def sliced(scope: Scope, node: torch.fx.Node, x: Value, dim: int, start: int, stop: int, step: int = 1) -> Value:
    """x[start:stop:step] of one dim. A sharded dim may be cut only where its interleaved parts meet."""
    size = size_of(x.dims[dim])
    if (start, stop, step) == (0, size, 1):
        return x
    count = max(0, -(-(stop - start) // step))
    first = x.dims[dim][0] if x.dims[dim] else Atom(1, ())
    dims = list(x.dims)
    if not any(atom.sharded for atom in x.dims[dim]):
        dims[dim] = plain(count, UNIFORM if all(a.axes is UNIFORM for a in x.dims[dim]) and x.dims[dim] else ())
        return x.with_dims(dims)
    if first.runs and len(x.dims[dim]) == 1 and step == 1:
        within, at = [], 0
        for run in first.runs:
            if start <= at and at + size_of(run) <= stop:
                within.append(run)
            at += size_of(run)
        if sum(map(size_of, within)) == count:
            dims[dim] = within[0] if len(within) == 1 else (Atom(count, runs=tuple(within)),)
            return x.with_dims(dims)
    if x.data:
        dims[dim] = (Atom(count, first.axes),)
        return x.with_dims(dims)
    edges = {0, size} | first.cuts
    if step == 1 and len(x.dims[dim]) == 1 and {start, stop} <= edges:
        inner_cuts = frozenset(c - start for c in first.cuts if start < c < stop)
        dims[dim] = (Atom(count, first.axes, inner_cuts, first.inner),)
        return x.with_dims(dims)
    hurt = over(x.dims[dim]) - x.tainted - x.varying
    for axis in sorted(hurt):
        scope.find(node, axis, f"takes [{start}:{stop}] of dim {dim}, which is sharded: a piece of every shard",
                   f"all_gather the dim over {axis!r} first, or shard it in parts that meet there")  # fmt: skip
    out = x.without(hurt, tainted=hurt)
    dims = list(out.dims)
    dims[dim] = plain(count)
    return out.with_dims(dims)


def pieces(scope: Scope, node: torch.fx.Node, x: Value, dim: int, sizes: Sequence[int]) -> list[Value]:
    """A split of one dim."""
    out, at = [], 0
    for n in sizes:
        out.append(sliced(scope, node, x, dim, at, at + n))
        at += n
    return out


def selected(scope: Scope, node: torch.fx.Node, x: Value, dim: int, count: int | None = None) -> Value | list[Value]:
    """One index of a dim (the dim goes), or with `count` all of them, as unbind does."""
    hurt = over(x.dims[dim]) - x.tainted - x.varying
    for axis in sorted(hurt):
        scope.find(node, axis, f"takes one index of dim {dim}, which is sharded",
                   f"all_gather the dim over {axis!r} first, or use axis_index and declare")  # fmt: skip
    whole = x.without(hurt, tainted=hurt)
    one = whole.with_dims(d for i, d in enumerate(whole.dims) if i != dim)
    return one if count is None else [one] * count


def padded(x: Value, shape: Sequence[int], dim: int, start: int, stop: int) -> Value:
    """The gradient of a slice: zeros around it along one dim (a new dim when x has one less)."""
    dims = list(x.dims)
    if len(shape) > len(dims):
        dims.insert(dim, ())
    first = dims[dim][0] if dims[dim] else Atom(1, ())
    if first.axes:
        cuts = ({start, stop} | {c + start for c in first.cuts}) - {0, shape[dim]}
        dims[dim] = (Atom(shape[dim], first.axes, frozenset(cuts)),)
    else:
        dims[dim] = plain(shape[dim])
    return replace(x.with_dims(dims), constant=x.constant if x.constant == 0 else None)


def concatenated(scope: Scope, node: torch.fx.Node, xs: Sequence[Value], dim: int, sizes: Sequence[int]) -> Value:
    """Values one after another along a dim; sharded pieces make an interleaved dim."""
    vague = frozenset().union(*(x.somewhere for x in xs))
    if vague:  # pieces that are sharded along the dim itself fit those of which it is not known
        along = [over(x.dims[dim]) & vague for x in xs]
        xs = [replace(x.without(axes), somewhere=x.somewhere | axes) for x, axes in zip(xs, along, strict=True)]
    bare = [x.with_dims(() if d == dim else a for d, a in enumerate(x.dims)) for x in xs]
    heads = [x.dims[dim][0] if x.dims[dim] else Atom(1, ()) for x in xs]
    out = elementwise(scope, node, "beside", bare)
    labels = {(h.axes or ()) for h in heads}
    dims = list(out.dims)
    mixed = any(len(x.dims[dim]) > 1 and any(a.sharded for a in x.dims[dim]) for x in xs)
    if mixed or not all(h.plain for h in heads) or (len(xs[0].dims) == 1 and len(labels) > 1):
        dims[dim] = (Atom(sum(sizes), runs=tuple(x.dims[dim] for x in xs)),)
    elif len(labels) > 1:
        hurt = set().union(*map(set, labels)) - set.intersection(*map(set, labels)) - out.tainted - out.varying
        for axis in sorted(hurt):
            scope.find(node, axis, "joins pieces of which one is sharded and another is not",
                       "gather the one, or shard the other")  # fmt: skip
        out = out.without(hurt, tainted=hurt)
        dims = list(out.dims)
        dims[dim] = plain(sum(sizes))
    elif heads[0].axes:
        cuts, at = set(), 0
        for head, n in zip(heads, sizes, strict=True):
            cuts |= {at} | {at + c for c in head.cuts}
            at += n
        dims[dim] = (Atom(at, heads[0].axes, frozenset(cuts - {0})),)
    else:
        dims[dim] = (Atom(sum(sizes), runs=tuple(x.dims[dim] for x in xs)),) if len(xs) > 1 else xs[0].dims[dim]
    constants = {x.constant for x in xs}
    return replace(out.with_dims(dims), constant=0 if constants == {0} else None)


def stacked(scope: Scope, node: torch.fx.Node, xs: Sequence[Value], dim: int) -> Value:
    """Values along a new dim."""
    out = elementwise(scope, node, "beside", list(xs))
    dims = list(out.dims)
    dims.insert(dim % (len(dims) + 1), plain(len(xs)))
    return replace(out.with_dims(dims), constant=0 if {x.constant for x in xs} == {0} else None)


def windows(x: Value, dim: int, count: int) -> Value:
    """An op that keeps the dims but for the size of one, whatever it does there (repeat, pad)."""
    dims = list(x.dims)
    dims[dim] = plain(count)
    return x.with_dims(dims)

"""Rules for lookups and their transposes. Indices that depend on the rank make a result vary until it is declared.

Proofs: a part of a pending sum that is taken by the rank's index. Proofs unless something corrects them: a sharded dim
that is indexed by what every rank has (each takes another row). Open: a rank's own rows by indices of its own, and rows
that are put where positions of its own part state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from fmegatron.step.checker.ahead import own_of_ranks
from fmegatron.step.checker.arithmetic import elementwise
from fmegatron.step.checker.context import Rules, Scope, op_name, shape_of, suspected
from fmegatron.step.checker.dims import Atom, Dim, canonical, joined, met, over, plain, size_of
from fmegatron.step.checker.marks import strongest
from fmegatron.step.checker.reductions import along, reduction
from fmegatron.step.checker.values import (
    First,
    Mark,
    Pending,
    Somewhere,
    Unknown,
    Value,
    Varying,
    Wrong,
    number,
    portions,
)

Node = torch.fx.Node
_OWN_ROWS = "indexes a rank's own part of a sharded dim by indices of its own"


def looked_up(
    scope: Scope,
    node: Node,
    x: Value,
    dims: Sequence[int],
    index: Value,
    after: Callable[[tuple[Dim, ...]], tuple[Dim, ...]],
) -> Value:
    """x indexed along `dims` by `index` (several indices as one); after(dims of x) -> dims of the result."""
    if len(dims) == 1 and index.index_of and len(joined(x.dims[dims[0]])) == 1:
        if size_of(x.dims[dims[0]]) == scope.mesh.extent(index.index_of):
            return _own_part(scope, node, x, dims[0], index)
    sharding = over(atom for d in dims for atom in x.dims[d])
    for axis in sorted(frozenset().union(*(x.may_shard(d) for d in dims))):
        x = x.marked({axis: scope.vague(node, "indexes a dim that may be sharded: shapes do not tell")})
    marks: dict[str, Mark | None] = {}
    for axis in sorted(sharding | set(x.marks) | set(index.marks)):
        marks[axis] = _looked_up(scope, node, x, index, axis, axis in sharding)
    base = x.without(sharding)
    out = replace(base.with_dims(after(base.dims)), data=False, equal_terms=False)
    out = replace(out, constant=x.constant)
    marks = {axis: mark for axis, mark in marks.items() if mark is not None or axis in x.marks}
    return out.marked(marks)


def _looked_up(scope: Scope, node: Node, x: Value, index: Value, axis: str, crosses: bool) -> Mark | None:
    mark = strongest(scope, node, (x, index), axis)
    if mark is not None:
        return mark
    if index.is_(axis, Varying, First):
        if not x.pending(axis):
            return Varying()
        return Wrong(node, "takes this rank's part of a pending sum", "reduce_scatter", x.birth(axis))
    if index.pending(axis):
        return suspected(node, "indexes by a pending reduction", "reduce it first", index.birth(axis))
    own = bool(index.shards(axis)) or index.is_(axis, Somewhere)
    if crosses and (own or any(atom.counted for dim in index.dims for atom in dim)):
        return scope.unknown(node, _OWN_ROWS)
    if crosses:
        return suspected(node, f"indexes dim {x.shards(axis)[0]}, which is sharded, with indices that do not depend on "
                         "the rank", "subtract axis_index * local size, mask, and declare what it means")  # fmt: skip
    if isinstance(pending := x.marks.get(axis), Pending) and own:
        return suspected(node, f"indexes a pending {pending.kind} by indices that are {index.state(axis)}",
                         "reduce it first", x.birth(axis))  # fmt: skip
    found = x.marks.get(axis) or index.marks.get(axis)
    return Somewhere() if isinstance(found, Somewhere) else found


def _own_part(scope: Scope, node: Node, x: Value, dim: int, index: Value) -> Value:
    """x[axis_index] along a dim with one entry for each rank: this rank's part, as `shard` takes it."""
    axes = index.index_of
    marks: dict[str, Mark | None] = {}
    for axis in axes:
        mark = x.marks.get(axis)
        if isinstance(mark, Pending):
            marks[axis] = Wrong(node, "takes this rank's part of a pending sum", "reduce_scatter", mark.birth)
        elif x.shards(axis):
            marks[axis] = Wrong(
                node, f"takes this rank's part of a value that is {x.state(axis)} already", "leave it out"
            )
        else:
            marks[axis] = mark._replace(equal=False) if isinstance(mark, Unknown) else mark
    fold = [atom.fold for atom in x.dims[dim] if atom.fold]
    marks |= {f.axis: scope.unknown(node, "takes one of what a collective brought together") for f in fold}
    out = x.marked(marks)
    dims = list(out.dims)
    before = (joined(out.dims[dim])[0].axes or ()) if out.dims[dim] else ()
    dims[dim] = (Atom(1, before + tuple(a for a in axes if marks[a] is None)),)
    out = replace(out, dims=tuple(dims))
    own_of_ranks(scope, node, out, dim)
    return out


def accumulated(scope: Scope, node: Node, g: Value, index: Value, rows: Sequence[Dim], dims: Sequence[Dim]) -> Value:
    """Values added up at indices into zeros: pending where the rows that are added are sharded.

    rows: dims that are summed away, as values and indices have them together.  dims: of the result.
    """
    summed = over(atom for dim in rows for atom in dim)
    out = Value(tuple(canonical(dim) for dim in dims), excess=g.excess, portion=portions("same", (g,)))
    marks: dict[str, Mark | None] = {}
    for axis in sorted(summed | set(index.marks) | set(g.marks)):
        marks[axis] = _accumulated(scope, node, g, index, axis, axis in summed)
    return out.marked({axis: mark for axis, mark in marks.items() if mark is not None})


def _accumulated(scope: Scope, node: Node, g: Value, index: Value, axis: str, summed: bool) -> Mark | None:
    mark = strongest(scope, node, (g, index), axis)
    if mark is not None:
        return mark
    if index.is_(axis, Varying, First) or g.is_(axis, Varying, First):
        if not g.pending(axis):
            return Varying()
        # Of a dim with an entry for each rank (ends of scans), a rank's own gradient belongs to its own entry.
        return scope.vague(node, "scatters a pending sum to places that differ between ranks: unless each is its own")
    if index.pending(axis):
        return suspected(node, "puts values where a pending reduction says", "reduce it first", index.birth(axis))
    if g.pending(axis):
        if not summed:
            return g.marks[axis]
        return suspected(node, "adds up a pending sum at indices that are sharded", "reduce it first", g.birth(axis))
    if summed and any(atom.counted for dim in index.dims for atom in dim):
        return scope.unknown(node, "adds up a rank's own rows at positions that it counts itself")
    return Pending("sum", node) if summed or g.is_(axis, Somewhere) or index.is_(axis, Somewhere) else None


# ---- rules -----------------------------------------------------------------------------------------------------------
def embedding(scope: Scope, node: Node, given: dict) -> Value:
    """weight[V, ...] at indices[...]."""
    index = given["indices"]
    return looked_up(scope, node, given["weight"], [0], index, lambda dims: (*index.dims, *dims[1:]))


def embedding_backward(scope: Scope, node: Node, given: dict) -> Value:
    """Gradients added up in the rows of the table."""
    g, index = given["grad_output"], given["indices"]
    count = len(index.dims)
    rows = [_together(g.dims[d], index.dims[d]) for d in range(count)]
    return accumulated(scope, node, g, index, rows, (plain(shape_of(node)[0]), *g.dims[count:]))


def _together(a: Dim, b: Dim) -> Dim:
    """A dim of values and indices that run along each other; the larger one counts where they differ."""
    return met(a, b).dim if size_of(a) == size_of(b) else min(a, b, key=size_of)


def index_select(scope: Scope, node: Node, given: dict) -> Value:
    """x at the indices of a 1-D (or 0-D) tensor along one dim."""
    x, at, dim = given["self"], given["index"], given["dim"] % max(1, len(given["self"].dims))
    if not x.dims:  # one element, whatever the index
        return x
    if not at.index_of:
        return _indexed(scope, node, x, {dim: at})
    return looked_up(
        scope, node, x, [dim], at, lambda dims: (*dims[:dim], at.dims[0] if at.dims else (), *dims[dim + 1 :])
    )


def gather(scope: Scope, node: Node, given: dict) -> Value:
    """torch.gather: the result has the dims of the index; other dims of x and index run together."""
    x, at, dim = given["self"], given["index"], given["dim"] % max(1, len(given["self"].dims))
    if not x.dims:
        return x
    rows = [_rows_of(v, dim) for v in (x, at)]
    marks: dict[str, Mark] = {}
    if all(size_of(a) == size_of(b) for a, b in zip(rows[0].dims, rows[1].dims, strict=True)):
        along_rows = elementwise(scope, node, "function", rows)
        dims, marks = along_rows.dims, dict(along_rows.marks)
    else:  # fewer rows than x has
        dims = rows[1].dims
        marks = {axis: scope.unknown(node, _OWN_ROWS) for axis in over(a for d in rows[0].dims for a in d)}
    out = looked_up(
        scope, node, x, [dim], at, lambda _: tuple(at.dims[d] if d == dim else a for d, a in enumerate(dims))
    )
    return out.marked({axis: mark for axis, mark in marks.items() if axis not in out.marks})


def _rows_of(x: Value, dim: int) -> Value:
    """Where the rows of a value are, whatever is in them."""
    unclear = {axis: mark for axis, mark in x.marks.items() if not isinstance(mark, (Pending, First))}
    return Value(tuple(() if d == dim else atoms for d, atoms in enumerate(x.dims)), unclear)


def index(scope: Scope, node: Node, given: dict) -> Value | None:
    """x[..., index, ...] with one or several tensors of indices."""
    return _indexed(scope, node, given["self"], {d: i for d, i in enumerate(given["indices"]) if i is not None})


def _indexed(scope: Scope, node: Node, x: Value, indices: dict[int, Value]) -> Value:
    used = sorted(indices)
    x, at = _combined(scope, node, x, indices)
    front = used[0] if used == list(range(used[0], used[-1] + 1)) else 0

    def after(dims):
        rest = [dim for d, dim in enumerate(dims) if d not in indices]
        return (*rest[:front], *at.dims, *rest[front:])

    return looked_up(scope, node, x, used, at, after)


def _combined(scope: Scope, node: Node, x: Value, indices: dict[int, Value]) -> tuple[Value, Value]:
    """(x, all indices as one); arange over all of a dim takes each rank's own rows: the index is sharded as the dim."""
    dims, parts = list(x.dims), []
    for d, at in indices.items():
        if at.ramp and over(x.dims[d]) and math.prod(map(size_of, at.dims)) == size_of(x.dims[d]):
            along = next((e for e, dim in enumerate(at.dims) if size_of(dim) > 1), None)
            if along is not None and size_of(at.dims[along]) == size_of(x.dims[d]):
                at = at.with_dims(x.dims[d] if e == along else dim for e, dim in enumerate(at.dims))
                dims[d] = plain(size_of(x.dims[d]))
        parts.append(at)
    if len(parts) == 1:
        return replace(x, dims=tuple(dims)), parts[0]
    return replace(x, dims=tuple(dims)), elementwise(scope, node, "function", parts)


def index_put(scope: Scope, node: Node, given: dict) -> Value | None:
    """Values added up in zeros (the gradient of x[index]), or put into each rank's own rows.

    Where arange is the index of a dim, each row goes to its own place: that dim is sharded as the rows are.
    """
    indices = {d: i for d, i in enumerate(given["indices"]) if i is not None}
    base, g, shape, used = given["self"], given["values"], shape_of(node), sorted(indices)
    count = max(len(i.dims) for i in indices.values())
    if len(used) == 1 and used[0] and given["accumulate"] and base.constant == 0 and not indices[used[0]].ramp:
        return _put_behind(scope, node, g, indices[used[0]], used[0])
    if used != list(range(len(used))) or len(g.dims) > count + len(shape) - len(used):
        return None
    rows = g.with_dims(g.dims[: max(0, len(g.dims) - (len(shape) - len(used)))])
    counted = {d: at for d, at in indices.items() if at.ramp and math.prod(map(size_of, at.dims)) == shape[d]}
    others = [replace(i, index_of=()) for d, i in indices.items() if d not in counted]
    at = elementwise(scope, node, "function", others) if others else number(0)
    if not given["accumulate"]:
        return _put(scope, node, base, at, rows, counted)
    if base.constant != 0:
        return None
    joint = _broadcast(at.dims, rows.dims, count)
    own = {d: joint[count - len(i.dims) + _counted_dim(i)] for d, i in counted.items()}
    summed = [dim for e, dim in enumerate(joint) if dim not in own.values()]
    behind = g.dims[len(g.dims) - (len(shape) - len(used)) :] if len(shape) > len(used) else ()
    dims = [own.get(d) or plain(shape[d]) for d in used]
    return accumulated(scope, node, g, at, summed, (*dims, *behind))


def _put_behind(scope: Scope, node: Node, g: Value, index: Value, dim: int) -> Value | None:
    """Values added up in zeros along a dim that is not the first, by one index."""
    shape, count = shape_of(node), len(index.dims)
    if len(g.dims) != len(shape) - 1 + count:
        return None
    rows = [_together(a, b) for a, b in zip(g.dims[dim : dim + count], index.dims, strict=True)]
    dims = (*g.dims[:dim], plain(shape[dim]), *g.dims[dim + count :])
    return accumulated(scope, node, g, replace(index, index_of=()), rows, dims)


def _counted_dim(index: Value) -> int:
    return next((d for d, dim in enumerate(index.dims) if size_of(dim) > 1), len(index.dims) - 1)


def _broadcast(a: Sequence[Dim], b: Sequence[Dim], count: int) -> list[Dim]:
    both = [((),) * (count - len(dims)) + tuple(dims) for dims in (a, b)]
    return [met(x, y).dim for x, y in zip(*both, strict=True)]


def _put(scope: Scope, node: Node, base: Value, at: Value, rows: Value, counted: dict[int, Value]) -> Value | None:
    """Elements replaced: of each rank's own rows where those are counted, of what all ranks have elsewhere."""
    own = over(atom for d in counted for atom in base.dims[d])
    taken = over(atom for d in range(len(base.dims)) if d not in counted for atom in base.dims[d])
    if not (base.settled and at.settled and rows.settled) or (at.sharded | rows.sharded) - own or taken & own:
        return None
    return replace(base, constant=None, ramp=False)


def added_at(scope: Scope, node: Node, given: dict) -> Value:
    """scatter_add, index_add, index_copy: self plus what is added up at indices along a dim."""
    g, shape, at = given["src" if "src" in given else "source"], shape_of(node), given["index"]
    dim = given["dim"] % max(1, len(shape))
    if not shape:
        return elementwise(scope, node, "sum", [given["self"], g])
    rows = (
        at.dims[dim] if len(at.dims) == len(g.dims) and op_name(node).startswith("scatter") else (at.dims or ((),))[0]
    )
    dims = (
        [_together(a, b) for a, b in zip(g.dims, at.dims, strict=True)]
        if op_name(node).startswith("scatter")
        else g.dims
    )
    dims = [plain(shape[d]) if d == dim or size_of(a) != shape[d] else a for d, a in enumerate(dims)]
    added = accumulated(scope, node, g, at, [_together(g.dims[dim], rows)], dims)
    alpha = given.get("alpha", 1)
    base = given["self"]
    if alpha != 1:
        added = elementwise(scope, node, "product", [added, number(alpha)])
    return added if base.constant == 0 else elementwise(scope, node, "sum", [base, added])


def reduced_at(scope: Scope, node: Node, given: dict) -> Value | None:
    """scatter_reduce: sums as scatter_add; of the largest and smallest the parts of ranks are reduced likewise."""
    kind = {"sum": "sum", "amax": "max", "amin": "min"}.get(given["reduce"])
    if kind == "sum" and given.get("include_self", True):
        return added_at(scope, node, given)
    if kind in (None, "sum") or given["self"].axes():
        return None
    added = added_at(scope, node, {**given, "self": number(0)})
    marks = {a: Pending(kind, node) if m == Pending("sum", node) else m for a, m in added.marks.items()}
    return replace(added, marks=marks)


def written_at(scope: Scope, node: Node, given: dict) -> Value | None:
    """scatter (also one_hot), index_fill: elements replaced at indices along a dim that is whole. None where indices
    are sharded along that dim: each rank then writes its own, and what that means is not known."""
    base, at = given["self"], given["index"]
    if not base.dims:
        return None
    dim = given["dim"] % len(base.dims)
    single = len(at.dims) != len(base.dims)  # index_fill: a list of positions
    if over(at.dims[0 if single else dim] if at.dims else ()):
        return None
    base = along(scope, node, base, dim, "a scatter")
    at = at.with_dims(()) if single else at
    values = [base, at] + [given[k] for k in ("src", "value") if isinstance(given.get(k), Value)]
    bare = [
        v.with_dims(() if d == dim else a for d, a in enumerate(v.dims)) if len(v.dims) > dim else v for v in values
    ]
    if any(size_of(a) != size_of(b) for a, b in zip(bare[0].dims, bare[1].dims, strict=False) if b):
        return None
    linear = base.constant == 0 and isinstance(given.get("src"), Value)  # into zeros: as the gradient of a sort is
    of = [bare[2], replace(bare[1], constant=None)] if linear else bare
    out = elementwise(scope, node, "product" if linear else "function", of)
    return out.with_dims(plain(shape_of(node)[dim]) if d == dim else a for d, a in enumerate(out.dims))


def counted_in(scope: Scope, node: Node, given: dict) -> Value:
    """histc: how many elements fall into each bin; those of ranks are summed."""
    total = reduction(scope, node, elementwise(scope, node, "function", [given["self"]]), None, False, "sum")
    return total.with_dims([plain(shape_of(node)[0])])


def bucketed(scope: Scope, node: Node, given: dict) -> Value | None:
    """bucketize, searchsorted in one row of boundaries that every rank has."""
    x, edges = given["self"], given["boundaries" if "boundaries" in given else "sorted_sequence"]
    x = given["input"] if op_name(node) == "bucketize" and isinstance(given.get("input"), Value) else x
    if len(edges.dims) != 1 or edges.sharded or edges.marks:
        return None
    return elementwise(scope, node, "rising", [x])


RULES: Rules = MappingProxyType(
    {
        "embedding": embedding,
        "embedding_dense_backward": embedding_backward,
        "index_select": index_select,
        "gather": gather,
        "index": index,
        "index_put": index_put,
        "scatter_add": added_at,
        "index_add": added_at,
        "scatter_reduce": reduced_at,
        "scatter": written_at,
        "index_fill": written_at,
        "histc": counted_in,
        "bucketize": bucketed,
        "searchsorted": bucketed,
    }
)

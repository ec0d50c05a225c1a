"""Rules for lookups and their transposes. Indices that depend on the rank make a result vary until it is declared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from fmegatron.step.check.arithmetic import along, elementwise
from fmegatron.step.check.scope import Rules, Scope, shape_of
from fmegatron.step.check.values import Atom, Partial, Value, canonical, met, over, plain, size_of


def looked_up(scope: Scope, node: torch.fx.Node, x: Value, dim: int, index: Value, dims_after) -> Value:
    """x indexed along `dim` by `index`; dims_after(dims of x) -> (dims of the result, axes that clash)."""
    dim %= len(x.dims)
    if index.index_of and len(x.dims[dim]) == 1 and size_of(x.dims[dim]) == scope.mesh.extent(index.index_of):
        return _own_part(scope, node, x, dim, index)
    depends = index.varying | index.tainted
    sharding = over(x.dims[dim])
    for axis in sorted(set(x.partial) & index.varying):
        scope.find(node, axis, "takes this rank's part of a pending sum", "reduce_scatter", x.partial[axis].birth)
    blind = sharding - depends - x.varying - x.tainted
    for axis in sorted(blind):
        scope.find(node, axis, f"indexes dim {dim}, which is sharded, with indices that do not depend on the rank",
                   "subtract axis_index * local size, mask, and declare what it means")  # fmt: skip
    base = x.without(sharding, varying=sharding - blind, tainted=blind)
    dims, clash = dims_after(base.dims)
    out = replace(
        base.with_dims(dims),
        varying=base.varying | index.varying,
        tainted=base.tainted | index.tainted,
        somewhere=base.somewhere | index.somewhere,
        drawn={**base.drawn, **index.drawn},
        data=False,
    )
    for axis in sorted((clash & index.axes()) - out.varying - out.tainted):
        if x.state(axis) == "replicated" or index.state(axis) == "replicated":
            continue
        scope.find(node, axis, f"indexes a value that is {x.state(axis)} by one that is {index.state(axis)}",
                   "gather the one, or shard the other alike")  # fmt: skip
    hurt = set(x.partial) & index.varying
    lost = out.varying - frozenset(hurt)
    return out.without(hurt, tainted=hurt).without(lost, varying=lost)


def _own_part(scope: Scope, node: torch.fx.Node, x: Value, dim: int, index: Value) -> Value:
    """x[axis_index] along a dim with one entry for each rank: this rank's part, as `shard` takes it."""
    axes = index.index_of
    hurt = set()
    for axis in axes:
        if axis in x.tainted or axis in x.varying:
            continue
        if axis in x.partial:
            scope.find(node, axis, "takes this rank's part of a pending sum", "reduce_scatter", x.partial[axis].birth)
            hurt.add(axis)
        elif x.shards(axis):
            scope.find(node, axis, f"takes this rank's part of a value that is {x.state(axis)} already", "leave it out")
            hurt.add(axis)
    out = x.without(axes)
    dims = list(out.dims)
    before = out.dims[dim][0].axes or ()
    dims[dim] = (Atom(1, before + axes),)
    return replace(out, dims=tuple(dims)).without(hurt, tainted=hurt) if hurt else replace(out, dims=tuple(dims))


def accumulated(
    scope: Scope, node: torch.fx.Node, shape: Sequence[int], dim: int, index: Value, g: Value, whole_rows: bool
) -> Value:
    """Gradients added up at indices into zeros of `shape` (the transpose of a lookup along `dim`).

    whole_rows: the index's dims are summed away (embedding); else g has the dims of the result (scatter_add).
    """
    varying, partial, somewhere = index.varying | g.varying, dict(g.partial), index.somewhere | g.somewhere
    summed = g.dims[: len(index.dims)] if whole_rows else (g.dims[dim],)
    tainted = index.tainted | g.tainted
    for atom in (atom for d in summed for atom in d):
        for axis in atom.sharded - varying - tainted:
            partial[axis] = Partial("sum", node)
    for axis in (somewhere - varying - tainted) if whole_rows else ():
        partial[axis] = Partial("sum", node)
    for axis in sorted(set(g.partial) & index.varying):
        scope.find(node, axis, "scatters a pending sum to places that differ between ranks", "reduce it first",
                   g.partial[axis].birth)  # fmt: skip
        tainted |= {axis}
    rest = g.dims[len(index.dims) :] if whole_rows else g.dims
    if whole_rows:
        dims = (plain(shape[0]), *rest)
    else:
        dims = tuple(plain(shape[d]) if d == dim else a for d, a in enumerate(rest))
    dims = tuple(canonical(d) for d in dims)
    out = Value(dims, partial, varying, tainted, somewhere - set(partial), {**index.drawn, **g.drawn})
    return out.without(varying, varying=varying - tainted, tainted=tainted & varying)


# ---- rules -----------------------------------------------------------------------------------------------------------
def embedding(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """weight[V, ...] at indices[...]."""
    index = given["indices"]
    return looked_up(scope, node, given["weight"], 0, index, lambda dims: ((*index.dims, *dims[1:]), frozenset()))


def embedding_backward(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """Gradients added up in the rows of the table."""
    return accumulated(scope, node, shape_of(node), 0, given["indices"], given["grad_output"], True)


def index_select(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """x at the indices of a 1-D (or 0-D) tensor along one dim."""
    x, index, dim = given["self"], given["index"], given["dim"] % len(given["self"].dims)
    count = index.dims[0] if index.dims else ()
    return looked_up(scope, node, x, dim, index, lambda dims: ((*dims[:dim], count, *dims[dim + 1 :]), frozenset()))


def gather(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """torch.gather: the result has the dims of the index; other dims of x and index run together."""
    x, index, dim = given["self"], given["index"], given["dim"] % len(given["self"].dims)

    def after(dims):
        clash, out = frozenset(), []
        for d, (own, at) in enumerate(zip(dims, index.dims, strict=True)):
            both, bad = (at, frozenset()) if d == dim else met(own, at)
            out.append(both)
            clash |= bad
        return tuple(out), clash

    return looked_up(scope, node, x, dim, index, after)


def index(scope: Scope, node: torch.fx.Node, given: dict) -> Value | None:
    """x[..., index, ...] with one tensor of indices."""
    used = [d for d, i in enumerate(given["indices"]) if i is not None]
    if len(used) != 1:
        return None
    dim, at = used[0], given["indices"][used[0]]
    return looked_up(
        scope, node, given["self"], dim, at, lambda dims: ((*dims[:dim], *at.dims, *dims[dim + 1 :]), frozenset())
    )


def index_put(scope: Scope, node: torch.fx.Node, given: dict) -> Value | None:
    """The gradient of x[index]: values added up in zeros."""
    indices = given["indices"]
    if len(indices) != 1 or given["self"].constant != 0 or not given["accumulate"]:
        return None
    return accumulated(scope, node, shape_of(node), 0, indices[0], given["values"], True)


def added_at(scope: Scope, node: torch.fx.Node, given: dict) -> Value:
    """scatter_add, index_add: self plus what is added up at indices along a dim."""
    source, shape = given.get("src", given.get("source")), shape_of(node)
    added = accumulated(scope, node, shape, given["dim"] % len(shape), given["index"], source, False)
    base = given["self"]
    return added if base.constant == 0 else elementwise(scope, node, "sum", [base, added])


def written_at(scope: Scope, node: torch.fx.Node, given: dict) -> Value | None:
    """scatter (also one_hot): elements replaced at indices along a dim that is whole. None where indices are sharded
    along that dim: each rank then writes its own, and what that means is not known."""
    base, at = given["self"], given["index"]
    dim = given["dim"] % len(base.dims)
    if any(atom.sharded for atom in at.dims[dim]):
        return None
    base = along(scope, node, base, dim, "a scatter")
    values = [base, at] + ([given["src"]] if isinstance(given.get("src"), Value) else [])
    bare = [v.with_dims(() if d == dim else a for d, a in enumerate(v.dims)) for v in values]
    out = elementwise(scope, node, "function", bare)
    return out.with_dims(plain(shape_of(node)[dim]) if d == dim else a for d, a in enumerate(out.dims))


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
        "scatter": written_at,
    }
)

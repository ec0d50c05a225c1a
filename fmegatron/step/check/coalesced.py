"""Rules for coalesced collectives: that of the single op for each tensor of the list, exact about dims and parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import MappingProxyType

import torch

from fmegatron.collectives import FLAT, Place
from fmegatron.step.check.collectives import constant_along, exchanged, reduced
from fmegatron.step.check.context import Rules, Scope
from fmegatron.step.check.dims import UNIFORM, Atom, Dim, canonical, cut, interleaved, plain, size_of
from fmegatron.step.check.movement import reshaped
from fmegatron.step.check.values import Mark, Pending, Value, Wrong


def for_each(rule: Callable) -> Callable:
    """A rule(scope, node, x, names of the axes, Place or None) for every tensor of a list."""

    def coalesced(scope: Scope, node: torch.fx.Node, given: dict) -> list[Value]:
        names, places = tuple(given["axes"]), given.get("places") or [None] * len(given["xs"])
        placed = [text and Place.parse(text) for text in places]
        return [rule(scope, node, x, names, place) for x, place in zip(given["xs"], placed, strict=True)]

    return coalesced


def _on(names: tuple[str, ...], place: Place, dim: int) -> tuple[str, ...]:
    return tuple(names[j] for j in place.axes_on(dim))


def _starts(parts: tuple[int, ...]) -> frozenset[int]:
    return frozenset(itertools.accumulate(parts[:-1]))


def gathered(scope: Scope, node: torch.fx.Node, x: Value, names: tuple[str, ...], place: Place) -> Value:
    """A tensor whole over the axes: each must shard just the dim that the place says, as its minor axis."""
    if place.block:
        x = _dim_gathered(scope, node, x, 0, _on(names, place, FLAT), None, "the flattened block")
        x = reshaped(scope, node, x, place.block)
    for dim in range(len(x.dims)):
        parts = place.parts if dim == place.interleaved else ()
        x = _dim_gathered(scope, node, x, dim, _on(names, place, dim), parts, f"dim {dim}")
    return x


def _dim_gathered(scope, node, x: Value, dim: int, axes: tuple[str, ...], parts: tuple[int, ...] | None, what: str):
    if not axes:
        return x
    atoms, n = interleaved(x.dims[dim]), scope.mesh.extent(axes)
    first = atoms[0] if atoms else Atom(1, ())
    own = first.axes or ()
    if constant_along(atoms) and not any(axis in x.marks for axis in axes):
        return x.with_dims(plain(size_of(a) * n, UNIFORM) if d == dim else a for d, a in enumerate(x.dims))
    marks: dict[str, Mark | None] = dict.fromkeys(axes)
    for axis in axes:
        mark = x.marks.get(axis)
        if mark is not None and not isinstance(mark, Pending):
            marks[axis] = mark
        elif mark is not None or axis not in own:
            marks[axis] = Wrong(node, f"all_gather of {what} of a value that is {x.state(axis)}",
                       "gather the axis that shards it, on its dim", mark.birth if mark else None)  # fmt: skip
    known = not any(marks.values())
    if known and own[len(own) - len(axes) :] != axes:
        wrong = Wrong(node, f"all_gather over {'+'.join(axes)} of {what}, sharded over {'+'.join(own)}",
                   "gather the minor axis first, or all in their order")  # fmt: skip
        marks = dict.fromkeys(axes, wrong)
    starts = _starts(parts or ())
    if known and parts is not None and (not starts <= first.cuts or (first.cuts and not starts)):
        wrong = Wrong(node, f"all_gather of {what} in parts that begin at {sorted(starts) or 0}, those of the "
                   f"value begin at {sorted(first.cuts) or 0}", "give the parts that the layout has")  # fmt: skip
        marks = dict.fromkeys(axes, wrong)
    out = x.marked(marks)
    dims = list(out.dims)
    dims[dim] = plain(size_of(atoms) * n) if any(marks.values()) else _restored(first, atoms, axes, n)
    return out.with_dims(dims)


def _restored(first: Atom, atoms: Dim, axes: tuple[str, ...], n: int) -> Dim:
    """The dim whose first atom is sharded over `axes` as its minor ones, without these."""
    left = first.axes[: len(first.axes) - len(axes)]
    if first.inner and not left:
        return first.inner
    cuts = frozenset(c * n for c in first.cuts) if left else frozenset()
    return (Atom(first.size * n, left, cuts, first.inner), *atoms[1:])


def scattered(scope: Scope, node: torch.fx.Node, x: Value, names: tuple[str, ...], place: Place) -> Value:
    """A pending sum over the axes, and of it the part that the place says."""
    x = reduced(scope, node, "reduce_scatter_many", x, tuple(a for a in names if scope.mesh[a] > 1), {})
    dims = list(x.dims)
    for dim, atoms in enumerate(dims):
        axes = _on(names, place, dim)
        if not axes:
            continue
        whole = canonical(tuple(Atom(atom.size, ()) if atom.axes is UNIFORM else atom for atom in atoms))
        n = scope.mesh.extent(axes)
        if dim == place.interleaved and len(whole) == 1 and whole[0].plain:
            dims[dim] = (Atom(whole[0].size // n, whole[0].axes + axes, _starts(place.parts)),)
        else:
            dims[dim] = cut(whole, axes, n)
    x = x.with_dims(dims)
    if not place.block:
        return x
    x = reshaped(scope, node, x, (size_of(tuple(atom for dim in x.dims for atom in dim)),))
    flat = _on(names, place, FLAT)
    return x.with_dims((cut(x.dims[0], flat, scope.mesh.extent(flat)),)) if flat else x


def summed(scope: Scope, node: torch.fx.Node, x: Value, names: tuple[str, ...], place: None) -> Value:
    """A pending sum made whole."""
    return reduced(scope, node, "psum_many", x, tuple(a for a in names if scope.mesh[a] > 1), {})


def swapped(scope: Scope, node: torch.fx.Node, given: dict) -> list[Value]:
    """all_to_all_many: for each tensor, one dim whole for another."""
    axes = tuple(a for a in given["axes"] if scope.mesh[a] > 1)
    dims = zip(given["xs"], given["split_dims"], given["concat_dims"], strict=True)
    return [
        exchanged(scope, node, "all_to_all_many", x, axes, {"split_dim": split, "concat_dim": concat})
        for x, split, concat in dims
    ]


RULES: Rules = MappingProxyType(
    {
        "all_gather_many": for_each(gathered),
        "reduce_scatter_many": for_each(scattered),
        "psum_many": for_each(summed),
        "all_to_all_many": swapped,
    }
)

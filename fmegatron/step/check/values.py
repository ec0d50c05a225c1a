"""What the checker knows of a value: per dim and mesh axis, how the ranks' local tensors make up one global array.

A dim is a row of atoms (major first) whose sizes multiply to its local size, so that views that split and merge dims
carry what is known along. Over each axis a value is exactly one of: a pending sum (partial), varying (ranks differ in a
way that no rule knows), drawn (each rank drew its own random numbers), sharded on a dim, or replicated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import torch

from fmegatron.layout import Layout

UNIFORM = None  # axes of an atom along which the value is constant (from expand, ones, zeros): it fits any other
NOTHING: Mapping = MappingProxyType({})
NOWHERE: frozenset[str] = frozenset()


class Atom(NamedTuple):
    """A factor of a dim: local size, and the axes that shard it (major first), () for none, or UNIFORM.

    cuts: where interleaved parts of a sharded atom begin, in local elements (fused QKV, gate and up).  inner: the atoms
    of what is left when a flattened dim is gathered over `axes`; () for a plain one.  runs: the dims that lie one after
    another in it, where they differ (a buffer of several flattened arrays); () for a plain one.
    """

    size: int
    axes: tuple[str, ...] | None = ()
    cuts: frozenset[int] = frozenset()
    inner: tuple[Atom, ...] = ()
    runs: tuple[tuple[Atom, ...], ...] = ()

    @property
    def plain(self) -> bool:
        """Whether size and axes say it all."""
        return not (self.inner or self.runs)

    @property
    def sharded(self) -> frozenset[str]:
        """All axes that shard it, or something in it."""
        if not self.inner and not self.runs:
            return frozenset(self.axes) if self.axes else NOWHERE
        within = (atom.sharded for dim in (self.inner, *self.runs) for atom in dim)
        return frozenset(self.axes or ()).union(*within)


Dim = tuple[Atom, ...]


class Partial(NamedTuple):
    """A pending reduction: "sum" or "max", and the node from which on it is pending."""

    kind: str
    birth: torch.fx.Node | None  # None: it came in so


def _nothing() -> Mapping:
    return NOTHING


@dataclass(frozen=True, slots=True)
class Value:
    """dims: see above.  partial: axis -> what is pending.  varying: axes over which ranks differ in an unknown way.

    somewhere: axes that shard it on a dim that is not known.  tainted: axes with a finding upstream (later findings on
    them are suppressed).  drawn: axis -> the node at which each rank drew random numbers of its own: right where each
    rank needs its own (with what is sharded over the axis), wrong in what must be alike on all ranks.  constant: the
    number that all elements are, if known.  index_of, scale: it is `scale` times the `axis_index` of these axes.  ramp:
    it is arange(n).  data: it is a part of the batch, whose rows may be dealt to ranks and microbatches in any order.
    equal_terms: it was summed along a dim on which it is constant (rows of a rank were counted): alike on all ranks, it
    may be a whole as well as one of equal terms of a sum.
    """

    dims: tuple[Dim, ...]
    partial: Mapping[str, Partial] = field(default_factory=_nothing)
    varying: frozenset[str] = NOWHERE
    tainted: frozenset[str] = NOWHERE
    somewhere: frozenset[str] = NOWHERE
    drawn: Mapping[str, torch.fx.Node] = field(default_factory=_nothing)
    constant: float | None = None
    index_of: tuple[str, ...] = ()
    scale: int = 1
    ramp: bool = False
    data: bool = False
    equal_terms: bool = False

    @property
    def settled(self) -> bool:
        """Whether it is sharded or replicated over every axis, and its dims say which."""
        return not (self.partial or self.varying or self.tainted or self.somewhere or self.drawn)

    @property
    def sharded(self) -> frozenset[str]:
        """All axes that shard a dim that is known."""
        return over(atom for dim in self.dims for atom in dim)

    def shards(self, axis: str) -> list[int]:
        """The dims that the axis shards."""
        return [d for d, dim in enumerate(self.dims) if any(axis in atom.sharded for atom in dim)]

    def state(self, axis: str) -> str:
        """What it is over an axis, in words."""
        if axis in self.partial:
            return f"partial ({self.partial[axis].kind})"
        if axis in self.varying or axis in self.tainted:
            return "varying"
        if axis in self.drawn:
            return "drawn anew on each rank"
        dims = self.shards(axis)
        if dims:
            return f"sharded on dim {dims[0]}"
        return "sharded" if axis in self.somewhere else "replicated"

    def axes(self) -> frozenset[str]:
        """The axes over which it is not replicated."""
        if self.settled:
            return self.sharded
        return self.sharded.union(self.varying, self.tainted, self.somewhere, self.partial, self.drawn)

    def with_dims(self, dims: Iterable[Dim]) -> Value:
        """The same knowledge about other dims; no longer an index."""
        return Value(
            tuple([canonical(dim) for dim in dims]),
            *(self.partial, self.varying, self.tainted, self.somewhere, self.drawn, self.constant),
            data=self.data,
            equal_terms=self.equal_terms,
        )

    def without(self, axes: Iterable[str], *, tainted: Iterable[str] = (), varying: Iterable[str] = ()) -> Value:
        """Forget all that is known over `axes`; then mark some as tainted or varying."""
        gone = frozenset(axes)
        if not gone and not tainted and not varying:
            return self
        dims = tuple(canonical(tuple(_strip(atom, gone) for atom in dim)) for dim in self.dims)
        return replace(
            self,
            dims=dims,
            partial={axis: pending for axis, pending in self.partial.items() if axis not in gone},
            varying=(self.varying - gone) | frozenset(varying),
            tainted=(self.tainted - gone) | frozenset(tainted),
            somewhere=self.somewhere - gone,
            drawn={axis: birth for axis, birth in self.drawn.items() if axis not in gone},
            index_of=(),
            ramp=False,
        )


def over(atoms: Iterable[Atom]) -> frozenset[str]:
    """All axes that shard one of the atoms."""
    return frozenset().union(*[atom.sharded for atom in atoms])


def _strip(atom: Atom, axes: frozenset[str]) -> Atom:
    if not atom.sharded & axes:
        return atom
    left = None if atom.axes is UNIFORM else tuple(a for a in atom.axes if a not in axes)
    inner = tuple(_strip(a, axes) for a in atom.inner) if left else ()
    runs = tuple(tuple(_strip(a, axes) for a in run) for run in atom.runs)
    return Atom(atom.size, left, atom.cuts if left else frozenset(), inner, runs)


def order_of(dim: Dim) -> tuple[str, ...]:
    """The axes that shard a dim, major first."""
    return tuple(axis for atom in dim for axis in atom.axes or ())


def stripped(dim: Dim, axes: Iterable[str]) -> Dim:
    """A dim that these axes do not shard any more."""
    return tuple(_strip(atom, frozenset(axes)) for atom in dim)


def filled(shape: Sequence[int], constant: float | None) -> Value:
    """A tensor made inside the step, alike on all ranks and constant along every dim."""
    return Value(tuple(plain(n, UNIFORM) for n in shape), constant=constant)


def size_of(dim: Dim) -> int:
    """Local size of a dim."""
    return math.prod(atom.size for atom in dim)


def plain(size: int, axes: tuple[str, ...] | None = ()) -> Dim:
    """A dim of one atom."""
    return canonical((Atom(size, axes),))


def canonical(dim: Dim) -> Dim:
    """Neighbours that say no more apart than together become one; unsharded atoms of size 1 go."""
    if len(dim) == 1 and (dim[0].size != 1 or dim[0].sharded):
        return dim
    out: list[Atom] = []
    for atom in dim:
        if atom.size == 1 and not atom.sharded:
            continue
        last = out[-1] if out else None
        if last and atom.axes == () and last.axes is not UNIFORM and last.plain and atom.plain:
            out[-1] = Atom(last.size * atom.size, last.axes, frozenset(c * atom.size for c in last.cuts))
        elif last and last.size == 1 and last.axes and last.plain and atom.axes is not UNIFORM and not atom.runs:
            out[-1] = atom._replace(axes=last.axes + atom.axes)
        elif last and atom.axes is UNIFORM and last.axes is UNIFORM:
            out[-1] = Atom(last.size * atom.size, UNIFORM)
        else:
            out.append(atom)
    return tuple(out)


def divided(atom: Atom, major: int) -> tuple[Atom, Atom]:
    """An atom as (major part of that size, the rest); what shards it stays with the major part."""
    minor = atom.size // major
    if not atom.plain and not atom.sharded:
        return Atom(major, ()), Atom(minor, ())
    if atom.axes is UNIFORM:
        return Atom(major, UNIFORM), Atom(minor, UNIFORM)
    cuts = frozenset(c // minor for c in atom.cuts) if all(c % minor == 0 for c in atom.cuts) else frozenset()
    return Atom(major, atom.axes, cuts, atom.inner), Atom(minor, ())


def cut(dim: Dim, axes: tuple[str, ...], n: int) -> Dim:
    """What is left of a dim on each of n ranks along `axes`, which take its parts in order."""
    first = dim[0] if dim else Atom(1, ())
    if first.plain and not first.cuts and first.axes is not UNIFORM and first.size % n == 0:
        return canonical((Atom(first.size // n, first.axes + axes), *dim[1:]))
    return (Atom(size_of(dim) // n, axes, frozenset(), dim),)


def viewed(dims: Sequence[Dim], shape: Sequence[int]) -> tuple[list[Dim], frozenset[str]] | None:
    """(the dims after a view to `shape`, axes whose dim is lost on the way); None when the factors do not line up.

    A shard of a single element leaves no trace in sizes: unless the new shape has a dim of size 1 for it, it may belong
    to its left or its right neighbour.
    """
    flat, out, lost = [atom for dim in dims for atom in dim], [], frozenset()
    for wanted in shape:
        dim: list[Atom] = []
        if wanted == 1 and flat and flat[0].size == 1:
            dim.append(flat.pop(0))
        elif wanted == 1 and flat and flat[0].sharded and flat[0].plain:
            # One of several shards of (heads, width) is (1, width): the new dim may be the one that is sharded.
            lost |= flat[0].sharded
            flat[0] = Atom(flat[0].size, ())
        while wanted > 1:
            if not flat:
                return None
            atom = flat.pop(0)
            if atom.size == 1:
                lost |= atom.sharded
            elif wanted % atom.size == 0:
                dim.append(atom)
                wanted //= atom.size
            elif atom.size % wanted == 0 and (atom.plain or not atom.sharded):
                first, rest = divided(atom, wanted)
                dim.append(first)
                flat.insert(0, rest)
                wanted = 1
            else:
                return None
        out.append(canonical(tuple(dim)))
    if any(atom.size > 1 for atom in flat):
        return None
    return out, lost.union(*(atom.sharded for atom in flat))


def met(a: Dim, b: Dim) -> tuple[Dim, frozenset[str]]:
    """One dim of two operands -> (the dim of the result, axes that shard one but not the other, or in
    another order)."""
    if not a or not b or a == b:
        return (a or b), NOWHERE
    left, right, out, clash = list(a), list(b), [], frozenset()
    while left and right:
        x, y = left.pop(0), right.pop(0)
        n = math.gcd(x.size, y.size)
        if x.size > n:
            x, rest = divided(x, n)
            left.insert(0, rest)
        if y.size > n:
            y, rest = divided(y, n)
            right.insert(0, rest)
        if x.axes is UNIFORM or y.axes is UNIFORM:
            out.append(y if x.axes is UNIFORM else x)
            continue
        if x != y:
            clash |= x.sharded ^ y.sharded
            if x.plain and y.plain and x.axes != y.axes:  # the same axes in another order are other ranges
                clash |= x.sharded & y.sharded if x.sharded == y.sharded else NOWHERE
        out.append(x._replace(cuts=x.cuts | y.cuts) if x.plain else x if len(x.sharded) >= len(y.sharded) else y)
    return canonical(tuple(out + left + right)), clash


def value_of(layout: Layout | None, shape: Sequence[int]) -> Value:
    """The value of an input or output of this local shape; None: replicated over all axes."""
    if layout is None:
        return Value(tuple(plain(n) for n in shape))
    big = [tuple(a for a in layout.axes(d) if layout.mesh[a] > 1) for d in range(len(layout.shape))]
    flat = tuple(a for a in layout.flat if layout.mesh[a] > 1)
    block = layout.replace(flat=(), unreduced=()).local_shape(0)
    dims = []
    for n, axes, parts in zip(block, big, layout.parts, strict=True):
        cuts, at = set(), 0
        for part in parts[:-1] if axes else ():
            at += part // layout.mesh.extent(axes)
            cuts.add(at)
        dims.append(canonical((Atom(n, axes, frozenset(cuts)),)))
    if layout.flat:
        block = canonical(tuple(atom for dim in dims for atom in dim))
        dims = [cut(block, flat, layout.mesh.extent(flat)) if flat else block]
    return Value(tuple(dims), {a: Partial("sum", None) for a in layout.unreduced if layout.mesh[a] > 1})

"""A dim of a local tensor as a row of factors, each with the mesh axes that shard it: what views, joins and cuts keep.

A dim is a row of atoms (major first) whose sizes multiply to its local size, so that views that split and merge dims
carry what is known along.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from fmegatron.layout import Mesh

UNIFORM = None  # axes of an atom along which the value is constant (from expand, ones, zeros): it fits any other
NOWHERE: frozenset[str] = frozenset()
_PARTS = 4096  # so many equal parts of a dim are written out as cuts at most


class Misfit(Exception):
    """Two dims that a rule puts together differ in size: a fault of the rule, never of the step."""


class Fold(NamedTuple):
    """A dim that means something as a total only: its elements are one rank's parts, side by side or added up.

    kind: the reduction along the dim that gives the value of one rank: "sum", "max", "min", or "copies" (the same
    again and again).  axis: over which.  node: the collective that made it.
    """

    kind: str
    axis: str
    node: torch.fx.Node


class Atom(NamedTuple):
    """A factor of a dim: local size, and the axes that shard it (major first), () for none, or UNIFORM.

    cuts: where interleaved parts of a sharded atom begin, in local elements (fused QKV, gate and up); of one that is
    assigned in pieces (stages of a pipeline) a negative number that stands for them (`pieces_of`).  inner: the atoms
    of what is left when a flattened dim is gathered over `axes`; () for a plain one.  runs: the dims that are one after
    another in it, where they differ (a buffer of several flattened arrays); () for a plain one.  counted: positions
    that the step counted itself from 0 (arange): of a full dim, or of this rank's part of one.  fold: see `Fold`.
    """

    size: int
    axes: tuple[str, ...] | None = ()
    cuts: frozenset[int] = frozenset()
    inner: tuple[Atom, ...] = ()
    runs: tuple[tuple[Atom, ...], ...] = ()
    counted: bool = False
    fold: Fold | None = None

    @property
    def plain(self) -> bool:
        """Whether size and axes are all there is to know."""
        return not (self.inner or self.runs or self.fold)

    @property
    def sharded(self) -> frozenset[str]:
        """All axes that shard it, or something in it."""
        if not self.inner and not self.runs:
            return frozenset(self.axes) if self.axes else NOWHERE
        within = (atom.sharded for dim in (self.inner, *self.runs) for atom in dim)
        return frozenset(self.axes or ()).union(*within)


Dim = tuple[Atom, ...]


def pieces_of(sizes: Sequence[int], order: Sequence[int]) -> frozenset[int]:
    """What `Atom.cuts` are of a dim that is assigned in pieces: one negative number for each such sizes and order.

    It goes through views as other cuts do. Of two that meet both are kept, so that such a value fits neither place.
    """
    text = "+".join(map(str, sizes)) + "|" + "+".join(map(str, order))
    return frozenset((-int.from_bytes(text.encode()),))


def same_pieces(one: frozenset[int], other: frozenset[int]) -> bool:
    """Whether two atoms with these cuts are assigned in the same pieces, or in none."""
    return {cut for cut in one if cut < 0} == {cut for cut in other if cut < 0}


def said(cuts: frozenset[int]) -> str:
    """Cuts in words: where parts begin, or that there are pieces of sizes and an order of their own."""
    return (
        f"{sorted(cut for cut in cuts if cut > 0) or 0}{' in pieces of their own' if min(cuts, default=0) < 0 else ''}"
    )


class Meeting(NamedTuple):
    """Two dims as one: the dim, axes that shard one but not the other (or in another order), axes that shard what the
    other counts from 0, axes of which it is not known, and folds that the other does not have."""

    dim: Dim
    clash: frozenset[str] = NOWHERE
    counted: frozenset[str] = NOWHERE
    unclear: frozenset[str] = NOWHERE
    folds: tuple[Fold, ...] = ()


def over(atoms: Iterable[Atom]) -> frozenset[str]:
    """All axes that shard one of the atoms."""
    return frozenset().union(*[atom.sharded for atom in atoms])


def folds_of(dim: Dim) -> tuple[Fold, ...]:
    """The folds in a dim."""
    return tuple([atom.fold for atom in dim if atom.fold])


def numbers_along(dim: Dim) -> Dim:
    """A dim of that shape along which all numbers are the same: what counted them, or is to reduce them, is gone."""
    if not any([atom.fold or atom.counted or atom.runs for atom in dim]):
        return dim
    return canonical(
        tuple([Atom(a.size, UNIFORM) if a.fold or a.counted or (a.runs and not a.sharded) else a for a in dim])
    )


def order_of(dim: Dim) -> tuple[str, ...]:
    """The axes that shard a dim, major first."""
    return tuple(axis for atom in dim for axis in atom.axes or ())


def size_of(dim: Dim) -> int:
    """Local size of a dim."""
    return math.prod([atom.size for atom in dim])


def plain(size: int, axes: tuple[str, ...] | None = ()) -> Dim:
    """A dim of one atom."""
    return canonical((Atom(size, axes),))


def stripped(dim: Dim, axes: Iterable[str]) -> Dim:
    """A dim that these axes do not shard any more."""
    return tuple(_strip(atom, frozenset(axes)) for atom in dim)


def _strip(atom: Atom, axes: frozenset[str]) -> Atom:
    if not atom.sharded & axes:
        return atom
    left = None if atom.axes is None else tuple(a for a in atom.axes if a not in axes)
    inner = tuple(_strip(a, axes) for a in atom.inner)
    inner = inner if left or over(inner) else ()  # other axes may shard what a flattened dim is made of
    runs = tuple(tuple(_strip(a, axes) for a in run) for run in atom.runs)
    return Atom(atom.size, left, atom.cuts if left else frozenset(), inner, runs, atom.counted, atom.fold)


def unfolded(dim: Dim, axis: str | None = None) -> Dim:
    """A dim without its folds (over one axis)."""
    return tuple(a._replace(fold=None) if a.fold and axis in (None, a.fold.axis) else a for a in dim)


def canonical(dim: Dim) -> Dim:
    """Neighbors that mean no more apart than together become one; unsharded atoms of size 1 go."""
    if len(dim) == 1 and (dim[0].size != 1 or dim[0].sharded):
        return dim
    out: list[Atom] = []
    for atom in dim:
        if atom.size == 1 and not atom.sharded:
            continue
        last = out[-1] if out else None
        alone = last is not None and last.size == 1 and bool(last.axes)  # a view may give it a dim of its own again
        if last and atom.axes == () and last.axes is not UNIFORM and last.plain and atom.plain and not alone:
            cuts = frozenset(c * atom.size for c in last.cuts)
            counted = atom.counted and last.counted
            out[-1] = Atom(last.size * atom.size, last.axes, cuts, counted=counted)
        elif last and atom.axes is UNIFORM and last.axes is UNIFORM and atom.plain and last.plain:
            out[-1] = Atom(last.size * atom.size, UNIFORM)
        else:
            out.append(atom)
    return tuple(out)


def joined(dim: Dim) -> Dim:
    """The same with a shard of one element and what follows as one atom: where a dim is cut, gathered or compared. A
    view has to know them apart, to give each what was its own."""
    out: list[Atom] = []
    for atom in dim:
        last = out[-1] if out else None
        if last and last.size == 1 and last.axes and last.plain and atom.axes is not UNIFORM and atom.plain:
            cuts = atom.cuts.union(cut * atom.size for cut in last.cuts)  # of one element: pieces alone
            out[-1] = atom._replace(axes=(*last.axes, *(atom.axes or ())), counted=False, cuts=cuts)
        else:
            out.append(atom)
    return tuple(out)


def interleaved(dim: Dim) -> Dim:
    """k of what is not sharded, times what is: the same as one atom in k parts, each sharded on its own."""
    dim = joined(dim)
    if len(dim) != 2 or dim[0].axes != () or not dim[1].axes or not (dim[0].plain and dim[1].plain):
        return dim
    (k, _, _, *_), minor = dim[0], dim[1]
    if k > _PARTS:
        return dim
    cuts = {i * minor.size + c for i in range(k) for c in (0, *minor.cuts)} - {0}
    return (Atom(k * minor.size, minor.axes, frozenset(cuts)),)


def divided(atom: Atom, major: int) -> tuple[Atom, Atom] | None:
    """An atom as (major part of that size, the rest), None where that cannot be expressed.

    What shards it stays with the major part, or with the rest where `major` is a number of equal interleaved parts.
    """
    minor = atom.size // major
    if atom.fold or (not atom.plain and atom.sharded):
        return None
    if not atom.plain:
        return Atom(major, ()), Atom(minor, ())
    if atom.axes is UNIFORM or atom.counted:
        return atom._replace(size=major), atom._replace(size=minor)
    if atom.cuts:
        if all(i * minor in atom.cuts for i in range(1, major)):
            within = frozenset(c % minor for c in atom.cuts) - {0}
            if atom.cuts == frozenset(i * minor + c for i in range(major) for c in (0, *within)) - {0}:
                return Atom(major, ()), Atom(minor, atom.axes, within)
        if any(c % minor for c in atom.cuts):
            return None
    return Atom(major, atom.axes, frozenset(c // minor for c in atom.cuts)), Atom(minor, ())


def cut(dim: Dim, axes: tuple[str, ...], n: int) -> Dim:
    """What is left of a dim on each of n ranks along `axes`, which take its parts in order."""
    dim = joined(dim)
    first = dim[0] if dim else Atom(1, ())
    alone = first.size == n and over(dim[1:])  # one element of it is left, which would be taken for the next atom's
    if first.plain and not first.cuts and first.axes is not UNIFORM and first.size % n == 0 and not alone:
        return canonical((Atom(first.size // n, (*(first.axes or ()), *axes)), *dim[1:]))
    return (Atom(size_of(dim) // n, axes, frozenset(), dim),)


def met(a: Dim, b: Dim) -> Meeting:
    """One dim of two operands. Raises Misfit where their sizes differ: no rule may go on with them."""
    if a == b or not a or not b:  # or one is broadcast
        return Meeting(a or b)
    if size_of(a) != size_of(b):
        if size_of(a) == 1 or size_of(b) == 1:  # a shard of one element, broadcast along the other
            small, large = (a, b) if size_of(a) == 1 else (b, a)
            return Meeting(large, unclear=over(small))
        raise Misfit(f"dims that meet: sizes {size_of(a)} and {size_of(b)}")
    return _aligned(a, b) or _aligned(interleaved(a), interleaved(b)) or _not_aligned(a, b)


def _aligned(a: Dim, b: Dim) -> Meeting | None:
    left, right, out = list(a), list(b), []
    clash, counted, folds = frozenset(), frozenset(), []
    while left and right:
        x, y = left.pop(0), right.pop(0)
        n = math.gcd(x.size, y.size)
        if n < min(x.size, y.size) or (n == 1 and x.size != y.size and not (x.sharded if x.size == 1 else y.sharded)):
            return None
        for one, rest in ((x, left), (y, right)):
            if one.size > n:
                halves = divided(one, n)
                if halves is None:
                    return None
                rest.insert(0, halves[1])
                x, y = (halves[0], y) if one is x else (x, halves[0])
        out.append(_joined(x, y))
        if x.fold != y.fold and UNIFORM not in (x.axes, y.axes):
            folds += [atom.fold for atom in (x, y) if atom.fold]
        if x.axes is UNIFORM or y.axes is UNIFORM or x == y:
            continue
        if (x.counted and not y.counted and y.sharded) or (y.counted and not x.counted and x.sharded):
            counted |= x.sharded | y.sharded
            continue
        clash |= x.sharded ^ y.sharded
        if x.plain and y.plain and x.axes != y.axes:  # the same axes in another order are other ranges
            clash |= x.sharded & y.sharded if x.sharded == y.sharded else NOWHERE
    if any(atom.size > 1 for atom in left + right):
        return None
    return Meeting(canonical(tuple(out + left + right)), clash, counted, NOWHERE, tuple(folds))


def _joined(x: Atom, y: Atom) -> Atom:
    if x.axes is UNIFORM or y.axes is UNIFORM:
        return y if x.axes is UNIFORM and not x.fold else x
    if x.counted != y.counted:
        return y if x.counted else x
    if x.plain and y.plain and x.axes == y.axes:
        return x._replace(cuts=x.cuts | y.cuts)
    return x if (len(x.sharded), bool(x.fold)) >= (len(y.sharded), bool(y.fold)) else y


def _not_aligned(a: Dim, b: Dim) -> Meeting:
    """Dims whose factors do not line up, such as 2 times 3 with 3 times 2: what shards only one of them is a clash."""
    one, other = over(a), over(b)
    return Meeting(plain(size_of(a)), one ^ other, unclear=one & other, folds=folds_of(a) + folds_of(b))


class Viewed(NamedTuple):
    """The dims after a view; axes whose dim is lost on the way, with the dims that they may shard (None: any)."""

    dims: list[Dim]
    lost: dict[tuple[str, ...], tuple[int, ...] | None]


def viewed(dims: Sequence[Dim], shape: Sequence[int]) -> Viewed | None:
    """A view to `shape`; None when the factors do not line up.

    A shard of a single element leaves no trace in sizes: unless the new shape has a dim of size 1 for it, it may belong
    to its left or its right neighbour. Nor do interleaved parts of a single element each: (3, width) of a fused QKV is
    three parts of width, or of one of several heads.
    """
    flat, out, lost = [atom for dim in dims for atom in dim], [], {}
    sizes, total = [size_of(dim) for dim in dims], len(flat)
    for at, wanted in enumerate(shape):
        dim: list[Atom] = []
        taken = sum([len(one) for one in dims[:at]]) == total - len(flat)
        one = bool(dims[at : at + 1] and dims[at]) and dims[at][-1].size == 1  # a new dim may be its
        new = list(shape[at + 1 : at + 2]) == [1] != sizes[at + 1 : at + 2]
        if wanted > 1 and taken and sizes[: at + 1] == list(shape[: at + 1]) and not (one and new):
            dim, wanted = list(dims[at]), 1  # as it was
            del flat[: len(dim)]
        elif wanted == 1 and (same := _same_one(dims, shape, at)) is not None:
            dim = list(dims[same])
            del flat[: len(dim)]
        elif wanted == 1 and flat and flat[0].size == 1 and flat[0].plain and len(ones := _ones(dims, shape, at)) > 1:
            lost[flat.pop(0).axes or ()] = ones
        elif wanted == 1 and flat and flat[0].size == 1:
            dim.append(flat.pop(0))
        elif wanted == 1 and flat and flat[0].sharded and _of_one_kind(flat[0]) and not flat[0].cuts:
            # One of several shards of (heads, width) is (1, width): the new dim may be the one that is sharded. So of a
            # range that is one row.
            behind = _behind(shape, at)
            lost[flat[0].axes] = None if behind is None else (at, behind)
            flat[0] = Atom(flat[0].size, ())
        elif wanted == 1 and flat and flat[0].plain and flat[0].cuts and len(flat[0].axes or ()) > 1:
            # Interleaved parts have more than one element: those of the minor axis stay, the major ones may go.
            behind, own = _behind(shape, at), flat[0].axes or ()
            lost[own[:-1]] = None if behind is None else (at, behind)
            flat[0] = flat[0]._replace(axes=own[-1:])
        while wanted > 1:
            if not flat:
                return None
            atom = flat.pop(0)
            if atom.size == 1 and atom.plain and not dim and at:  # it ends the dim before this one, or begins it
                lost[atom.axes or ()] = (at - 1, at)
            elif atom.size == 1:
                dim.append(atom)
            elif wanted % atom.size == 0:
                dim.append(atom)
                wanted //= atom.size
            elif atom.sharded and atom.plain and _in_parts(atom, wanted) and not dim:
                behind = _behind(shape, at)
                lost[atom.axes] = None if behind is None else tuple(range(at, behind + 1))
                dim.append(Atom(wanted, ()))
                flat.insert(0, Atom(atom.size // wanted, ()))
                wanted = 1
            elif atom.size % wanted == 0 and (halves := divided(atom, wanted)):
                dim.append(halves[0])
                flat.insert(0, halves[1])
                wanted = 1
            else:
                return None
        out.append(canonical(tuple(dim)))
    if any(atom.size > 1 for atom in flat):
        return None
    if flat and out:
        out[-1] = canonical((*out[-1], *flat))
        flat = []
    return Viewed(out, lost | {(axis,): None for axis in over(flat)})


def viewed_with_ones(dims: Sequence[Dim], shape: Sequence[int]) -> list[Dim] | None:
    """The dims after a view to which dims of one element come and go that have one on any number of ranks; None where
    others have one, too, or where the factors of the rest do not line up."""
    if any(atom.size == 1 for dim in dims for atom in dim):
        return None
    found = viewed([dim for dim in dims if dim], [n for n in shape if n != 1])
    if found is None or found.lost:
        return None
    rest = iter(found.dims)
    return [() if n == 1 else next(rest) for n in shape]


def _of_one_kind(atom: Atom) -> bool:
    """Whether its own axes are all that shard it."""
    return atom.plain or bool(atom.inner and not over(atom.inner) and not atom.runs and not atom.fold)


def _ones(dims: Sequence[Dim], shape: Sequence[int], at: int) -> tuple[int, ...]:
    """The dims that a shard of one element may be: those of one element from this one on; where there were more of
    them, the one behind them, too."""
    sizes, place = [size_of(dim) for dim in dims], math.prod(shape[:at])
    before, behind = ([d for d, n in enumerate(of) if n == 1 and math.prod(of[:d]) == place] for of in (sizes, shape))
    ones = tuple(d for d in behind if d >= at)
    return ones if len(before) <= len(behind) or ones[-1] + 1 >= len(shape) else (*ones, ones[-1] + 1)


def _same_one(dims: Sequence[Dim], shape: Sequence[int], at: int) -> int | None:
    """The dim of one element that this one was, where as many of them are in a row at its place as before."""
    sizes = [size_of(dim) for dim in dims]
    before, behind = (
        [d for d, n in enumerate(of) if n == 1 and math.prod(of[:d]) == math.prod(shape[:at])] for of in (sizes, shape)
    )
    return before[behind.index(at)] if len(before) == len(behind) else None


def _behind(shape: Sequence[int], at: int) -> int | None:
    """The next dim of more than one element."""
    return next((d for d in range(at + 1, len(shape)) if shape[d] > 1), None)


def _in_parts(atom: Atom, count: int) -> bool:
    """Whether an atom is interleaved in that many equal parts."""
    return (
        atom.size % count == 0
        and bool(atom.cuts)
        and atom.cuts == frozenset(range(atom.size // count, atom.size, atom.size // count))
    )


def constant_along(atoms: Dim) -> bool:
    """Whether a value is the same all along a dim: as well of all of the dim as of each rank's part."""
    return bool(atoms) and all(atom.axes is UNIFORM for atom in atoms)


def beside(mesh: Mesh, axes: tuple[str, ...], folds: dict[str, Fold]) -> Dim:
    """The ranks' parts side by side: a factor for each axis, major first."""
    return tuple(Atom(int(mesh[axis]), (), fold=folds.get(axis)) for axis in axes)


def filled_in(own: tuple[str, ...], gathered: tuple[str, ...], mesh: Mesh, size: int) -> tuple[Atom, ...]:
    """Atoms of a dim of `size` sharded by `own` when some of these axes are gathered: each takes its place in order."""
    out, before = [], ()
    for axis in own:
        if axis in gathered:
            out.append(Atom(int(mesh[axis]), before))
            before = ()
        else:
            before += (axis,)
    return (*out, Atom(size, before))

"""Abstract values: how the ranks' local tensors form the value that one rank would have.

Over each axis a value is exactly one of: replicated, sharded on a dim (its dims state which), or what its `Mark` is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch

from fmegatron.layout import Layout, split
from fmegatron.step.checker.dims import UNIFORM, Atom, Dim, canonical, cut, over, pieces_of, plain, stripped
from fmegatron.step.torch_private import outside_of_tracing

NOTHING: Mapping = MappingProxyType({})
Node = torch.fx.Node


# ---- marks: what a value is over one axis ----------------------------------------------------------------------------
class Pending(NamedTuple):
    """A reduction over the axis is still to be made.

    kind: "sum", "max", "min"; "root" of a pending sum of squares (a norm of parts), "logsumexp".  birth: the node from
    which on it is pending, None: it came in so.
    """

    kind: str
    birth: Node | None

    @property
    def words(self) -> str:
        """For messages."""
        return f"partial ({self.kind})"


@dataclass(frozen=True, slots=True)  # a tuple without fields would be false, and equal to any other
class Varying:
    """It depends on the rank's index, and no rule knows what that means; `declare` states it."""

    words: ClassVar[str] = "varying"


@dataclass(frozen=True, slots=True)
class First:
    """A condition that is true on the first rank of the axis only: axis_index == 0."""

    words: ClassVar[str] = "varying"


class Somewhere(NamedTuple):
    """Sharded on one of these dims (None: any), and shapes do not determine on which.

    group: the axes that are there together, major first.  or_sum: or a pending sum, if the dim that was sharded is one
    that was summed.  reduced: how some of the dims that it may have been were reduced ("sum", "max", ...), so that it
    may be such a pending reduction, too; "" where none was.
    """

    dims: tuple[int, ...] | None = None
    group: tuple[str, ...] = ()
    or_sum: bool = False
    reduced: str = ""
    words = "sharded"

    def may_be(self, dim: int) -> bool:
        """Whether it may be sharded on that dim."""
        return self.dims is None or dim in self.dims


class Suspect(NamedTuple):
    """A part of a rank was used as if it were all there is, which only a later correction could set right (a softmax of
    parts that is rescaled by their maxima). A finding when it arrives at an output without having met one.

    node: the line to name; what, fix: as in `Finding`.  birth: from where on it was pending.  births: nodes whose
    reduction over the ranks a correction would use.  blocks: of all pairs of two parts it has those of its own.  pairs:
    and they stand there one by one, so that some may be all there are (a diagonal).  gradient: of a loss, that its
    gradient is as wrong.
    """

    node: Node
    what: str
    fix: str
    birth: Node | None
    births: frozenset[Node]
    blocks: bool = False
    pairs: bool = False
    gradient: bool = False
    words = "varying"


class Unknown(NamedTuple):
    """No rule can decide what it is. origins: the reasons, by their numbers in the list of the context.

    own: it is made of each rank's part, and no collective over the axis came since: no other rank has the same.
    factor: it may be n times too large, of which a `declare` is not informative.
    equal: whatever it is, all ranks of the axis have the same, by a sum or a gather over it.
    gradient: of a loss, that its gradient may be wrong, too, though no rule sees it there.
    """

    origins: frozenset[int]
    own: bool = False
    factor: bool = False
    equal: bool = False
    gradient: bool = False
    words = "not known"


class Wrong(NamedTuple):
    """A mistake was made on the way: a finding if it arrives at an output. More of them over the same axis would state
    nothing new. node, what, fix, birth: as of a suspect, which only differs in that something may still correct it.
    """

    node: Node
    what: str
    fix: str
    birth: Node | None = None
    words = "varying"


Mark = Pending | Varying | First | Somewhere | Suspect | Unknown | Wrong


class Padding(NamedTuple):
    """What stands behind the true elements of padded shards along an axis.

    number: what all of it is; None: it may be anything.  moved: an all_to_all has brought it into the middle of a dim
    that is in full now, and split another: (the one, the other); the all_to_all that takes both back sets it in order.
    """

    number: float | None
    moved: tuple[int, int] | None = None


class Excess(NamedTuple):
    """The value is n ** power times that of one rank, n the size of an axis: a mean of parts, a sum of replicas.

    node: where that began, what: as text.  loose: it was multiplied by numbers since, which may have been meant to
    take it out again.  sure: those numbers cannot have been (only a division by n takes it out).  unused: nothing was
    computed from it yet.  doubt: the number of the reason why a division by n may not take it out (parts that are means
    of more or fewer terms), which stays when the power is 0.
    """

    power: Fraction
    node: Node
    what: str
    loose: bool = False
    sure: bool = False
    unused: bool = True
    doubt: int | None = None


# ---- values ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Value:
    """dims: rows of atoms.  marks: axis -> what it is over that axis where it is not replicated or sharded on a known
    dim; no axis stands in both.  excess: axis -> how many times too large it is.

    What is known of its numbers besides: constant: the number that all elements are, if known.  index_of, scale: it is
    `scale` times the `axis_index` of these axes.  ramp: in the order of memory it is arange(n).  data: it is a part of
    the batch, whose rows may go to ranks and microbatches in any order.  equal_terms: it was summed along a dim
    on which it is constant (rows of a rank were counted): equal on all ranks, it may be complete as well as one of
    equal terms of a sum.
    portion: axis -> what it is of the value of one rank, where it is the same on all ranks: "exact" 1/n, as it was
    divided by the number of ranks; "part", a sum of that and of what is not; "maybe" 1/n, as it was divided by a number
    that may be made of n, "equal", by one that is as large; "rows", times a whole number that may count a rank's rows,
    and so a term of a sum over the ranks; "owed", a gradient of a loss that is a sum over that axis, of which the sum
    is still to be made ("owed, of a mean", where a number divided its terms); "mixed", made of that and of what is
    complete. "number": parts that were divided by a number, which may count a rank's rows, "number/n": and by the
    number of ranks; a sum of the former over the ranks is a "mean", of others a "total"; a "mean" divided by the number
    of ranks is "either" complete or 1/n.
    pads: axis -> what its padding is, where shards have some (`padding.py`).
    ranks: {axis: power} of the numbers of ranks whose product its constant is.
    """

    dims: tuple[Dim, ...]
    marks: Mapping[str, Mark] = field(default_factory=lambda: NOTHING)
    excess: Mapping[str, Excess] = field(default_factory=lambda: NOTHING)
    constant: float | None = None
    index_of: tuple[str, ...] = ()
    scale: int = 1
    ramp: bool = False
    data: bool = False
    equal_terms: bool = False
    portion: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    pads: Mapping[str, Padding] = field(default_factory=lambda: NOTHING)
    ranks: Mapping[str, Fraction] = field(default_factory=lambda: NOTHING)

    @property
    def settled(self) -> bool:
        """Whether it is sharded or replicated over every axis, and its dims state which."""
        return not self.marks and not self.excess

    @property
    def sharded(self) -> frozenset[str]:
        """All axes that shard a dim that is known."""
        return over(atom for dim in self.dims for atom in dim)

    def shards(self, axis: str) -> list[int]:
        """The dims that the axis shards."""
        return [d for d, dim in enumerate(self.dims) if any(axis in atom.sharded for atom in dim)]

    def pending(self, axis: str, *kinds: str) -> bool:
        """Whether a reduction over the axis is pending, of one of these kinds (any if none is named)."""
        mark = self.marks.get(axis)
        return isinstance(mark, Pending) and (not kinds or mark.kind in kinds)

    def birth(self, axis: str) -> Node | None:
        """The node from which on a reduction over the axis is pending; None where it came in so, or none is."""
        mark = self.marks.get(axis)
        return mark.birth if isinstance(mark, Pending) else None

    def is_(self, axis: str, *kinds: type) -> bool:
        """Whether its mark over the axis is one of these."""
        return isinstance(self.marks.get(axis), kinds)

    def replicated(self, axis: str) -> bool:
        """Whether it is equal on all ranks of the axis."""
        return axis not in self.marks and not self.shards(axis)

    def state(self, axis: str) -> str:
        """What it is over an axis, as text."""
        mark = self.marks.get(axis)
        if mark is not None:
            return mark.words
        dims = self.shards(axis)
        return f"sharded on dim {dims[0]}" if dims else "replicated"

    def axes(self) -> frozenset[str]:
        """The axes over which it is not replicated."""
        return self.sharded.union(self.marks) if self.marks else self.sharded

    def may_shard(self, dim: int) -> frozenset[str]:
        """The axes of which shapes leave open whether they shard the dim."""
        return frozenset([a for a, m in self.marks.items() if isinstance(m, Somewhere) and m.may_be(dim)])

    def having(self, mark: type) -> frozenset[str]:
        """The axes over which it has a mark of this type."""
        return frozenset([axis for axis, m in self.marks.items() if isinstance(m, mark)])

    def with_dims(self, dims: Iterable[Dim]) -> Value:
        """The same knowledge about other dims; no longer an index."""
        return Value(
            tuple([canonical(dim) for dim in dims]),
            *(self.marks, self.excess, self.constant),
            data=self.data,
            equal_terms=self.equal_terms,
            portion=self.portion,
        )

    def marked(self, marks: Mapping[str, Mark | None]) -> Value:
        """Over the axes of `marks`, what these state and nothing else: None makes it replicated."""
        if not marks:
            return self
        gone = frozenset(marks)
        kept = {axis: _less(mark, gone) for axis, mark in self.marks.items() if axis not in gone}
        kept.update((axis, mark) for axis, mark in marks.items() if mark is not None)
        unsure = [axis for axis, mark in marks.items() if isinstance(mark, (Suspect, Unknown, Wrong))]
        return replace(
            self,
            dims=tuple([canonical(stripped(dim, gone)) for dim in self.dims]) if self.sharded & gone else self.dims,
            marks=kept,
            excess={a: e for a, e in self.excess.items() if a not in unsure} if unsure else self.excess,
            **({"constant": None} if kept and self.constant is not None else {}),
            index_of=(),
            ramp=False,
        )

    def without(self, axes: Iterable[str]) -> Value:
        """Replicated over these axes."""
        return self.marked(dict.fromkeys(axes))


def _less(mark: Mark, gone: frozenset[str]) -> Mark:
    """A mark of what these axes, of which something else is known now, are no longer together with."""
    if not isinstance(mark, Somewhere) or not gone.intersection(mark.group):
        return mark
    return mark._replace(group=tuple([axis for axis in mark.group if axis not in gone]))


OWED = frozenset(("owed", "owed, of a mean"))
SUMMED = ("number", "total", "mean")
_TERMS = frozenset(("sum", "beside", "select"))
_SCALE_FREE = frozenset(("sign", "nan", "finite"))


def portions(kind: str, values: Sequence[Value]) -> Mapping[str, str]:
    """What an op of that kind (as of `elementwise`) makes of values that are portions."""
    given = [v.portion for v in values if v.portion]
    if not given or kind in _SCALE_FREE:
        return NOTHING
    out = {}
    for axis in given[0] if len(given) == 1 else dict.fromkeys(axis for one in given for axis in one):
        if kind in _TERMS:
            found = _of_terms(axis, values[1:] if kind == "select" else values)
        else:
            found = _of_factors(axis, kind, values)
        if found is not None:
            out[axis] = found
    return out or NOTHING


def _of_terms(axis: str, terms: Sequence[Value]) -> str | None:
    """Of what is added, or stands beside another: zeros, counts and pending sums may stand beside any."""
    some = [v for v in terms if v.constant != 0 and not v.equal_terms]
    have = {v.portion.get(axis) for v in some if axis not in v.marks} or {v.portion.get(axis) for v in some}
    if len(have) <= 1:
        return have.pop() if have else None
    if have <= OWED:
        return "owed"
    if have & {*OWED, "mixed"}:
        return "mixed"
    if have & {"exact", "part"}:
        return "part"
    if "either" in have:
        return "maybe"
    if have <= {None, "total", "mean"}:
        return "total"
    return None if None in have else "number" if "number" in have else "maybe"


def _of_factors(axis: str, kind: str, factors: Sequence[Value]) -> str | None:
    linear = kind in ("same", "product", "quotient")
    if len(factors) == 1:
        one = factors[0].portion[axis]
        return one if linear else "mixed" if one == "mixed" or one in OWED else None
    first, second = factors[0].portion.get(axis), factors[1].portion.get(axis)
    if len(factors) == 2 and (second is None or (first is None and kind != "quotient")):  # as nearly always
        one = second if first is None else first
        return one if linear else "mixed" if one == "mixed" or one in OWED else None
    all_ = [one for v in factors if (one := v.portion.get(axis)) is not None]
    have = [one for one in all_ if one not in SUMMED]
    below = kind == "quotient" and factors[1].portion.get(axis) in have
    owed = [one for one in have if one in OWED]
    if owed or "mixed" in have:  # linear in one gradient, whatever it is multiplied with or divided by
        by_one = kind == "quotient" and factors[1].portion.get(axis) in OWED
        return owed[0] if linear and not by_one and len(owed) == 1 and "mixed" not in have else "mixed"
    if not linear or not all_:
        return None
    if not have:
        above = [v.portion.get(axis) for v in factors[: 1 if kind == "quotient" else None]]
        return next((one for one in SUMMED if one in above), None)
    return have[0] if len(have) == 1 and not below else "maybe"


def filled(shape: Sequence[int], constant: float | None) -> Value:
    """A tensor made inside the step, equal on all ranks and constant along every dim."""
    return Value(tuple(plain(n, UNIFORM) for n in shape), constant=constant)


@functools.lru_cache(maxsize=512, typed=True)
def number(x: float | int | bool) -> Value:
    """A Python number as a value."""
    return Value((), constant=x)


def value_of(layout: Layout | None, shape: Sequence[int]) -> Value:
    """The value of an input or output of this local shape; None: replicated over all axes."""
    if layout is None:
        return Value(tuple(plain(n) for n in shape))
    big = [tuple(a for a in layout.axes(d) if layout.mesh[a] > 1) for d in range(len(layout.shape))]
    flat = tuple(a for a in layout.flat if layout.mesh[a] > 1)
    block = layout.replace(flat=(), unreduced=()).local_shape(0)
    dims = []
    for n, axes, (parts, _, order) in zip(block, big, layout.cuts, strict=True):
        cuts, at = set(pieces_of(parts, order) if order else ()), 0
        for part in parts[:-1] if axes and not order else ():
            at += split.rooms(part, [layout.mesh[a] for a in axes])[-1]
            cuts.add(at)
        dims.append(canonical((Atom(n, axes, frozenset(cuts)),)))
    if layout.flat:
        first = layout.flat_from
        whole = canonical(tuple(atom for dim in dims[first:] for atom in dim))
        if flat and layout.padded:
            whole = (Atom(layout.local_shape(0)[first], flat, frozenset(), whole),)
        elif flat:
            whole = cut(whole, flat, int(layout.mesh.extent(flat)))
        dims = [*dims[:first], whole]
    pads = dict.fromkeys(layout.padding_axes, Padding(0.0)) if layout.padded else NOTHING
    return Value(tuple(dims), {a: Pending("sum", None) for a in layout.unreduced if layout.mesh[a] > 1}, pads=pads)


def counted(shape: Sequence[int], ramp: bool = False) -> Value:
    """A tensor made inside the step that differs along its dims: equal on all ranks, or counted in each one's part."""
    return Value(tuple(canonical((Atom(n, counted=True),)) for n in shape), ramp=ramp)


def of_constant(constant: torch.Tensor) -> Value:
    """A tensor that the step made of Python numbers: equal on all ranks; a single number may count what a rank has."""
    if constant.numel() != 1:
        return Value(tuple(plain(n) for n in constant.shape))
    with outside_of_tracing():
        value = constant.item()
    return replace(filled(tuple(constant.shape), value), equal_terms=bool(value))

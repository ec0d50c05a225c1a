"""Views of stored leaves: arrays made of regions of stored ones, cut, joined, transposed and stacked by integers only.

A view holds no elements. It states of each of its parts which region of which stored leaf it shows, and through which
permutation of dims; so what a rank wants of a view is what it wants of stored leaves, wherever the view's dims went.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from fmegatron.layout import Box, check_cover

Ints = tuple[int, ...]


class Fill(enum.Enum):
    """What a part holds that no stored leaf gives."""

    ZEROS = "zeros"
    FRESH = "fresh"  # from the tree `initial` that is given to restore


@dataclass(frozen=True)
class Part:
    """The region [start, start + shape) of a view, and where its elements come from.

    source: a stored leaf, or a Fill.  dims: for each dim of the view the dim of the source that it runs along; None for
    a dim of extent 1 that the source does not have.  at: index in the source of the first element, one for each dim of
    the source; dims of the source that are not in `dims` stay at that index.
    """

    source: str | Fill
    start: Ints
    shape: Ints
    dims: tuple[int | None, ...]
    at: Ints = ()

    def source_box(self, start: Sequence[int], shape: Sequence[int]) -> Box:
        """The source's region behind the region `start`, `shape` (of the view, inside this part); no local place."""
        if self.start == self.at and self.dims == tuple(range(len(self.at))):
            return Box(tuple(start), tuple(shape), 0, (0,) * len(self.at))
        first, extent = list(self.at), [1] * len(self.at)
        for v, dim in enumerate(self.dims):
            if dim is not None:
                first[dim] += start[v] - self.start[v]
                extent[dim] = shape[v]
        return Box(tuple(first), tuple(extent), 0, (0,) * len(first))

    def as_source(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor over a region of this part, with dims as the source has them; the same memory."""
        if self.dims == tuple(range(len(self.at))):  # nearly always
            return x
        for v in reversed([v for v, dim in enumerate(self.dims) if dim is None]):
            x = x.select(v, 0)
        order = [dim for dim in self.dims if dim is not None]
        x = x.permute(sorted(range(len(order)), key=lambda i: order[i]))
        for dim in range(len(self.at)):
            if dim not in order:
                x = x.unsqueeze(dim)
        return x


@dataclass(frozen=True)
class View:
    """An array of `shape` made of disjoint parts that cover it.

    sources: every stored leaf that went into it, also where a later step cut its elements away.  fits: (dim, how) of
    dims that adapt to the size that is asked for; see `fitted`.  spare: it need not be asked for (a copy).
    """

    shape: Ints
    parts: tuple[Part, ...]
    sources: frozenset[str]
    fits: tuple[tuple[int, str], ...] = ()
    spare: bool = False


def whole(name: str, shape: Sequence[int]) -> View:
    """A stored leaf as it is."""
    zero, dims = (0,) * len(shape), tuple(range(len(shape)))
    parts = () if 0 in shape else (Part(name, zero, tuple(shape), dims, zero),)
    return View(tuple(shape), parts, frozenset([name]))


def filled(shape: Sequence[int], fill: Fill) -> View:
    """An array that no stored leaf gives."""
    parts = () if 0 in shape else (Part(fill, (0,) * len(shape), tuple(shape), (None,) * len(shape)),)
    return View(tuple(shape), parts, frozenset())


def transposed(view: View, dims: Sequence[int]) -> View:
    """Dim i of the result is dim dims[i] of the view. Raises ValueError unless `dims` is a permutation."""
    n = len(view.shape)
    if sorted(d + n if d < 0 else d for d in dims) != list(range(n)):
        raise ValueError(f"got dims {tuple(dims)}, wanted every dim of an array of shape {view.shape} once")
    dims = [d % n for d in dims]

    def turn(values):
        return tuple(values[d] for d in dims)

    parts = tuple(replace(p, start=turn(p.start), shape=turn(p.shape), dims=turn(p.dims)) for p in view.parts)
    fits = tuple((dims.index(d), how) for d, how in view.fits)
    return replace(view, shape=turn(view.shape), parts=parts, fits=fits)


def cut(view: View, dim: int, lo: int, hi: int) -> View:
    """The indices [lo, hi) of a dim."""
    parts = []
    for p in view.parts:
        a, z = max(p.start[dim], lo), min(p.start[dim] + p.shape[dim], hi)
        if a >= z:
            continue
        at = p.at
        if (d := p.dims[dim]) is not None:
            at = _put(at, d, at[d] + a - p.start[dim])
        parts.append(replace(p, start=_put(p.start, dim, a - lo), shape=_put(p.shape, dim, z - a), at=at))
    return replace(view, shape=_put(view.shape, dim, hi - lo), parts=tuple(parts))


def joined(views: Sequence[View], dim: int) -> View:
    """The views one after another along a dim. Raises ValueError when their other dims differ."""
    shape, parts, at = views[0].shape, [], 0
    for view in views:
        if len(view.shape) != len(shape) or _put(view.shape, dim, 0) != _put(shape, dim, 0):
            raise ValueError(f"got shapes {shape} and {view.shape}, wanted the same but for dim {dim}")
        parts += (replace(p, start=_put(p.start, dim, p.start[dim] + at)) for p in view.parts) if at else view.parts
        at += view.shape[dim]
    fits = tuple(sorted({fit for view in views for fit in view.fits}))
    sources = frozenset().union(*(view.sources for view in views))
    return View(_put(shape, dim, at), tuple(parts), sources, fits, all(view.spare for view in views))


def inserted(view: View, dim: int) -> View:
    """The view with a new dim of size 1."""

    def add(values, value):
        return (*values[:dim], value, *values[dim:])

    parts = (replace(p, start=add(p.start, 0), shape=add(p.shape, 1), dims=add(p.dims, None)) for p in view.parts)
    fits = tuple((d + (d >= dim), how) for d, how in view.fits)
    return replace(view, shape=add(view.shape, 1), parts=tuple(parts), fits=fits)


def removed(view: View, dim: int) -> View:
    """The view without a dim of size 1."""
    assert view.shape[dim] == 1, (view.shape, dim)

    def drop(values):
        return (*values[:dim], *values[dim + 1 :])

    parts = (replace(p, start=drop(p.start), shape=drop(p.shape), dims=drop(p.dims)) for p in view.parts)
    fits = tuple((d - (d > dim), how) for d, how in view.fits if d != dim)
    return replace(view, shape=drop(view.shape), parts=tuple(parts), fits=fits)


def fitted(view: View, shape: Sequence[int]) -> View:
    """The view with its adaptable dims as `shape` has them; other dims stay as they are.

    "pad": grows with zeros at the end, shrinks by leaving the end out.  "first": index 0 again and again.  "wrap":
    index i is the stored index i modulo the stored size.
    """
    if len(shape) != len(view.shape):
        return view
    for dim, how in view.fits:
        have, want = view.shape[dim], shape[dim]
        if how == "pad" and want > have:
            view = joined([view, filled(_put(view.shape, dim, want - have), Fill.ZEROS)], dim)
        elif how == "pad":
            view = cut(view, dim, 0, want)
        elif have:
            times, rest = (want, 0) if how == "first" else divmod(want, have)
            once = cut(view, dim, 0, 1) if how == "first" else view
            view = joined([cut(view, dim, 0, 0), *[once] * times, cut(view, dim, 0, rest)], dim)
    return view


def regions(view: View, box: Box) -> Iterator[tuple[Part, Box]]:
    """(part, the piece of `box` that it fills) for all parts that a box of the view touches."""
    if len(view.parts) == 1 and view.parts[0].shape == view.shape:
        yield view.parts[0], box
        return
    for part in view.parts:
        stop = [a + n for a, n in zip(part.start, part.shape, strict=True)]
        if (piece := box.intersect(part.start, stop)) is not None:
            yield part, piece


def check_parts(view: View) -> None:
    """Raise ValueError, naming the indices, unless the parts cover the view exactly once."""
    boxes = [Box(part.start, part.shape, 0, (0,) * len(part.shape)) for part in view.parts]
    if len(boxes) != 1 or boxes[0].shape != view.shape:
        check_cover(boxes, view.shape)


def _put(values: Sequence[int], dim: int, value: int) -> Ints:
    return (*values[:dim], value, *values[dim + 1 :])

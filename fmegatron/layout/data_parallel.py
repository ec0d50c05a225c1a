"""Data parallelism as a value: which data axes shard the parameters, the gradients and the optimizer's state."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fmegatron.layout.layout import Layout
from fmegatron.layout.mesh import Mesh
from fmegatron.layout.notation import entry_axes
from fmegatron.layout.split import Split, rooms

DATA_AXES = ("dp", "fsdp")  # as they are called unless other names are given
SEQUENCE_AXES = ("cp", "cpi")  # cpi: the inner one of two levels, beside each other in a sequence
_MOST_PADDING = 1 / 64  # of a leaf, for which it is split on a dim, as a matrix, and not into ranges
_LARGE_BYTES = 1 << 20  # of a rank's part: a leaf that a strategy was to shard may stay full below


class Placed(NamedTuple):
    """Layouts of one parameter: at rest, of its gradient while it is accumulated, and of the optimizer's view of it."""

    params: Layout
    grads: Layout
    optim: Layout


@dataclass(frozen=True)
class DataParallel:
    """Which axes split the tokens of a batch, and which of them shard what.

    axes: split the rows of a batch (dim 0). sequence: split its sequences (dim 1; context parallelism). `tokens` are
    both: over them a loss is summed and gradients are pending sums. A name in both is one of `sequence`.
    params: parameters at rest; a step gathers them over these axes when it uses them.
    grads: gradients between microbatches; they are reduced over these axes after each one.
    optim: moments, master weights and the update; gradients meet this layout once a step, and the updated parameters
    are gathered back from it. Each kind is sharded at least as far as the one before it.
    What ranks do not divide is padded at rest (`Layout.padded`): on the dim with the least padding if that is at most
    1/64 of the leaf, else as a range of the flattened leaf, of a stack as ranges of each layer (`Layout.flat_from`). So
    all ranks hold their share on any number of ranks.
    block: of a state in 8 bits (`optim.contrib.int8(block=256)`): no edge of a shard cuts a block of so many elements
    of the last dim. Where rooms of the last dim are no multiples of it, another dim is split, or the leaf into ranges
    that are: `dataclasses.replace(DataParallel.zero3(), block=256)`. 1: edges may be anywhere.

        ZeRO-0 (replicated)   axes               ()     ()     ()
        ZeRO-1                axes               ()     ()     axes
        ZeRO-2                axes               ()     axes   axes
        ZeRO-3                axes               axes   axes   axes
        HSDP                  (outer, inner)     inner  inner  inner
        hybrid                (outer, inner)     inner  inner  inner + outer

    Standard axes that a mesh lacks have size 1, so that one strategy serves all meshes (see `Mesh`). Source: ZeRO,
    Rajbhandari et al. 2020, arXiv 1910.02054, section 5; HSDP, Zhao et al. 2023, arXiv 2304.11277, section 3.2.2.
    Raises ValueError for a kind that is sharded less than the one before it, or over no data axis.

    >>> from fmegatron.layout import Layout, Mesh
    >>> import torch
    >>> w = Layout((4, 512, 512), torch.float32, Mesh(dp=2, fsdp=2), (None, "fsdp"))  # what a model's rules state
    >>> for layout in DataParallel.hybrid("fsdp", "dp").place(w, whole=(0,)):
    ...     print(layout)
    f32[4, 512@fsdp, 512] on dp2·fsdp2
    f32[4, 512@fsdp, 512] unreduced@dp on dp2·fsdp2
    f32[4@dp, 512@fsdp, 512] on dp2·fsdp2
    """

    axes: tuple[str, ...] = DATA_AXES
    params: tuple[str, ...] = ()
    grads: tuple[str, ...] = ()
    optim: tuple[str, ...] = ()
    sequence: tuple[str, ...] = field(default=SEQUENCE_AXES, repr=False)
    block: int = field(default=1, repr=False, kw_only=True)

    def __post_init__(self):
        if self.block < 1:
            raise ValueError(f"DataParallel: got block={self.block}, wanted elements of a block, 1 or more")
        for kind in ("axes", "params", "grads", "optim", "sequence"):
            value = getattr(self, kind)
            value = (value,) if isinstance(value, str) else tuple(value)
            if not all(isinstance(name, str) for name in value) or len(set(value)) < len(value):
                raise ValueError(f"DataParallel: {kind}: got {value}, wanted names of axes, each once: ('dp', 'fsdp')")
            object.__setattr__(self, kind, value)
        object.__setattr__(self, "axes", tuple(name for name in self.axes if name not in self.sequence))
        kinds = ("params", "grads", "optim")
        for kind, wider in zip(kinds, (*kinds[1:], "tokens"), strict=True):
            missing = [name for name in getattr(self, kind) if name not in getattr(self, wider)]
            if missing:
                called = "axes" if wider == "tokens" else wider
                raise ValueError(
                    f"DataParallel: got {kind} sharded over {missing[0]!r} and {called} over {getattr(self, wider)}, "
                    f"wanted what comes later in a step sharded at least as far; add the axis to {called}"
                )

    @property
    def tokens(self) -> tuple[str, ...]:
        """The axes that split the tokens of a batch: `axes`, then `sequence`."""
        return (*self.axes, *self.sequence)

    # ---- the named strategies

    @staticmethod
    def replicated(*axes: str) -> DataParallel:
        """Everything in full on every rank; gradients are all-reduced once a step."""
        return DataParallel(axes or DATA_AXES)

    @staticmethod
    def zero1(*axes: str) -> DataParallel:
        """The optimizer's state is sharded: reduce-scatter once a step, all-gather of the updated parameters."""
        axes = axes or DATA_AXES
        return DataParallel(axes, optim=axes)

    @staticmethod
    def zero2(*axes: str) -> DataParallel:
        """ZeRO-1, and gradients are reduce-scattered after every microbatch, so that only a shard is accumulated."""
        axes = axes or DATA_AXES
        return DataParallel(axes, grads=axes, optim=axes)

    @staticmethod
    def zero3(*axes: str) -> DataParallel:
        """Parameters are sharded too: gathered when a layer runs, forward and backward."""
        axes = axes or DATA_AXES
        return DataParallel(axes, axes, axes, axes)

    @staticmethod
    def hsdp(inner: str = "fsdp", outer: str = "dp") -> DataParallel:
        """ZeRO-3 over `inner` (fast links), copies over `outer`: an all-reduce of shards over outer once a step."""
        return DataParallel((outer, inner), (inner,), (inner,), (inner,))

    @staticmethod
    def hybrid(inner: str = "fsdp", outer: str = "dp") -> DataParallel:
        """HSDP with the optimizer's state over both axes: reduce-scatter and all-gather over `outer` once a step."""
        return DataParallel((outer, inner), (inner,), (inner,), (inner, outer))

    @staticmethod
    def named(name: str) -> DataParallel:
        """The strategy that a flag names, over dp and fsdp: replicated, zero1, zero2, zero3, hsdp, hybrid.

        Raises ValueError for another name.
        """
        known = ("replicated", "zero1", "zero2", "zero3", "hsdp", "hybrid")
        if name not in known:
            raise ValueError(f"got the strategy {name!r}, wanted one of {', '.join(known)}")
        return getattr(DataParallel, name)()

    # ---- layouts

    def batch_layout(self, shape: tuple[int, ...], dtype: torch.dtype, mesh: Mesh, microbatches: int = 1) -> Layout:
        """The layout of one array of a batch: its rows (dim 0) split over `axes`, dim 1 over `sequence`, no other.

        shape: global. microbatches: how many a step cuts each rank's rows into (`step.accumulate`). Microbatch m of n
        then is the rows [m·B/n, (m+1)·B/n) of the batch on every mesh, of which each rank holds its share: it has one
        piece of every microbatch, one after the other. So a loss that couples the rows of a microbatch (a softmax over
        the batch, batch statistics, the load of experts) means the same on every mesh. `data.Batches` gives ranks their
        rows by it; what checks, compiles or simulates a step with microbatches refuses another one.
        Arrays without dims are replicated. Raises ValueError where ranks and microbatches do not divide the rows.

        >>> from fmegatron.layout import Mesh
        >>> import torch
        >>> layout = DataParallel("dp").batch_layout((8, 64), torch.int64, Mesh(dp=2), microbatches=2)
        >>> [[(s.start, s.start + s.length) for s in layout.segments(rank, 0)] for rank in range(2)]
        [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]
        """
        if microbatches < 1:
            raise ValueError(f"batch_layout: got microbatches={microbatches}, wanted 1 or more")
        if not shape:
            return Layout((), dtype, mesh)
        names = mesh.axes(self.axes)
        ranks = mesh.extent(names)
        parts = ranks * microbatches
        if shape[0] % parts:
            below, above = shape[0] - shape[0] % parts, shape[0] + parts - shape[0] % parts
            better = f"{below} or {above}" if below else f"{above}"
            cut = f" and {microbatches} microbatches" if microbatches > 1 else ""
            raise ValueError(
                f"batch_size: got {shape[0]} rows, which {ranks} data-parallel ranks{cut} cannot share evenly, wanted "
                f"{better}; or use a mesh whose data axes multiply to a divisor of it"
            )
        rows = Split(names, microbatches) if microbatches > 1 and ranks > 1 else names
        along = mesh.axes(self.sequence) if len(shape) > 1 else ()
        pieces = mesh.extent(along)
        length = shape[1] if len(shape) > 1 else 0
        if length % pieces:
            raise ValueError(
                f"sequence: got {length} positions, which {pieces} ranks of {'+'.join(along)} cannot share evenly, "
                f"wanted a multiple; pad it to {-(-length // pieces) * pieces}, or choose another mesh"
            )
        return Layout(shape, dtype, mesh, (rows, along) if pieces > 1 else (rows,))

    def place(self, layout: Layout, whole: tuple[int, ...] = ()) -> Placed:
        """The three layouts of one parameter.

        layout: where the model's rules put it; the dim on which they name a data axis is the one that `params` splits.
        whole: dims that parameters at rest never split (the layer dim of stacked leaves).
        """
        params = self.params_layout(layout, whole)
        return Placed(params, self.grads_layout(params), self.optim_layout(params))

    def params_layout(self, layout: Layout, whole: tuple[int, ...] = ()) -> Layout:
        """At rest: split over `params` on the dims where the rules name data axes, else on another dim that divides.

        A leaf that no dim can share out equally is flattened into ranges, or padded (see the class). Of a stack, whose
        leading dims stay full, a matrix is split on a dim that pads at most 1/64, else each layer into ranges. Raises
        ValueError where a large leaf would stay full for another reason.
        """
        named = [d for d in range(len(layout.shape)) if set(layout.axes(d)) & set(self.tokens)]
        if pieces := sorted(set(named) & set(layout.assigned)):
            raise ValueError(
                f"DataParallel: got {layout}, whose dim {pieces[0]} is assigned in pieces over data axes, which share "
                "every dim equally, wanted sizes and order over other axes (pp); name the axes alone"
            )
        base = layout.without(layout.mesh.axes(self.tokens))
        free = [d for d in range(len(layout.shape)) if d not in named and d not in whole and _plain(layout, d)]
        in_order = sorted(free, key=lambda d: -layout.shape[d])
        # The order of the mesh, so that the minor axis of a dim is the one that is gathered first.
        axes = [name for name in layout.mesh.names if name in self.params]
        behind = whole == tuple(range(len(whole))) and len(whole) < len(layout.shape)
        found = _split_over(base, axes, [*named, *in_order], len(whole) if behind else None, self.block)
        if len(whole) < len(layout.shape):
            _require_split(found, axes, whole)
        return found

    def grads_layout(self, params: Layout) -> Layout:
        """Of an accumulated gradient: sharded over `grads` beyond the parameter, and a pending sum over the others."""
        layout = _split_over(params, self._more(params, self.grads), _contiguous_first(params), 0, self.block)
        pending = tuple(a for a in self.tokens if layout.mesh[a] > 1 and a not in layout.sharded)
        return layout.replace(unreduced=pending)

    def optim_layout(self, params: Layout) -> Layout:
        """Of moments, master weights and the updated parameter: sharded over `optim` beyond the parameter."""
        reduced = self.grads_layout(params).replace(unreduced=())
        return _split_over(reduced, self._more(reduced, self.optim), _contiguous_first(reduced), 0, self.block)

    def _more(self, layout: Layout, axes: tuple[str, ...]) -> list[str]:
        return [name for name in layout.mesh.axes(axes) if name not in layout.sharded]


def shared_over(layout: Layout, axis: str, whole: tuple[int, ...] = ()) -> Layout:
    """The layout at rest of a parameter that the ranks of one more axis share: split over it as the minor axis of a dim
    that divides, else where least padding is, or in ranges; the same where the axis is of size 1.

    whole: dims that it does not split.
    """
    dims = [d for d in range(len(layout.shape)) if d not in whole and _plain(layout, d)]
    behind = whole == tuple(range(len(whole))) and len(whole) < len(layout.shape)
    return _split_over(layout, [axis], sorted(dims, key=lambda d: -layout.shape[d]), len(whole) if behind else None, 1)


def _contiguous_first(layout: Layout) -> list[int]:
    """Dims in the order in which they are split for gradients and state: a reduce-scatter of dim 0 copies nothing, and
    leaves matrices of a stack unsplit, for optimizers that look at matrices."""
    dims = [d for d in range(len(layout.shape)) if _plain(layout, d)]
    return sorted(dims, key=lambda d: (d > 0, -layout.shape[d]))


def _plain(layout: Layout, dim: int) -> bool:
    """Whether a dim is not interleaved or assigned; a cut of an interleaved dim moves every part of it."""
    return not isinstance(layout.spec[dim], Split) or not layout.counts[dim]


def _split_over(layout: Layout, axes: list[str], dims: list[int], first: int | None, block: int) -> Layout:
    """The layout with every axis put, as the minor one, on the first of `dims` that all ranks can share equally, or
    where least padding is. first: the dim from which on it may be flattened into ranges; None: it may not. block: of
    elements of the last dim, of which no edge cuts one."""
    for axis in axes:
        if layout.mesh[axis] == 1:
            continue
        layout = _split_once(layout, axis, dims, first, block) or layout
    return layout


def _split_once(layout: Layout, axis: str, dims: list[int], first: int | None, block: int) -> Layout | None:
    """The layout with the axis where it divides: on a dim, else in ranges; else where it pads least. None: nowhere."""
    ranks, held = int(layout.mesh[axis]), _room(layout)
    if not layout.is_even_otherwise or 0 in layout.shape or not layout.shape:
        return None  # the uneven layout of a rule stays what it is
    on_dims = [_on_dim(layout, axis, dim) for dim in dims if not layout.flat]
    if len(layout.shape) - 1 == (layout.flat_from if layout.flat else first or 0) and layout.shape[-1] % block:
        block = 1  # of a row with a shorter block at its end no padding may begin within one
    on_dims = [found for found in on_dims if block == 1 or found.axes(-1) == layout.axes(-1) or _whole(found, block)]
    first, in_ranges = layout.flat_from if layout.flat else first, []
    if first is not None:
        unit = _unit(layout, block)
        in_ranges = [layout.replace(flat=(*layout.flat, axis), flat_from=first, padded=unit)]
    for found in on_dims if first else (*on_dims, *in_ranges):  # of a stack matrices before equal ranges
        if _room(found) * ranks == held:
            return found
    # The dim before ranges: a matrix stays one for optimizers that look at matrices.
    best = min(on_dims, key=_room, default=None)
    if best is None or _room(best) * ranks > held * (1 + _MOST_PADDING):
        best = min((found for found in (best, *in_ranges) if found is not None), key=_room, default=None)
    return best if best is not None and _room(best) < held else None


def _on_dim(layout: Layout, axis: str, dim: int) -> Layout:
    spec = list(layout.spec)
    entry, names = spec[dim], (*entry_axes(spec[dim]), axis)
    spec[dim] = Split(names, entry.parts) if isinstance(entry, Split) and layout.counts[dim] else names
    return layout.replace(spec=tuple(spec), padded=True)


def _whole(layout: Layout, block: int) -> bool:
    """Whether no edge on the last dim cuts a block of it, nor padding begins within one."""
    width, parts, ways = min(block, layout.shape[-1]), layout.parts[-1], math.prod(layout.counts[-1])
    edges = [rooms(part, layout.counts[-1])[-1] for part in parts]
    exact = all(edge * ways == part for edge, part in zip(edges, parts, strict=True))
    return not any(n % width for n in (edges if exact else (*edges, *parts)))


def _unit(layout: Layout, block: int) -> int:
    """Of which ranges are multiples, so that no edge cuts a block of the last dim: a block, or, where rows end with a
    shorter one, a row."""
    width, row = min(block, layout.shape[-1]), layout.replace(flat=(), unreduced=()).local_shape(0)[-1]
    return row if row % width else width


def _room(layout: Layout) -> int:
    """Elements that every rank has room for, or the one with most pieces of a dim that is assigned."""
    return math.prod(layout.local_shape(layout.fullest))


def _require_split(layout: Layout, axes: list[str], whole: tuple[int, ...]) -> None:
    """ValueError where a large leaf stays full over an axis that was to shard it."""
    nbytes = layout.most_nbytes
    left = [axis for axis in axes if layout.mesh[axis] > 1 and axis not in layout.sharded]
    if left and layout.is_even_otherwise and nbytes > _LARGE_BYTES:
        raise ValueError(
            f"DataParallel: got {layout}, of which every rank along {'+'.join(left)} would hold all {nbytes} bytes, "
            f"wanted a dim that it can split: not one of {whole or '()'}, which stay whole, and not one of interleaved "
            "parts; give the leaf another dim, do not split it over tp, or leave the axis out of the strategy"
        )

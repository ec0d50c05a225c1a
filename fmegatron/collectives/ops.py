"""Differentiable collectives over named axes, of one tensor or of a list that travels together: one node in a graph.

Each has one transpose, and nothing else sums or moves gradients. Types in the notation of the scaling book: `x[S_a]` is
sharded over axis a on dim S, `x{U_a}` is a partial sum over a, no mark is replicated. For the gradient of a replicated
value two meanings exist: every rank holds the full gradient, or each holds a part of the sum. `enter` is the border
between them, and the only op that sums gradients: a value that is replicated and used differently by each rank must
pass through `enter` exactly once.

Over an axis of size 1 every function returns its argument: no node is left in the graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fmegatron.collectives.axes import Axis
from fmegatron.collectives.kinds import is_flat, linear
from fmegatron.collectives.places import Place
from fmegatron.collectives.real import filled_up
from fmegatron.collectives.table import (
    ALL_GATHER,
    ALL_TO_ALL,
    ALL_TO_ALL_ROWS,
    AXIS_INDEX,
    CUT,
    DECLARE,
    PMAX,
    PPERMUTE,
    PSUM,
    REDUCE_SCATTER,
)
from fmegatron.collectives.torch_private import is_transformed
from fmegatron.collectives.wires import Wire, wide

__all__ = [
    *("all_gather", "all_gather_many", "all_to_all", "all_to_all_many", "all_to_all_rows", "axis_index", "declare"),
    *("enter", "pmax", "ppermute", "psum", "psum_many", "reduce_scatter", "reduce_scatter_many", "shard"),
]


# ---- gathers and reductions ------------------------------------------------------------------------------------------
def all_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """`x[S_a] -> x[S]`; transpose: reduce_scatter over a on the same dim.

    Each rank uses the gathered value for its own purpose, so the gradients of all ranks are summed on the way back.
    An interleaved dim is left as it comes, the shards side by side.
    """
    dim = _dim(x, dim, f"all_gather over {_own(axis, 'all_gather', x)}")
    return all_gather_many([x], axis, [_side_by_side(axis, dim)])[0]


def lend(x: Tensor, axis: Axis, dim: int | Place) -> Tensor:
    """`x[S_a] -> x[S]` as all_gather, for a value that every rank then treats identically and cuts by a again.

    Transpose: shard over a (see `reshard`). After the cut's transpose, an all_gather, each rank has the full gradient:
    the reduce-scatter of a plain all_gather would add up as many copies as there are ranks. dim: a `Place` where shards
    have padding.
    """
    if axis.size == 1:
        return x
    place = dim if isinstance(dim, Place) else _side_by_side(axis, dim)
    return linear(
        lambda xs, *_: ALL_GATHER.emit(xs, axis, [place]),
        lambda gs, *_: [_own_part(g, axis, dim) for g in gs],
        [x],
        name=f"a gather over {axis}",
        flat=is_flat(place),
    )[0]


def all_gather_many(
    xs: Sequence[Tensor],
    axis: Axis,
    dims: Sequence[int | Place],
    wire: Wire | Sequence[Wire] = Wire(),  # noqa: B008  a frozen value
    scales: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """`x[S_a] -> x[S]` for each tensor, in one collective; transpose: one reduce_scatter_many over a on the same dims.

    The transpose leaves out tensors that need no gradient, and the gradient that arrives has the tensor's own dtype.
    With `exact` for some of the tensors only, it is two collectives. The rounding is not differentiated: the gradient
    of what arrives is that of the tensor (straight through). Over an axis of size 1 only the roundings remain.

    Args:
        xs: the shards.
        axis: one axis, or several joined.
        dims: per tensor the dim that the axis splits (joined axes: major first), or a `Place` for interleaved dims,
            flat shards, and joined axes that split different dims.
        wire: for all tensors or one for each: dtypes on the way there and back.
        scales: per tensor the scale (0-d fp32, the same on all ranks) with which it travels in 8 bits, or None.

    Raises ValueError for a place that does not fit its tensor.
    """
    _own(axis, "all_gather", *xs)
    wires = [wire] * len(xs) if isinstance(wire, Wire) else list(wire)
    scales = [None] * len(xs) if scales is None else list(scales)
    if axis.size == 1:
        given = zip(xs, wires, scales, strict=True)
        return [x if _idle(w, x.dtype) else _gathered([x], axis, [], [w], [s])[0] for x, w, s in given]
    who = f"all_gather over {axis}"
    places = _places(xs, axis, dims, who)
    for x, place in zip(xs, places, strict=True):
        place.check(place.whole_shape(x.shape, axis.sizes), axis.sizes, who)
        place.require_shard(x.shape, axis.sizes, who)
    return _gathered(xs, axis, places, wires, scales)


def _gathered(xs, axis, places, wires, scales):
    """Casts around the gather; transpose: casts around the reduction. Over an axis of size 1 the casts alone."""
    dtypes, arriving = [x.dtype for x in xs], [_arriving(x.dtype, wire) for x, wire in zip(xs, wires, strict=True)]
    scaled = [i for i, scale in enumerate(scales) if scale is not None]

    def there(xs, which, beside):
        given = dict(zip(scaled, beside, strict=True))
        sent = [wires[i].sent(x, given.get(i)) for x, i in zip(xs, which, strict=True)]
        whole = ALL_GATHER.emit(sent, axis, [places[i] for i in which]) if axis.size > 1 else _same(sent)
        return [wires[i].arrived(y, given.get(i)) for y, i in zip(whole, which, strict=True)]

    def back(gs, which, _):
        out: dict[int, Tensor] = {}
        # Exact and plain sums are two kinds of reduction; one wire for all makes one collective.
        for exact in (False, True):
            mine = [(i, g) for i, g in zip(which, gs, strict=True) if wires[i].exact == exact]
            sent = [g if wires[i].reduce is None else g.to(wires[i].reduce) for i, g in mine]
            if axis.size > 1:
                _require_sums(sent, exact, f"reduce_scatter over {axis}")
                sent = REDUCE_SCATTER.emit(sent, axis, [places[i] for i, _ in mine], exact)
            out |= {i: g.to(dtypes[i]) for (i, _), g in zip(mine, sent, strict=True)}
        return [out[i] for i in which]

    def again(gs, which, _):  # without the rounding of 8 bits, whose scale is that of the value
        sent = [g.to(wires[i].reduce or arriving[i]) for g, i in zip(gs, which, strict=True)]
        whole = ALL_GATHER.emit(sent, axis, [places[i] for i in which]) if axis.size > 1 else _same(sent)
        return [y.to(arriving[i]) for y, i in zip(whole, which, strict=True)]

    return linear(
        *(there, back, xs, *[scale for scale in scales if scale is not None]),
        name=f"all_gather over {axis}",
        flat=any(map(is_flat, places)),
        again=again,
    )


def _same(xs: list[Tensor]) -> list[Tensor]:
    return [x.view_as(x) for x in xs]


def _arriving(dtype: torch.dtype, wire: Wire) -> torch.dtype:
    return wire.arrive or (torch.float32 if wire.scaled else wire.gather) or dtype


def _idle(wire: Wire, dtype: torch.dtype) -> bool:
    return {wire.gather, wire.reduce, wire.arrive} <= {None, dtype}


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """`x[S]{U_a} -> x[S_a]`; transpose: all_gather over a on the same dim. The dim must divide by the axis size."""
    dim = _dim(x, dim, f"reduce_scatter over {_own(axis, 'reduce_scatter', x)}")
    return reduce_scatter_many([x], axis, [dim])[0]


def reduce_scatter_many(
    xs: Sequence[Tensor], axis: Axis, dims: Sequence[int | Place], exact: bool = False
) -> list[Tensor]:
    """`x[S]{U_a} -> x[S_a]` for each tensor, in one collective; transpose: one all_gather_many on the same dims.

    exact: what has less than 32 bits is sent as it is, summed in fp32 and returned in fp32. Several dtypes, or exact:
    an all_to_all of bytes and local sums in the order of the ranks; the bytes are those of a reduce-scatter.
    Raises ValueError for a place that does not fit its tensor, dims that do not divide included.
    """
    who = f"reduce_scatter over {_own(axis, 'reduce_scatter', *xs)}"
    if axis.size == 1:
        return [x.to(wide(x.dtype)) if exact else x for x in xs]
    places = _places(xs, axis, dims, who)
    for x, place in zip(xs, places, strict=True):
        place.check(x.shape, axis.sizes, who)
    _require_sums(xs, exact, who)
    return REDUCE_SCATTER(xs, axis, places, exact)


def psum(x: Tensor, axis: Axis) -> Tensor:
    """`x{U_a} -> x`; transpose: identity. All ranks use the sum in one way, so its gradient is complete."""
    return psum_many([x], axis)[0]


def psum_many(xs: Sequence[Tensor], axis: Axis, exact: bool = False) -> list[Tensor]:
    """`x{U_a} -> x` for each tensor, together; transpose: identity (see `psum`).

    One all_reduce where all have one dtype. exact (as in `reduce_scatter_many`), or several dtypes: a reduce-scatter of
    bytes by all_to_all and an all-gather of the sums; one all-gather and local sums where that sends no more or little.
    """
    if _own(axis, "psum", *xs).size == 1:
        return [x.to(wide(x.dtype)) if exact else x for x in xs]
    _require_sums(xs, exact, f"psum over {axis}")
    return PSUM(xs, axis, exact)


def enter(x: Tensor, axis: Axis) -> Tensor:
    """`x -> x`, the identity; transpose: psum over a. Marks where a replicated value begins to be used differently."""
    if _own(axis, "enter", x).size == 1:
        return x
    return linear(lambda xs, *_: _same(xs), lambda gs, *_: PSUM.emit(gs, axis, False), [x], name=f"enter over {axis}")[
        0
    ]


def pmax(x: Tensor, axis: Axis) -> Tensor:
    """Elementwise maximum over a; no gradient passes (the argument is detached)."""
    return x.detach() if _own(axis, "pmax", x).size == 1 else PMAX([x], axis)[0]


# ---- moves -----------------------------------------------------------------------------------------------------------
def all_to_all(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """`x[S, C_a] -> x[S_a, C]` (split_dim S, concat_dim C); transpose: all_to_all with the dims exchanged."""
    return all_to_all_many([x], axis, [split_dim], [concat_dim])[0]


def all_to_all_many(
    xs: Sequence[Tensor], axis: Axis, split_dims: Sequence[int], concat_dims: Sequence[int]
) -> list[Tensor]:
    """`x[S, C_a] -> x[S_a, C]` for each tensor, in one collective; transpose: the same with the dims exchanged.

    split_dims, concat_dims: S and C of each tensor. Raises ValueError for a dim that a tensor does not have, and for a
    split dim that does not divide by the axis.
    """
    who = f"all_to_all over {_own(axis, 'all_to_all', *xs)}"
    if len(xs) != len(split_dims) or len(xs) != len(concat_dims):
        raise ValueError(
            f"{who}: got {len(xs)} tensors, {len(split_dims)} split dims and {len(concat_dims)} concat dims, wanted "
            "as many of each; give one of each for each tensor"
        )
    splits = [_dim(x, dim, f"{who}: split dim") for x, dim in zip(xs, split_dims, strict=True)]
    concats = [_dim(x, dim, f"{who}: concat dim") for x, dim in zip(xs, concat_dims, strict=True)]
    for x, dim in zip(xs, splits, strict=True):
        _side_by_side(axis, dim).check(x.shape, axis.sizes, who)
    return ALL_TO_ALL(xs, axis, splits, concats)


def all_to_all_rows(x: Tensor, send: Tensor, recv: Tensor, axis: Axis, rows: int) -> Tensor:
    """Each rank's own rows `x[N, ...]` to the ranks that they are for -> its own rows `y[rows, ...]`.

    The shape of the result is a number of the trace, the counts are data: one graph for all ranks and all counts.
    Transpose: the same with the counts exchanged. Over an axis of size 1: the first send[0] rows, then zeros.

    Args:
        x: rows sorted by destination; of more than send.sum() the rest stays here.
        send: [n] int64, how many go to each index along the axis.
        recv: [n] int64, how many come from each: `all_to_all(send, axis, 0, 0)`.
        axis: of size n.
        rows: of the result, which are sorted by source; behind them are zeros. Rows that do not fit are left out, and
            where their results are sent back, zeros arrive: compare recv.sum() with rows, and refuse the step.

    Raises ValueError for counts of another shape or dtype, and for rows below 0.
    """
    who = f"all_to_all_rows over {_own(axis, 'all_to_all_rows', x, send, recv)}"
    for name, counts in (("send", send), ("recv", recv)):
        if tuple(counts.shape) != (axis.size,) or counts.dtype != torch.int64:
            raise ValueError(
                f"{who}: {name}: got {counts.dtype} of shape {tuple(counts.shape)}, wanted torch.int64 of "
                f"({axis.size},); give a count for each rank of the axis"
            )
    if rows < 0 or x.dim() == 0:
        raise ValueError(
            f"{who}: got {rows} rows of a tensor of shape {tuple(x.shape)}, wanted 0 or more rows of at least one dim; "
            "give the number of rows that the result has room for"
        )
    if axis.size > 1:
        return ALL_TO_ALL_ROWS([x], axis, send, recv, x.shape[0], rows)[0]
    here = torch.arange(rows, device=x.device) < send[0]
    return torch.where(here.view(-1, *[1] * (x.dim() - 1)), filled_up(x, rows)[:rows], 0)


def ppermute(x: Tensor, axis: Axis, shift: int) -> Tensor:
    """Rank i receives the value of rank i - shift (a ring); transpose: ppermute by -shift."""
    if not isinstance(shift, int):
        raise ValueError(
            f"ppermute over {_own(axis, 'ppermute')}: got shift={shift!r}, wanted a whole number: every rank sends to "
            "the one that is so many behind it; the pairs (i, i + 1) of all ranks are shift=1"
        )
    _own(axis, "ppermute", x)
    return PPERMUTE([x], axis, shift)[0]


def shard(x: Tensor, axis: Axis, dim: int | Place) -> Tensor:
    """`x[S] -> x[S_a]`, this rank's part of a value replicated over a; transpose: all_gather over a.

    dim: a `Place` where the parts have padding behind them, which then is zeros. Raises ValueError for a dim or place
    that does not fit.
    """
    who = f"shard over {_own(axis, 'shard', x)}"
    dim = dim if isinstance(dim, Place) else _dim(x, dim, who)
    if axis.size == 1:
        return x
    place = dim if isinstance(dim, Place) else _side_by_side(axis, dim)
    place.check(x.shape, axis.sizes, who)
    return linear(
        lambda xs, *_: [_own_part(x, axis, dim) for x in xs],
        lambda gs, *_: ALL_GATHER.emit(gs, axis, [place]),
        [x],
        name=f"shard over {axis}",
        flat=is_flat(place),
    )[0]


def _own_part(x: Tensor, axis: Axis, dim: int | Place) -> Tensor:
    """This rank's part of `dim`, with the rank as a tensor, so that the graph does not depend on it."""
    if isinstance(dim, Place):
        return CUT.emit([x], axis, [dim], axis_index(axis, like=x))[0]
    parts = x.unflatten(dim, (axis.size, x.shape[dim] // axis.size))
    return parts.index_select(dim, axis_index(axis, like=x).view(1)).squeeze(dim)


# ---- what depends on the rank ----------------------------------------------------------------------------------------
def axis_index(axis: Axis, like: Tensor | None = None) -> Tensor:
    """This rank's position along the axis, a 0-d int64 tensor on the device of `like`.

    A tensor and never a Python int: all ranks share one graph, and a checker can see what depends on the rank.
    """
    if _own(axis, "axis_index").size == 1:
        return torch.zeros((), dtype=torch.int64, device=None if like is None else like.device)
    if like is None or is_transformed():  # a value of which torch.func has several rows would give several positions
        like = torch.zeros((), device=None if like is None else like.device)
    return AXIS_INDEX([like], axis)[0]


def declare(
    x: Tensor,
    axis: Axis,
    forward: str | tuple[str, int] | None = None,
    backward: str | tuple[str, int] | int | None = None,
) -> Tensor:
    """State what no rule can see of value and gradient: "partial", "replicated", ("sharded", dim) or "own".

    An identity that leaves a node only in symbolic graphs. It is the one statement that a checker believes, so use it
    only where rules end (a lookup of this rank's rows, an op that the check calls unproven); `testing.simulate` tests
    it.
    `declare(x, axis, "own", dim)`: from here on `x[S_a]` is this rank's own part, in an order or at a place that no
    layout describes (routed rows, a block of keys that goes round a ring); its transpose declares the part sharded on
    `dim` again. The way back is `declare(y, axis, ("sharded", dim))`.

    Args:
        x: the ranks' values.
        axis: over which they are what is said.
        forward: what the value is; None: what the rules find.
        backward: the same for its gradient. After "own" the dim on which x is sharded.

    Raises ValueError for anything else.
    """
    if forward == "own":
        if not isinstance(backward, int):
            raise ValueError(
                f'declare: "own": got {backward!r} after it, wanted the dim on which the axis shards the value; its '
                'gradient is declared sharded there: declare(x, axis, "own", 0)'
            )
        backward = ("sharded", _dim(x, backward, 'declare: "own"'))
    for name, kind in (("forward", forward), ("backward", backward)):
        words = kind in (None, "own", "partial", "replicated")
        if not words and not (isinstance(kind, tuple) and len(kind) == 2 and kind[0] == "sharded"):
            raise ValueError(
                f'declare: {name}: got {kind!r}, wanted "own", "partial", "replicated", ("sharded", dim) or None; '
                "say what the ranks' values are"
            )
    if _own(axis, "declare").size == 1 or axis.world is not None:
        return x

    def stated(xs, kind):
        name, dim = (kind, -1) if isinstance(kind, str) else kind or ("", -1)
        return DECLARE.emit(xs, axis, name, dim) if name else _same(xs)

    return linear(
        lambda xs, *_: stated(xs, forward), lambda gs, *_: stated(gs, backward), [x], name=f"declare over {axis}"
    )[0]


def as_terms(x: Tensor, axis: Axis, count: Tensor | float) -> Tensor:
    """x as this rank's term of a sum over the axis, also where all ranks have the same: then as one of n equal terms.

    An identity that leaves nodes only in symbolic graphs, for a check: what is pending stays so; what all ranks have is
    pending from here on, and so is its gradient, of which each rank gets 1/n of that of the sum's value.

    Args:
        x: the ranks' terms.
        axis: over which they are added up.
        count: of this rank, by the sum of which that of x is divided. Where x is equal on all ranks and this may be the
            number of each one's rows (a whole number above 1, and no size that all ranks have), the check cannot tell
            whether it is right.
    """
    if _own(axis, "as_terms").size == 1 or axis.world is not None:
        return x
    beside = [count.detach()] if isinstance(count, Tensor) else []
    rows, before = 0, x.detach()
    if not isinstance(count, Tensor) and count > 1 and count == int(count):
        rows, _ = count.as_integer_ratio()  # which knows of what it is made
    return linear(
        lambda xs, _, beside: DECLARE.emit([*xs, *beside[1:]], axis, "terms", rows)[:1],
        lambda gs, _, beside: DECLARE.emit([*gs, *beside], axis, "terms of", rows)[:1],
        [x],
        *(before, *beside),
        name=f"a sum over {axis}",
    )[0]


# ---- arguments -------------------------------------------------------------------------------------------------------
def _own(axis: Axis, who: str, *given: Tensor) -> Axis:
    """The axis. ValueError for what is none, such as its name, and for a value that is no tensor."""
    if not isinstance(axis, Axis):
        name = repr(axis) if isinstance(axis, str) else "name"
        raise ValueError(f"{who}: got the axis {axis!r}, wanted a value of Axes; with axes = Axes(mesh): axes[{name}]")
    for x in given:
        if not isinstance(x, Tensor):
            raise ValueError(
                f"{who} over {axis}: got a value of type {type(x).__name__}, wanted a tensor; of a tree it is "
                f"tree.map(lambda x: {who}(x, ...), values), and the number of ranks is the axis's own: axis.size"
            )
    return axis


def _side_by_side(axis: Axis, dim: int) -> Place:
    return Place((dim,) * len(axis.names), dim)


def _dim(x: Tensor, dim: int, who: str) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{who}: got dim {dim} of a tensor with shape {tuple(x.shape)}, wanted a dim of it")
    return dim % x.dim()


def _require_sums(xs: Sequence[Tensor], exact: bool, who: str) -> None:
    for x in xs:
        if x.dtype.is_floating_point and x.dtype.itemsize == 1 and not exact:
            raise ValueError(
                f"{who}: got {x.dtype}, which has no sums, wanted 16 bits or more; cast it "
                "(Wire(reduce=torch.bfloat16)), or use exact"
            )


def _places(xs: Sequence[Tensor], axis: Axis, dims: Sequence[int | Place], who: str) -> list[Place]:
    if len(dims) != len(xs):
        raise ValueError(
            f"{who}: got {len(xs)} tensors and {len(dims)} dims, wanted as many; give one dim (or Place) for each "
            "tensor"
        )
    out = []
    for x, dim in zip(xs, dims, strict=True):
        place = Place((_dim(x, dim, who),) * len(axis.names)) if isinstance(dim, int) else dim
        if len(place.dims) != len(axis.names):
            raise ValueError(
                f"{who}: got the place {place} for {len(place.dims)} axes, wanted one for {len(axis.names)}; name each "
                "axis's dim"
            )
        out.append(place)
    return out

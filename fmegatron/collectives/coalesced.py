"""One collective for a list of tensors, whatever their shapes and dtypes: differentiable, one node in a graph.

The type of each tensor is that of the single op; what the list adds is that all travel in one buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fmegatron.collectives import real_coalesced
from fmegatron.collectives.axes import Axis
from fmegatron.collectives.place import Place
from fmegatron.collectives.wire import Wire, wide

__all__ = ["all_gather_many", "all_to_all_many", "psum_many", "reduce_scatter_many"]


# ---- what a call emits -----------------------------------------------------------------------------------------------
def _emit(name: str, xs: list[Tensor], axis: Axis, *arguments) -> list[Tensor]:
    if not xs:
        return []
    if axis.world is None:
        return getattr(torch.ops.fmegatron, name)(xs, axis.names, *arguments, mesh=axis.mesh.fingerprint)
    return real_coalesced.emit(name, xs, axis.world, axis.names, *arguments)


def _gather(xs, axis, places):
    return _emit("all_gather_many", xs, axis, list(axis.sizes), [str(p) for p in places])


def _require_sums(xs: Sequence[Tensor], exact: bool, what: str) -> None:
    for x in xs:
        if x.dtype.is_floating_point and x.dtype.itemsize == 1 and not exact:
            raise ValueError(f"{what}: {x.dtype} has no sums; cast it (Wire(reduce=torch.bfloat16)), or use exact")


def _scatter(xs, axis, places, exact):
    _require_sums(xs, exact, f"reduce_scatter_many over {axis}")
    return _emit("reduce_scatter_many", xs, axis, list(axis.sizes), [str(p) for p in places], exact)


# ---- the pairs of an op and its transpose ----------------------------------------------------------------------------
class _AllGatherMany(torch.autograd.Function):
    """Casts around the gather; transpose: casts around the reduction. Over an axis of size 1 the casts alone."""

    @staticmethod
    def forward(ctx, axis, places, wires, scales, *xs):
        ctx.axis, ctx.places, ctx.wires, ctx.dtypes = axis, places, wires, [x.dtype for x in xs]
        sent = [wire.sent(x, scale) for x, wire, scale in zip(xs, wires, scales, strict=True)]
        whole = _gather(sent, axis, places) if axis.size > 1 else [x.view_as(x) for x in sent]
        return tuple(wire.arrived(y, scale) for y, wire, scale in zip(whole, wires, scales, strict=True))

    @staticmethod
    def backward(ctx, *gs):
        out: list[Tensor | None] = [None] * len(gs)
        trained = [i for i in range(len(gs)) if ctx.needs_input_grad[4 + i]]
        # Exact and plain sums are two kinds of reduction; one wire for all makes one collective.
        for exact in (False, True):
            mine = [i for i in trained if ctx.wires[i].exact == exact]
            sent = [gs[i] if ctx.wires[i].reduce is None else gs[i].to(ctx.wires[i].reduce) for i in mine]
            if ctx.axis.size > 1:
                sent = _scatter(sent, ctx.axis, [ctx.places[i] for i in mine], exact)
            for i, g in zip(mine, sent, strict=True):
                out[i] = g.to(ctx.dtypes[i])
        return None, None, None, None, *out


class _ReduceScatterMany(torch.autograd.Function):
    @staticmethod
    def forward(ctx, axis, places, exact, *xs):
        ctx.axis, ctx.places, ctx.dtypes = axis, places, [x.dtype for x in xs]
        return tuple(_scatter(list(xs), axis, places, exact))

    @staticmethod
    def backward(ctx, *gs):
        sent = [g.to(dtype) for g, dtype in zip(gs, ctx.dtypes, strict=True)]
        return None, None, None, *_gather(sent, ctx.axis, ctx.places)


class _PsumMany(torch.autograd.Function):
    @staticmethod
    def forward(ctx, axis, exact, *xs):
        ctx.dtypes = [x.dtype for x in xs]
        return tuple(_emit("psum_many", list(xs), axis, exact))

    @staticmethod
    def backward(ctx, *gs):
        return None, None, *(g.to(dtype) for g, dtype in zip(gs, ctx.dtypes, strict=True))


class _AllToAllMany(torch.autograd.Function):
    @staticmethod
    def forward(ctx, axis, split_dims, concat_dims, *xs):
        ctx.axis, ctx.dims = axis, (split_dims, concat_dims)
        return tuple(_emit("all_to_all_many", list(xs), axis, axis.size, split_dims, concat_dims))

    @staticmethod
    def backward(ctx, *gs):
        return None, None, None, *_emit("all_to_all_many", list(gs), ctx.axis, ctx.axis.size, *reversed(ctx.dims))


# ---- the public functions --------------------------------------------------------------------------------------------
def _places(xs: Sequence[Tensor], axis: Axis, dims: Sequence[int | Place], what: str) -> list[Place]:
    if len(dims) != len(xs):
        raise ValueError(f"{what}: got {len(xs)} tensors and {len(dims)} dims; give one dim (or Place) for each tensor")
    out = []
    for x, dim in zip(xs, dims, strict=True):
        if isinstance(dim, int):
            if not -x.dim() <= dim < x.dim():
                raise ValueError(f"{what}: dim {dim} of a tensor with shape {tuple(x.shape)}; give a dim of it")
            dim = Place((dim % x.dim(),) * len(axis.names))
        if len(dim.dims) != len(axis.names):
            raise ValueError(f"{what} over {axis}: got the place {dim} for {len(dim.dims)} axes; name each axis's dim")
        out.append(dim)
    return out


def all_gather_many(
    xs: Sequence[Tensor],
    axis: Axis,
    dims: Sequence[int | Place],
    wire: Wire | Sequence[Wire] = Wire(),  # noqa: B008  a frozen value
    scales: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """`x[S_a] -> x[S]` for each tensor, in one collective; transpose: one reduce_scatter_many over a on the same dims.

    dims: per tensor the dim that the axis splits (joined axes: major first), or a `Place` for interleaved dims, flat
    shards, and joined axes that split different dims. The transpose leaves out tensors that need no gradient.
    wire: for all tensors or one for each: dtypes on the way there and back (with `exact` for some of the tensors only,
    the transpose is two collectives). The gradient that arrives has the tensor's own dtype.
    scales: per tensor the scale (0-d fp32, alike on all ranks) with which it travels in 8 bits, or None. The rounding
    is not differentiated: the gradient of what arrives is that of the tensor (straight through).
    Over an axis of size 1 only the roundings remain. Raises ValueError for a place that does not fit its tensor.
    """
    wires = [wire] * len(xs) if isinstance(wire, Wire) else list(wire)
    scales = [None] * len(xs) if scales is None else list(scales)
    if axis.size == 1:
        given = zip(xs, wires, scales, strict=True)
        return [x if _idle(w, x.dtype) else _AllGatherMany.apply(axis, [], [w], [s], x)[0] for x, w, s in given]
    places = _places(xs, axis, dims, "all_gather_many")
    for x, place in zip(xs, places, strict=True):
        place.check(place.whole_shape(x.shape, axis.sizes), axis.sizes, f"all_gather_many over {axis}")
    return list(_AllGatherMany.apply(axis, places, wires, scales, *xs)) if xs else []


def _idle(wire: Wire, dtype: torch.dtype) -> bool:
    return {wire.gather, wire.reduce, wire.arrive} <= {None, dtype}


def reduce_scatter_many(
    xs: Sequence[Tensor], axis: Axis, dims: Sequence[int | Place], exact: bool = False
) -> list[Tensor]:
    """`x[S]{U_a} -> x[S_a]` for each tensor, in one collective; transpose: one all_gather_many on the same dims.

    exact: what has less than 32 bits is sent as it is, summed in fp32 and returned in fp32. Several dtypes, or exact:
    an all_to_all of bytes and local sums in the order of the ranks; the bytes are those of a reduce-scatter.
    Raises ValueError for a place that does not fit its tensor, dims that do not divide included.
    """
    if axis.size == 1:
        return [x.to(wide(x.dtype)) if exact else x for x in xs]
    places = _places(xs, axis, dims, "reduce_scatter_many")
    for x, place in zip(xs, places, strict=True):
        place.check(x.shape, axis.sizes, f"reduce_scatter_many over {axis}")
    return list(_ReduceScatterMany.apply(axis, places, exact, *xs)) if xs else []


def psum_many(xs: Sequence[Tensor], axis: Axis, exact: bool = False) -> list[Tensor]:
    """`x{U_a} -> x` for each tensor, together; transpose: identity (see `psum`).

    One all_reduce where all have one dtype. exact (as in `reduce_scatter_many`), or several dtypes: a reduce-scatter of
    bytes by all_to_all and an all-gather of the sums; one all-gather and local sums where that sends no more or little.
    """
    if axis.size == 1:
        return [x.to(wide(x.dtype)) if exact else x for x in xs]
    _require_sums(xs, exact, f"psum_many over {axis}")
    return list(_PsumMany.apply(axis, exact, *xs)) if xs else []


def all_to_all_many(
    xs: Sequence[Tensor], axis: Axis, split_dims: Sequence[int], concat_dims: Sequence[int]
) -> list[Tensor]:
    """`x[S, C_a] -> x[S_a, C]` for each tensor, in one collective; transpose: the same with the dims exchanged.

    split_dims, concat_dims: S and C of each tensor. Raises ValueError for a dim that a tensor does not have, and for a
    split dim that does not divide by the axis.
    """
    if len(xs) != len(split_dims) or len(xs) != len(concat_dims):
        raise ValueError(
            f"all_to_all_many over {axis}: got {len(xs)} tensors, {len(split_dims)} split dims and {len(concat_dims)} "
            "concat dims; give one of each for each tensor"
        )
    for x, split, concat in zip(xs, split_dims, concat_dims, strict=True):
        if not (0 <= split < x.dim() and 0 <= concat < x.dim()) or x.shape[split] % axis.size:
            raise ValueError(
                f"all_to_all_many over {axis}: got split dim {split} and concat dim {concat} of a tensor with shape "
                f"{tuple(x.shape)}; want dims of it, the split one a multiple of {axis.size}"
            )
    if axis.size == 1 or not xs:
        return list(xs)
    return list(_AllToAllMany.apply(axis, list(split_dims), list(concat_dims), *xs))

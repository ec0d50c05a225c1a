"""Moves values from one layout to another inside a step, several of them in fewer collectives than one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fmegatron.collectives.axes import Axes
from fmegatron.collectives.ops import (
    all_gather,
    all_gather_many,
    all_to_all,
    lend,
    psum_many,
    reduce_scatter_many,
    shard,
)
from fmegatron.collectives.places import Place
from fmegatron.collectives.reshard_plan import Move, reshard_moves
from fmegatron.collectives.wires import Wire
from fmegatron.layout import Layout, split
from fmegatron.tree import labels

__all__ = ["reshard", "reshard_many", "whole_parts"]


def reshard(x: torch.Tensor, src: Layout, dst: Layout, axes: Axes) -> torch.Tensor:
    """The same global value laid out as `dst`; x is this rank's part under `src`.

    The collectives are those that `reshard_moves(src, dst)` lists, and their transposes are those of the ops: nothing
    is exchanged that need not be (pending sums are reduce-scattered where dst shards by that axis, else summed; an axis
    that moves from dim to dim is one all_to_all). Inside a graph all ranks have one shape, so both layouts must be
    even, by division or padding (which stays zeros); uneven ones are moved by `layout.plan_reshard` outside of graphs.
    Raises ValueError when shapes or meshes differ, a layout is uneven, or dst has a pending sum that src has not.
    """
    return reshard_many([x], [src], [dst], axes)[0]


def reshard_many(
    xs: Sequence[torch.Tensor],
    srcs: Sequence[Layout],
    dsts: Sequence[Layout],
    axes: Axes,
    wire: Wire | Sequence[Wire] = Wire(),  # noqa: B008  a frozen value
    bucket_bytes: int = 1 << 20,
) -> list[torch.Tensor]:
    """`reshard` of several values, in fewer collectives: small ones that need the same one share it.

    Transposes as in `reshard`, in the dtypes of the arguments. The results know their layouts.

    Args:
        xs: this rank's parts.
        srcs: their layouts.
        dsts: the layouts that are wanted.
        axes: those of the mesh of the layouts.
        wire: for all values or one for each: pending sums are reduced in `wire.reduce`, exactly if `wire.exact`, and
            arrive in the dtype of the sum (a value without a pending sum keeps its own); each of several reductions of
            one value is made so. Sums that are not exact are shared by values of one wire.
        bucket_bytes: bytes of the largest value that is copied into a shared buffer. Larger ones are buckets by
            themselves, and a copy would cost more than a collective.

    Raises ValueError as `reshard` does.
    """
    axes.require(list(srcs), "reshard: the source")
    wires = [wire] * len(xs) if isinstance(wire, Wire) else list(wire)
    xs, todo = list(xs), [reshard_moves(src, dst) for src, dst in zip(srcs, dsts, strict=True)]
    while any(todo):
        for i, moves in enumerate(todo):
            while moves and moves[0].op in ("flatten", "unflatten", "shard"):
                xs[i] = _locally(xs[i], moves.pop(0), srcs[i], axes)
        waiting = [i for i, moves in enumerate(todo) if moves]
        if not waiting:
            break
        first = waiting[0]
        mine = [first]
        if _small(xs[first], todo[first][0], dsts[first], bucket_bytes):
            mine += [i for i in waiting[1:] if _key(todo[i][0], wires[i]) == _key(todo[first][0], wires[first])
                     and _small(xs[i], todo[i][0], dsts[i], bucket_bytes)]  # fmt: skip
        moves, given = [todo[i].pop(0) for i in mine], ([xs[i] for i in mine], [wires[i] for i in mine])
        for i, x in zip(mine, _together(*given, moves, dsts[first], axes), strict=True):
            xs[i] = x
    of_dtype = (dst.replace(dtype=x.dtype) for x, dst in zip(xs, dsts, strict=True))
    return [
        labels.labelled(x, layout) if labels.layout_of(x) is None else x for x, layout in zip(xs, of_dtype, strict=True)
    ]


def _key(move, wire):
    """What values have in common that may share their next collective."""
    if move.op not in ("psum", "reduce_scatter"):
        return move.op, move.axes
    return move.op, move.axes, wire.exact, None if wire.exact else wire.reduce


def _small(x, move, dst, bucket_bytes):
    """Whether a value may share its next collective: one that all_to_all or `lend` moves does not."""
    shared = move.op in ("psum", "reduce_scatter") or (
        move.op == "all_gather" and not any(name in dst.sharded for name in move.axes)
    )
    return shared and x.numel() * x.dtype.itemsize <= bucket_bytes


def _together(xs, wires, moves, dst, axes):
    """The values after one move each, of the same kind over the same axes; dst: that of the first value."""
    op, axis, exact = moves[0].op, axes[moves[0].axes], wires[0].exact
    if op in ("psum", "reduce_scatter"):
        xs = [x if wire.reduce is None else x.to(wire.reduce) for x, wire in zip(xs, wires, strict=True)]
        if op == "psum":
            return psum_many(xs, axis, exact=exact)
        return reduce_scatter_many(xs, axis, [_place(m, axis) if m.true else m.dim for m in moves], exact=exact)
    if op == "all_to_all":
        return [all_to_all(xs[0], axis, split_dim=moves[0].dim2, concat_dim=moves[0].dim)]
    if not any(name in dst.sharded for name in moves[0].axes):
        return all_gather_many(xs, axis, [_place(move, axis) for move in moves])
    return [_lent(xs[0], moves[0], dst, axes)]


def _place(move, axis):
    if move.order:
        return Place((move.dim,) * len(axis.names), assigned=(move.parts, move.order))
    true = ((move.dim, move.true),) if move.true else ()
    parts = tuple(split.rooms(size, axis.sizes)[-1] for size in (move.true or move.parts if move.parts else ()))
    return Place((move.dim,) * len(axis.names), move.dim if parts else -1, parts, true=true, unit=move.unit)


def _locally(x: torch.Tensor, move: Move, src: Layout, axes: Axes) -> torch.Tensor:
    """The value after a move that needs no communication."""
    if move.op == "flatten":
        return _behind(max(move.dim, 0), x, lambda y, first: y.flatten(first))
    if move.op == "unflatten":
        block, k = src.replace(flat=(), unreduced=()).local_shape(0), src.flat_from
        return _behind(k, x, lambda y, first: y.view(block[k - first :]))
    if move.true or move.order:
        return shard(x, axes[move.axes], _place(move, axes[move.axes]))
    pieces = [x] if move.parts is None else x.split(list(move.parts), move.dim)
    pieces = [shard(piece, axes[move.axes], move.dim) for piece in pieces]
    return pieces[0] if move.parts is None else torch.cat(pieces, move.dim)


def _behind(first: int, x: torch.Tensor, view: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    """A view of the dims from `first` on."""
    if first and all(n == 1 for n in x.shape[:first]):
        # Apart from it: a dim of 1 in a view may as well be a shard of what follows, for who reads the graph.
        return view(x.squeeze(tuple(range(first))), 0)[(None,) * first]
    return view(x, first)


def _lent(x: torch.Tensor, move: Move, dst: Layout, axes: Axes) -> torch.Tensor:
    """A gather of which some axes cut again in a later move: `lend` over these, all_gather over the others."""
    again = [name in dst.sharded for name in move.axes]
    if move.order:
        if not all(again):
            raise ValueError(
                f"reshard to {dst}: got pieces over {'+'.join(move.axes)}, some of which split another dim then, "
                "wanted all of them or none; reshard it in two steps"
            )
        return lend(x, axes[move.axes], _place(move, axes[move.axes]))
    if move.true:
        sizes = axes[move.axes].sizes
        for i in [None] if all(again) else reversed(range(len(sizes))):  # minor first: the same as jointly
            one = move if i is None else replace(
                move, axes=move.axes[i : i + 1], true=tuple(split.rooms(n, sizes[:i], move.unit)[-1] for n in move.true)
            )  # fmt: skip
            place, axis = _place(one, axes[one.axes]), axes[one.axes]
            x = lend(x, axis, place) if i is None or again[i] else all_gather_many([x], axis, [place])[0]
        return x
    for names in [move.axes] if all(again) else reversed(move.axes):  # minor first: the same as jointly
        x = (lend if all(again) or names in dst.sharded else all_gather)(x, axes[names], move.dim)
    return whole_parts(x, move.dim, move.parts, axes[move.axes].size) if move.parts else x


def whole_parts(x: torch.Tensor, dim: int, sizes: tuple[int, ...], n: int) -> torch.Tensor:
    """An interleaved dim that n ranks gathered, in order: from rank-major pieces of every part to full parts."""
    pieces = x.split([size // n for _ in range(n) for size in sizes], dim)
    return torch.cat([pieces[rank * len(sizes) + part] for part in range(len(sizes)) for rank in range(n)], dim)

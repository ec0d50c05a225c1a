"""Move several values from layout to layout inside a step, in fewer collectives than one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fmegatron.collectives.axes import Axes
from fmegatron.collectives.ops import all_gather_many, psum_many, reduce_scatter_many
from fmegatron.collectives.place import Place
from fmegatron.collectives.reshard import moved, reshard_moves
from fmegatron.collectives.wire import Wire
from fmegatron.layout import Layout

__all__ = ["reshard_many"]


def reshard_many(
    xs: Sequence[torch.Tensor],
    srcs: Sequence[Layout],
    dsts: Sequence[Layout],
    axes: Axes,
    wire: Wire | Sequence[Wire] = Wire(),  # noqa: B008  a frozen value
    together: int = 1 << 20,
) -> list[torch.Tensor]:
    """`reshard` of several values, in fewer collectives: small ones that need the same one share it.

    together: bytes of the largest value that is copied into a shared buffer. Larger ones are buckets by themselves, and
    a copy would cost more than a collective. wire: for all values or one for each: pending sums are reduced in
    `wire.reduce`, exactly if `wire.exact`, and arrive in the dtype of the sum (a value without a pending sum keeps its
    own); each of several reductions of one value is made so. Sums that are not exact are shared by values of one wire.
    Transposes as in `reshard`, in the dtypes of the arguments.
    """
    axes.require(list(srcs), "reshard_many: srcs")
    wires = [wire] * len(xs) if isinstance(wire, Wire) else list(wire)
    xs, todo = list(xs), [reshard_moves(src, dst) for src, dst in zip(srcs, dsts, strict=True)]
    while any(todo):
        for i, moves in enumerate(todo):
            while moves and moves[0].op in ("flatten", "unflatten", "shard"):
                xs[i] = moved(xs[i], moves.pop(0), srcs[i], dsts[i], axes)
        waiting = [i for i, moves in enumerate(todo) if moves]
        if not waiting:
            break
        first = waiting[0]
        mine = [first]
        if _small(xs[first], todo[first][0], dsts[first], together):
            mine += [i for i in waiting[1:] if _key(todo[i][0], wires[i]) == _key(todo[first][0], wires[first])
                     and _small(xs[i], todo[i][0], dsts[i], together)]  # fmt: skip
        moves, given = [todo[i].pop(0) for i in mine], ([xs[i] for i in mine], [wires[i] for i in mine])
        for i, x in zip(mine, _together(*given, moves, srcs[first], dsts[first], axes), strict=True):
            xs[i] = x
    return xs


def _key(move, wire):
    """What values have in common that may share their next collective."""
    if move.op not in ("psum", "reduce_scatter"):
        return move.op, move.axes
    return move.op, move.axes, wire.exact, None if wire.exact else wire.reduce


def _small(x, move, dst, together):
    """Whether a value may share its next collective: one that all_to_all or `lend` moves does not."""
    shared = move.op in ("psum", "reduce_scatter") or (
        move.op == "all_gather" and not any(name in dst.sharded for name in move.axes)
    )
    return shared and x.numel() * x.dtype.itemsize <= together


def _together(xs, wires, moves, src, dst, axes):
    """The values after one move each, of the same kind over the same axes; src, dst: those of the first value."""
    op, axis, exact = moves[0].op, axes[moves[0].axes], wires[0].exact
    if op in ("psum", "reduce_scatter"):
        xs = [x if wire.reduce is None else x.to(wire.reduce) for x, wire in zip(xs, wires, strict=True)]
        if len(xs) > 1 or exact:
            if op == "psum":
                return psum_many(xs, axis, exact=exact)
            return reduce_scatter_many(xs, axis, [move.dim for move in moves], exact=exact)
    if len(xs) > 1:
        return all_gather_many(xs, axis, [_place(move, axis) for move in moves])
    return [moved(xs[0], moves[0], src, dst, axes)]


def _place(move, axis):
    parts = tuple(size // axis.size for size in move.parts or ())
    return Place((move.dim,) * len(axis.names), move.dim if parts else -1, parts)

"""Move a value from one layout to another inside a step: a short list of collectives, made by integer arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fmegatron.collectives.axes import Axes
from fmegatron.collectives.ops import all_gather, all_to_all, lend, psum, reduce_scatter, shard
from fmegatron.layout import Layout, Split

__all__ = ["Move", "moved", "reshard", "reshard_moves", "whole_parts"]


@dataclass(frozen=True)
class Move:
    """One collective of a reshard: `op` over the joined `axes`, on `dim` (and `dim2` = the dim that all_to_all splits).

    parts: sizes of the consecutive parts of an interleaved dim (local to the other axes), or None.
    """

    op: str
    axes: tuple[str, ...]
    dim: int = -1
    dim2: int = -1
    parts: tuple[int, ...] | None = None

    def __str__(self) -> str:
        place = "" if self.dim < 0 else f" dim {self.dim}" + ("" if self.dim2 < 0 else f" -> dim {self.dim2}")
        return f"{self.op}({'+'.join(self.axes)}{place}{' interleaved' if self.parts else ''})"


def reshard(x: torch.Tensor, src: Layout, dst: Layout, axes: Axes) -> torch.Tensor:
    """The same global value laid out as `dst`; x is this rank's part under `src`.

    The collectives are those that `reshard_moves(src, dst)` lists, and their transposes are those of the ops: nothing
    is exchanged that need not be (pending sums are reduce-scattered where dst shards by that axis, else summed; an axis
    that moves from dim to dim is one all_to_all). Inside a graph all ranks have one shape, so both layouts must be
    even; uneven ones are moved by `layout.plan_reshard` outside of graphs.
    Raises ValueError when shapes or meshes differ, a layout is uneven, or dst has a pending sum that src has not.
    """
    axes.require(src, "reshard")
    for move in reshard_moves(src, dst):
        x = moved(x, move, src, dst, axes)
    return x


def moved(x: torch.Tensor, move: Move, src: Layout, dst: Layout, axes: Axes) -> torch.Tensor:
    """The value after one of the moves of a reshard from src to dst."""
    axis = axes[move.axes] if move.axes else None
    if move.op == "flatten":
        return x.flatten()
    if move.op == "unflatten":
        return x.view(_block_shape(src))
    if move.op == "psum":
        return psum(x, axis)
    if move.op == "reduce_scatter":
        return reduce_scatter(x, axis, move.dim)
    if move.op == "all_to_all":
        return all_to_all(x, axis, split_dim=move.dim2, concat_dim=move.dim)
    if move.op == "shard":
        return _by_parts(x, move, lambda piece: shard(piece, axis, move.dim))
    x = _gathered(x, move, dst, axes)
    return whole_parts(x, move.dim, move.parts, axis.size) if move.parts else x


def _gathered(x, move, dst, axes):
    """all_gather over the axes that dst does not shard by, `lend` over those by which a later move cuts again."""
    again = [name in dst.sharded for name in move.axes]
    if len(set(again)) == 1:
        return (lend if again[0] else all_gather)(x, axes[move.axes], move.dim)
    for name in reversed(move.axes):  # minor first: the same as jointly
        x = (lend if name in dst.sharded else all_gather)(x, axes[name], move.dim)
    return x


def _by_parts(x, move, f):
    """Apply f to each part of an interleaved dim on its own (to the whole dim when it is not interleaved)."""
    if move.parts is None:
        return f(x)
    return torch.cat([f(piece) for piece in x.split(list(move.parts), move.dim)], move.dim)


def whole_parts(x: torch.Tensor, dim: int, sizes: tuple[int, ...], n: int) -> torch.Tensor:
    """An interleaved dim that n ranks gathered, in order: from rank-major pieces of every part to whole parts."""
    pieces = x.split([size // n for _ in range(n) for size in sizes], dim)
    return torch.cat([pieces[rank * len(sizes) + part] for part in range(len(sizes)) for rank in range(n)], dim)


def _block_shape(layout: Layout) -> tuple[int, ...]:
    return layout.replace(flat=(), unreduced=()).local_shape(0)


def _big(layout: Layout, names) -> tuple[str, ...]:
    return tuple(name for name in names if layout.mesh[name] > 1)


def _dim_state(layout: Layout, dim: int):
    """(axes, parts) of one dim, without axes of size 1; parts is None for plain splits."""
    entry = layout.spec[dim] if dim < len(layout.spec) else None
    axes = _big(layout, layout.axes(dim))
    parts = None
    if isinstance(entry, Split) and axes:
        parts = entry.sizes(layout.shape[dim])
    return axes, parts


def reshard_moves(src: Layout, dst: Layout) -> list[Move]:
    """The moves that lead from src to dst, in order; a pure function of integers (see `reshard`)."""
    if src.shape != dst.shape or src.mesh != dst.mesh:
        raise ValueError(f"cannot reshard {src} into {dst}: shape and mesh must be the same")
    for name, layout in (("source", src), ("target", dst)):
        if not layout.is_even:
            raise ValueError(
                f"cannot reshard inside a graph: the {name} {layout} is uneven, ranks would have different shapes; "
                "pad the dim, or move it outside of the step with layout.plan_reshard"
            )
    pending = [name for name in _big(src, src.unreduced) if name not in dst.unreduced]
    extra = [name for name in _big(dst, dst.unreduced) if name not in src.unreduced]
    if extra:
        raise ValueError(
            f"target {dst} is a pending sum over {extra}, source {src} is not; a complete value cannot become partial"
        )
    moves: list[Move] = []
    src_flat, dst_flat = _big(src, src.flat), _big(dst, dst.flat)
    dims = range(len(src.shape))
    now = [_dim_state(src, d) for d in dims]
    want = [_dim_state(dst, d) for d in dims]
    stays_flat = bool(src_flat) and src_flat == dst_flat and now == want
    if src.flat and not stays_flat:
        if src_flat:
            moves.append(Move("all_gather", src_flat, 0))
        moves.append(Move("unflatten", ()))
    if not stays_flat:
        moves += _move_dims(now, want, pending, src)
    flat_axes = [name for name in dst_flat if name in pending]
    if pending and not (flat_axes and not stays_flat and set(pending) == set(dst_flat)):
        rest = tuple(name for name in src.mesh.names if name in pending)
        moves.append(Move("psum", rest))
        pending.clear()
    if dst.flat and not stays_flat:
        moves.append(Move("flatten", ()))
        if dst_flat:
            moves.append(Move("reduce_scatter" if pending else "shard", dst_flat, 0))
    return moves


def _move_dims(now, want, pending, layout):
    """Moves between the split of each dim as it is and as it is wanted; takes what it reduces out of `pending`."""
    moves = []
    keep = [_common(a, b) for a, b in zip(now, want, strict=True)]
    held = [list(axes) for axes, _ in now]
    todo = [list(axes[k:]) for (axes, _), k in zip(want, keep, strict=True)]

    def surplus(d):
        return held[d][keep[d] :]

    def settled(d):
        return not surplus(d)

    def in_use(axis):
        return any(axis in axes for axes in held)

    def interleaved(state, d):
        return state[d][1] is not None

    # 1. pending sums, where the target shards by their axis: a reduce-scatter moves and reduces at once
    for d in range(len(now)):
        taken = []
        while settled(d) and todo[d] and todo[d][0] in pending and not interleaved(want, d):
            taken.append(todo[d].pop(0))
            pending.remove(taken[-1])
        if taken:
            moves.append(Move("reduce_scatter", tuple(taken), d))
            held[d] += taken
            keep[d] += len(taken)
    # Other pending sums over axes that a dim will be split by must be done first.
    soon = tuple(a for a in layout.mesh.names if a in pending and any(a in t for t in todo))
    if soon:
        moves.append(Move("psum", soon))
        for axis in soon:
            pending.remove(axis)
    # 2. until all dims are as wanted: exchange, cut what is replicated, gather as the last resort
    while any(todo) or any(surplus(d) for d in range(len(now))):
        moves.append(
            _exchange(held, todo, keep, surplus, settled, now, want)
            or _cut(held, todo, keep, settled, in_use, want)
            or _gather(held, keep, surplus, now)
        )
    return moves


def _common(a, b):
    """How many leading axes two states of a dim share; none when they are interleaved differently."""
    if a[1] != b[1]:
        return len(a[0]) if a == b else 0
    if a[1] is not None and a[0] != b[0]:
        return 0
    k = 0
    while k < min(len(a[0]), len(b[0])) and a[0][k] == b[0][k]:
        k += 1
    return k


def _exchange(held, todo, keep, surplus, settled, now, want):
    for d in range(len(held)):
        if not surplus(d) or now[d][1] is not None:
            continue
        axis = held[d][-1]
        for e in range(len(held)):
            if e != d and settled(e) and todo[e] and todo[e][0] == axis and want[e][1] is None:
                held[d].pop()
                held[e].append(todo[e].pop(0))
                keep[e] += 1
                return Move("all_to_all", (axis,), d, e)
    return None


def _cut(held, todo, keep, settled, in_use, want):
    for d in range(len(held)):
        if not (settled(d) and todo[d]) or any(in_use(axis) for axis in todo[d]):
            continue
        axes, todo[d] = tuple(todo[d]), []
        held[d] += axes
        keep[d] += len(axes)
        return Move("shard", axes, d, parts=want[d][1])
    return None


def _gather(held, keep, surplus, now):
    d = next(d for d in range(len(held)) if surplus(d))
    if now[d][1] is None:
        return Move("all_gather", (held[d].pop(),), d)
    axes, held[d] = tuple(held[d]), []
    return Move("all_gather", axes, d, parts=now[d][1])

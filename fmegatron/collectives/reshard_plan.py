"""Planning of a reshard: the short list of collectives from one layout to another, by integer arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fmegatron.layout import Layout, Split, notation, split

__all__ = ["Move", "reshard_moves"]


@dataclass(frozen=True)
class Move:
    """One collective of a reshard: `op` over the joined `axes`, on `dim` (and `dim2` = the dim that all_to_all splits).

    parts: sizes of the consecutive parts of an interleaved dim (local to the other axes), or None.  order: of a dim
    that is assigned in pieces, the index along the axes that holds each of the parts.  true: sizes of the parts of the
    dim (or range) where it is in full over the axes, if its shards are padded: a gather leaves padding out, a cut puts
    zeros in. () for no padding.  unit: of which the rooms of padded ranges are multiples.
    """

    op: str
    axes: tuple[str, ...]
    dim: int = -1
    dim2: int = -1
    parts: tuple[int, ...] | None = None
    true: tuple[int, ...] = ()
    unit: int = 1
    order: tuple[int, ...] = ()

    def __str__(self) -> str:
        place = "" if self.dim < 0 else f" dim {self.dim}" + ("" if self.dim2 < 0 else f" -> dim {self.dim2}")
        how = " in pieces" if self.order else " interleaved" if self.parts else ""
        how += f"{' padded' if self.true else ''}"
        return f"{self.op}({'+'.join(self.axes)}{place}{how})"


def _big(layout: Layout, names) -> tuple[str, ...]:
    return tuple(name for name in names if layout.mesh[name] > 1)


def _dim_state(layout: Layout, dim: int):
    """(axes, parts, order) of one dim, without axes of size 1; parts: None of plain splits, order: () but of pieces."""
    entry = layout.spec[dim] if dim < len(layout.spec) else None
    axes = _big(layout, layout.axes(dim))
    parts = None
    if isinstance(entry, Split) and axes:
        parts = entry.lengths(layout.shape[dim])
    return axes, parts, layout.cuts[dim].order if axes else ()


def reshard_moves(src: Layout, dst: Layout) -> list[Move]:
    """The moves that lead from src to dst, in order; a pure function of integers (see `reshard`)."""
    if src.shape != dst.shape or src.mesh != dst.mesh:
        raise ValueError(f"reshard: got {src} and {dst}, wanted layouts of one shape and mesh")
    for name, layout in (("source", src), ("target", dst)):
        notation.require_shares(layout, f"reshard: the {name}")
        if not layout.is_even:
            raise ValueError(
                f"reshard: the {name}: got {layout}, which is uneven, wanted ranks of one shape inside of a graph; pad "
                "it (layout.replace(padded=True)), or move it outside of the step with layout.plan_reshard"
            )
    pending = [name for name in _big(src, src.unreduced) if name not in dst.unreduced]
    extra = [name for name in _big(dst, dst.unreduced) if name not in src.unreduced]
    if extra:
        raise ValueError(
            f"reshard: the target: got {dst}, a pending sum over {extra}, wanted none that the source {src} is not; a "
            "complete value cannot become partial"
        )
    moves: list[Move] = []
    src_flat, dst_flat = _big(src, src.flat), _big(dst, dst.flat)
    dims = range(len(src.shape))
    now = [_dim_state(src, d) for d in dims]
    want = [_dim_state(dst, d) for d in dims]
    same_dims = now == want and src.flat_from == dst.flat_from
    stays_flat = bool(src_flat) and src_flat == dst_flat and same_dims and _range_rooms(src) == _range_rooms(dst)
    padded = src.padded or dst.padded
    if padded and src_flat and dst_flat and same_dims and not stays_flat:
        if (more := _ranges(src, dst, src_flat, dst_flat, pending)) is not None:
            return more
    if src.flat and not stays_flat:
        if src_flat:
            moves.append(_of_ranges(Move("all_gather", src_flat, src.flat_from), src, src_flat))
        moves.append(Move("unflatten", ()))
    if not stays_flat:
        moves += _move_dims(now, want, pending, src, padded)
    flat_axes = [name for name in dst_flat if name in pending]
    if pending and not (flat_axes and not stays_flat and set(pending) == set(dst_flat)):
        rest = tuple(name for name in src.mesh.names if name in pending)
        moves.append(Move("psum", rest))
        pending.clear()
    if dst.flat and not stays_flat:
        moves.append(Move("flatten", (), dst.flat_from or -1))
        if dst_flat:
            move = Move("reduce_scatter" if pending else "shard", dst_flat, dst.flat_from)
            moves.append(_of_ranges(move, dst, dst_flat))
    return moves


def _true(
    sizes: Sequence[int], layout: Layout, held: Sequence[str], moved: Sequence[str], unit: int = 1
) -> tuple[int, ...]:
    """Sizes of parts that `held` axes cut, once they are in full over the minor ones `moved`; () where these divide."""
    counts = tuple(layout.mesh[name] for name in held)
    first = held.index(moved[0])
    found = [split.rooms(size, counts, unit) for size in sizes]
    exact = all(room[-1] * math.prod(counts[first:]) == room[first] for room in found)
    return () if exact else tuple(room[first] for room in found)


def _of_ranges(move: Move, layout: Layout, flat: tuple[str, ...]) -> Move:
    """A move of ranges of the flattened block of a layout."""
    if not layout.padded:
        return move
    true = _true([_flattened(layout)], layout, flat, move.axes, layout.padded)
    return replace(move, true=true, unit=int(layout.padded) if true else 1)


def _flattened(layout: Layout) -> int:
    """How many elements of a rank's block are cut into ranges."""
    return math.prod(layout.replace(flat=(), unreduced=()).local_shape(0)[layout.flat_from :])


def _range_rooms(layout: Layout) -> tuple[int, ...]:
    """The rooms of ranges, axis after axis."""
    return split.rooms(_flattened(layout), layout.flat_counts, int(layout.padded) or 1)


def _ranges(
    src: Layout, dst: Layout, now: tuple[str, ...], want: tuple[str, ...], pending: list[str]
) -> list[Move] | None:
    """Moves from ranges to ranges of ranges, or back, without the block in full; None where they are others."""
    padded = (src if len(now) > len(want) else dst).padded or True
    longer = src.replace(flat=max(now, want, key=len), unreduced=(), padded=padded)
    if any(a != b for short in (src, dst) for a, b in zip(_range_rooms(short), _range_rooms(longer), strict=False)):
        return None
    if want[: len(now)] == now:
        more = want[len(now) :]
        reduced = bool(pending) and set(pending) == set(more)
        rest = () if reduced else tuple(name for name in src.mesh.names if name in pending)
        moves = [Move("psum", rest)] if rest else []
        return [*moves, _of_ranges(Move("reduce_scatter" if reduced else "shard", more, src.flat_from), longer, want)]
    if now[: len(want)] == want:
        moves = [Move("psum", tuple(name for name in src.mesh.names if name in pending))] if pending else []
        return [*moves, _of_ranges(Move("all_gather", now[len(want) :], src.flat_from), longer, now)]
    return None


def _move_dims(now, want, pending, layout, padded):
    """Moves between the split of each dim as it is and as it is wanted; takes what it reduces out of `pending`."""
    moves = []

    def add(move, names):  # names: the axes on its dim while it is cut
        sizes = move.parts or (layout.shape[move.dim],)
        padding = padded and not move.order
        moves.append(replace(move, true=_true(sizes, layout, names, move.axes)) if padding else move)

    keep = [_common(a, b) for a, b in zip(now, want, strict=True)]
    held = [list(axes) for axes, *_ in now]
    todo = [list(axes[k:]) for (axes, *_), k in zip(want, keep, strict=True)]

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
            held[d] += taken
            add(Move("reduce_scatter", tuple(taken), d), held[d])
            keep[d] += len(taken)
    # Other pending sums over axes that a dim will be split by must be done first.
    soon = tuple(a for a in layout.mesh.names if a in pending and any(a in t for t in todo))
    if soon:
        moves.append(Move("psum", soon))
        for axis in soon:
            pending.remove(axis)
    # 2. until all dims are as wanted: exchange, cut what is replicated, gather as the last resort
    while any(todo) or any(surplus(d) for d in range(len(now))):
        before = [list(axes) for axes in held]
        # Between padded dims there is no exchange: a rank's padding would lie inside of what others get.
        if not padded and (move := _exchange(held, todo, keep, surplus, settled, now, want)):
            moves.append(move)
        elif move := _cut(held, todo, keep, settled, in_use, want):
            add(move, held[move.dim])
        else:
            move = _gather(held, keep, surplus, now)
            add(move, before[move.dim])
    return moves


def _common(a, b):
    """How many leading axes two states of a dim share; none when they are interleaved differently."""
    if a[1:] != b[1:]:
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
        return Move("shard", axes, d, parts=want[d][1], order=want[d][2])
    return None


def _gather(held, keep, surplus, now):
    d = next(d for d in range(len(held)) if surplus(d))
    if now[d][1] is None:
        return Move("all_gather", (held[d].pop(),), d)
    axes, held[d] = tuple(held[d]), []
    return Move("all_gather", axes, d, parts=now[d][1], order=now[d][2])

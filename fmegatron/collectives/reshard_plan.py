"""Planning of a reshard: the short list of collectives from one layout to another, by integer arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from fmegatron.layout import Layout, Split

__all__ = ["Move", "reshard_moves"]


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
        raise ValueError(f"reshard: got {src} and {dst}, wanted layouts of one shape and mesh")
    for name, layout in (("source", src), ("target", dst)):
        if not layout.is_even:
            raise ValueError(
                f"reshard: the {name}: got {layout}, which is uneven, wanted ranks of one shape inside of a graph; pad "
                "the dim, or move it outside of the step with layout.plan_reshard"
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

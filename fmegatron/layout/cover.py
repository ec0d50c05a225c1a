"""check_cover: do boxes cover an array exactly once? By a sweep, dim after dim, never by pairs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from fmegatron.layout.boxes import Box
from fmegatron.layout.layout import Layout

Rectangle = tuple[tuple[int, ...], tuple[int, ...], Any]  # (start, stop, who)


def check_cover(boxes: Layout | Sequence[Box], shape: Sequence[int] | None = None) -> None:
    """Raise ValueError, naming the indices and the holders, unless the boxes cover an array of `shape` exactly once.

    boxes: a Layout (its first replicas are checked; `shape` is its own), or boxes of any origin, named by number.

    >>> check_cover([Box((0,), (3,), 0, (1,)), Box((2,), (2,), 0, (1,))], (5,))
    Traceback (most recent call last):
    ...
    ValueError: boxes: got gaps or overlaps in an array of shape (5,), wanted every element exactly once:
      overlap: [2:3] is in box 0 and box 1
      gap: [4:5] is in no box
    """
    if isinstance(boxes, Layout):
        shape, layout = boxes.shape, boxes
        shards = itertools.product(*(range(n) for n in layout.shard_counts))
        rectangles = [
            (box.start, box.stop, f"rank {layout.rank_of(shard)}")
            for shard in shards
            for box in layout.shard_boxes(shard)
        ]
        what = f"{layout}"
    else:
        if shape is None:
            raise ValueError("check_cover: got boxes without a shape, wanted the shape of the array that they cover")
        rectangles = [(box.start, box.stop, f"box {i}") for i, box in enumerate(boxes) if box.size]
        what = "boxes"
    shape = tuple(shape)
    for start, stop, who in rectangles:
        if len(start) != len(shape) or any(a < 0 or z > n for a, z, n in zip(start, stop, shape, strict=True)):
            raise ValueError(f"{what}: got {who} as {_text(start, stop)}, wanted it inside an array of shape {shape}")
    if 0 in shape:
        return
    problems: list[str] = []
    _sweep(rectangles, shape, (), (), problems)
    if problems:
        more = ["  ... and more"] if len(problems) > 8 else []
        raise ValueError(
            f"{what}: got gaps or overlaps in an array of shape {shape}, wanted every element exactly once:\n"
            + "\n".join(problems[:8] + more)
        )


def _sweep(rectangles: list[Rectangle], shape: tuple[int, ...], start: tuple, stop: tuple, problems: list[str]) -> None:
    """Sweep over the first dim that is left; between two events the same rectangles are open, checked one dim down.

    start, stop: the slab of the dims that are already fixed.
    """
    if len(problems) > 8:
        return
    dim = len(start)
    if dim == len(shape):
        holders = [who for _, _, who in rectangles]
        if len(holders) > 1:
            problems.append(f"  overlap: {_text(start, stop)} is in {' and '.join(holders[:4])}")
        elif not holders:
            problems.append(f"  gap: {_text(start, stop)} is in no box")
        return
    if not rectangles:
        rest = shape[dim:]
        problems.append(f"  gap: {_text(start + (0,) * len(rest), stop + rest)} is in no box")
        return
    opening: dict[int, list[int]] = {0: [], shape[dim]: []}
    closing: dict[int, list[int]] = {}
    for i, (a, z, _) in enumerate(rectangles):
        opening.setdefault(a[dim], []).append(i)
        opening.setdefault(z[dim], [])
        closing.setdefault(z[dim], []).append(i)
    events = sorted(opening)
    open_now: dict[int, None] = {}
    for at, until in itertools.pairwise(events):
        for i in closing.get(at, ()):
            del open_now[i]
        open_now.update(dict.fromkeys(opening[at]))
        _sweep([rectangles[i] for i in open_now], shape, (*start, at), (*stop, until), problems)


def _text(start: Sequence[int], stop: Sequence[int]) -> str:
    return "[" + ", ".join(f"{a}:{z}" for a, z in zip(start, stop, strict=True)) + "]"

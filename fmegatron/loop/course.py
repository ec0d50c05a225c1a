"""Course: which data each update of a run reads, where batch sizes change and samples are left out.

    run(batches, steps=1000, batch_sizes=((0, 16), (200, 32)), skip=((4096, 4160),))

Batches stay pure functions of a position: a course is a list of pieces, each `data.Batches` of one size that begins
behind the samples of the piece before (`Batches.after`).
"""

import bisect
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fmegatron.data.steps import Batch, StepBatches

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Course:
    """The pieces: (first position, Batches), in rising order of positions. Made by `course`."""

    pieces: tuple[tuple[int, StepBatches], ...]

    def of(self, position: int) -> StepBatches:
        """The Batches that the update which reads this position reads."""
        return self.pieces[self._index(position)][1]

    def first(self, position: int) -> int:
        """The first position of the piece that a position is in."""
        return self.pieces[self._index(position)][0]

    def _index(self, position: int) -> int:
        return max(0, bisect.bisect_right(self.pieces, position, key=lambda piece: piece[0]) - 1)

    def at(self, position: int) -> Batch:
        """The full batch of a position."""
        return self.of(position).at(position)

    def samples(self, step: int) -> int:
        """The position in the data after `step` updates: samples that were read, or left out."""
        return self.of(max(step - 1, 0)).samples(step)

    def tokens(self, step: int) -> int:
        """That update `step` reads, all ranks."""
        of = self.of(step - 1)
        return of.batch_size * of.seq_len

    def steps(self, samples: int) -> int:
        """The first number of updates after which at least so many samples are behind the run."""
        least = 0
        for (first, of), end in zip(self.pieces, [p[0] for p in self.pieces[1:]] + [None], strict=True):
            least = max(first, -(-(samples - of.offset) // of.batch_size))
            if end is None or least <= end:
                return max(0, least)
        return least


def course(
    batches: StepBatches,
    samples: int | None,
    step: int,
    batch_sizes: Sequence[tuple[int, int]] = (),
    skip: Sequence[tuple[int, int]] = (),
) -> Course:
    """The course of a run that has made `step` updates and has `samples` samples behind it.

    Args:
        batches: the data; its size counts where `batch_sizes` states none.
        samples: None: as many as `step` updates of this size read.
        step: updates that were made.
        batch_sizes: (updates after which it holds, batch size), in rising order.
        skip: ranges [start, stop) of samples. A batch that one of them would be in begins behind that range instead.

    Raises ValueError for sizes and ranges that are none, and for sizes without the first.

    >>> import numpy as np
    >>> from fmegatron.data import Batches
    >>> data = Batches(np.arange(1000), batch_size=4, seq_len=8, seed=0)
    >>> way = course(data, 0, 0, batch_sizes=((0, 4), (3, 8)), skip=((5, 9),))
    >>> [(way.samples(n), way.tokens(n + 1) // 8) for n in range(6)], way.steps(samples=30)
    ([(0, 4), (4, 4), (13, 4), (17, 8), (25, 8), (33, 8)], 5)
    """
    sizes, ranges = check_sizes(batch_sizes), joined(skip)
    if samples is None:
        samples = batches.samples(step)

    def size_at(position: int) -> int:
        index = bisect.bisect_right(sizes, position, key=lambda entry: entry[0]) - 1
        return sizes[index][1] if index >= 0 else batches.batch_size

    starts = sorted({step, *(first for first, _ in sizes if first > step)})
    pieces, position, behind = [], step, samples

    def begin(position: int, behind: int) -> StepBatches:
        resized = replace(batches, batch_size=size_at(position))  # pyright: ignore[reportArgumentType]  a dataclass
        of = resized.after(behind, position)
        pieces.append((position, of))
        return of

    for number, first in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else None
        position, of = first, begin(first, behind)
        for start, stop in ranges:
            if stop <= behind:
                continue
            until = max(position, (start - of.offset) // of.batch_size)  # its batch has `start` in it
            if end is not None and until >= end:
                break
            position, behind = until, stop
            if pieces[-1][0] == position:
                pieces.pop()
            of = begin(position, behind)
        if end is not None:
            behind = of.samples(end)
    return Course(tuple(pieces))


def check_sizes(batch_sizes: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """ValueError for what is no schedule of batch sizes."""
    sizes = _pairs("batch_sizes", batch_sizes, "((0, 16), (200, 32))")
    if any(size < 1 or first < 0 for first, size in sizes) or [f for f, _ in sizes] != sorted({f for f, _ in sizes}):
        raise ValueError(
            f"batch_sizes: got {sizes}, wanted (updates, size) with sizes of at least 1 and rising updates; such as "
            "((0, 16), (200, 32))"
        )
    return sizes


def joined(skip: Sequence[tuple[int, int]]) -> Ranges:
    """Ranges in rising order, those that touch as one; ValueError for what is no range."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(_pairs("skip", skip, "((4096, 4160),)")):
        if not 0 <= start < stop:
            raise ValueError(f"skip: got {(start, stop)}, wanted ranges (start, stop) with 0 <= start < stop")
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return tuple(found)


def _pairs(name: str, given: Sequence[tuple[int, int]], example: str) -> Ranges:
    """What is given as pairs of whole numbers; ValueError for anything else."""
    try:
        return tuple((operator.index(a), operator.index(b)) for a, b in given)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: got {given!r:.80}, wanted pairs of whole numbers; such as {example}") from None

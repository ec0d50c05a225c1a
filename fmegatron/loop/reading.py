"""What a run reads: the batches of its ranks, its length in updates, samples or tokens, and what is left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from fmegatron import tree
from fmegatron.collectives import World
from fmegatron.data import RankBatches, StepBatches
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.loop.course import Course, Ranges, check_sizes, course, joined


@dataclasses.dataclass(frozen=True)
class Reading:
    """The data of one rank. data: Batches, None where `at` is a function of one's own; then positions are counted in
    the place of samples. layout_of: the layout of the batch of such StepBatches."""

    data: StepBatches | None
    at: Callable[[int], Any] | None
    layout_of: Callable[[StepBatches], Layout] | None
    rank: int
    device: Any
    batch_sizes: tuple[tuple[int, int], ...] = ()
    skip: Ranges = ()

    def describe(self) -> dict[str, Any] | None:
        """What a checkpoint states of the data; None for data that do not describe themselves: a plain function."""
        of: Any = self.at if self.data is None else self.data
        stated = getattr(type(of), "describe", None)
        return None if stated is None or stated is StepBatches.describe else of.describe()

    def length(self, steps: int | None, samples: int | None, tokens: int | None) -> tuple[str, int]:
        """What the length is given in, and the length. ValueError for none, or several of them."""
        given = {name: n for name, n in (("steps", steps), ("samples", samples), ("tokens", tokens)) if n is not None}
        if len(given) != 1:
            raise ValueError(f"Run: got {given or 'no length'}, wanted one of steps=, samples= and tokens=")
        ((name, count),) = given.items()
        if name != "steps" and self.data is None:
            raise ValueError(f"Run: {name}: got {count} and a function from position to batch, wanted steps=")
        return name, count

    def of_rank(self, rank: int) -> Reading:
        """The part of another rank. A function of one's own stays what it is."""
        return dataclasses.replace(self, rank=rank)

    def begin(self, samples: int | None, step: int, skip: Ranges = ()) -> Begun:
        """The data of a run that has made `step` updates and read `samples` samples. skip: beside its own."""
        ranges = joined((*self.skip, *skip))
        if self.data is None or self.layout_of is None:
            at = self.at
            assert at is not None, "there is one of the two"
            return Begun(lambda position: at(_moved(position, ranges)), None, ranges, step)
        way = course(self.data, samples, step, self.batch_sizes, ranges)
        return Begun(way.for_rank(self.layout_of, self.rank, self.device), way, ranges, step)


@dataclasses.dataclass(frozen=True)
class Begun:
    """A `Reading` from an update on. at: position -> this rank's batch. skip: what is left out, in all."""

    at: Callable[[int], Any]
    course: Course | None
    skip: Ranges
    start: int

    def samples(self, step: int) -> int | None:
        """Behind the run after `step` updates; None where they are not counted."""
        return None if self.course is None else self.course.samples(step)

    def tokens(self, step: int) -> int:
        """That update `step` reads; 0 where that is not known."""
        return 0 if self.course is None else self.course.tokens(step)

    def steps(self, length: tuple[str, int]) -> int:
        """A length in updates."""
        name, count = length
        if name == "steps" or self.course is None:
            return count
        each = self.course.pieces[0][1].seq_len if name == "tokens" else 1
        return self.course.steps(-(-count // each))

    def of_updates(self, first: int, last: int) -> tuple[int, int]:
        """The range of samples (or positions) that the updates first .. last read."""
        if self.course is None:
            return _moved(first - 1, self.skip), _moved(last - 1, self.skip) + 1
        return self.course.samples(first - 1), self.course.samples(last)


def _moved(position: int, skip: Ranges) -> int:
    """The position that is read in the place of this one, where ranges of them are left out."""
    for start, stop in skip:
        if position >= start:
            position += stop - start
    return position


def rows_of(
    batches: Any,
    strategy: DataParallel | None,
    microbatches: int,
    mesh: Mesh,
    world: World,
    batch_sizes: Sequence[tuple[int, int]] = (),
    skip: Sequence[tuple[int, int]] = (),
) -> Reading:
    """One rank's part of the batches.

    strategy: by which rows are given to ranks, that of the state's specs; None: over dp and fsdp. microbatches: into
    how many a step cuts them.
    """
    sizes, ranges = check_sizes(batch_sizes), joined(skip)
    if isinstance(batches, StepBatches):

        def layout_of(of: StepBatches) -> Layout:
            return of.layout(mesh, strategy, microbatches)

        for size in {batches.batch_size, *(size for _, size in sizes)}:  # raises for sizes that ranks cannot share
            layout_of(dataclasses.replace(batches, batch_size=size))  # pyright: ignore[reportArgumentType]  a dataclass
        return Reading(batches, None, layout_of, world.rank, world.device, sizes, ranges)
    if sizes:
        raise ValueError(f"Run: batch_sizes: got {sizes} and {tree.in_words(batches)}, wanted data.Batches")
    if isinstance(batches, RankBatches) and isinstance(batches.batches, StepBatches):
        layout = batches.layout
        return Reading(batches.batches, None, lambda of: layout, batches.rank, batches.device, (), ranges)
    if isinstance(batches, RankBatches):
        return Reading(None, batches.at, None, batches.rank, batches.device, (), ranges)
    if not callable(batches):
        raise ValueError(
            f"Run: batches: got {tree.in_words(batches)}, wanted data.Batches, or a function from position to a batch"
        )
    return Reading(None, batches, None, world.rank, world.device, (), ranges)

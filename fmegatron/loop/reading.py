"""What a run reads: the batches of its ranks, its length in updates, samples or tokens, and what is left out."""

from __future__ import annotations

import dataclasses
import os
import traceback
from collections.abc import Sequence
from typing import Any

from fmegatron import tree
from fmegatron.collectives import World
from fmegatron.data import EvaluationBatches, Source, contract, steps
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.loop.course import Course, Ranges, check_sizes, course, joined
from fmegatron.loop.remembered import Remembered, States
from fmegatron.step import Description
from fmegatron.tree import spec, structure

READS = "Raised by the data source"  # the beginning of a note on an error of it


@dataclasses.dataclass(frozen=True)
class Reading:
    """The data of one rank, for any attempt of a run.

    source: the batches of all ranks; where they are no StepBatches, positions are counted in the place of samples.
    of: specs of the state, or the Description of the step, from which the layouts of batches follow. states: of a
    source that has a state; None for another.
    """

    source: Source
    of: Description | structure.Tree
    world: World
    rank: int
    batch_sizes: tuple[tuple[int, int], ...] = ()
    skip: Ranges = ()
    states: States | None = None

    @property
    def data(self) -> steps.StepBatches | None:
        """The source, where its samples are counted."""
        return self.source if isinstance(self.source, steps.StepBatches) else None

    def describe(self) -> dict[str, Any] | None:
        """What a checkpoint states of the data; None for data that do not describe themselves."""
        return self.source.describe()

    def written(self) -> dict[str, Any]:
        """What a checkpoint states of names that a function of data has written to: {} or {"written"}."""
        names = contract.written_by(self.source)
        return {"written": [*names]} if names else {}

    def length(self, steps: int | None, samples: int | None, tokens: int | None) -> tuple[str, int]:
        """What the length is given in, and the length. ValueError for none, or several of them."""
        given = {name: n for name, n in (("steps", steps), ("samples", samples), ("tokens", tokens)) if n is not None}
        if len(given) != 1:
            raise ValueError(f"Run: got {given or 'no length'}, wanted one of steps=, samples= and tokens=")
        ((name, count),) = given.items()
        if name != "steps" and self.data is None:
            what = type(self.source).__name__
            raise ValueError(f"Run: {name}: got {count} and {what}, whose samples are not counted, wanted steps=")
        return name, count

    def steps(self, length: tuple[str, int]) -> int:
        """A length in updates of a new run."""
        return length[1] if length[0] == "steps" else self.begin(0, 0).steps(length)

    def of_rank(self, rank: int) -> Reading:
        """The part of another rank."""
        return dataclasses.replace(self, rank=rank)

    def begin(self, samples: int | None, step: int, skip: Ranges = (), saved: Any = None) -> Begun:
        """The data of a run that has made `step` updates and read `samples` samples. skip: beside its own. saved: the
        states of the source in the checkpoint that it goes on from (`Begun.states`)."""
        ranges = joined((*self.skip, *skip))
        if saved is not None and self.states is None:
            raise ValueError(
                f"Run: got a checkpoint of step {step} with the state of its source and {type(self.source).__name__}, "
                "which has none, wanted the source that the run began with; give that one, or begin another run"
            )
        if self.data is not None:
            way = course(self.data, samples, step, self.batch_sizes, ranges)
            parts = tuple((first, own_part(of, self.of, self.rank)) for first, of in way.pieces)
            part = parts[0][1] if len(parts) == 1 else _Pieces(way, dict(parts))
            return Begun(contract.Placed(part, self.world.device), way, ranges, step)
        remembered = None
        if self.states is not None:
            remembered = self.states.begin(step, saved, self.rank, self.world.size, self._rows)
        given = self.source if remembered is None else remembered
        part = own_part(given, self.of, self.rank, contract.source_name(self.source))
        part = _Told(_Moved(part, ranges) if ranges else part, self.source)
        return Begun(contract.Placed(part, self.world.device), None, ranges, step, self.source, remembered)

    @property
    def _rows(self) -> Ranges | None:
        return own_part(self.source, self.of, self.rank).ranges


@dataclasses.dataclass(frozen=True)
class Begun:
    """A `Reading` from an update on. source: this rank's batches. skip: what is left out, in all. given: the source of
    all ranks, where it is none of data."""

    source: Source
    course: Course | None
    skip: Ranges
    start: int
    given: Source | None = None
    remembered: Remembered | None = None

    def states(self, step: int, world: World) -> dict[str, Any]:
        """What a checkpoint states of the source behind the batch of update `step`, of all ranks: {} or {"source"}.
        All ranks call it."""
        if self.remembered is None:
            if self.given is not None and (state := self.given.state()) is not None:
                raise ValueError(
                    f"{type(self.given).__name__}.state: got {state!r:.80}, and None when the run began, wanted one "
                    "from the beginning: else the run does not keep it"
                )
            return {}
        return {"source": self.remembered.of_all(_moved(step - 1, self.skip) if step > self.start else None, world)}

    def samples(self, step: int) -> int | None:
        """Behind the run after `step` updates; None where they are not counted."""
        return None if self.course is None else self.course.samples(step)

    def tokens(self, step: int) -> int:
        """That update `step` reads; 0 where that is not known."""
        return 0 if self.course is None else self.course.tokens(step)

    def all_tokens(self, steps: int) -> int:
        """That the updates from here to `steps` read, all ranks; 0 where that is not known."""
        pieces = () if self.course is None else self.course.pieces
        ends = [first for first, _ in pieces[1:]] + [steps]
        return sum(
            max(0, min(end, steps) - first) * of.batch_size * of.seq_len
            for (first, of), end in zip(pieces, ends, strict=bool(pieces))
        )

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


@dataclasses.dataclass(frozen=True, eq=False)
class _Moved(Source):
    """A source of which ranges of positions are left out."""

    source: Source
    skip: Ranges

    def at(self, position: int) -> Any:
        return self.source.at(_moved(position, self.skip))


@dataclasses.dataclass(frozen=True, eq=False)
class _Told(Source):
    """The part of a rank, whose errors note the class and the line of the source that it is made of."""

    source: Source
    given: Source

    def at(self, position: int) -> Any:
        try:
            return self.source.at(position)
        except Exception as error:
            file = contract.source_file(self.given)
            lines = [x.lineno for x in traceback.extract_tb(error.__traceback__) if file and x.filename == file]
            if lines:
                name = contract.source_name(self.given)
                error.add_note(f"{READS} {name}, position {position} ({os.path.basename(str(file))}:{lines[-1]})")
            raise


@dataclasses.dataclass(frozen=True, eq=False)
class _Pieces(Source):
    """One rank's part of a course of several pieces, each by its first position."""

    way: Course
    parts: dict[int, Source]

    def at(self, position: int) -> Any:
        return self.parts[self.way.first(position)].at(position)


def own_part(source: Source, of: Description | structure.Tree, rank: int, name: str | None = None) -> steps.RankBatches:
    """One rank's part of a source, in host memory, by the layouts that follow from `of`. ValueError where uneven.

    name: of the source in messages. Of the decoder of a `Description` the vocabulary, in which ids have to be.
    """
    strategy, described, microbatches = _how(of)
    mesh, decoder = _mesh(of), of.decoder if isinstance(of, Description) else None
    vocab_size = None if decoder is None else decoder.vocab_size
    if isinstance(source, steps.TokenBatches):
        known = [x for x in tree.leaves(described) if len(x.shape) > 1]
        if strategy is None and known:
            layout = known[0].replace(shape=(source.batch_size, source.seq_len))
            return steps.RankBatches(source, layout, rank, vocab_size=vocab_size)
        by_stages = isinstance(of, Description) and of.pipeline is not None and mesh["pp"] > 1
        whole = isinstance(source, EvaluationBatches) and not by_stages  # others cut no microbatches in an evaluation
        layout = steps.TokenBatches.layout(source, mesh, strategy, 1 if whole else microbatches)
        return steps.RankBatches(source, layout, rank, vocab_size=vocab_size)
    if tree.leaves(described):
        return steps.RankBatches(source, described, rank, name, vocab_size)

    def layout_of(shape: tuple[int, ...], dtype: Any) -> Layout:
        return (strategy or DataParallel()).batch_layout(shape, dtype, mesh, microbatches)

    return steps.RankBatches(source, layout_of, rank, name, vocab_size)


def own_rows(source: Source, of: Description | structure.Tree, world: World) -> Source:
    """This rank's part of every batch of a source, on its device: for loops and evaluations by hand (a `Run` does it).

    Args:
        source: the batches of all ranks.
        of: the `step.Description`, whose layouts of the batch count, or the specs of the state, whose strategy does
            (without one: rows over dp and fsdp).
        world: the ranks.

    Raises ValueError for what is no source, and for batches that the ranks cannot share evenly.
    """
    _mesh(of).require_same(world.mesh, "own_rows", "the specs", "the world")
    return contract.Placed(own_part(contract.require_source(source, "own_rows"), of, world.rank), world.device)


def _mesh(of: Description | structure.Tree) -> Mesh:
    return tree.leaves(tree.layouts(of.state if isinstance(of, Description) else of))[0].mesh


def _how(of: Description | structure.Tree) -> tuple[DataParallel | None, structure.Tree, int]:
    """(strategy, layouts of the batch, microbatches)."""
    if isinstance(of, Description):
        return spec.strategy_of(of.state), tree.layouts(of.batch), of.microbatches
    return spec.strategy_of(of), {}, 1


def reading_of(
    source: Any,
    of: Description | structure.Tree,
    world: World,
    batch_sizes: Sequence[tuple[int, int]] = (),
    skip: Sequence[tuple[int, int]] = (),
) -> Reading:
    """What a rank reads. ValueError for batches that ranks cannot share, and for what is no source."""
    sizes, ranges = check_sizes(batch_sizes), joined(skip)
    if isinstance(source, (steps.RankBatches, contract.Placed)):
        raise ValueError("Run: batches: got the part of one rank, wanted those of all; the run gives each its own")
    contract.require_source(source, "Run: batches")
    if isinstance(source, steps.StepBatches):
        for size in {source.batch_size, *(size for _, size in sizes)}:  # raises for sizes that ranks cannot share
            own_part(dataclasses.replace(source, batch_size=size), of, world.rank)  # pyright: ignore[reportArgumentType]  a dataclass
        return Reading(source, of, world, world.rank, sizes, ranges)
    if sizes:
        raise ValueError(f"Run: batch_sizes: got {sizes} and {type(source).__name__}, wanted data.Batches")
    states = None if source.state() is None else States(source)
    return Reading(source, of, world, world.rank, (), ranges, states)

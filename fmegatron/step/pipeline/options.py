"""A pipeline as a value, and as options of a configuration: --pipeline.schedule=zb_v --pipeline.stages=3,4,4,1."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from fmegatron.layout import Mesh, Split
from fmegatron.step.pipeline import schedules
from fmegatron.step.pipeline.clock import Clock, Costs, clock
from fmegatron.step.pipeline.greedy import microbatch_of
from fmegatron.step.pipeline.pictures import picture
from fmegatron.step.pipeline.stages import Stages, balanced, counted, read_stages
from fmegatron.step.pipeline.table import Message, Table, checked, gathering, messages

__all__ = ["Pipeline", "Pipelining", "Scheduled", "by_stages"]

# How many stages a rank has where nothing names it; those of a V are always two.
_CHUNKS = MappingProxyType(
    {
        **{"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb_h1": 1, "1f1b_pairs": 1},
        **{"zb_v": 2, "dualpipe_v": 2, "greedy": 1, "greedy_v": 2},
    }
)
_FIXED = ("gpipe", "1f1b", "1f1b_pairs", "zb_h1", "zb_v", "dualpipe_v", "greedy_v")
_OFTEN = ("use", "burst", "step")
_VEES = ("zb_v", "dualpipe_v", "greedy_v")


def _named(default: Any) -> Any:
    """A field that a resumed run may have another value of, by name (`loop.field`)."""
    return field(default=default, metadata={"resume": "named", "least": None, "above": None})


@dataclass(frozen=True)
class Pipeline:
    """Which rank computes what, and when; `print` shows it on the clock, at equal costs of all actions.

    table: the actions of each rank of the axis pp (`step.pipeline.schedules`). stages: how many blocks each stage has;
    what comes before the first block is in the first stage, what comes behind the last one in the last.
    Raises ValueError for a table that cannot run, and for another number of stages than it has.
    """

    table: Table
    stages: tuple[int, ...]

    def __post_init__(self):
        checked(self.table)
        object.__setattr__(self, "stages", tuple(self.stages))
        if len(self.stages) != self.table.stages or min(self.stages) < 1:
            raise ValueError(
                f"Pipeline: got stages of {', '.join(map(str, self.stages))} blocks for {self.table.name}, wanted "
                f"{self.table.stages} stages, one block or more in each; take fewer stages"
            )

    @property
    def microbatches(self) -> int:
        """How many microbatches there are."""
        return self.table.microbatches

    @property
    def messages(self) -> tuple[Message, ...]:
        """What crosses ranks in a step."""
        return messages(self.table)

    def clock(self, costs: Mapping[str, float | tuple[float, ...]]) -> Clock:
        """When each action of the table runs; costs: {"F": ..., "B": ...} as `Costs` has them."""
        return clock(self.table, Costs(**costs))

    def split(self, mesh: Mesh, blocks: int) -> Split | None:
        """How the layers of a stack, a block each, lie over pp: with their stages (`tree.specs(stacked=)`); None where
        pp is 1."""
        del blocks
        return Split("pp", sizes=self.stages, order=tuple(self.table.place)) if mesh["pp"] > 1 else None

    def on(self, ranks: int, blocks: int) -> Pipeline:
        """Itself: as options are one on so many ranks of pp, of so many blocks."""
        del ranks, blocks
        return self

    def __str__(self) -> str:
        return f"{picture(self.table)}\nblocks of each stage: {', '.join(map(str, self.stages))}"


@dataclass(frozen=True)
class Pipelining:
    """How a pipeline runs, as text and numbers: a group of options. Nothing is done with it where pp is 1.

    schedule:
        "gpipe"        all forwards, then all backwards
        "1f1b"         a backward as soon as there is one
        "1f1b_pairs"   the same, a forward and a backward as one graph, each beside what the other communicates; with
                       twice as many microbatches live
        "interleaved"  1F1B with several stages a rank
        "zb_h1"        weight gradients fill idle time
        "zb_v"         the same with two stages a rank in a V
        "dualpipe_v"   a V in which forwards and backwards run as pairs
        "greedy"       the shortest that is found for costs and memory, with `chunks` stages a rank
        "greedy_v"     the same in a V
    stages: how many blocks each stage holds, in the order of the forward: "3,4,4,1", or a layout of Megatron such as
        "Et*3|(tt|)*29,m|L"; "": balanced by the costs of blocks and ends.
    chunks: stages a rank; 0: as `stages` or the schedule has them (2 for "interleaved").
    memory: of greedy tables, how many microbatches of all its stages a rank may hold at once; 0: without limit.
    gather: when weights of a stage that rest in parts (ZeRO-3), or in another dtype, are gathered and cast, and their
        gradients reduced.
        "use"    by each action that reads them, of each microbatch
        "burst"  once for each run of actions of the stage
        "step"   once, and kept with the sum of their gradients

    Raises ValueError for another schedule, and for what does not go with it.
    """

    schedule: str = _named("1f1b")  # gpipe, 1f1b[_pairs], interleaved, zb_h1, zb_v, dualpipe_v, greedy[_v]
    stages: str = _named("")  # blocks of each stage, "3,4,4,1", or Megatron's layout; empty: balanced
    chunks: int = _named(0)  # stages a rank; 0: as stages or the schedule have them
    memory: float = _named(0.0)  # of greedy ones, microbatches of all its stages that a rank may hold; 0: no limit
    gather: str = _named("use")  # weights of a stage, and reduce gradients: use, burst (of its actions), step

    def __post_init__(self):
        if self.schedule not in _CHUNKS:
            raise ValueError(f"pipeline.schedule: got {self.schedule!r}, wanted one of {', '.join(_CHUNKS)}")
        if self.gather not in _OFTEN:
            raise ValueError(f"pipeline.gather: got {self.gather!r}, wanted one of {', '.join(_OFTEN)}")
        least = _CHUNKS[self.schedule] if self.schedule in _FIXED else 1
        if self.chunks < 0 or (self.schedule in _FIXED and self.chunks not in (0, least)):
            others = "" if self.schedule in _FIXED else " or more, or 0"
            raise ValueError(f"pipeline.chunks: got {self.chunks} with {self.schedule}, wanted {least}{others}")
        if self.memory < 0 or (self.memory and not self.schedule.startswith("greedy")):
            raise ValueError(
                f"pipeline.memory: got {self.memory:g} with {self.schedule}, wanted 0, or more with a greedy schedule"
            )

    def of(self, microbatches: int) -> Scheduled:
        """What builders of steps and `step.pipelined` take: so many microbatches, computed as these options say.

        Raises ValueError for fewer than one.
        """
        if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
            raise ValueError(
                f"Pipelining.of: microbatches: got {microbatches!r}, wanted a whole number of them, 1 or more"
            )
        return Scheduled(self.schedule, self.stages, self.chunks, self.memory, self.gather, microbatches)

    def on(self, ranks: int, blocks: int) -> Pipeline:
        """ValueError: `of` says of how many microbatches."""
        del ranks, blocks
        raise ValueError(f"microbatches: got {self}, wanted how many of them, too; {self}.of(8)")

    def place(self, ranks: int, blocks: int, mtp: int = 0) -> tuple[int, ...]:
        """The rank of each stage. Raises ValueError where `stages` are not `chunks` a rank."""
        chunks = self.chunks or _CHUNKS[self.schedule]
        if self.stages:
            named = len(read_stages(self.stages, blocks, mtp, "pipeline.stages").sizes)
            if named % ranks or ((self.chunks or self.schedule in _FIXED) and named != chunks * ranks):
                fix = f"{chunks * ranks}" if self.chunks or self.schedule in _FIXED else f"a multiple of {ranks}"
                raise ValueError(
                    f"pipeline.stages: got {named} stages on {ranks} ranks with {self.schedule}, wanted {fix}; ranks "
                    "hold equally many"
                )
            chunks = named // ranks
        return schedules.vee(ranks) if self.schedule in _VEES else schedules.loop(ranks, chunks)

    def cut(
        self, place: Sequence[int], blocks: Sequence[float], first: float = 0.0, last: float = 0.0, mtp: int = 0
    ) -> Stages:
        """What each stage holds, as `stages` has it, or balanced by the costs of blocks and of the two ends.

        Raises ValueError for text that cannot be read, another number of blocks, and more stages than blocks.
        """
        if self.stages:
            return read_stages(self.stages, len(blocks), mtp, "pipeline.stages")
        return Stages(balanced(blocks, place, first, last))

    def split(self, mesh: Mesh, blocks: int) -> Split | None:
        """How so many layers of a stack, a block each, lie over pp: with their stages (`tree.specs(stacked=)`); None
        where pp is 1. Raises ValueError for what does not go together."""
        if mesh["pp"] == 1:
            return None
        place = self.place(mesh["pp"], blocks)
        return Split("pp", sizes=self.cut(place, [1.0] * blocks).sizes, order=tuple(place))

    def table(self, place: Sequence[int], microbatches: int, costs: Costs | None = None) -> Table:
        """The table of the schedule on stages at `place`; `costs` are asked by greedy ones.

        Raises ValueError for fewer microbatches than the schedule needs.
        """
        p, chunks = max(place) + 1, len(place) // (max(place) + 1)
        if self.schedule.startswith("greedy"):
            held = microbatch_of(place, costs or Costs())
            memory = [self.memory * rank for rank in held] if self.memory else None
            name = f"{self.schedule} p={p} m={microbatches}"
            return checked(gathering(schedules.best(place, microbatches, costs, memory, name), self.gather))
        if self.schedule == "interleaved":
            return checked(gathering(schedules.interleaved(p, microbatches, chunks), self.gather))
        made = {"gpipe": schedules.gpipe, "1f1b": schedules.one_f_one_b, "zb_h1": schedules.zb_h1}
        made |= {"zb_v": schedules.zb_v, "dualpipe_v": schedules.dualpipe_v}
        made["1f1b_pairs"] = functools.partial(schedules.one_f_one_b, pairs=True)
        return checked(gathering(made[self.schedule](p, microbatches), self.gather))


@dataclass(frozen=True)
class Scheduled(Pipelining):
    """As many microbatches by these options: a `Pipeline`, once ranks and blocks are known.

    ranks: of pp; 0: not known yet. Where they are known, `print` shows the table.
    """

    microbatches: int = 1
    ranks: int = 0

    def on(self, ranks: int, blocks: int) -> Pipeline:
        """On so many ranks of pp, of so many blocks. Raises ValueError for what does not go together."""
        place = self.place(ranks, blocks)
        return Pipeline(self.table(place, self.microbatches), self.cut(place, [1.0] * blocks).sizes)

    def __str__(self) -> str:
        if not self.ranks:
            return repr(self)
        blocks, mtp = counted(self.stages, "pipeline.stages")  # the table asks for the number of stages alone
        table = self.table(self.place(self.ranks, blocks, mtp), self.microbatches)
        sizes = self.stages or "balanced, once a trace has counted them"
        return f"{picture(table)}\nblocks of each stage: {sizes}"


def by_stages(microbatches: int | Pipelining | Pipeline, mesh: Mesh) -> tuple[int, Scheduled | Pipeline | None]:
    """(how many microbatches there are, what computes them by stages): 1F1B where only their number is said; None on
    a mesh without pp. ValueError for options that do not say how many."""
    if isinstance(microbatches, Pipelining) and not isinstance(microbatches, Scheduled):
        microbatches = microbatches.on(mesh["pp"], 0)
    count = microbatches if isinstance(microbatches, int) else microbatches.microbatches
    if mesh["pp"] == 1:
        return count, None
    found = Pipelining().of(count) if isinstance(microbatches, int) else microbatches
    return count, replace(found, ranks=mesh["pp"]) if isinstance(found, Scheduled) else found

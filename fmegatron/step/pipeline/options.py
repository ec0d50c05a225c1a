"""A pipeline as options of a configuration: --pipeline.schedule=zb_v --pipeline.stages=3,4,4,1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from fmegatron.step.pipeline import schedules
from fmegatron.step.pipeline.clock import Costs
from fmegatron.step.pipeline.greedy import microbatch_of
from fmegatron.step.pipeline.stages import Stages, balanced, read_stages
from fmegatron.step.pipeline.table import Table, checked

__all__ = ["Pipelining"]

# How many stages a rank has where nothing names it; those of a V are always two.
_CHUNKS = MappingProxyType(
    {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb_h1": 1, "zb_v": 2, "dualpipe_v": 2, "greedy": 1, "greedy_v": 2}
)
_FIXED = ("gpipe", "1f1b", "zb_h1", "zb_v", "dualpipe_v", "greedy_v")
_VEES = ("zb_v", "dualpipe_v", "greedy_v")


@dataclass(frozen=True)
class Pipelining:
    """How a pipeline runs, as text and numbers. Nothing is done with it where the pipeline has one rank.

    schedule:
        "gpipe"        all forwards, then all backwards
        "1f1b"         a backward as soon as there is one
        "interleaved"  the same with several stages a rank
        "zb_h1"        weight gradients fill idle time
        "zb_v"         the same with two stages a rank in a V
        "dualpipe_v"   a V in which forwards and backwards run as pairs
        "greedy"       the shortest that is found for costs and memory, with `chunks` stages a rank
        "greedy_v"     the same in a V
    stages: how many blocks each stage holds, in the order of the forward: "3,4,4,1", or a layout of Megatron such as
        "Et*3|(tt|)*29,m|L"; "": balanced by the costs of blocks and ends.
    chunks: stages a rank; 0: as `stages` or the schedule has them (2 for "interleaved").
    memory: of greedy tables, how many microbatches of all its stages a rank may hold at once; 0: without limit.

    Raises ValueError for another schedule, and for what does not go with it.
    """

    schedule: str = "1f1b"
    stages: str = ""
    chunks: int = 0
    memory: float = 0.0

    def __post_init__(self):
        if self.schedule not in _CHUNKS:
            raise ValueError(f"pipeline.schedule: got {self.schedule!r}, wanted one of {', '.join(_CHUNKS)}")
        least = _CHUNKS[self.schedule] if self.schedule in _FIXED else 1
        if self.chunks < 0 or (self.schedule in _FIXED and self.chunks not in (0, least)):
            others = "" if self.schedule in _FIXED else " or more, or 0"
            raise ValueError(f"pipeline.chunks: got {self.chunks} with {self.schedule}, wanted {least}{others}")
        if self.memory < 0 or (self.memory and not self.schedule.startswith("greedy")):
            raise ValueError(
                f"pipeline.memory: got {self.memory:g} with {self.schedule}, wanted 0, or more with a greedy schedule"
            )

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

    def table(self, place: Sequence[int], microbatches: int, costs: Costs | None = None) -> Table:
        """The table of the schedule on stages at `place`; `costs` are asked by greedy ones.

        Raises ValueError for fewer microbatches than the schedule needs.
        """
        p, chunks = max(place) + 1, len(place) // (max(place) + 1)
        if self.schedule.startswith("greedy"):
            held = microbatch_of(place, costs or Costs())
            memory = [self.memory * rank for rank in held] if self.memory else None
            name = f"{self.schedule} p={p} m={microbatches}"
            return checked(schedules.best(place, microbatches, costs, memory, name))
        if self.schedule == "interleaved":
            return checked(schedules.interleaved(p, microbatches, chunks))
        made = {"gpipe": schedules.gpipe, "1f1b": schedules.one_f_one_b, "zb_h1": schedules.zb_h1}
        made |= {"zb_v": schedules.zb_v, "dualpipe_v": schedules.dualpipe_v}
        return checked(made[self.schedule](p, microbatches))

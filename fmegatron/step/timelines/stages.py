"""The timeline of a pipeline's table: a lane for each rank of pp and one for messages, by the clock of the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import fx

from fmegatron.step.graph.nodes import entry_of
from fmegatron.step.pipeline.clock import Clock, Costs, timed
from fmegatron.step.pipeline.entry import BoundPipeline
from fmegatron.step.pipeline.table import Action, messages
from fmegatron.step.timelines.events import Event

__all__ = ["MESSAGES", "calls_of", "clock_of", "events_of", "pipelines_of", "seconds_of_ends"]

MESSAGES = "messages"


def clock_of(
    bound: BoundPipeline, seconds: Callable[[fx.Graph], float], travels: Callable[[int], float]
) -> tuple[Clock, Costs]:
    """A table by what its actions take, and what these are.

    seconds: a lowered graph -> how long it takes. travels: bytes of a message -> how long it is on its way.
    """
    plan, stages = bound.plan, range(bound.plan.parts.stages)

    def cost(kind: str, stage: int) -> float:
        if not plan.parts.of[kind, stage].gives:
            return 0.0
        return seconds(bound.part(kind, stage).program.stages["overlap"].graph)

    def mean(kind: str, stage: int) -> float:
        """Of a G, each of whose runs gathers what those that follow read, the mean."""
        rank = plan.table.place[stage]
        pairs = zip(plan.table.rows[rank], plan.table.parts(rank), strict=True)
        runs = Counter(of for action, kinds in pairs for of in kinds if (of[0], action.stage) == (kind, stage))
        return sum(cost(of, stage) * n for of, n in runs.items()) / max(1, sum(runs.values()))

    sent = []
    for stage in stages:
        pairs = [("F", plan.parts.forward[stage]), ("B", plan.parts.backward[stage])]
        sizes = [plan.like(kind, stage, pair[0]).nbytes for kind, pair in pairs if pair is not None]
        sent.append(max(map(travels, sizes), default=0.0))
    kinds = {kind: tuple(mean(kind, stage) for stage in stages) for kind in "FBWGR"}
    costs = Costs(**kinds, send=tuple(sent))
    return timed(plan.table, costs), costs


def events_of(bound: BoundPipeline, found: Clock, costs: Costs, begin: float) -> Iterator[Event]:
    """What runs in a table that begins then: of each rank of pp its actions, of the rank that is looked at also where
    it waits, and the messages between ranks.
    """
    table = bound.plan.table
    ends = {}
    for rank, (row, spans) in enumerate(zip(table.rows, found.spans, strict=True)):
        lane, last = f"pp {rank}", 0.0
        for action, (start, end) in zip(row, spans, strict=True):
            if start > last and rank == bound.rank:
                yield Event("message", lane, begin + last, begin + start, waits=True)
            yield Event(_named(bound, action), lane, begin + start, begin + end, detail=str(action))
            ends |= {(kind, action.stage, action.microbatch): end for kind in action.kind}
            last = end
        if found.duration > last and rank == bound.rank:
            yield Event("others", lane, begin + last, begin + found.duration, waits=True)
    for one in messages(table):
        start = begin + ends[one.kind, one.stage, one.microbatch]
        name = f"{one.source}>{one.target}"
        yield Event(name, MESSAGES, start, start + costs.at("send", one.stage), detail=str(one))


def seconds_of_ends(bound: BoundPipeline, seconds: Callable[[fx.Graph], float]) -> tuple[float, float]:
    """How long what is run before the table takes, and what is run behind it."""
    first = 0.0 if bound.begin is None else seconds(bound.begin.program.stages["overlap"].graph)
    return first, seconds(bound.end.program.stages["overlap"].graph)


def pipelines_of(graph: fx.Graph) -> list[BoundPipeline]:
    """The pipelines that a lowered graph runs, in order."""
    return [entry for entry in map(entry_of, graph.nodes) if isinstance(entry, BoundPipeline)]


def calls_of(bound: BoundPipeline) -> dict[str, tuple[str, Iterator[str]]]:
    """Name of the operator of a part of this rank -> (its lane, the names of its calls in a step, in their order)."""
    found: dict[tuple[str, int], list[str]] = {}
    table = bound.plan.table
    for action, kinds in zip(table.rows[bound.rank], table.parts(bound.rank), strict=True):
        for kind in kinds:
            found.setdefault((kind, action.stage), []).append(_named(bound, replace(action, kind=kind[0])))
    parts = {key: bound.part(*key) for key in found if bound.plan.parts.of[key].gives}
    return {part.op.name(): (f"pp {bound.rank}", iter(found[key])) for key, part in parts.items()}


def _named(bound: BoundPipeline, action: Action) -> str:
    """An action by its kind and microbatch, where a rank has several stages behind the number of its stage."""
    stage = f"{action.stage}." if bound.plan.table.stages > bound.plan.table.ranks else ""
    return f"{action.kind}{stage}{action.microbatch}"

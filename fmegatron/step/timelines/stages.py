"""The timeline of a pipeline's table: a lane for each rank of pp and one for messages, by the clock of the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import fx

from fmegatron.step.graph.nodes import entry_of
from fmegatron.step.pipeline.clock import Clock, Costs, timed
from fmegatron.step.pipeline.entry import BoundPipeline
from fmegatron.step.pipeline.table import Action, messages, units
from fmegatron.step.timelines.events import COMPUTE, Event, Timeline

__all__ = ["MESSAGES", "calls_of", "clock_of", "events_of", "graph_of", "pipelines_of", "seconds_of_ends"]

MESSAGES = "messages"


def clock_of(
    bound: BoundPipeline, seconds: Callable[[fx.Graph], float], travels: Callable[[int], float]
) -> tuple[Clock, Costs]:
    """A table by what its actions take, and what these are.

    seconds: a lowered graph -> how long it takes. travels: bytes of a message -> how long it is on its way.
    """
    plan, stages = bound.plan, range(bound.plan.parts.stages)
    took: dict[tuple[tuple[str, int], ...], float] = {}

    def cost(*steps: tuple[str, int]) -> float:
        if steps not in took:
            gives = any(plan.parts.of[step].gives for step in steps)
            took[steps] = seconds(graph_of(bound, steps)) if gives else 0.0
        return took[steps]

    def mean(kind: str, stage: int) -> float:
        """Of a G, each of whose runs gathers what those that follow read, the mean."""
        rank = plan.table.place[stage]
        pairs = zip(plan.table.rows[rank], plan.table.parts(rank), strict=True)
        runs = Counter(of for action, kinds in pairs for of in kinds if (of[0], action.stage) == (kind, stage))
        return sum(cost((of, stage)) * n for of, n in runs.items()) / max(1, sum(runs.values()))

    def of_pairs(stage: int) -> float:
        """Of the pairs whose forward is of this stage the mean."""
        units = [steps for unit in plan.runs(plan.table.place[stage]) for steps in unit if len(steps) > 1]
        found = [cost(*steps) for steps in units if ("F", stage) in steps]
        return sum(found) / max(1, len(found))

    sent = []
    for stage in stages:
        pairs = [("F", plan.parts.forward[stage]), ("B", plan.parts.backward[stage])]
        sizes = [plan.like(kind, stage, pair[0]).nbytes for kind, pair in pairs if pair is not None]
        sent.append(max(map(travels, sizes), default=0.0))
    kinds = {kind: tuple(mean(kind, stage) for stage in stages) for kind in "FBWGR"}
    together = tuple(map(of_pairs, stages)) if any(plan.table.pairs) else None
    costs = Costs(**kinds, pair=together, send=tuple(sent))
    return timed(plan.table, costs), costs


def graph_of(bound: BoundPipeline, steps: tuple[tuple[str, int], ...]) -> fx.Graph:
    """The lowered graph of a part, or of those of a pair, of any rank."""
    return bound.part(*steps).program.stages["overlap"].graph


def events_of(
    bound: BoundPipeline, found: Clock, costs: Costs, begin: float, inside: Callable[[fx.Graph], Timeline]
) -> Iterator[Event]:
    """What runs in a table that begins then: of each rank of pp its actions, of the rank that is looked at also where
    it waits and what its parts communicate, and the messages between ranks.

    inside: a lowered graph -> its timeline.
    """
    table, ends, played = bound.plan.table, {}, dict[tuple[tuple[str, int], ...], Timeline]()
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
    starts = iter(start for start, _ in found.spans[bound.rank])
    for unit, runs in zip(units(table, bound.rank), bound.plan.runs(bound.rank), strict=True):
        start = min(next(starts) for _ in unit)
        for steps in runs:
            if steps not in played:
                played[steps] = inside(graph_of(bound, steps))
            for event in played[steps].events:  # what it communicates, and where it waits for that
                if event.waits or event.lane != COMPUTE:
                    at = event.lane if event.lane != COMPUTE else f"pp {bound.rank}"
                    yield replace(event, lane=at, start=begin + start + event.start, end=begin + start + event.end)
            start += played[steps].duration
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
    found: dict[tuple[tuple[str, int], ...], list[str]] = {}
    table = bound.plan.table
    for unit, runs in zip(units(table, bound.rank), bound.plan.runs(bound.rank), strict=True):
        for steps in runs:
            of = [replace(unit[0], kind=steps[0][0][0])] if len(unit) == 1 else unit
            found.setdefault(steps, []).append("+".join(_named(bound, action) for action in of))
    return {bound.part(*steps).op.name(): (f"pp {bound.rank}", iter(names)) for steps, names in found.items()}


def _named(bound: BoundPipeline, action: Action) -> str:
    """An action by its kind and microbatch, where a rank has several stages behind the number of its stage."""
    stage = f"{action.stage}." if bound.plan.table.stages > bound.plan.table.ranks else ""
    return f"{action.kind}{stage}{action.microbatch}"

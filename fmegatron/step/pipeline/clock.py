"""The clock of a table: when each action runs at given costs, how long ranks stand idle, how much they hold."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields

from fmegatron.step.pipeline.table import Action, Table, checked, needs, played

__all__ = ["Clock", "Costs", "clock", "timed"]


@dataclass(frozen=True)
class Costs:
    """What actions take and hold: a number for all stages, or a tuple with one for each.

    F, B, W, G, R: the time of an action of that kind, in any unit. BW: of B and W joined; None: their sum. pair: of an
        F and a backward that run as one, by the stage of the F; None: their sum.
    send: from the end of an action until another rank has what it made. Messages do not wait for each other.
    live: what a stage holds of a microbatch from the start of its F to the end of its B, in any unit (1: counted in
        microbatches). left: from there to the end of its W; what both read is in both.

    Raises ValueError for a number that is negative or not finite.
    """

    F: float | tuple[float, ...] = 1.0
    B: float | tuple[float, ...] = 1.0
    W: float | tuple[float, ...] = 1.0
    BW: float | tuple[float, ...] | None = None
    pair: float | tuple[float, ...] | None = None
    G: float | tuple[float, ...] = 0.0
    R: float | tuple[float, ...] = 0.0
    send: float | tuple[float, ...] = 0.0
    live: float | tuple[float, ...] = 1.0
    left: float | tuple[float, ...] = 1.0

    def __post_init__(self):
        for name, given in self._given():
            for number in given if isinstance(given, tuple) else (given,):
                if not (math.isfinite(number) and number >= 0):
                    raise ValueError(f"Costs: {name}: got {number}, wanted a finite number of 0 or more")

    def _given(self) -> Iterator[tuple[str, float | tuple[float, ...]]]:
        return ((f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) is not None)

    def at(self, name: str, stage: int) -> float:
        """A cost of one stage: at("BW", 3)."""
        if name == "BW" and self.BW is None:
            return self.at("B", stage) + self.at("W", stage)
        given = getattr(self, name)
        return given[stage] if isinstance(given, tuple) else given

    def of(self, action: Action) -> float:
        """The time of an action."""
        return self.at(action.kind, action.stage)

    def of_unit(self, unit: tuple[Action, ...]) -> tuple[float, ...]:
        """The times of what runs as one: of a pair that hides something each action is shorter by the same factor."""
        times = tuple(map(self.of, unit))
        if len(unit) == 1 or self.pair is None or not sum(times):
            return times
        (whole,) = (self.at("pair", action.stage) for action in unit if action.kind == "F")
        return tuple(time * whole / sum(times) for time in times)

    def fitting(self, stages: int) -> Costs:
        """The costs themselves. Raises ValueError where they are those of another number of stages."""
        for name, given in self._given():
            if isinstance(given, tuple) and len(given) != stages:
                raise ValueError(f"Costs: {name}: got {len(given)} numbers, wanted {stages}, one for each stage")
        return self


@dataclass(frozen=True)
class Clock:
    """A table in time.

    spans[rank][i]: start and end of the i-th action of a row. peaks[rank]: the most that a rank holds at once, in the
    unit of `Costs.live`.
    """

    table: Table
    spans: tuple[tuple[tuple[float, float], ...], ...]
    peaks: tuple[float, ...]

    @property
    def duration(self) -> float:
        """From the first start, at 0, to the last end."""
        return max(end for row in self.spans for _, end in row)

    @property
    def idle(self) -> tuple[float, ...]:
        """How long each rank has nothing to do."""
        return tuple(self.duration - sum(end - start for start, end in row) for row in self.spans)

    @property
    def idle_share(self) -> float:
        """The part of all ranks' time in which they have nothing to do."""
        return sum(self.idle) / (self.duration * len(self.spans)) if self.duration else 0.0


def clock(table: Table, costs: Costs | None = None) -> Clock:
    """When each action of a table runs: as soon as its rank is free and what it needs is there.

    Raises ValueError for a table that is wrong (`checked`), or costs of another number of stages.
    """
    return timed(checked(table), costs)


def timed(table: Table, costs: Costs | None = None) -> Clock:
    """`clock` of a table that is right, or has the forwards of one alone (`forwards`)."""
    costs = (costs or Costs()).fitting(table.stages)
    free, done = [0.0] * table.ranks, dict[Action, float]()
    spans: list[list[tuple[float, float]]] = [[] for _ in table.rows]
    for rank, unit in played(table):
        ready = [
            done[need] + (costs.at("send", need.stage) if table.place[need.stage] != rank else 0.0)
            for action in unit
            for need in needs(action, table.stages)
        ]
        end = max([free[rank], *ready])
        for time in costs.of_unit(unit):
            spans[rank].append((end, end + time))
            end += time
        free[rank] = end
        done |= {Action(kind, a.stage, a.microbatch): end for a in unit for kind in a.kind}
    return Clock(table, tuple(map(tuple, spans)), tuple(_peak(row, costs) for row in table.rows))


def _peak(row: tuple[Action, ...], costs: Costs) -> float:
    """The most that the actions of a row hold; a rank runs one at a time, so that it depends on their order alone."""
    held, peak = defaultdict[tuple[int, int], float](float), 0.0
    for action in row:
        key = action.stage, action.microbatch
        for kind in action.kind:
            if kind == "F":
                held[key] = costs.at("live", action.stage)
                peak = max(peak, sum(held.values()))
            elif kind == "B":
                held[key] = costs.at("left", action.stage)
                peak = max(peak, sum(held.values()))
            elif kind == "W":
                del held[key]
    return peak

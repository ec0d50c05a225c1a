"""Tables made by a clock: rules decide what a free rank runs, and the shortest table of several rules is taken."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fmegatron.step.pipeline.clock import Clock, Costs, clock
from fmegatron.step.pipeline.table import Action, Table

__all__ = ["greedy", "microbatch_of", "shortest"]


def greedy(
    place: Sequence[int],
    m: int,
    costs: Costs | None = None,
    memory: float | Sequence[float] | None = None,
    split: bool = True,
    name: str = "greedy",
) -> Table:
    """The shortest table that a few rules find for given costs, in a given memory.

    A free rank runs a backward or a forward that is ready, else weight gradients; forwards only while there is room for
    what the rank needs to end its oldest microbatch, so that no table waits for ever.

    Args:
        place: the rank of each stage.
        m: how many microbatches.
        costs: what actions take and hold; None: 1 each.
        memory: the most that a rank may hold at once, in the unit of `Costs.live` (a number for all, or one a rank);
            None: without limit.
        split: weight gradients are actions of their own (W), which fill idle time. False: BW alone.
        name: of the table.

    Raises ValueError where a rank cannot hold one microbatch.
    """
    costs = (costs or Costs()).fitting(len(place))
    ranks = max(place) + 1
    limits = tuple(memory) if isinstance(memory, Sequence) else (math.inf if memory is None else memory,) * ranks
    if len(limits) != ranks or m < 1:
        raise ValueError(
            f"{name}: got memory of {len(limits)} ranks and {m} microbatches, wanted {ranks}, and 1 or more"
        )
    for rank, (limit, least) in enumerate(zip(limits, microbatch_of(place, costs), strict=True)):
        if least > limit:
            raise ValueError(
                f"{name}: rank {rank}: got memory {limit:g}, wanted {least:g} or more; it holds a microbatch"
            )
    return shortest(
        (_Play(tuple(place), m, costs, limits, split, rules).table(name) for rules in _rules(split)), costs
    ).table


def microbatch_of(place: Sequence[int], costs: Costs) -> tuple[float, ...]:
    """What one microbatch takes of each rank's memory, with all of the rank's stages."""
    found = [0.0] * (max(place) + 1)
    for stage, rank in enumerate(place):
        found[rank] += _held(costs, stage)
    return tuple(found)


def shortest(tables: Iterator[Table] | Sequence[Table], costs: Costs) -> Clock:
    """The clock of the shortest of some tables: the first of several that are as short."""
    return min((clock(table, costs) for table in tables), key=lambda c: (round(c.duration, 9), sum(c.peaks)))


@dataclass(frozen=True)
class _Rules:
    """How a rank chooses.

    first: "B" a backward before a forward, "F" the other way round, "A" by turns. deep: of several forwards that of the
    deepest stage. patience: how long a W may delay what comes next, in parts of it. ahead: how many microbatches of a
    stage may be between forward and backward, in parts of the way from the stage to the last.
    """

    first: str
    deep: bool
    patience: float
    ahead: float


# Each is the best for some costs: of 54 sets, those that made the tables of 60 random pipelines shortest, together.
_RULES = (
    _Rules("A", True, 1.0, math.inf),
    _Rules("A", True, 0.5, math.inf),
    _Rules("A", True, 1.0, 1.5),
    _Rules("A", False, 0.0, math.inf),
    _Rules("B", True, 0.5, 1.5),
    _Rules("A", True, 0.0, 1.0),
    _Rules("A", True, 0.0, 1.5),
    _Rules("F", True, 1.0, math.inf),
    _Rules("F", True, 0.5, 1.0),
    _Rules("B", True, 0.0, math.inf),
)


def _rules(split: bool) -> Iterator[_Rules]:
    """Without a W there is no patience."""
    return iter(_RULES if split else dict.fromkeys(replace(rules, patience=1.0) for rules in _RULES))


def _held(costs: Costs, stage: int) -> float:
    """What a microbatch takes of a rank's room, from the start of F: what B leaves may be more than what F keeps."""
    return max(costs.at("live", stage), costs.at("left", stage))


class _Play:
    """One run of the clock under given rules."""

    def __init__(self, place, m, costs, limits, split, rules):
        self.place, self.m, self.costs, self.limits, self.split, self.rules = place, m, costs, limits, split, rules
        self.stages, self.ranks = len(place), len(limits)
        self.own = [[s for s in range(self.stages) if place[s] == rank] for rank in range(self.ranks)]
        self.next = {kind: [0] * self.stages for kind in "FB"}
        self.ready = {kind: [[math.inf] * m for _ in place] for kind in "FB"}  # when the input of an action is there
        self.ready["F"][0] = [0.0] * m
        self.waiting: list[deque[tuple[int, int]]] = [deque() for _ in limits]
        self.room = list(limits)
        self.rows: list[list[Action]] = [[] for _ in limits]
        hold = [_held(costs, s) for s in range(self.stages)]
        # What a forward must leave free: the later stages of its rank
        self.reserve = [sum(hold[t] for t in range(s, self.stages) if place[t] == place[s]) for s in range(self.stages)]
        self.hold = hold

    def table(self, name: str) -> Table:
        events, free = [0.0], [0.0] * self.ranks
        left = self.stages * self.m * (3 if self.split else 2)
        while left:
            now = heapq.heappop(events)
            while events and events[0] <= now:
                heapq.heappop(events)
            for rank in range(self.ranks):
                if free[rank] > now:
                    continue
                action = self._pick(rank, now)
                if action is not None:
                    free[rank] = now + self.costs.of(action)
                    for time in self._run(rank, action, free[rank]):
                        heapq.heappush(events, time)
                    left -= 1
        return Table(tuple(map(tuple, self.rows)), self.place, self.m, name)

    def _pick(self, rank: int, now: float) -> Action | None:
        """What a free rank runs at a time, None to wait."""
        found, later = {}, math.inf
        for kind in "BF":
            order = self.own[rank] if kind == "B" else self.own[rank][:: -1 if self.rules.deep else 1]
            for s in order:
                i = self.next[kind][s]
                if i == self.m or (kind == "F" and self._full(rank, s, i)):
                    continue
                time = self.ready[kind][s][i]
                if time > now:
                    later = min(later, time)
                elif kind not in found or (kind == "B" and i < found[kind][1]):
                    found[kind] = (s, i)
        row = self.rows[rank]
        turn = "F" if self.rules.first == "A" and row and row[-1].kind != "F" else "B"
        for kind in "FB" if "F" in (self.rules.first, turn) else "BF":
            if kind in found:
                return Action("BW" if kind == "B" and not self.split else kind, *found[kind])
        if self.waiting[rank]:
            s, i = self.waiting[rank][0]
            length = self.costs.at("W", s)
            if now + length * (1 - self.rules.patience) <= later or self.room[rank] < max(self.hold):
                return Action("W", s, i)
        return None

    def _full(self, rank: int, stage: int, microbatch: int) -> bool:
        """Whether a forward must wait for a backward or a W."""
        ahead = microbatch - self.next["B"][stage]
        return self.reserve[stage] > self.room[rank] + 1e-9 or ahead >= self.rules.ahead * (self.stages - stage)

    def _run(self, rank: int, action: Action, end: float) -> Iterator[float]:
        """Notes an action; times at which something may begin after it."""
        s, i = action.stage, action.microbatch
        self.rows[rank].append(action)
        yield end
        for kind in action.kind:
            if kind == "W":
                self.room[rank] += self.hold[s] if not self.split else self.costs.at("left", s)
                if self.split:
                    self.waiting[rank].remove((s, i))
                continue
            self.next[kind][s] += 1
            if kind == "F":
                self.room[rank] -= self.hold[s]
            elif self.split:
                self.room[rank] += self.hold[s] - self.costs.at("left", s)
                self.waiting[rank].append((s, i))
            reader = s + (1 if kind == "F" else -1)
            if kind == "F" and reader == self.stages:
                self.ready["B"][s][i] = end
            elif 0 <= reader < self.stages:
                time = end + (self.costs.at("send", s) if self.place[reader] != rank else 0.0)
                self.ready[kind][reader][i] = time
                yield time

"""A timeline: what ran when, in lanes; as text, and as a trace for chrome://tracing or Perfetto."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["COMPUTE", "Event", "Timeline"]

COMPUTE = "compute"
_SIDE_BY_SIDE = 12  # the least room for the names of lanes


@dataclass(frozen=True)
class Event:
    """Something that ran from `start` to `end` (both in the unit of its timeline).

    lane: "compute", or a name for what communicates ("gather fsdp"). waits: computation stood still for a collective.
    detail: more about it, for the trace.
    """

    name: str
    lane: str
    start: float
    end: float
    waits: bool = False
    detail: str = ""

    @property
    def duration(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The events of one step. `print` it; `chrome_trace(path)` writes it for a viewer.

    title: what it is of, and whether it is planned or measured. unit: "s", or "units" of a plan without rates.
    """

    events: tuple[Event, ...]
    title: str
    unit: str = "s"

    @property
    def duration(self) -> float:
        """From the first start to the last end."""
        return max((e.end for e in self.events), default=0.0) - min((e.start for e in self.events), default=0.0)

    @property
    def waiting(self) -> float:
        """How long computation stood still for communication."""
        return sum(e.duration for e in self.events if e.waits)

    def busy(self, lane: str) -> float:
        """How long a lane had something to do (waits are not work)."""
        return sum(e.duration for e in self.events if e.lane == lane and not e.waits)

    @property
    def lanes(self) -> list[str]:
        """Computation first, ranks of a pipeline, then the others by their first event."""
        names = dict.fromkeys(e.lane for e in sorted(self.events, key=lambda e: e.start))
        return sorted(names, key=lambda name: (name != COMPUTE, not name.startswith("pp ")))

    def picture(self, width: int = 110) -> str:
        """One row of `width` characters per lane: `[F0==]` runs, `....` waits for a collective; a legend below."""
        names = max([_SIDE_BY_SIDE, *map(len, self.lanes)])
        columns = max(width - names - 1, 1)
        begin = min((e.start for e in self.events), default=0.0)
        scale = columns / (self.duration or 1.0)
        rows = [f"{self.title}: {_number(self.duration, self.unit)}, {self._share()}"]
        for lane in self.lanes:
            row = [" "] * columns
            for event in sorted((e for e in self.events if e.lane == lane), key=lambda e: e.start):
                a, b = int((event.start - begin) * scale), int((event.end - begin) * scale)
                a, b = min(a, columns - 1), min(max(b, a + 1), columns)
                row[a:b] = "." * (b - a) if event.waits else _block(event.name, b - a)
            rows.append(f"{lane:{names}s} {''.join(row).rstrip()}")
        rows.append("[F0==] runs, .... waits; G gather, R reduce-scatter, A all-reduce, F B a layer forward, backward")
        if any(lane.startswith("pp ") for lane in self.lanes):
            rows.append("pp: a rank's actions, F forward, B gradient of the input, W of the weights, by microbatch")
        return "\n".join(rows)

    def _share(self) -> str:
        share = self.waiting / self.duration if self.duration else 0.0
        return f"{_number(self.waiting, self.unit)} of them waiting for communication ({share:.0%})"

    def __str__(self) -> str:
        return self.picture()

    def chrome_trace(self, path: str | Path) -> Path:
        """Write the events as JSON that chrome://tracing and ui.perfetto.dev open; a unit counts as a millisecond."""
        to_us = 1e6 if self.unit == "s" else 1e3
        numbers = {lane: i for i, lane in enumerate(self.lanes)}
        begin = min((e.start for e in self.events), default=0.0)
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": lane}}
            for lane, i in numbers.items()
        ]
        events = [
            {
                "name": f"wait for {e.name}" if e.waits else e.name,
                "ph": "X",
                "ts": (e.start - begin) * to_us,
                "dur": e.duration * to_us,
                "pid": 0,
                "tid": numbers[e.lane],
                "args": {"detail": e.detail},
            }
            for e in self.events
        ]
        path = Path(path)
        path.write_text(json.dumps({"traceEvents": names + events, "otherData": {"title": self.title}}))
        return path


def _block(name: str, columns: int) -> str:
    if columns >= len(name) + 2:
        return "[" + name + "=" * (columns - len(name) - 2) + "]"
    return ("[" + name)[:columns] if columns > 2 else "[]"[:columns] if columns > 1 else "|"


def _number(value: float, unit: str) -> str:
    return f"{value * 1e3:.3g} ms" if unit == "s" else f"{value:.3g} {unit}"

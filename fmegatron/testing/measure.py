"""Paired measurements under noise: two variants alternate in one process; the result is a median of ratios."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fmegatron.step import torch_private

__all__ = ["paired_seconds", "peak_bytes", "report", "seconds"]


def seconds(work: Callable[[], Any]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def paired_seconds(
    first: Callable[[], Any], second: Callable[[], Any], rounds: int, before: Callable[[], Any] | None = None
) -> list[tuple[float, float]]:
    """[(seconds of first, seconds of second)] of each round, after one round that warms up; the order alternates.

    before: called ahead of every single measurement, unmeasured (e.g. to remove what the last one wrote).
    """
    pairs = []
    for i in range(rounds + 1):
        measured = {}
        for work in (first, second) if i % 2 else (second, first):
            if before is not None:
                before()
            measured[work] = seconds(work)
        pairs.append((measured[first], measured[second]))
    return pairs[1:]


def peak_bytes(work: Callable[[], Any]) -> int:
    """Largest sum of live allocations in host memory during one call, above what was live before it.

    From the profiler's memory events: what torch's CPU allocator gave and took back, in the order of time.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = [e for e in torch_private.profiled_events(profile) if e.name() == "[memory]"]
    live = top = 0
    for _, size in sorted((e.start_ns(), e.nbytes()) for e in events):
        live += size
        top = max(top, live)
    return top


def report(
    metric: str,
    values: Sequence[float],
    *,
    unit: str,
    where: str,
    against: str | None = None,
    bar: str | None = None,
    note: str = "",
) -> float:
    """Print one measurement: a JSON line on stdout, a line for people on stderr; returns the median of `values`.

    Args:
        metric: its name.
        values: measured, one per repetition.
        unit: of the values.
        where: machine, ranks, versions.
        against: what a ratio compares with.
        bar: what was asked for, e.g. "<= 1.05", ">= 0.9", "< 1", or None.
        note: for the line on stderr.

    >>> report("save_vs_plain", [0.9, 1.1, 1.0], unit="ratio", where="here", bar=">= 0.9")
    {"metric": "save_vs_plain", "value": 1.0, "unit": "ratio", "against": null, "bar": ">= 0.9", "holds": true, "n": 3, "spread": [0.9, 1.1], "where": "here"}
    1.0
    """  # noqa: E501
    value = statistics.median(values)
    holds = None if bar is None else _holds(value, bar)
    line = {
        "metric": metric,
        "value": round(value, 4),
        "unit": unit,
        "against": against,
        "bar": bar,
        "holds": holds,
        "n": len(values),
        "spread": [round(min(values), 4), round(max(values), 4)],
        "where": where,
    }
    print(json.dumps(line), flush=True)
    mark = "" if holds is None else f"  {bar} {'holds' if holds else 'MISSED'}"
    spread = f"[{min(values):.3g} - {max(values):.3g}]"
    print(f"{metric:44s} {value:8.3g} {unit:6s} {spread:20s}{mark}  {note}", file=sys.stderr, flush=True)
    return value


def _holds(value: float, bar: str) -> bool:
    sign, limit = bar.split()
    return {
        "<=": value <= float(limit),
        ">=": value >= float(limit),
        "<": value < float(limit),
        ">": value > float(limit),
    }[sign]

"""The measured timeline of a call: the profiler's events in the lanes of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import torch

from fmegatron.step.overlap.events import COMPUTE, Event, Timeline

__all__ = ["measured"]

_WAIT = "_c10d_functional::wait_tensor"
_CALLS = "fmegatron_compiled::"
_LANES = MappingProxyType({"G": "gather", "R": "reduce", "A": "reduce", "X": "exchange"})  # by a name's first letter


def measured(call: Callable[[], Any], launched: Sequence[str], title: str = "measured") -> tuple[Any, Timeline]:
    """Run `call()` once under torch.profiler -> (its result, the timeline of what it did here).

    launched: the names of the collectives that the call starts, in their order (`launches.launched`).

    Lanes: "compute" holds compiled layers, matrix products outside of them and waits; the others what the library
    communicated (gloo on its threads, gathers and reduce-scatters as exchanges; NCCL on its streams).
    On CUDA "compute" is what the host launches, and each stream has a lane of its kernels.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        result = call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    found = profile.profiler.kineto_results.events()
    return result, Timeline(tuple(_events(sorted(found, key=lambda e: e.start_ns()), launched)), title)


def _events(found, launched) -> list[Event]:
    counts: dict[str, int] = {}
    events, inside = [], 0  # inside: when the last layer ends; what is in a layer is not shown again
    begin = found[0].start_ns() if found else 0

    def number(letter):
        counts[letter] = counts.get(letter, 0) + 1
        return f"{letter}{counts[letter] - 1}"

    for e in found:
        name, start, end = e.name(), (e.start_ns() - begin) / 1e9, (e.start_ns() - begin + e.duration_ns()) / 1e9
        on_device = e.device_type() != torch.autograd.DeviceType.CPU
        if on_device:
            lane = "gather" if "AllGather" in name else "reduce" if "Reduce" in name and "nccl" in name else "stream"
            events.append(Event(name[:40], f"{lane} {e.device_resource_id()}", start, end))
        elif name.startswith("gloo:"):
            events.append(Event(name, "other", start, end))
        elif name == _WAIT:
            events.append(Event("collective", COMPUTE, start, end, waits=True))
        elif name.startswith(_CALLS) and start >= inside:
            letter = "F" if "_fwd_" in name else "B" if "_bwd_" in name else "C"
            events.append(Event(number(letter), COMPUTE, start, end, detail=name))
            inside = end
        elif name in ("aten::mm", "aten::bmm", "aten::addmm") and start >= inside:
            events.append(Event("mm", COMPUTE, start, end))
    return _by_launch(events, launched)


def _by_launch(events: list[Event], launched: Sequence[str]) -> list[Event]:
    """Name what gloo ran after the calls that launched it: its threads take work in the order of the launches."""
    names, found = iter(launched), []
    for e in events:
        name, lane = e.name, e.lane
        if name.startswith("gloo:") and name not in ("gloo:send", "gloo:recv"):  # a gather in place has no start
            name = next(names, name)
            lane = _LANES.get(name[0], lane)
        found.append(Event(name, lane, e.start, e.end, e.waits, e.detail or e.name))
    return found

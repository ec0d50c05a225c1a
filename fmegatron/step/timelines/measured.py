"""Timelines of a step: measured in a call under the profiler, or planned from its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import torch

from fmegatron import tree
from fmegatron.layout import Mesh
from fmegatron.step.description import Description
from fmegatron.step.jitted import Compiled, Jitted
from fmegatron.step.overlap.schedule import Overlap, overlap_of
from fmegatron.step.passes import Target
from fmegatron.step.pipeline.entry import BoundPipeline
from fmegatron.step.timelines.events import COMPUTE, Event, Timeline
from fmegatron.step.timelines.planned import PaperWorld, Rates, launched, planned
from fmegatron.step.timelines.stages import MESSAGES, calls_of, pipelines_of
from fmegatron.step.torch_private import FakeTensorMode, profiled_events
from fmegatron.tree import labels

__all__ = ["measured", "timeline"]

_WAIT = "_c10d_functional::wait_tensor"
_CALLS = "fmegatron_compiled::"
_LANES = MappingProxyType({"G": "gather", "R": "reduce", "A": "reduce", "X": "exchange"})  # by a name's first letter


def timeline(
    step: Jitted | Callable | Description,
    *args: Any,
    mesh: Mesh | None = None,
    overlap: Overlap | bool | None = None,
    rates: Rates | None = None,
    call: int = 0,
) -> Timeline:
    """The timeline of a step: `print` it, or `.chrome_trace("step.json")` for ui.perfetto.dev.

    timeline(step)                        planned, from the graph of the call-th signature that a jit has compiled
    timeline(step, state, batch)          measured: one call of the jit under the profiler (the first compiles it
                                          unmeasured); its result is dropped, and what it donates are copies: the
                                          state is as before, and is in memory twice meanwhile
    timeline(step, state, batch, mesh=Mesh(fsdp=512))
                                          planned for a mesh on paper: `step` is a function over its symbolic axes (or
                                          a jit of one), its arguments those of one rank; no processes, nothing runs
    timeline(describe(config))            planned for the mesh of a `step.Description`, of arguments by its specs; or of
                                          a state and a batch that are given

    On a mesh with pp the pipeline has a lane for each rank of it, "pp 0", ..., and one for messages: planned, by the
    clock of its table with what the parts of each stage take; measured, of this rank.

    Args:
        step: a jit, with a mesh any function over symbolic axes, or a Description.
        *args: the arguments of one call.
        mesh: a mesh on paper.
        overlap: how collectives are ordered on it, as `jit` is given it; None: as the jit has it, else as by default.
        rates: of the device, to estimate durations in seconds; None: a layer's forward takes 1, its backward 2, a
            collective 1.
        call: which compiled signature is planned.

    Raises ValueError for a plan of a function that is not compiled yet.
    """
    if isinstance(step, Description):
        mesh, args = step.mesh, args or _on_paper(step)
        step = step.function
    name = getattr(step, "name", None) or getattr(step, "__name__", "step")
    if mesh is not None:
        fn, of_step = (step.fn, step.target.overlap) if isinstance(step, Jitted) else (step, overlap_of(True))
        setting = of_step if overlap is None else overlap_of(overlap)
        compiled = Compiled(fn, args, (), Target(PaperWorld(mesh), overlap=setting))
        return planned(compiled.stages["overlap"].graph, rates, f"{name} planned on {mesh}")
    if not isinstance(step, Jitted):
        raise ValueError(
            f"timeline: got {name}, which is no jit, wanted one; pass step.jit(fn), or arguments and mesh=Mesh(...)"
        )
    if not args:
        return planned(step.graph("overlap", call), rates, f"{name} planned")
    if not step.cache:
        step(*_copied(step, args))
    own, graph = _copied(step, args), step.graph("exchange", call)
    return measured(lambda: step(*own), launched(graph), f"{name} measured", pipelines_of(graph))[1]


def _on_paper(described: Description) -> tuple:
    """What a step is called with on rank 0, without memory."""
    with FakeTensorMode():
        return tuple(
            tree.map(lambda x: labels.labelled(torch.empty(x.local_shape(0), dtype=x.dtype), x), tree.layouts(given))
            for given in (described.state, described.batch)
        )


def _copied(step: Jitted, args: tuple) -> tuple:
    """The arguments, those that the step donates as copies."""
    return tuple(
        tree.map(lambda x: labels.alike(x.clone(), x) if isinstance(x, torch.Tensor) else x, arg)
        if i in step.donate
        else arg
        for i, arg in enumerate(args)
    )


def measured(
    call: Callable[[], Any],
    launched: Sequence[str],
    title: str = "measured",
    pipelines: Sequence[BoundPipeline] = (),
) -> tuple[Any, Timeline]:
    """Run `call()` once under torch.profiler -> (its result, the timeline of what it did here).

    launched: the names of the collectives that the call starts, in their order (`launches.launched`). pipelines: that
    it runs, in their order.

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
    found = profiled_events(profile)
    return result, Timeline(tuple(_events(sorted(found, key=lambda e: e.start_ns()), launched, pipelines)), title)


def _events(found, launched, pipelines) -> list[Event]:
    counts: dict[str, int] = {}
    parts = {name: calls for bound in pipelines for name, calls in calls_of(bound).items()}
    wholes = {bound.op.name() for bound in pipelines}
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
        elif name in wholes:
            continue  # its parts are shown
        elif name in parts and start >= inside:
            lane, calls = parts[name]
            action = next(calls, "?")
            events.append(Event(action, lane, start, end, detail=name))
            inside = end
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
        if name in ("gloo:send", "gloo:recv"):  # of a pipeline's messages, and of gathers in place, which have no start
            lane = MESSAGES
        elif name.startswith("gloo:"):
            name = next(names, name)
            lane = _LANES.get(name[0], lane)
        found.append(Event(name, lane, e.start, e.end, e.waits, e.detail or e.name))
    return found

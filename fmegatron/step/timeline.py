"""What one step computes and communicates when: planned from its graph, or measured in a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fmegatron import tree
from fmegatron.layout import Mesh
from fmegatron.step.jit import Compiled, Jitted
from fmegatron.step.overlap import Overlap, PaperWorld, Rates, Timeline, launched, measured, planned

__all__ = ["timeline"]


def timeline(
    step: Jitted | Callable,
    *args: Any,
    mesh: Mesh | None = None,
    overlap: Overlap | None = None,
    rates: Rates | None = None,
    call: int = 0,
) -> Timeline:
    """The timeline of a step: `print` it, or `.chrome_trace("step.json")` for ui.perfetto.dev.

    timeline(step)                        planned, from the graph of the call-th signature that a jit has compiled
    timeline(step, state, batch)          measured: one call of the jit under the profiler (the first compiles it
                                          unmeasured); its result is dropped, and what it donates are copies: the
                                          state is as before, and lies in memory twice meanwhile
    timeline(step, state, batch, mesh=Mesh(fsdp=512), overlap=Overlap())
                                          planned for a mesh on paper: `step` is a function over its symbolic axes (or
                                          a jit of one), its arguments those of one rank; no processes, nothing runs

    rates: of the device, to estimate durations in seconds; None: a layer's forward takes 1, its backward 2, a
    collective 1. Raises ValueError for a plan of a function that is not compiled yet.
    """
    name = getattr(step, "name", None) or getattr(step, "__name__", "step")
    if mesh is not None:
        fn, setting = (step.fn, overlap or step.overlap) if isinstance(step, Jitted) else (step, overlap)
        compiled = Compiled(fn, args, (), PaperWorld(mesh), "inductor", {}, {}, None, setting)
        return planned(compiled.stages["overlap"].graph, rates, f"{name} planned on {mesh}")
    if not isinstance(step, Jitted):
        raise ValueError(
            f"timeline of {name}, which is no jit: pass step.jit(fn), or arguments and mesh=Mesh(...) for a plan"
        )
    if not args:
        return planned(step.graph("overlap", call), rates, f"{name} planned")
    if not step.cache:
        step(*_copied(step, args))
    own = _copied(step, args)
    return measured(lambda: step(*own), launched(step.graph("exchange", call)), f"{name} measured")[1]


def _copied(step: Jitted, args: tuple) -> tuple:
    """The arguments, those that the step donates as copies."""
    return tuple(
        tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, arg) if i in step.donate else arg
        for i, arg in enumerate(args)
    )

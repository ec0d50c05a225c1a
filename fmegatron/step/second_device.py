"""A step on another device than that on which it was traced: what it makes has to be where its arguments are."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fmegatron import tree
from fmegatron.collectives import known_ranks
from fmegatron.step.torch_private import outside_of_tracing
from fmegatron.step.tracing import Traced, trace
from fmegatron.tree.labels import alike

__all__ = ["on_second_device"]


def on_second_device(traced: Traced, fn: Callable, args: tuple) -> tuple[str, str] | None:
    """(the line that makes a tensor without a device, what ends a trace of the same call on another device); None:
    nothing does.

    Only what was made on no device in particular can (`Traced.made_here`): a step without that is not traced again,
    which would take as long as the first time.
    """
    if not traced.made_here:
        return None

    def moved(x):
        if not isinstance(x, torch.Tensor):
            return x
        with outside_of_tracing():
            return alike(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), x)

    try:
        trace(fn, tree.map(moved, args), mesh=known_ranks.recorded_mesh())
    except ValueError as error:
        lines = list(dict.fromkeys(traced.made_here))
        others = f", also made without a device: {', '.join(lines[1:])}" if lines[1:] else ""
        return lines[0], f"{error}{others}"
    return None

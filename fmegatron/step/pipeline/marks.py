"""Where the stages of a pipeline may begin: marks that a loss sets before its blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmegatron.collectives import known_ranks
from fmegatron.step.tracing import line_here
from fmegatron.tree import structure

__all__ = ["MARK", "next_stage", "stage"]


def _define() -> torch.library.Library:
    # What crosses ranks is contiguous: a receiver allocates it by its shape.
    library = torch.library.Library("fmegatron_step", "FRAGMENT")
    library.define("stage(Tensor x, int n) -> Tensor")
    library.impl("stage", lambda x, n: x.clone(memory_format=torch.contiguous_format), "CompositeExplicitAutograd")
    library.impl("stage", lambda x, n: x.new_empty(x.shape), "Meta")
    return library


_LIBRARY = _define()
MARK = torch.ops.fmegatron_step.stage.default


def stage(x: Tensor, n: int) -> Tensor:
    """x itself, and the statement that block n of a stack begins here: a stage of a pipeline may.

        for n, w in enumerate(blocks):
            x = block(step.stage(x, n), w)

    x: the only value that goes from block n - 1 to block n; a floating tensor. n: from 0, in order, each once.
    Nothing is left of it in a graph but where a pipeline is cut (`step.pipelined`). Raises ValueError for another n,
    and for what is no tensor.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise ValueError(f"stage: x: got {_words(x)}, wanted the floating tensor that goes from block to block")
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise ValueError(f"stage: n: got {n!r}, wanted the number of the block, 0 or more")
    recorded = known_ranks.recorded_stages()
    if recorded is None:
        return x
    recorded.marked = n + 1
    return _Mark.apply(x, n)


def next_stage(x: Any) -> Any:
    """`stage` of the block behind those that have been marked: of functions that apply blocks themselves."""
    recorded = known_ranks.recorded_stages()
    return x if recorded is None else stage(x, recorded.marked)


def _words(x: Any) -> str:
    return f"{x.dtype} at {line_here()}" if isinstance(x, Tensor) else structure.in_words(x)


class _Mark(torch.autograd.Function):
    """A mark in the forward, and one in the backward: of the gradient of what goes from block to block."""

    @staticmethod
    def forward(ctx, x, n):
        ctx.n = n
        return MARK(x, n)

    @staticmethod
    def backward(ctx, *gs):
        return MARK(gs[0], ctx.n), None

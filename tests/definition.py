"""The value of a loss of sums and counts by its definition, in plain torch, on one rank that has the whole batch."""

import functools
import operator

import torch

from fmegatron import step


def mean_of(part: step.Part) -> torch.Tensor:
    """total / count, times the means among its weights, which no gradient reaches; numbers left out."""
    shares = [(w.total / w.count).detach() for w in part.weights if isinstance(w, step.Part)]
    return functools.reduce(torch.mul, shares, part.total / part.count).sum()


def loss_of(parts: step.Part | dict[str, step.Part]) -> torch.Tensor:
    """The sum of all parts, each with its weights; differentiable."""
    found = [parts] if isinstance(parts, step.Part) else parts.values()
    return sum(
        functools.reduce(operator.mul, [w for w in one.weights if not isinstance(w, step.Part)], mean_of(one))
        for one in found
    )

"""The value of a loss of sums and counts by its definition, in plain torch, on one rank that has the whole batch."""

import functools
import operator

import torch

from fmegatron import step
from fmegatron.collectives import psum


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


def scalar_of(parts: dict[str, step.Part], axes) -> tuple[torch.Tensor, dict]:
    """The same loss as a scalar, this rank's part of it, whose sum over the data ranks is the loss; and its metrics."""
    data = axes[axes.data]
    terms = [functools.reduce(operator.mul, one.weights, one.total / psum(one.count, data)) for one in parts.values()]
    loss = sum(terms[1:], terms[0])
    return loss, {"loss": psum(loss.detach(), data)}

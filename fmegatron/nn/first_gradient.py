"""Gradients that are written by hand for one differentiation: another one is an error, else it were zero in silence.

torch's `once_differentiable` says so only where the gradient that arrives needs a gradient itself, and not where the
saved values do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["first_only"]


def first_only(name: str, grads: Sequence[Tensor | None], *used: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients that a backward returns; where autograd records it (create_graph=True), a gradient of them is a
    ValueError that names the function. used: what they were made of, where that was not recorded."""
    if not torch.is_grad_enabled():
        return tuple(grads)
    return _First.apply(name, len(grads), torch.zeros((), requires_grad=True), *grads, *used)


class _First(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, n, _, *grads):
        ctx.name = name
        return tuple(None if g is None else g.view_as(g) for g in grads[:n])

    @staticmethod
    def backward(ctx, *_):
        raise ValueError(
            f"{ctx.name}: got a gradient of its gradient, wanted first gradients only: its backward is written for "
            "one; call the plain function, or plain torch, where second gradients are taken"
        )

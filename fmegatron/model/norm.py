"""Norms of a block: root mean square, and mean and variance."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fmegatron import nn
from fmegatron.collectives import enter
from fmegatron.model.arrays import Array, TokenContext


@dataclass(frozen=True)
class RMSNorm:
    """x / rms(x) * w. offset: the factor is `offset + w`, and w begins at `1 - offset` (Gemma: 1)."""

    eps: float = 1e-5
    offset: float = 0.0

    def arrays(self, dim: int) -> Array:
        """The weight [D]."""
        return Array((dim,), init=1.0 - self.offset)

    def __call__(self, x_D: Tensor, w_D: Tensor, at: TokenContext) -> Tensor:
        """`x[B, S, D] -> y[B, S, D]`. Where each rank of tp normalises other tokens (sequence parallelism), the
        gradient of w is a sum over tp: `enter` makes it. Else all ranks do identical work, and it is complete."""
        return nn.rms_norm(x_D, enter(w_D, at.axes["tp"]) if at.splits(x_D) else w_D, self.eps, self.offset)


@dataclass(frozen=True)
class LayerNorm:
    """(x - mean) / sqrt(var + eps) * w + b."""

    eps: float = 1e-5

    def arrays(self, dim: int) -> dict[str, Array]:
        """Weight and bias, [D] each."""
        return {"w": Array((dim,), init=1.0), "b": Array((dim,), init=0.0)}

    def __call__(self, x_D: Tensor, w: dict[str, Tensor], at: TokenContext) -> Tensor:
        """`x[B, S, D] -> y[B, S, D]`; gradients as `RMSNorm`'s."""
        w_D, b_D = (enter(w[k], at.axes["tp"]) if at.splits(x_D) else w[k] for k in ("w", "b"))
        return nn.layer_norm(x_D, w_D, b_D, self.eps)


Norm = RMSNorm | LayerNorm

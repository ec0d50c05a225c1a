"""The rotary embedding of a mixer, as a value: equal ones share their tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fmegatron import nn
from fmegatron.nn import rope


@dataclass(frozen=True)
class Rope:
    """Rotates the first `dim` of each head by angles of base `theta`. ValueError for an odd `dim`.

    interleaved: pairs are neighbours. scaling: `nn.Linear`, `nn.Llama3` or `nn.Yarn`, for long contexts.
    """

    dim: int
    theta: float = 10000.0
    interleaved: bool = False
    scaling: rope.Scaling | None = None

    def __post_init__(self):
        if self.dim < 2 or self.dim % 2:
            raise ValueError(
                f"Rope.dim: got a width of {self.dim}, wanted an even one (RoPE rotates pairs); choose dim / heads even"
            )

    def angles(self, positions_S: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin) at these positions, fp32 or wider."""
        return nn.rope_angles(positions_S, self.dim, self.theta, dtype, self.scaling)

    def __call__(self, x_BSHK: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Queries or keys, rotated by what `angles` gave."""
        return nn.apply_rope(x_BSHK, *angles, self.interleaved)

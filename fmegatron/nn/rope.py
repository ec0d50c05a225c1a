"""Rotary position embedding.  Legend: B batch, S sequence, H heads, K rotated width of a head, h half of K."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


# ---- longer contexts than the model was trained on -------------------------------------------------------------------
@dataclass(frozen=True)
class Linear:
    """Positions divided by `factor`. Source: Chen et al. 2023, arXiv 2306.15595."""

    factor: float

    def __call__(self, frequency_h: Tensor, theta: float) -> tuple[Tensor, float]:
        """(frequencies[h], factor of cos and sin)."""
        return frequency_h / self.factor, 1.0


@dataclass(frozen=True)
class Llama3:
    """Long waves divided by `factor`, short ones kept, those between interpolated. Source: Llama 3.1, arXiv 2407.21783.

    low, high: how often the longest and the shortest of the waves between turn within `original` positions.
    """

    factor: float
    low: float
    high: float
    original: int

    def __call__(self, frequency_h: Tensor, theta: float) -> tuple[Tensor, float]:
        """(frequencies[h], factor of cos and sin)."""
        turns_h = self.original * frequency_h / (2 * math.pi)
        kept_h = ((turns_h - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - kept_h) * frequency_h / self.factor + kept_h * frequency_h, 1.0


@dataclass(frozen=True)
class Yarn:
    """Waves of few turns divided by `factor`, those of many kept, a ramp over the dims between; cos and sin times
    `attention`. Source: Peng et al. 2023, arXiv 2309.00071, sections 3.2 to 3.4.

    fast, slow: turns within `original` positions at the ends of the ramp. truncate: its ends are whole dims.
    """

    factor: float
    original: int
    fast: float = 32.0
    slow: float = 1.0
    attention: float = 1.0
    truncate: bool = True

    def __call__(self, frequency_h: Tensor, theta: float) -> tuple[Tensor, float]:
        """(frequencies[h], factor of cos and sin)."""
        h = frequency_h.shape[0]
        low, high = (h * math.log(self.original / (t * 2 * math.pi)) / math.log(theta) for t in (self.fast, self.slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * h - 1)
        i_h = torch.arange(h, dtype=frequency_h.dtype, device=frequency_h.device)
        kept_h = 1 - ((i_h - low) / (high - low if high != low else 0.001)).clamp(0, 1)
        return (1 - kept_h) * frequency_h / self.factor + kept_h * frequency_h, self.attention


Scaling = Linear | Llama3 | Yarn


# ---- angles and rotation ---------------------------------------------------------------------------------------------
def rope_angles(
    positions_S: Tensor,
    head_dim: int,
    theta: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    scaling: Scaling | None = None,
) -> tuple[Tensor, Tensor]:
    """The tables (cos[S, h], sin[S, h]) of angles `position * theta^(-2i/K)`, i = 0 .. K/2-1; [B, S, h] of [B, S].

    Angles are computed in fp32, or in fp64 when `dtype` is fp64; never in bf16, which has no integers beyond 256.
    Source: Su et al. 2021, arXiv 2104.09864, section 3.2.2.

    Args:
        positions_S: int64 [S], or [B, S]: data, so that a decode step can pass its own position.
        head_dim: K, how much of a head is rotated.
        theta: the base.
        dtype: of the activations.
        scaling: of the frequencies; None: as they are.

    Raises ValueError for an odd head width.
    """
    if head_dim % 2:
        raise ValueError(
            f"rope: got head width {head_dim}, wanted an even one (pairs are rotated); choose dim / heads even"
        )
    wide = torch.promote_types(dtype, torch.float32)
    exponent_h = torch.arange(0, head_dim, 2, device=positions_S.device, dtype=wide) / head_dim
    if scaling is None:
        angle_Sh = positions_S.to(wide)[..., None] * theta**-exponent_h
        return angle_Sh.cos(), angle_Sh.sin()
    frequency_h, factor = scaling(theta**-exponent_h, theta)
    angle_Sh = positions_S.to(wide)[..., None] * frequency_h
    return angle_Sh.cos() * factor, angle_Sh.sin() * factor


def apply_rope(x_BSHK: Tensor, cos_Sh: Tensor, sin_Sh: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate each pair (x[i], x[i + K/2]) of a head by its position's angle; the half-split order of Llama checkpoints.

    `x[B, S, H_tp, K] -> y[B, S, H_tp, K]`, elementwise over heads, no communication. Tables of 2h < K rotate the first
    2h of a head and leave the rest. The maths is as wide as the tables (fp32 or wider), the result has x's dtype.

    Args:
        x_BSHK: queries or keys.
        cos_Sh: [S, h], or [B, S, h].
        sin_Sh: of that shape.
        interleaved: pairs are (x[2i], x[2i + 1]); the result is in half-split order, which no product of two of them
            sees (DeepSeek).
    """
    width, cos, sin = 2 * cos_Sh.shape[-1], cos_Sh.unsqueeze(-2), sin_Sh.unsqueeze(-2)
    if width < x_BSHK.shape[-1]:
        turned, rest = x_BSHK.split((width, x_BSHK.shape[-1] - width), -1)
        return torch.cat((apply_rope(turned, cos_Sh, sin_Sh, interleaved), rest), -1)
    a_BSHh, b_BSHh = x_BSHK.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x_BSHK.chunk(2, -1)
    return torch.cat((a_BSHh * cos - b_BSHh * sin, b_BSHh * cos + a_BSHh * sin), -1).to(x_BSHK.dtype)

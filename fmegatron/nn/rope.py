"""Rotary position embedding.  Legend: B batch, S sequence, H heads, K head width, h half of K."""

import torch
from torch import Tensor


def rope_angles(
    positions_S: Tensor, head_dim: int, theta: float = 10000.0, dtype=torch.float32
) -> tuple[Tensor, Tensor]:
    """The tables (cos[S, h], sin[S, h]) of angles `position * theta^(-2i/K)`, i = 0 .. K/2-1.

    `positions` is an int64 tensor (not a range), so that a decode step can pass its own position: [S], or [B, S] where
    rows differ (packed documents, parts of a sequence); then so are the tables, [B, S, h]. Angles are
    computed in fp32, or in fp64 when `dtype` is fp64; never in bf16, which has no integers beyond 256.
    Source: Su et al. 2021, arXiv 2104.09864, section 3.2.2.
    Raises ValueError for an odd head width.
    """
    if head_dim % 2:
        raise ValueError(
            f"rope: got head width {head_dim}, wanted an even one (pairs are rotated); choose dim / heads even"
        )
    wide = torch.promote_types(dtype, torch.float32)
    exponent_h = torch.arange(0, head_dim, 2, device=positions_S.device, dtype=wide) / head_dim
    angle_Sh = positions_S.to(wide)[..., None] * theta**-exponent_h
    return angle_Sh.cos(), angle_Sh.sin()


def apply_rope(x_BSHK: Tensor, cos_Sh: Tensor, sin_Sh: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + K/2]) of a head by its position's angle; the half-split order of Llama checkpoints.

    `x[B, S, H_tp, K] -> y[B, S, H_tp, K]`, elementwise over heads, no communication; tables [S, h] or [B, S, h]. The
    maths is as wide as the tables (fp32 or wider), the result has x's dtype.
    """
    a_BSHh, b_BSHh = x_BSHK.chunk(2, -1)
    cos, sin = cos_Sh.unsqueeze(-2), sin_Sh.unsqueeze(-2)
    return torch.cat((a_BSHh * cos - b_BSHh * sin, b_BSHh * cos + a_BSHh * sin), -1).to(x_BSHK.dtype)

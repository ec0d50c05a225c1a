"""Every private name of torch that this room uses, in one place. Tried on torch 2.13."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["flash_on_cpu", "flash_on_cpu_backward", "grouped_mm"]

grouped_mm = torch._grouped_mm


def flash_on_cpu(
    q_BHSK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of attention on the CPU, in fp64 too. mask: in q's dtype, added to the scores.

    A row that sees nothing has the output 0 and the log-sum-exp 0.
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_BHSK, k_BGTK, v_BGTK, 0.0, causal, attn_mask=mask
    )


def flash_on_cpu_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `flash_on_cpu`, of which o and lse are the results, or those of attention to more keys."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, k, v, o, lse, 0.0, causal, attn_mask=mask
    )

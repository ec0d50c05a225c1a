"""Every private name of torch that this room uses, in one place. Tried on torch 2.13."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "efficient_on_cuda",
    "efficient_on_cuda_backward",
    "flash_on_cpu",
    "flash_on_cpu_backward",
    "flash_on_cuda",
    "flash_on_cuda_backward",
    "grouped_mm",
]

grouped_mm = torch._grouped_mm
_LSE, _ROW = 32, 16  # of the memory-efficient kernel: numbers of a row of log-sum-exps, and of biases, are multiples


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
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    causal: bool,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `flash_on_cpu`, of which o and lse are the results, or those of attention to more keys."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, k, v, o, lse, 0.0, causal, attn_mask=mask
    )


def flash_on_cuda(q_BHSK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of attention on CUDA in 16 bits, for grouped heads and heads of at most 256."""
    o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q_BHSK, k_BGTK, v_BGTK, 0.0, causal)
    return o, lse


def flash_on_cuda_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `flash_on_cuda`, of which o and lse are the results, or those of attention to more keys."""
    seed, offset = _no_dropout(q, 2), _no_dropout(q)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        do, q, k, v, o, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, offset
    )


def efficient_on_cuda(
    q_BHSK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of attention on CUDA with as many heads of keys as of queries. bias: in q's dtype, added
    to the scores, broadcast to [B, H, S, T]; every query must see a key. 8 divides the widths."""
    o, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q_BHSK, k_BHTK, v_BHTK, _expanded(bias, q_BHSK, k_BHTK), True, 0.0, causal
    )
    return o, lse[..., : q_BHSK.shape[2]]


def efficient_on_cuda_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    causal: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `efficient_on_cuda`, of which o and lse are the results, or those of attention to more keys; a
    query may see none here."""
    bias, wanted = _expanded(bias, q, k), [True, True, True, False]
    lse = F.pad(lse, (0, -lse.shape[-1] % _LSE), value=math.inf)  # as the forward has it
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        do, q, k, v, bias, o, lse, _no_dropout(q), _no_dropout(q), 0.0, wanted, causal
    )
    return dq, dk, dv


def _no_dropout(like: Tensor, *shape: int) -> Tensor:
    """The state of a generator that nothing is drawn from."""
    return torch.zeros(shape, dtype=torch.int64, device=like.device)


def _expanded(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """With rows that begin where the kernel can read."""
    if bias is None:
        return None
    keys = k.shape[2]
    bias = bias.expand(*bias.shape[:-1], keys)
    return F.pad(bias, (0, -keys % _ROW))[..., :keys].expand(*q.shape[:3], keys)

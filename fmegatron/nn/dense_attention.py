"""Attention on local heads.  Legend: B batch, S queries, T keys, H/G query/kv heads, K head width."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fmegatron.nn.attention_blocks import attention_in_blocks, kernel_of, of_queries
from fmegatron.nn.attention_masks import Causal, Sight, over_heads, sight
from fmegatron.nn.tiled_attention import Dropped

__all__ = ["attention", "attention_kernel"]


def attention(
    q_BSHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    mask_ST: Tensor | Causal | Sight | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    dropped: Dropped | None = None,
) -> Tensor:
    """Scaled dot-product attention with grouped key/value heads -> o[B, S, H, K].

    `q[B, S, H_tp, K], k[B, T, G_tp, K], v[B, T, G_tp, K] -> o[B, S, H_tp, K]`, no communication: heads are
    independent. H is a multiple of G; query head h reads key/value head h // (H/G) without repeating it in memory.
    Source: Vaswani et al. 2017, arXiv 1706.03762, equation 1; grouped heads: arXiv 2305.13245.

    Args:
        q_BSHK: queries.
        k_BTGK: keys.
        v_BTGK: values; their width may be another than that of the keys.
        mask_ST: what the tokens, S == T, are told of each other (`Causal`: positions, documents, a window), of which
            kernels make masks of their own; or bool, True = may look, [S, T] or [B, S, T]. None: causal, S == T.
        scale: of the products; None: 1 / sqrt(K).
        softcap: scores are capped to it (`soft_cap`; Gemma 2, arXiv 2408.00118).
        sinks_H: a logit of each head that takes its share of the softmax and gives no value (arXiv 2508.10925).
        dropped: keyed dropout of the softmax.

    No scores are kept in memory, whatever is asked; which kernel it is, `attention_kernel` says.
    """
    mask = sight(mask_ST) if isinstance(mask_ST, Causal) else mask_ST
    if _by_blocks(q_BSHK, v_BTGK, mask, softcap, sinks_H, dropped):
        how = {"sinks_H": sinks_H, "softcap": softcap, "scale": scale, "dropped": dropped}
        return attention_in_blocks(q_BSHK, k_BTGK, v_BTGK, mask, **how)
    assert not isinstance(mask, Sight), "of blocks"
    mask = over_heads(mask)
    q_BHSK, k_BGTK, v_BGTK = (x.transpose(1, 2) for x in (q_BSHK, k_BTGK, v_BTGK))
    wide = q_BHSK.dtype in (torch.float32, torch.float64)
    if q_BHSK.device.type == "cuda" and (wide or mask is not None):  # the kernel of these has no grouped heads
        k_BGTK, v_BGTK = (of_queries(x, q_BHSK) for x in (k_BGTK, v_BGTK))
    grouped = q_BHSK.shape[1] != k_BGTK.shape[1]
    o_BHSK = F.scaled_dot_product_attention(
        q_BHSK, k_BGTK, v_BGTK, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return o_BHSK.transpose(1, 2)


def attention_kernel(
    q_BSHK: Tensor,
    v_BTGK: Tensor,
    mask_ST: Tensor | Causal | Sight | None = None,
    *,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    dropped: Dropped | None = None,
) -> str:
    """Which kernel computes `attention` of these, and why not each of those that are preferred to it, a line each.

    Fake tensors are enough, of any device. Arguments as of `attention`.
    """
    mask = sight(mask_ST) if isinstance(mask_ST, Causal) else mask_ST
    if _by_blocks(q_BSHK, v_BTGK, mask, softcap, sinks_H, dropped):
        return str(kernel_of(q_BSHK, v_BTGK, mask, softcap, dropped))
    return "F.scaled_dot_product_attention: taken, by cuDNN, flash or a memory-efficient kernel as torch chooses"


def _by_blocks(q, v, mask, softcap, sinks, dropped) -> bool:
    """Whether torch's function does not know it, or would keep the scores on CUDA."""
    if isinstance(mask, Sight) or softcap is not None or sinks is not None or dropped is not None:
        return True
    return q.device.type == "cuda" and kernel_of(q, v, mask).kernel == "tiled"

"""Attention on local heads.  Legend: B batch, S queries, T keys, H/G query/kv heads, K head width."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fmegatron.nn.attention_blocks import attention_in_blocks, of_queries
from fmegatron.nn.attention_masks import over_heads, soft_cap

__all__ = ["attention"]


def attention(
    q_BSHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    mask_ST: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Scaled dot-product attention with grouped key/value heads -> o[B, S, H, K].

    `q[B, S, H_tp, K], k[B, T, G_tp, K], v[B, T, G_tp, K] -> o[B, S, H_tp, K]`, no communication: heads are
    independent. H is a multiple of G; query head h reads key/value head h // (H/G) without repeating it in memory.
    Source: Vaswani et al. 2017, arXiv 1706.03762, equation 1; grouped heads: arXiv 2305.13245.

    Args:
        q_BSHK: queries.
        k_BTGK: keys.
        v_BTGK: values; their width may be another than that of the keys.
        mask_ST: bool, True = may look: [S, T], or [B, S, T] (`visible` makes one of positions). None: causal, S == T.
        scale: of the products; None: 1 / sqrt(K).
        softcap: scores are capped to it (`soft_cap`; Gemma 2, arXiv 2408.00118).
        sinks_H: a logit of each head that takes its share of the softmax and gives no value (arXiv 2508.10925).
        drop: what becomes of the softmax [B, H, S, T], keyed dropout of it: with scores in memory.
    """
    mask = over_heads(mask_ST)
    if drop is not None:
        return _with_scores(q_BSHK, k_BTGK, v_BTGK, mask, sinks_H, softcap, scale, drop)
    if softcap is not None or sinks_H is not None:
        return attention_in_blocks(q_BSHK, k_BTGK, v_BTGK, mask, sinks_H=sinks_H, softcap=softcap, scale=scale)
    q_BHSK, k_BGTK, v_BGTK = (x.transpose(1, 2) for x in (q_BSHK, k_BTGK, v_BTGK))
    wide = q_BHSK.dtype in (torch.float32, torch.float64)
    if q_BHSK.device.type == "cuda" and (wide or mask is not None):  # the kernel of these has no grouped heads
        k_BGTK, v_BGTK = (of_queries(x, q_BHSK) for x in (k_BGTK, v_BGTK))
    grouped = q_BHSK.shape[1] != k_BGTK.shape[1]
    o_BHSK = F.scaled_dot_product_attention(
        q_BHSK, k_BGTK, v_BGTK, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return o_BHSK.transpose(1, 2)


def _with_scores(q_BSHK, k_BTGK, v_BTGK, mask, sinks_H, softcap, scale, drop) -> Tensor:
    q_BHSK, k_BGTK, v_BGTK = (x.transpose(1, 2) for x in (q_BSHK, k_BTGK, v_BTGK))
    H, G, S, T = q_BHSK.shape[1], k_BGTK.shape[1], q_BHSK.shape[2], k_BGTK.shape[2]
    q_BGRSK = q_BHSK.unflatten(1, (G, H // G))
    s_BHST = (q_BGRSK @ k_BGTK.unsqueeze(2).mT).flatten(1, 2) * (q_BHSK.shape[-1] ** -0.5 if scale is None else scale)
    s_BHST = s_BHST if softcap is None else soft_cap(s_BHST, softcap)
    if mask is None:
        mask = torch.arange(S, device=s_BHST.device)[:, None] >= torch.arange(T, device=s_BHST.device)
    sees = mask.any(-1, keepdim=True)  # a row that sees nothing has the output 0, not that of 0 / 0
    s_BHST = s_BHST.to(torch.promote_types(s_BHST.dtype, torch.float32)).masked_fill(~mask & sees, -torch.inf)
    if sinks_H is None:
        p_BHST = s_BHST.softmax(-1)
    else:
        total_BHS1 = torch.logaddexp(s_BHST.logsumexp(-1, keepdim=True), sinks_H.to(s_BHST.dtype)[:, None, None])
        p_BHST = (s_BHST - total_BHS1).exp()
    p_BHST = p_BHST.masked_fill(~sees, 0.0)
    o_BGRSK = drop(p_BHST).to(v_BGTK.dtype).unflatten(1, (G, H // G)) @ v_BGTK.unsqueeze(2)
    return o_BGRSK.flatten(1, 2).transpose(1, 2)

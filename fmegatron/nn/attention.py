"""Causal attention on local heads.  Legend: B batch, S queries, T keys, H/G query/kv heads, K head width."""

import torch.nn.functional as F
from torch import Tensor


def attention(q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask_ST: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention with grouped key/value heads -> o[B, S, H, K].

    `q[B, S, H_tp, K], k[B, T, G_tp, K], v[B, T, G_tp, K] -> o[B, S, H_tp, K]`, no communication: heads are
    independent. H is a multiple of G; query head h reads key/value head h // (H/G) without repeating it in memory. The
    mask is causal (S == T), or what `mask_ST` says (bool, True = may look; used by cached decoding).
    Source: Vaswani et al. 2017, arXiv 1706.03762, equation 1; grouped heads: arXiv 2305.13245.
    """
    q_BHSK, k_BGTK, v_BGTK = (x.transpose(1, 2) for x in (q_BSHK, k_BTGK, v_BTGK))
    grouped = q_BHSK.shape[1] != k_BGTK.shape[1]
    o_BHSK = F.scaled_dot_product_attention(
        q_BHSK, k_BGTK, v_BGTK, attn_mask=mask_ST, is_causal=mask_ST is None, enable_gqa=grouped
    )
    return o_BHSK.transpose(1, 2)

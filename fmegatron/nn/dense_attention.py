"""Attention on local heads.  Legend: B batch, S queries, T keys, H/G query/kv heads, K head width."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


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
        drop: what becomes of the softmax [B, H, S, T], keyed dropout of it; like softcap and sinks it takes the form
            with scores in memory, which no flash kernel computes.
    """
    q_BHSK, k_BGTK, v_BGTK = (x.transpose(1, 2) for x in (q_BSHK, k_BTGK, v_BTGK))
    mask = over_heads(mask_ST)
    if softcap is None and sinks_H is None and drop is None:
        grouped = q_BHSK.shape[1] != k_BGTK.shape[1]
        o_BHSK = F.scaled_dot_product_attention(
            q_BHSK, k_BGTK, v_BGTK, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        return o_BHSK.transpose(1, 2)
    H, G, S, T = q_BHSK.shape[1], k_BGTK.shape[1], q_BHSK.shape[2], k_BGTK.shape[2]
    q_BGRSK = q_BHSK.unflatten(1, (G, H // G))
    s_BHST = (q_BGRSK @ k_BGTK.unsqueeze(2).mT).flatten(1, 2) * (q_BHSK.shape[-1] ** -0.5 if scale is None else scale)
    s_BHST = s_BHST if softcap is None else soft_cap(s_BHST, softcap)
    if mask is None:
        mask = torch.arange(S, device=s_BHST.device)[:, None] >= torch.arange(T, device=s_BHST.device)
    s_BHST = s_BHST.to(torch.promote_types(s_BHST.dtype, torch.float32)).masked_fill(~mask, -torch.inf)
    if sinks_H is None:
        p_BHST = s_BHST.softmax(-1)
    else:
        total_BHS1 = torch.logaddexp(s_BHST.logsumexp(-1, keepdim=True), sinks_H.to(s_BHST.dtype)[:, None, None])
        p_BHST = (s_BHST - total_BHS1).exp()
    p_BHST = p_BHST if drop is None else drop(p_BHST)
    o_BGRSK = p_BHST.to(v_BGTK.dtype).unflatten(1, (G, H // G)) @ v_BGTK.unsqueeze(2)
    return o_BGRSK.flatten(1, 2).transpose(1, 2)


class Causal(NamedTuple):
    """What causal attention over a sequence that is split over ranks is told of this rank's tokens: data, as they are.

    positions: int64 [B, S_cp] or [S_cp], of each token in its document (or in the sequence).
    documents: int64 [B, S_cp], the number of its document; None: a row is one.
    window: how many positions a query sees, itself included; None: all before it.
    zigzag: whether the ranks have the parts of the sequence in the order of `zigzag`, for an equal share of the work.
    """

    positions: Tensor
    documents: Tensor | None = None
    window: int | None = None
    zigzag: bool = False


def visible(
    positions_S: Tensor,
    positions_T: Tensor,
    window: int | None = None,
    documents_S: Tensor | None = None,
    documents_T: Tensor | None = None,
) -> Tensor:
    """The mask of causal attention, made of data alone: bool [S, T], or [B, S, T] where anything is given per row.

    A query sees keys at its own position or before, of its own document, with a window only the last `window` of them,
    its own position included.

    Args:
        positions_S: int64 [S] or [B, S], of the queries.
        positions_T: of the keys.
        window: number of positions; None: all.
        documents_S: int64 [B, S], of the queries; None: all tokens are of one document.
        documents_T: of the keys.
    """
    gap_ST = positions_S[..., :, None] - positions_T[..., None, :]
    mask_ST = gap_ST >= 0
    if window is not None:
        mask_ST = mask_ST & (gap_ST < window)
    if documents_S is not None and documents_T is not None:
        mask_ST = mask_ST & (documents_S[..., :, None] == documents_T[..., None, :])
    return mask_ST


def over_heads(mask: Tensor | None) -> Tensor | None:
    """A mask [B, S, T] as [B, 1, S, T], so that it holds for every head; one of other dims as it is."""
    return mask if mask is None or mask.dim() != 3 else mask[:, None]


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap): nearly x where it is small, never beyond the cap. Any shape, no communication."""
    return cap * torch.tanh(x / cap)

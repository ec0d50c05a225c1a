"""Attention to one block of keys with its log-sum-exp, so that attentions to several blocks can be merged into one.

Legend: B batch, S queries, T keys, H/G query/kv heads, K head width. Heads stand before positions, as kernels want it.
A row that sees no key has the output 0 and the log-sum-exp -inf. On the CPU a block is one flash kernel, in fp64 too;
elsewhere it is two products (five backward) with the scores in memory, which no machine with CUDA was there to replace.
Source: Dao 2023, arXiv 2307.08691.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fmegatron.nn.dense_attention import over_heads, soft_cap
from fmegatron.nn.torch_private import flash_on_cpu, flash_on_cpu_backward

__all__ = ["attention_with_lse", "block", "block_backward", "merged", "skips_hidden"]


def block(
    q_BHSK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`q[B, H, S, K], k, v[B, G, T, K] -> (o[B, H, S, K], lse[B, H, S])`, normalised within the block; no gradient.

    mask: bool, broadcast to [B, H, S, T]. causal: the mask of equal positions of queries and keys, S == T. lse is wide
    (fp32, or fp64 of fp64), o has q's dtype. softcap: of the scores, which no flash kernel knows.
    """
    if softcap is None and _has_kernel(q_BHSK, v_BGTK):
        o, lse = flash_on_cpu(q_BHSK, k_BGTK, v_BGTK, causal, _additive(q_BHSK, mask))
        return o, lse if mask is None else lse.masked_fill(~mask.any(-1), -math.inf)
    s_BHST = _seen(_scores(q_BHSK, k_BGTK, softcap), mask, causal)
    lse = s_BHST.logsumexp(-1)
    p_BHST = (s_BHST - _finite(lse)[..., None]).exp()
    return (p_BHST @ _of_queries(v_BGTK, q_BHSK).to(p_BHST.dtype)).to(q_BHSK.dtype), lse


def block_backward(
    do_BHSK: Tensor,
    q_BHSK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    out: tuple[Tensor, Tensor],
    mask: Tensor | None = None,
    causal: bool = False,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) through one block of keys, given output and log-sum-exp of *all* blocks.

    With those of one block alone it is the gradient of `block`; with those of all blocks the sum over blocks is that of
    attention to all of them.

    Args:
        do_BHSK: gradient of the output.
        q_BHSK: queries.
        k_BGTK: keys of the block.
        v_BGTK: values of the block.
        out: (o[B, H, S, K], lse[B, H, S]) of attention to all blocks, as `block` and `merged` give them.
        mask: as of `block`.
        causal: as of `block`.
        softcap: as of `block`.
    """
    o_BHSK, lse_BHS = out[0], _finite(out[1])
    if softcap is None and _has_kernel(q_BHSK, v_BGTK):
        do_BHSK, o_BHSK = do_BHSK.to(q_BHSK.dtype), o_BHSK.to(q_BHSK.dtype)
        return flash_on_cpu_backward(do_BHSK, q_BHSK, k_BGTK, v_BGTK, o_BHSK, lse_BHS, causal, _additive(q_BHSK, mask))
    s_BHST = _scores(q_BHSK, k_BGTK, softcap)
    p_BHST = (_seen(s_BHST, mask, causal) - lse_BHS[..., None]).exp()
    do, o, q, k, v = (x.to(p_BHST.dtype) for x in (do_BHSK, o_BHSK, q_BHSK, k_BGTK, v_BGTK))
    dp_BHST = do @ _of_queries(v, q).mT
    ds_BHST = p_BHST * (dp_BHST - (do * o).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    if softcap is not None:
        ds_BHST = ds_BHST * (1 - (s_BHST / softcap).square())  # of cap tanh(x / cap)
    dk, dv = _of_keys(ds_BHST.mT @ q, k), _of_keys(p_BHST.mT @ do, v)
    return (ds_BHST @ _of_queries(k, q)).to(q_BHSK.dtype), dk.to(k_BGTK.dtype), dv.to(v_BGTK.dtype)


def merged(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two attentions (o, lse) of the same queries to different keys as one; o as wide as the log-sum-exp."""
    (o, lse), (o2, lse2) = first, second
    both = torch.logaddexp(lse, lse2)
    safe = _finite(both)
    a, b = ((x - safe).exp()[..., None] for x in (lse, lse2))
    return o.to(both.dtype) * a + o2.to(both.dtype) * b, both


def attention_with_lse(
    q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`attention` with its log-sum-exp: (o[B, S, H, K], lse[B, S, H]), differentiable in both.

    mask: bool, [B, S, T], or broadcast to [B, H, S, T], True where a query sees a key; None: causal, S == T. lse is in
    fp32 (fp64 of fp64) and leaves out nothing: o * exp(lse - lse') is what o adds to attention to more keys, of
    log-sum-exp lse'.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BSHK, k_BTGK, v_BTGK))
    o, lse = _WithLse.apply(q, k, v, over_heads(mask))
    return o.transpose(1, 2), lse.transpose(1, 2)


class _WithLse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask):
        o, lse = block(q, k, v, mask, causal=mask is None)
        ctx.save_for_backward(q, k, v, o, lse, mask)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        q, k, v, o, lse, mask = ctx.saved_tensors
        causal, dq, dk, dv = mask is None, None, None, None
        if do is not None:
            dq, dk, dv = block_backward(do, q, k, v, (o, lse), mask, causal)
        if dlse is not None:
            # d lse / d s = p, so it is attention with the keys as values, and dv of it with the queries as gradient.
            by = dlse[..., None] / math.sqrt(q.shape[-1])
            mean_of_keys, _ = block(q, k, k, mask, causal)
            given = (by * q).to(q.dtype)
            _, _, more = block_backward(given, q, k, k, (mean_of_keys, lse), mask, causal)
            of_q = (by * mean_of_keys).to(q.dtype)
            dq, dk = (of_q, more) if dq is None or dk is None else (dq + of_q, dk + more)
        return dq, dk, dv, None


def skips_hidden(q_BHSK: Tensor, v_BGTK: Tensor) -> bool:
    """Whether a causal `block` of these computes only what its mask lets through, half of the block."""
    return _has_kernel(q_BHSK, v_BGTK)


# ---- details ---------------------------------------------------------------------------------------------------------
def _has_kernel(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _additive(q: Tensor, mask: Tensor | None) -> Tensor | None:
    return None if mask is None else torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(~mask, -math.inf)


def _scores(q: Tensor, k: Tensor, softcap: float | None) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    s_BHST = (q @ _of_queries(k, q).mT).to(wide) / math.sqrt(q.shape[-1])
    return s_BHST if softcap is None else soft_cap(s_BHST, softcap)


def _seen(s_BHST: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Scores of the keys that a query sees, -inf of the others."""
    if causal:
        mask = torch.ones(s_BHST.shape[-2:], dtype=torch.bool, device=s_BHST.device).tril()
    return s_BHST if mask is None else s_BHST.masked_fill(~mask, -math.inf)


def _finite(lse: Tensor) -> Tensor:
    """The log-sum-exp, 0 where nothing is seen: exp(-inf - 0) is 0, exp(-inf - -inf) is not a number."""
    return torch.where(lse == -math.inf, 0.0, lse)


def _of_queries(x_BGTK: Tensor, q: Tensor) -> Tensor:
    """Heads of keys as often as queries use them."""
    return x_BGTK.repeat_interleave(q.shape[1] // x_BGTK.shape[1], 1)


def _of_keys(x_BHTK: Tensor, k: Tensor) -> Tensor:
    """The sum over the heads of queries that use a head of keys."""
    return x_BHTK.unflatten(1, (k.shape[1], -1)).sum(2)

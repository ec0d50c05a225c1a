"""Attention to one block of keys with its log-sum-exp, so that attentions to several blocks can be merged into one.

Legend: B batch, S queries, T keys, H/G query/kv heads, K head width. Heads stand before positions, as kernels want it.
A row that sees no key has the output 0 and the log-sum-exp -inf. Which kernel computes a block stands in `kernel_of`;
where there is none (a cap of the scores, widths that no kernel has), it is two products, five backward, with the scores
of this block in memory: so `attention_in_blocks` makes the blocks small.
Sources: Dao 2023, arXiv 2307.08691; Rabe and Staats 2021, arXiv 2112.05682 (memory-efficient attention).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fmegatron.nn.attention_masks import over_heads, soft_cap
from fmegatron.nn.first_gradient import first_only
from fmegatron.nn.torch_private import (
    efficient_on_cuda,
    efficient_on_cuda_backward,
    flash_on_cpu,
    flash_on_cpu_backward,
    flash_on_cuda,
    flash_on_cuda_backward,
)

__all__ = [
    "attention_in_blocks",
    "attention_with_lse",
    "block",
    "block_backward",
    "kernel_of",
    "merged",
    "of_queries",
    "sinks_backward",
    "skips_hidden",
    "wide",
    "with_sinks",
]

Kernel = Literal["flash on the CPU", "flash", "memory-efficient"]
_TILE = 1024  # keys of a block that no kernel computes, at least: its scores are in memory
_TILES = 8  # blocks of keys at most, so that the graph of a long sequence stays short


def kernel_of(q_BHSK: Tensor, v_BGTK: Tensor, masked: bool, softcap: float | None) -> Kernel | None:
    """Which of torch's kernels computes a block of attention, its log-sum-exp and its gradient; None: products do.

    On the CPU flash, with masks and in fp64 too, for values as wide as the keys. On CUDA flash without a mask, in 16
    bits, for heads of at most 256; else the memory-efficient one (masks, fp32, other widths of values). 8 divides the
    widths of both. A cap of the scores no kernel knows.
    """
    width, values, dtype = q_BHSK.shape[-1], v_BGTK.shape[-1], q_BHSK.dtype
    if softcap is not None or dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return None
    if q_BHSK.device.type == "cpu":
        return "flash on the CPU" if width == values else None
    if q_BHSK.device.type != "cuda" or dtype == torch.float64 or width % 8 or values % 8:
        return None
    if not masked and width == values and width <= 256 and dtype != torch.float32:
        return "flash"
    return "memory-efficient"


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
    (fp32, or fp64 of fp64), o has q's dtype. softcap: of the scores, which no kernel knows.
    """
    kernel = kernel_of(q_BHSK, v_BGTK, mask is not None, softcap)
    if kernel == "flash on the CPU":
        o, lse = flash_on_cpu(q_BHSK, k_BGTK, v_BGTK, causal, _additive(q_BHSK, mask))
        return o, lse if mask is None else lse.masked_fill(~mask.any(-1), -math.inf)
    if kernel == "flash":
        return flash_on_cuda(q_BHSK, k_BGTK, v_BGTK, causal)
    if kernel == "memory-efficient":
        k_BHTK, v_BHTK = of_queries(k_BGTK, q_BHSK), of_queries(v_BGTK, q_BHSK)
        if mask is None:
            return efficient_on_cuda(q_BHSK, k_BHTK, v_BHTK, causal, None)
        # A row that sees nothing sees everything here, as what the kernel makes of none is not said anywhere.
        sees = mask.any(-1, keepdim=True)
        o, lse = efficient_on_cuda(q_BHSK, k_BHTK, v_BHTK, causal, _additive(q_BHSK, mask | ~sees))
        return o.masked_fill(~sees, 0.0), lse.masked_fill(~sees[..., 0], -math.inf)
    s_BHST = _capped(q_BHSK @ of_queries(k_BGTK, q_BHSK).mT, q_BHSK, softcap)
    s_BHST = _seen(s_BHST, mask, causal)
    lse = s_BHST.logsumexp(-1)
    p_BHST = (s_BHST - _finite(lse)[..., None]).exp()
    return p_BHST.to(v_BGTK.dtype) @ of_queries(v_BGTK, q_BHSK), lse


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
    kernel = kernel_of(q_BHSK, v_BGTK, mask is not None, softcap)
    if kernel is not None:
        given = (do_BHSK.to(q_BHSK.dtype), q_BHSK, k_BGTK, v_BGTK, o_BHSK.to(q_BHSK.dtype), lse_BHS, causal)
        if kernel == "flash on the CPU":
            return flash_on_cpu_backward(*given, _additive(q_BHSK, mask))
        if kernel == "flash":
            return flash_on_cuda_backward(*given)
        do, q, k, v, o, lse, _ = given
        k, v = of_queries(k, q), of_queries(v, q)
        dq, dk, dv = efficient_on_cuda_backward(do, q, k, v, o, lse, causal, _additive(q, mask))
        return dq, _of_keys(dk, k_BGTK), _of_keys(dv, v_BGTK)
    # Keys before queries: equal to no product of the forward, which a partition into forward and backward would keep.
    dtype, k_BHTK, v_BHTK = q_BHSK.dtype, of_queries(k_BGTK, q_BHSK), of_queries(v_BGTK, q_BHSK)
    s_BHTS, do_BHSK = _capped(k_BHTK @ q_BHSK.mT, q_BHSK, softcap), do_BHSK.to(dtype)
    p_BHTS = (_seen(s_BHTS, mask, causal, transposed=True) - lse_BHS[..., None, :]).exp()
    of_rows_BHS = wide(do_BHSK * o_BHSK).sum(-1)
    ds_BHTS = p_BHTS * (wide(v_BHTK @ do_BHSK.mT) - of_rows_BHS[..., None, :]) * q_BHSK.shape[-1] ** -0.5
    if softcap is not None:
        ds_BHTS = ds_BHTS * (1 - (s_BHTS / softcap).square())  # of cap tanh(x / cap)
    ds_BHTS = ds_BHTS.to(dtype)
    dk, dv = _of_keys(ds_BHTS @ q_BHSK, k_BGTK), _of_keys(p_BHTS.to(dtype) @ do_BHSK, v_BGTK)
    return ds_BHTS.mT @ k_BHTK, dk.to(k_BGTK.dtype), dv.to(v_BGTK.dtype)


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
    return kernel_of(q_BHSK, v_BGTK, masked=False, softcap=None) is not None


def attention_in_blocks(
    q_BSHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    mask: Tensor | None = None,
    *,
    sinks_H: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """`attention` with sinks or a cap of the scores -> o[B, S, H, K]: what is kept is q, k, v, o and a number a query.

    A kernel computes it whole where there is one, else blocks of some 1,024 keys one after the other, of which those
    that a causal mask hides are left out. First gradients only, as of torch's kernels. Arguments as of `attention`.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BSHK, k_BTGK, v_BTGK))
    q = q if scale is None else q * (scale * q.shape[-1] ** 0.5)
    return _InBlocks.apply(q, k, v, over_heads(mask), sinks_H, softcap).transpose(1, 2)


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, sinks, softcap):
        ctx.softcap, found = softcap, {}
        for row, _, seen in _tiles(q, k, v, mask, softcap):
            more = block(*seen.of(q, k, v), softcap=softcap)
            found[row] = merged(found[row], more) if row in found else more
        o, lse = _joined(found, 0), _joined(found, 1)
        if sinks is not None:
            o, lse = with_sinks(o, lse, sinks)
        o = o.to(v.dtype)
        ctx.save_for_backward(q, k, v, o, lse, mask, sinks)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse, mask, sinks = ctx.saved_tensors
        softcap = ctx.softcap
        dq_of, dkv_of = {}, {}
        for row, column, seen in _tiles(q, k, v, mask, softcap):
            out = seen.rows_of(o), seen.rows_of(lse)
            q_row, k_column, v_column, part, causal = seen.of(q, k, v)
            dq, *dkv = block_backward(seen.rows_of(do), q_row, k_column, v_column, out, part, causal, softcap)
            dq_of[row] = _added(dq_of.get(row), (dq,))
            dkv_of[column] = _added(dkv_of.get(column), dkv)
        found = _joined(dq_of, 0), _joined(dkv_of, 0), _joined(dkv_of, 1)
        grads = [g.to(x.dtype) for g, x in zip(found, (q, k, v), strict=True)]
        dsinks = None if sinks is None else sinks_backward(do, o, lse, sinks).sum((0, 2)).to(sinks.dtype)
        dq, dk, dv, dsinks = first_only("attention with sinks or a cap", (*grads, dsinks))
        return dq, dk, dv, None, dsinks, None


def with_sinks(o_BHSK: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """(o, lse) with a logit of each head behind all blocks, like one key more, of value 0; o as wide as lse."""
    total_BHS = torch.logaddexp(lse_BHS, sinks_H.to(lse_BHS.dtype)[:, None])
    return o_BHSK.to(lse_BHS.dtype) * (lse_BHS - total_BHS).exp()[..., None], total_BHS


def sinks_backward(do_BHSK: Tensor, o_BHSK: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> Tensor:
    """The gradient [B, H, S] of the sinks by token, of results of `with_sinks`: p (0 - do o) of a key of value 0."""
    p_BHS = (sinks_H.to(lse_BHS.dtype)[:, None] - lse_BHS).exp()
    return -p_BHS * (do_BHSK.to(lse_BHS.dtype) * o_BHSK).sum(-1)


def of_queries(x_BGTK: Tensor, q: Tensor) -> Tensor:
    """Heads of keys [B, G, T, K] as often as queries [B, H, S, K] use them: [B, H, T, K]."""
    return x_BGTK.repeat_interleave(q.shape[1] // x_BGTK.shape[1], 1)


def wide(x: Tensor) -> Tensor:
    """In fp32, or fp64 of fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ---- details ---------------------------------------------------------------------------------------------------------
class _Seen(NamedTuple):
    """A block: its queries and keys (None: all of them), its part of the mask, and whether it is causal itself."""

    rows: slice | None
    keys: slice | None
    mask: Tensor | None
    causal: bool

    def of(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool]:
        """The first arguments of `block`."""
        k, v = (x if self.keys is None else x[:, :, self.keys] for x in (k, v))
        return self.rows_of(q), k, v, self.mask, self.causal

    def rows_of(self, x: Tensor) -> Tensor:
        return x if self.rows is None else x[:, :, self.rows]


def _tiles(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, softcap: float | None) -> Iterator[tuple]:
    """(number of the rows, number of the keys, `_Seen`) of the blocks in turn."""
    total = k.shape[2]
    if total <= _TILE or kernel_of(q, v, mask is not None, softcap) is not None:
        yield 0, 0, _Seen(None, None, mask, mask is None)
        return
    size = max(_TILE, -(-total // _TILES))
    parts = [slice(start, min(start + size, total)) for start in range(0, total, size)]
    if mask is not None:
        for column, keys in enumerate(parts):
            yield 0, column, _Seen(None, keys, mask[..., keys], False)
        return
    for row, rows in enumerate(parts):
        for column, keys in enumerate(parts[: row + 1]):
            yield row, column, _Seen(rows, keys, None, row == column)


def _added(first: Sequence[Tensor] | None, second: Sequence[Tensor]) -> list[Tensor]:
    """Wide, where there is something to add."""
    return list(second) if first is None else [wide(x) + wide(y) for x, y in zip(first, second, strict=True)]


def _joined(found: dict[int, Sequence[Tensor]], which: int) -> Tensor:
    """Along the positions."""
    parts = [found[n][which] for n in sorted(found)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _additive(q: Tensor, mask: Tensor | None) -> Tensor | None:
    return None if mask is None else torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(~mask, -math.inf)


def _capped(products: Tensor, q: Tensor, softcap: float | None) -> Tensor:
    """Scores of products of queries and keys."""
    scores = wide(products) * q.shape[-1] ** -0.5
    return scores if softcap is None else soft_cap(scores, softcap)


def _seen(scores: Tensor, mask: Tensor | None, causal: bool, transposed: bool = False) -> Tensor:
    """Scores [B, H, S, T] of the keys that a query sees, -inf of the others; transposed: [B, H, T, S]."""
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        mask = mask.triu() if transposed else mask.tril()
    elif mask is not None and transposed:
        mask = mask.mT
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def _finite(lse: Tensor) -> Tensor:
    """The log-sum-exp, 0 where nothing is seen: exp(-inf - 0) is 0, exp(-inf - -inf) is not a number."""
    return torch.where(lse == -math.inf, 0.0, lse)


def _of_keys(x_BHTK: Tensor, k: Tensor) -> Tensor:
    """The sum over the heads of queries that use a head of keys."""
    return x_BHTK.unflatten(1, (k.shape[1], -1)).sum(2)

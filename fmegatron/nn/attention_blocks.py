"""Attention to one block of keys with its log-sum-exp, so that attentions to several blocks can be merged into one.

Legend: B batch, S queries, T keys, H/G query/kv heads, K head width. Heads stand before positions, as kernels want it.
A row that sees no key has the output 0 and the log-sum-exp -inf. Which kernel computes a block stands in `_CHOICES`.
Source: Dao 2023, arXiv 2307.08691.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fmegatron.nn.attention_masks import Sight, over_heads
from fmegatron.nn.first_gradient import first_only
from fmegatron.nn.tiled_attention import (
    Dropped,
    additive,
    finite,
    merged,
    of_queries,
    tiled,
    tiled_backward,
    wide,
)
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
    "wide",
    "with_sinks",
]

Kernel = Literal["flash on the CPU", "flash", "memory-efficient", "tiled"]


class _Asked(NamedTuple):
    """A block that is to be computed."""

    device: str
    dtype: torch.dtype
    width: int
    values: int
    mask: bool
    sight: bool
    softcap: bool
    dropout: bool


_HALF = (torch.float16, torch.bfloat16)
_FLOATS = (*_HALF, torch.float32, torch.float64)
_MASKS_BY_POSITIONS = "makes no mask of positions", lambda of: not of.sight
_CAPS = "has no cap of the scores", lambda of: not of.softcap
_DROPS = "has no dropout by keys", lambda of: not of.dropout
_SAME = "wants values as wide as the keys", lambda of: of.width == of.values
_ON_CUDA = "is CUDA's", lambda of: of.device == "cuda"
_BY_EIGHT = "wants widths that 8 divides", lambda of: of.width % 8 == of.values % 8 == 0
# The kernels in the order of preference, and of each what has to hold: (what it is where that does not hold, whether).
_CHOICES: tuple[tuple[Kernel, tuple[tuple[str, Callable[[_Asked], bool]], ...]], ...] = (
    (
        "flash on the CPU",
        (
            ("is the CPU's", lambda of: of.device == "cpu"),
            ("wants a floating dtype of 16 bits or more", lambda of: of.dtype in _FLOATS),
            *(_SAME, _MASKS_BY_POSITIONS, _CAPS, _DROPS),
        ),
    ),
    (
        "flash",
        (
            _ON_CUDA,
            ("wants 16 bits", lambda of: of.dtype in _HALF),
            ("has no mask", lambda of: not of.mask),
            ("wants heads of at most 256", lambda of: of.width <= 256),
            *(_SAME, _BY_EIGHT, _MASKS_BY_POSITIONS, _CAPS, _DROPS),
        ),
    ),
    (
        "memory-efficient",
        (
            _ON_CUDA,
            ("wants 16 bits or fp32", lambda of: of.dtype in _FLOATS[:3]),
            *(_BY_EIGHT, _MASKS_BY_POSITIONS, _CAPS, _DROPS),
        ),
    ),
)  # and all else is "tiled"


class Choice(NamedTuple):
    """The kernel that computes a block of attention, and why not each of those that are preferred to it."""

    kernel: Kernel
    refused: tuple[tuple[Kernel, tuple[str, ...]], ...]

    def __str__(self) -> str:
        lines = [f"{name}: {', '.join(why)}" for name, why in self.refused]
        return "\n".join([*lines, f"{self.kernel}: taken"])


def kernel_of(
    q_BHSK: Tensor,
    v_BGTK: Tensor,
    mask: Tensor | Sight | None = None,
    softcap: float | None = None,
    dropped: Dropped | None = None,
) -> Choice:
    """Which kernel computes a block of attention, its log-sum-exp and its gradient; the arguments as of `block`.

    On the CPU flash, with masks and in fp64 too, for values as wide as the keys. On CUDA flash without a mask, in 16
    bits, for heads of at most 256; the memory-efficient one for masks that are given, fp32, other widths of values. 8
    divides the widths of both. All else, masks of positions and documents above all, is `tiled_attention`'s.
    """
    sight = isinstance(mask, Sight)
    asked = _Asked(
        q_BHSK.device.type,
        q_BHSK.dtype,
        q_BHSK.shape[-1],
        v_BGTK.shape[-1],
        mask is not None and not sight,
        sight,
        softcap is not None,
        dropped is not None,
    )
    refused: list[tuple[Kernel, tuple[str, ...]]] = []
    for name, conditions in _CHOICES:
        why = tuple(text for text, holds in conditions if not holds(asked))
        if not why:
            return Choice(name, tuple(refused))
        refused.append((name, why))
    return Choice("tiled", tuple(refused))


def block(
    q_BHSK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    mask: Tensor | Sight | None = None,
    causal: bool = False,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`q[B, H, S, K], k, v[B, G, T, K] -> (o[B, H, S, K], lse[B, H, S])`, normalised within the block; no gradient.

    mask: bool, broadcast to [B, H, S, T], or what it is made of. causal: the mask of equal positions of queries and
    keys, S == T. lse is wide (fp32, or fp64 of fp64), o has q's dtype. softcap: of the scores.
    """
    kernel = kernel_of(q_BHSK, v_BGTK, mask, softcap).kernel
    if kernel == "tiled" or isinstance(mask, Sight):
        return tiled(q_BHSK, k_BGTK, v_BGTK, mask, causal, softcap)
    if kernel == "flash on the CPU":
        o, lse = flash_on_cpu(q_BHSK, k_BGTK, v_BGTK, causal, additive(q_BHSK, mask))
        return o, lse if mask is None else lse.masked_fill(~mask.any(-1), -math.inf)
    if kernel == "flash":
        return flash_on_cuda(q_BHSK, k_BGTK, v_BGTK, causal)
    k_BHTK, v_BHTK = of_queries(k_BGTK, q_BHSK), of_queries(v_BGTK, q_BHSK)
    if mask is None:
        return efficient_on_cuda(q_BHSK, k_BHTK, v_BHTK, causal, None)
    # A row that sees nothing sees everything here, as what the kernel makes of none is not said anywhere.
    sees = mask.any(-1, keepdim=True)
    o, lse = efficient_on_cuda(q_BHSK, k_BHTK, v_BHTK, causal, additive(q_BHSK, mask | ~sees))
    return o.masked_fill(~sees, 0.0), lse.masked_fill(~sees[..., 0], -math.inf)


def block_backward(
    do_BHSK: Tensor,
    q_BHSK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    out: tuple[Tensor, Tensor],
    mask: Tensor | Sight | None = None,
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
    do, o, lse = do_BHSK.to(q_BHSK.dtype), out[0].to(q_BHSK.dtype), finite(out[1])
    kernel = kernel_of(q_BHSK, v_BGTK, mask, softcap).kernel
    if kernel == "tiled" or isinstance(mask, Sight):
        return tiled_backward((q_BHSK, k_BGTK, v_BGTK), (do, o, lse), mask, causal, softcap)
    if kernel == "flash on the CPU":
        return flash_on_cpu_backward(do, q_BHSK, k_BGTK, v_BGTK, o, lse, causal, additive(q_BHSK, mask))
    if kernel == "flash":
        return flash_on_cuda_backward(do, q_BHSK, k_BGTK, v_BGTK, o, lse, causal)
    k, v = of_queries(k_BGTK, q_BHSK), of_queries(v_BGTK, q_BHSK)
    dq, dk, dv = efficient_on_cuda_backward(do, q_BHSK, k, v, o, lse, causal, additive(q_BHSK, mask))
    return dq, _of_keys(dk, k_BGTK), _of_keys(dv, v_BGTK)


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


def attention_in_blocks(
    q_BSHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    mask: Tensor | Sight | None = None,
    *,
    sinks_H: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    dropped: Dropped | None = None,
) -> Tensor:
    """`attention` of `block` -> o[B, S, H, K]: what is kept is q, k, v, o and a number a query.

    First gradients only, as of torch's kernels. Arguments as of `attention`.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BSHK, k_BTGK, v_BTGK))
    q = q if scale is None else q * (scale * q.shape[-1] ** 0.5)
    mask = mask if isinstance(mask, Sight) else over_heads(mask)
    given = () if mask is None else tuple(mask[:2]) if isinstance(mask, Sight) else (mask,)
    window = mask.window if isinstance(mask, Sight) else None
    how = _How(isinstance(mask, Sight), window, softcap, 0.0 if dropped is None else dropped.rate)
    words = (None, None) if dropped is None else dropped[:2]
    return _InBlocks.apply(q, k, v, sinks_H, how, *words, *given).transpose(1, 2)


class _How(NamedTuple):
    """What of a mask, a cap and dropout is no tensor."""

    by_positions: bool
    window: int | None
    softcap: float | None
    rate: float

    def of(self, words: Tensor | None, heads: Tensor | None, given: tuple[Tensor, ...]) -> tuple:
        """(mask, causal, softcap, dropped) of `tiled`; without dropout the arguments of `block` behind q, k and v."""
        mask = Sight(given[0], given[1], self.window) if self.by_positions else given[0] if given else None
        rest = () if words is None or heads is None else (Dropped(words, heads, self.rate),)
        return mask, mask is None, self.softcap, *rest


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, how: _How, words, heads, *given):
        ctx.how = how
        o, lse = (block if words is None else tiled)(q, k, v, *how.of(words, heads, given))
        if sinks is not None:
            o, lse = with_sinks(o, lse, sinks)
        o = o.to(v.dtype)
        ctx.save_for_backward(q, k, v, o, lse, sinks, words, heads, *given)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse, sinks, words, heads, *given = ctx.saved_tensors
        rest = ctx.how.of(words, heads, tuple(given))
        if words is None:
            found = block_backward(do, q, k, v, (o, lse), *rest)
        else:
            found = tiled_backward((q, k, v), (do, o, lse), *rest)
        dq, dk, dv = (g.to(x.dtype) for g, x in zip(found, (q, k, v), strict=True))
        dsinks = None if sinks is None else sinks_backward(do, o, lse, sinks).sum((0, 2)).to(sinks.dtype)
        dq, dk, dv, dsinks = first_only(
            "attention with sinks, a cap, dropout or a mask of positions", (dq, dk, dv, dsinks)
        )
        return dq, dk, dv, dsinks, None, None, None, *(None for _ in given)


def with_sinks(o_BHSK: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """(o, lse) with a logit of each head behind all blocks, like one key more, of value 0; o as wide as lse."""
    total_BHS = torch.logaddexp(lse_BHS, sinks_H.to(lse_BHS.dtype)[:, None])
    return o_BHSK.to(lse_BHS.dtype) * (lse_BHS - total_BHS).exp()[..., None], total_BHS


def sinks_backward(do_BHSK: Tensor, o_BHSK: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> Tensor:
    """The gradient [B, H, S] of the sinks by token, of results of `with_sinks`: p (0 - do o) of a key of value 0."""
    p_BHS = (sinks_H.to(lse_BHS.dtype)[:, None] - lse_BHS).exp()
    return -p_BHS * (do_BHSK.to(lse_BHS.dtype) * o_BHSK).sum(-1)


# ---- details ---------------------------------------------------------------------------------------------------------
def _of_keys(x_BHTK: Tensor, k: Tensor) -> Tensor:
    """The sum over the heads of queries that use a head of keys."""
    return x_BHTK.unflatten(1, (k.shape[1], -1)).sum(2)

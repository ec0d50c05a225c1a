"""Attention over a sequence that is split over ranks: a ring, an all-gather, an exchange of heads, or two of them.

Legend: B batch, S this rank's positions, T all that it sees at once, H/G query/kv heads, K head width, n ranks of cp.

One rule for masks in all of them: positions and documents are data that lie with the tokens and travel with the keys
(`visible`). So no mask depends on a rank, packed documents and windows need no code of their own, and the order in
which ranks get the tokens of a sequence (`zigzag`) is the loader's matter and no part of the maths.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmegatron.collectives import Axes, all_gather, all_to_all, axes, axis_index, ops, ppermute
from fmegatron.collectives.ops import declare
from fmegatron.layout.zigzag import zigzag as zigzag_of_layout
from fmegatron.nn.attention_blocks import (
    block,
    block_backward,
    merged,
    sinks_backward,
    wide,
    with_sinks,
)
from fmegatron.nn.attention_masks import Causal, Sight, sight
from fmegatron.nn.dense_attention import attention
from fmegatron.nn.first_gradient import first_only

__all__ = ["gathered_attention", "ring_attention", "two_level_attention", "ulysses_attention", "zigzag"]


# ---- forms -----------------------------------------------------------------------------------------------------------
def ring_attention(
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    causal: Causal,
    cp: axes.Axis,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """`q[B, S_cp, H, K], k, v[B, S_cp, G, K] -> o[B, S_cp, H, K]`: blocks of keys go round the ranks, n - 1 hops.

    Forward the blocks are merged by an online softmax. The backward goes round again with the log-sum-exp of all of
    them, and the gradients of a block's keys travel with it until they are home, n hops: nothing but q, k, v, o and one
    number for each query is kept in between. Each hop is under way while the block before is multiplied.

    Balanced, where the ranks have the parts of the sequence in the order of `zigzag` (in which documents are packed one
    after the other), every rank computes 2n + 1 blocks of half its length, where else it computes 4n of which a causal
    mask hides nearly half. Without documents and window no mask is made at all then: a position sees all before it.
    Sources: Liu et al. 2023, arXiv 2310.01889; Brandon et al. 2023, arXiv 2311.09431 (balance).

    Args:
        q_BSHK: queries of this rank's positions.
        k_BSGK: their keys.
        v_BSGK: their values, of another width if need be.
        causal: positions, documents, window, order of these tokens.
        cp: over which the sequence is split.
        softcap: of the scores.
        sinks_H: a logit of each head (`attention`): like one key more, of value 0, behind all blocks. Its gradient is
            this rank's term.

    Raises ValueError for a balanced ring over an odd number of positions on each rank.
    """
    if cp.size == 1:
        return _local(q_BSHK, k_BSGK, v_BSGK, causal, softcap, sinks_H)
    positions, documents, window, balanced = causal
    if balanced and q_BSHK.shape[1] % 2:
        raise ValueError(
            f"ring over {cp}: got {q_BSHK.shape[1]} positions on each rank, wanted an even number, since a balanced "
            f"ring gives each rank two parts of the sequence; pad it to a multiple of {2 * cp.size}"
        )
    masked = not balanced or documents is not None or window is not None
    how = _Ring(cp, window, balanced, masked, softcap)
    at = sight(causal).at_queries
    q, k, v = (x.transpose(1, 2) for x in (q_BSHK, k_BSGK, v_BSGK))
    return declare(_RingAttention.apply(q, k, v, sinks_H, at, how), cp, ("sharded", 2)).transpose(1, 2)


def gathered_attention(
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    causal: Causal,
    cp: axes.Axis,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """The same with keys and values of all ranks gathered, in one collective; their gradients are reduce-scattered.

    Memory for all keys. Arguments as of `ring_attention`.
    Source: Llama team 2024, arXiv 2407.21783, section 3.3.2.
    """
    kv_BTGK = all_gather(torch.cat((k_BSGK, v_BSGK), -1), cp, 1)
    k_BTGK, v_BTGK = kv_BTGK.split((k_BSGK.shape[-1], v_BSGK.shape[-1]), -1)
    positions_T = all_gather(causal.positions, cp, -1)
    keys = Causal(positions_T, _gathered(causal.documents, cp))
    return attention(q_BSHK, k_BTGK, v_BTGK, sight(causal, keys), softcap=softcap, sinks_H=sinks_H)


def ulysses_attention(
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    causal: Causal,
    cp: axes.Axis,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    tp: axes.Axis | None = None,
) -> Tensor:
    """The same with heads exchanged for positions: each rank has all positions of H/n heads, then its own of all.

    Fewer kv heads than ranks are copied as often as it takes. Arguments as of `ring_attention`.
    tp: what splits the heads already, for the check: one head of keys and parts of sinks leave no trace of it in sizes.
    Source: Jacobs et al. 2023, arXiv 2309.14509.
    Raises ValueError for heads that cannot be given to the ranks in equal parts.
    """
    in_memory = softcap is not None or sinks_H is not None
    local = functools.partial(_local, softcap=softcap)
    return _exchanged((q_BSHK, k_BSGK, v_BSGK), causal, cp, local, sinks_H, tp, in_memory)


def _exchanged(
    qkv, causal: Causal, cp: axes.Axis, local: Callable[..., Tensor], sinks_H, tp: axes.Axis | None, in_memory: bool
):
    """Attention `local(q, k, v, causal, sinks_H=)` of heads exchanged over cp for positions. in_memory: with scores."""
    q_BSHK, k_BSGK, v_BSGK = qkv
    n, heads, groups = cp.size, q_BSHK.shape[2], k_BSGK.shape[2]
    if heads % n or (groups % n and n % groups):
        raise ValueError(
            f"ulysses over {cp}: got {heads} heads of queries and {groups} of keys, wanted multiples of {n} (fewer "
            f"heads of keys if they divide {n}); choose a smaller axis, and a ring over the rest (two_level_attention)"
        )
    if n == 1:
        return local(q_BSHK, k_BSGK, v_BSGK, causal, sinks_H=sinks_H)
    if groups % n:
        k_BSGK, v_BSGK = (x.repeat_interleave(n // groups, 2) for x in (k_BSGK, v_BSGK))
    q_BTHK, k_BTGK, v_BTGK = ops.all_to_all_many([q_BSHK, k_BSGK, v_BSGK], cp, [2] * 3, [1] * 3)
    if k_BTGK.shape[2] == 1 and in_memory:
        for axis in (cp,) if tp is None else (tp, cp):
            k_BTGK, v_BTGK = (declare(x, axis, backward=("sharded", 2)) for x in (k_BTGK, v_BTGK))
    sinks_H = None if sinks_H is None else _of_heads(sinks_H, cp, tp)
    positions, documents = all_gather(causal.positions, cp, -1), _gathered(causal.documents, cp)
    causal = causal._replace(positions=positions, documents=documents)
    o_BTHK = local(q_BTHK, k_BTGK, v_BTGK, causal, sinks_H=sinks_H)
    return all_to_all(o_BTHK, cp, 1, 2)


def two_level_attention(
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    causal: Causal,
    axes: Axes,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Heads exchanged over cpi (fast links), a ring over cp; the sequence is split over both, cp major.

    Arguments as of `ring_attention`; the order of `zigzag` is that for the ranks of cp. axes: of which cp, cpi and tp.
    """
    given, outer, inner = (q_BSHK, k_BSGK, v_BSGK), axes["cp"], axes["cpi"]
    if outer.size == 1:
        return ulysses_attention(*given, causal, inner, softcap, sinks_H, axes["tp"])
    ring = functools.partial(ring_attention, cp=outer, softcap=softcap)
    return _exchanged(given, causal, inner, ring, sinks_H, axes["tp"], in_memory=False)


def zigzag(length: int, n: int) -> Tensor:
    """The order [S] of positions in which equal parts for n ranks have the chunks r and 2n - 1 - r: equal causal work.

    `x[:, order]` deals a batch so: tokens, labels, positions and documents alike.
    Raises ValueError for a length that 2n does not divide.
    """
    return torch.cat([torch.arange(start, stop) for start, stop in zigzag_of_layout(length, n)])


def _local(q_BSHK, k_BSGK, v_BSGK, causal: Causal, softcap=None, sinks_H=None) -> Tensor:
    return attention(q_BSHK, k_BSGK, v_BSGK, causal, softcap=softcap, sinks_H=sinks_H)


def _of_heads(sinks_H: Tensor, cp: axes.Axis, tp: axes.Axis | None) -> Tensor:
    """Those of the heads that this rank gets; their gradient is its term, 0 for the others.

    Of a gradient for parts of parts sizes tell another order of the axes: it is the rank's own, in the place that its
    sinks had.
    """
    if tp is not None:
        sinks_H = declare(declare(sinks_H, tp, backward=("sharded", 0)), tp, backward="own")
    sinks_NH = declare(sinks_H, cp, backward="partial").unflatten(0, (cp.size, -1))
    own_H = sinks_NH.index_select(0, axis_index(cp, like=sinks_H).view(1)).squeeze(0)
    return declare(own_H, cp, ("sharded", 0))


def _gathered(documents: Tensor | None, cp: axes.Axis) -> Tensor | None:
    return None if documents is None else all_gather(documents, cp, -1)


# ---- the ring --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Ring:
    """masked: whether masks are made of positions and documents, or none is needed but the diagonal's: both chunks of a
    rank's own keys are one causal block then, of which kernels compute the three of four parts that it sees."""

    cp: axes.Axis
    window: int | None
    balanced: bool
    masked: bool
    softcap: float | None = None

    def seen(self, at_q: Tensor, at_k: Tensor) -> Sight | None:
        """The mask of a block."""
        return Sight(at_q, at_k, self.window) if self.masked else None

    def round(self, kv: Tensor, at: Tensor):
        """(hop, keys, values, their positions) of every block in turn; the next one is under way meanwhile."""
        for hop in range(self.cp.size):
            now = kv, at
            if hop + 1 < self.cp.size:
                kv = ppermute(kv, self.cp, 1)
                at = ppermute(at, self.cp, 1) if self.masked else at
            yield hop, *now


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, at, how: _Ring):
        ctx.how, found = how, []
        if how.balanced:  # its two chunks are no part of the sequence in any layout
            q, at = (declare(x, how.cp, "own", 2) for x in (q, at))
        for hop, kv, at_k in how.round(*_travelling(k, v, at, how)):
            keys = *kv.split((k.shape[-1], v.shape[-1]), -1), at_k
            found = (_balanced if how.balanced else _plain)(how, hop, found, (q, at), keys)
        o, lse = (torch.cat(parts, 2) for parts in zip(*found, strict=True))
        if sinks is not None:
            o, lse = with_sinks(o, lse, sinks)
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, at, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, sinks, at, o, lse = ctx.saved_tensors
        how, widths = ctx.how, (k.shape[-1], v.shape[-1])
        do = declare(do, how.cp, "own", 2) if how.balanced else do
        dq: Any = 0.0
        dkv: Any = 0.0
        dsinks = None
        if sinks is not None:
            of_tokens_BHS = sinks_backward(do, o, lse, sinks)
            dsinks = declare(of_tokens_BHS, how.cp, ("sharded", 2)).sum((0, 2)).to(sinks.dtype)
        for hop, kv, at_k in how.round(*_travelling(k, v, at, how)):
            rows, keys = (q, at, do, o, lse), (*kv.split(widths, -1), at_k)
            dq_now, *dkv_now = (_balanced_backward if how.balanced else _plain_backward)(how, hop, rows, keys)
            dq = dq + dq_now
            dkv = ppermute(dkv + torch.cat(dkv_now, -1), how.cp, 1)  # after the last block one hop more: home
        found = zip((dq, *dkv.split(widths, -1)), (q, k, v), strict=True)
        grads = [declare(g.to(x.dtype), how.cp, ("sharded", 2)) for g, x in found]
        # The sums of the forward, which it keeps, would be constants of a second gradient.
        return *first_only("ring attention", (*grads, dsinks)), None, None


def _travelling(k, v, at, how: _Ring) -> tuple[Tensor, Tensor]:
    kv = declare(torch.cat((k, v), -1), how.cp, "own", 2)
    return kv, declare(at, how.cp, "own", 2) if how.masked else at


def _plain(how, hop, found, rows, keys):
    """[(o, lse)] with one block more."""
    (q, at), (k, v, at_k) = rows, keys
    more = block(q, k, v, how.seen(at, at_k), softcap=how.softcap)
    return [merged(found[0], more) if hop else more]


def _plain_backward(how, hop, rows, keys):
    (q, at, do, o, lse), (k, v, at_k) = rows, keys
    return [wide(g) for g in block_backward(do, q, k, v, (o, lse), how.seen(at, at_k), softcap=how.softcap)]


# ---- balanced: of a block that came from rank s, rank r needs two of four parts --------------------------------------
# Rank r has the chunks r and 2n - 1 - r. If s < r, both see the first chunk of keys, if s > r, the second chunk of
# queries sees both: (q1, k0) always, and one more, whose operands `where` picks: what depends on the rank is data.
def _halves(x: Tensor, dim: int = 2) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, dim)
    return first, second


def _earlier(how: _Ring, hop: int, like: Tensor) -> Tensor:
    """Whether the block came from a rank before this one, and not round from behind."""
    return axis_index(how.cp, like=like) >= hop


def _balanced(how, hop, found, rows, keys):
    """[(o, lse) of the first chunk of queries, of the second] with the block of one hop more."""
    if hop == 0 and not how.masked:
        return list(zip(*map(_halves, block(rows[0], keys[0], keys[1], None, True, how.softcap)), strict=True))
    pairs = [_halves(x) for x in (*rows, *keys)]
    (q0, q1), (a0, a1), (k0, k1), (v0, v1), (b0, b1) = pairs

    def attention(q, a, k, v, b):
        return block(q, k, v, how.seen(a, b), softcap=how.softcap)

    low = attention(q1, a1, k0, v0, b0)
    if hop == 0:
        return [attention(q0, a0, k0, v0, b0), merged(low, attention(q1, a1, k1, v1, b1))]
    earlier = _earlier(how, hop, q0)
    q, a, k, v, b = (torch.where(earlier, x, y) for x, y in pairs)
    o, lse = attention(q, a, k, v, b)
    first = merged(found[0], (o, torch.where(earlier, lse, -math.inf)))
    return [first, merged(merged(found[1], low), (o, torch.where(earlier, -math.inf, lse)))]


def _balanced_backward(how, hop, rows, keys):
    if hop == 0 and not how.masked:
        (q, _, do, o, lse), (k, v, _) = rows, keys
        return list(map(wide, block_backward(do, q, k, v, (o, lse), None, True, how.softcap)))
    pairs = [_halves(x) for x in (*rows, *keys)]
    (q0, q1), (a0, a1), (do0, do1), (o0, o1), (l0, l1), (k0, k1), (v0, v1), (b0, b1) = pairs

    def backward(do, q, k, v, o, lse, seen):
        return block_backward(do, q, k, v, (o, lse), seen, softcap=how.softcap)

    dq1, dk0, dv0 = map(wide, backward(do1, q1, k0, v0, o1, l1, how.seen(a1, b0)))
    if hop == 0:
        dq0, *more = map(wide, backward(do0, q0, k0, v0, o0, l0, how.seen(a0, b0)))
        dk0, dv0 = dk0 + more[0], dv0 + more[1]
        more, dk1, dv1 = map(wide, backward(do1, q1, k1, v1, o1, l1, how.seen(a1, b1)))
        return _joined((dq0, dq1 + more), (dk0, dk1), (dv0, dv1))
    earlier = _earlier(how, hop, q0)
    q, a, do, o, lse, k, v, b = (torch.where(earlier, x, y) for x, y in pairs)
    dq, dk, dv = map(wide, backward(do, q, k, v, o, lse, how.seen(a, b)))

    def parted(x):
        return torch.where(earlier, x, 0.0), torch.where(earlier, 0.0, x)

    (x0, x1), (y0, dk1), (z0, dv1) = parted(dq), parted(dk), parted(dv)
    return _joined((x0, dq1 + x1), (dk0 + y0, dk1), (dv0 + z0, dv1))


def _joined(*parts):
    return [torch.cat(part, 2) for part in parts]

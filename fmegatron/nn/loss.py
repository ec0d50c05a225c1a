"""Vocabulary-parallel cross-entropy.  Legend: B batch, S sequence, D width, V this rank's columns, N tokens."""

import math

import torch
from torch import Tensor

from fmegatron.collectives import all_gather, axes, axis_index, enter, ops, pmax, psum
from fmegatron.nn.attention_masks import soft_cap
from fmegatron.nn.embedding import local_ids
from fmegatron.nn.weight import Weight, dense


def cross_entropy(
    logits_BSV: Tensor, labels_BS: Tensor, tp: axes.Axis, vocab_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Token losses and log-normalisers of logits that are split over tp by vocabulary: (nll[B, S], lse[B, S]).

    `logits[B, S, V_tp], labels[B, S]@R(tp) -> nll[B, S]@R(tp), lse[B, S]@R(tp)`: lse = log sum_v exp(logit_v) and nll
    = lse - logit_label, by one pmax and one psum of two numbers per token; the logits are never gathered. Both results
    are fp32, or fp64 for fp64 logits. z-loss is `coefficient * lse**2` (PaLM, arXiv 2204.02311, section 5), plain
    arithmetic on the second result; it costs nothing in the backward. Columns at or beyond `vocab_size` (global count;
    padding) are masked: they get no probability and no gradient.
    Labels below 0 are none: nll is 0 and has no gradient. Of a label at or beyond the vocabulary nll and gradient are
    NaN, on every mesh. Mask other tokens by weighting nll.
    Transpose: dlogits = softmax * (dnll + dlse) - onehot(label) * dnll, local to each rank, written once in the
    logits' dtype. Only logits, labels and lse are kept.
    """
    return _CrossEntropy.apply(logits_BSV, labels_BS, tp, vocab_size)


def real_columns(logits: Tensor, tp: axes.Axis, vocab_size: int | None) -> Tensor | None:
    """Which of this rank's columns are vocabulary and not padding, or None when all are."""
    columns = logits.shape[-1]
    if vocab_size is None or vocab_size == columns * tp.size:
        return None
    columns_V = torch.arange(columns, device=logits.device)
    return (columns_V if tp.size == 1 else columns_V + axis_index(tp, like=columns_V) * columns) < vocab_size


def _counted(x_BS: Tensor, labels_BS: Tensor, vocabulary: int, used_BS: Tensor | None = None) -> Tensor:
    """x, but 0 for labels below 0, and NaN for those beyond the vocabulary, where they are used: of tokens' losses, and
    of their gradients."""
    outside_BS = labels_BS >= vocabulary if used_BS is None else (labels_BS >= vocabulary) & used_BS
    return torch.where(labels_BS < 0, 0.0, torch.where(outside_BS, torch.nan, x_BS))


def _wide(logits: Tensor, real_V: Tensor | None) -> Tensor:
    """Logits in fp32 or wider, padding at minus infinity."""
    z_BSV = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return z_BSV if real_V is None else z_BSV.masked_fill(~real_V, -torch.inf)


class _CrossEntropy(torch.autograd.Function):
    """A hand-written pair: autograd's own would keep exp(logits) and scatter into a second [B, S, V] of zeros."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits, labels, tp, vocab_size):
        z = _wide(logits, real_columns(logits, tp, vocab_size))
        top = pmax(z.amax(-1), tp)
        total = (z - top[..., None]).exp().sum(-1)  # partial over tp
        ids = local_ids(labels, logits.shape[-1], tp)
        label = logits.gather(-1, ids.clamp(0, logits.shape[-1] - 1)[..., None]).squeeze(-1).to(z.dtype)
        if tp.size > 1:
            own = (ids >= 0) & (ids < logits.shape[-1])
            label = ops.declare(
                torch.where(own, label, 0.0), tp, forward="partial"
            )  # its owner adds the logit, the others zero
            total, label = psum(torch.stack((total, label)), tp).unbind(0)
        lse = top + total.log()
        return _counted(lse - label, labels, vocab_size or logits.shape[-1] * tp.size), lse

    @staticmethod
    def setup_context(ctx, inputs, output):
        logits, labels, ctx.tp, ctx.vocab_size = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, labels, output[1])

    @staticmethod
    def backward(ctx, dnll, dlse):
        logits, labels, lse = ctx.saved_tensors
        real, ids = real_columns(logits, ctx.tp, ctx.vocab_size), local_ids(labels, logits.shape[-1], ctx.tp)
        vocabulary = ctx.vocab_size or logits.shape[-1] * ctx.tp.size
        dnll = torch.zeros_like(lse) if dnll is None else _counted(dnll, labels, vocabulary, dnll != 0)
        both = dnll if dlse is None else dnll + dlse
        if torch.is_grad_enabled():  # a second gradient: each rank of tp has used these for its own columns
            lse, dnll, both = (enter(t, ctx.tp) for t in (lse, dnll, both))
        softmax = (_wide(logits, real) - lse[..., None]).exp()
        columns = torch.arange(logits.shape[-1], device=logits.device)
        grad = softmax * both[..., None] - torch.where(columns == ids[..., None], dnll[..., None], 0.0)
        return ops.declare(grad.to(logits.dtype), ctx.tp, forward=("sharded", logits.dim() - 1)), None, None, None


def best(logits_BSV: Tensor, tp: axes.Axis, vocab_size: int | None = None) -> Tensor:
    """The token with the largest logit, of equal ones the first: `logits[B, S, V_tp] -> ids[B, S]@R(tp)`, int64.

    One all_gather of two numbers per token and rank of tp. Columns at or beyond `vocab_size` (global count) are masked.
    """
    columns, z_BSV = logits_BSV.shape[-1], _wide(logits_BSV, real_columns(logits_BSV, tp, vocab_size))
    top_BS, id_BS = z_BSV.max(-1)
    if tp.size == 1:
        return id_BS
    id_BS = id_BS + axis_index(tp, like=id_BS) * columns
    tops, ids = (all_gather(ops.declare(x[..., None], tp, ("sharded", 2), "own"), tp, 2) for x in (top_BS, id_BS))
    return ids.gather(-1, tops.argmax(-1, keepdim=True)).squeeze(-1)


# ---- without the logits of all tokens --------------------------------------------------------------------------------
def chunked_cross_entropy(
    x_BSD: Tensor,
    head_DV: Weight,
    labels_BS: Tensor,
    tp: axes.Axis,
    vocab_size: int | None = None,
    *,
    chunks: int,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`cross_entropy(soft_cap(x @ head), labels)`, with the logits of 1/chunks of the tokens at a time.

    `x[B, S, D]@R(tp), head[D, V_tp], labels[B, S]@R(tp) -> nll[B, S]@R(tp), lse[B, S]@R(tp)`. The logits are computed
    again in the backward: one product more of four, and no buffer larger than N/chunks * V. One pmax and one psum.
    Transpose: x's gradient is a partial sum over tp, so x comes through `enter` or an all_gather.

    Args:
        x_BSD: what the head multiplies.
        head_DV: split over tp by columns. Of a `LowRank` the dense matrix is made.
        labels_BS: int64 ids.
        tp: the axis of tensor parallelism.
        vocab_size: real columns, of all ranks; None: all.
        chunks: how many.
        softcap: of the logits.

    Raises ValueError for a number of chunks that does not divide the tokens.
    """
    B, S, _ = x_BSD.shape
    if chunks < 1 or (B * S) % chunks:
        raise ValueError(
            f"chunks: got {chunks}, wanted a divisor of the {B * S} tokens of a rank; change it or the batch"
        )
    nll, lse = _Chunked.apply(x_BSD, dense(head_DV), labels_BS, tp, vocab_size, chunks, softcap)
    return nll, lse


class _Chunked(torch.autograd.Function):
    """A hand-written pair: the backward makes each chunk's logits again, and its part of both gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, head, labels, tp, vocab_size, chunks, cap):
        real, columns, found = real_columns(head, tp, vocab_size), head.shape[1], []
        ids = local_ids(labels, columns, tp)
        for x_BSD, ids_BS in zip(_parts(x, chunks), _parts(ids, chunks), strict=True):
            z_BSV = _wide(_capped(x_BSD @ head, cap), real)
            # Of a rank all of whose columns are padding the largest is -inf, and -inf - -inf is NaN.
            top_BS = z_BSV.amax(-1).clamp(min=torch.finfo(z_BSV.dtype).min)
            label_BS = z_BSV.gather(-1, ids_BS.clamp(0, columns - 1)[..., None]).squeeze(-1)
            found.append((top_BS, (z_BSV - top_BS[..., None]).exp().sum(-1), label_BS))
        own_top, total, label = (_joined(parts, labels.shape) for parts in zip(*found, strict=True))
        top = pmax(own_top, tp)
        total = total * (own_top - top).exp()  # partial over tp
        if tp.size > 1:
            own = (ids >= 0) & (ids < columns)
            label = torch.where(own, label, 0.0)  # its owner adds the logit, the others zero
            total, label = psum(ops.declare(torch.stack((total, label)), tp, forward="partial"), tp).unbind(0)
        lse = top + total.log()
        return _counted(lse - label, labels, vocab_size or columns * tp.size), lse

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, head, labels, *ctx.given = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, head, labels, output[1])

    @staticmethod
    def backward(ctx, dnll, dlse):
        (x, head, labels, lse), (tp, vocab_size, chunks, cap) = ctx.saved_tensors, ctx.given
        real, columns = real_columns(head, tp, vocab_size), torch.arange(head.shape[1], device=head.device)
        ids, vocabulary = local_ids(labels, head.shape[1], tp), vocab_size or len(columns) * tp.size
        dnll = torch.zeros_like(lse) if dnll is None else _counted(dnll, labels, vocabulary, dnll != 0)
        both = dnll if dlse is None else dnll + dlse
        if torch.is_grad_enabled():  # a second gradient: each rank of tp has used these for its own columns
            lse, dnll, both = (enter(t, tp) for t in (lse, dnll, both))
        # A sum of many chunks in 16 bits loses more with each of them.
        dx, dhead = [], head.new_zeros(head.shape, dtype=torch.promote_types(head.dtype, torch.float32))
        each = zip(*(_parts(t, chunks) for t in (x, ids, lse, dnll, both)), strict=True)
        for x_BSD, ids_BS, lse_BS, dnll_BS, both_BS in each:
            y_BSV = _capped(x_BSD @ head, cap)
            softmax_BSV = (_wide(y_BSV, real) - lse_BS[..., None]).exp()
            hot_BSV = torch.where(columns == ids_BS[..., None], dnll_BS[..., None], 0.0)
            g_BSV = softmax_BSV * both_BS[..., None] - hot_BSV
            g_BSV = g_BSV if cap is None else g_BSV * (1 - (y_BSV.to(g_BSV.dtype) / cap).square())
            g_BSV = ops.declare(g_BSV.to(head.dtype), tp, forward=("sharded", 2))
            dx.append(g_BSV @ head.t())
            dhead = dhead + x_BSD.flatten(0, 1).t() @ g_BSV.flatten(0, 1)
        return _joined(dx, x.shape), dhead.to(head.dtype), None, None, None, None, None


def _parts(x: Tensor, chunks: int) -> list[Tensor]:
    """`x[B, S, ...]` in so many parts of b·s tokens apart: as the tokens of a rank are split, so is each part."""
    s = math.gcd(x.shape[1], chunks)
    x = x.unflatten(1, (-1, s)).unflatten(0, (-1, chunks // s))
    return [of_row for of_rows in x.unbind(1) for of_row in of_rows.unbind(2)]


def _joined(parts: list[Tensor] | tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
    """The tensor of this shape whose `_parts` these are."""
    s = math.gcd(shape[1], len(parts))
    rows = [torch.stack(parts[i : i + s], 2) for i in range(0, len(parts), s)]
    return torch.stack(rows, 1).view(shape)


def _capped(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else soft_cap(logits, cap)

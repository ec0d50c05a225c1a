"""Vocabulary-parallel cross-entropy.  Legend: B batch, S sequence, V this rank's vocabulary columns."""

import torch
from torch import Tensor

from fmegatron.collectives import Axis, axis_index, declare, pmax, psum
from fmegatron.nn.embed import local_ids


def cross_entropy(
    logits_BSV: Tensor, labels_BS: Tensor, tp: Axis, vocab_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Token losses and log-normalisers of logits that are split over tp by vocabulary: (nll[B, S], lse[B, S]).

    `logits[B, S, V_tp], labels[B, S]@R(tp) -> nll[B, S]@R(tp), lse[B, S]@R(tp)`: lse = log sum_v exp(logit_v) and nll
    = lse - logit_label, by one pmax and one psum of two numbers per token; the logits are never gathered. Both results
    are fp32, or fp64 for fp64 logits. z-loss is `coefficient * lse**2` (PaLM, arXiv 2204.02311, section 5), plain
    arithmetic on the second result; it costs nothing in the backward. Columns at or beyond `vocab_size` (global count;
    padding) are masked: they get no probability and no gradient.
    Transpose: dlogits = softmax * (dnll + dlse) - onehot(label) * dnll, local to each rank, written once in the
    logits' dtype. Only logits, labels and lse are kept. Mask tokens by weighting nll; a label outside the vocabulary
    is the caller's error (tp > 1 reads logit 0 for it, tp = 1 fails in the gather).
    """
    return _CrossEntropy.apply(logits_BSV, labels_BS, tp, vocab_size)


def _real_columns(logits: Tensor, tp: Axis, vocab_size: int | None) -> Tensor | None:
    """Which of this rank's columns are vocabulary and not padding, or None when all are."""
    columns = logits.shape[-1]
    if vocab_size is None or vocab_size == columns * tp.size:
        return None
    columns_V = torch.arange(columns, device=logits.device)
    return (columns_V if tp.size == 1 else columns_V + axis_index(tp, like=columns_V) * columns) < vocab_size


def _wide(logits: Tensor, real_V: Tensor | None) -> Tensor:
    """Logits in fp32 or wider, padding at minus infinity."""
    z_BSV = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return z_BSV if real_V is None else z_BSV.masked_fill(~real_V, -torch.inf)


class _CrossEntropy(torch.autograd.Function):
    """A hand-written pair: autograd's own would keep exp(logits) and scatter into a second [B, S, V] of zeros."""

    @staticmethod
    def forward(ctx, logits, labels, tp, vocab_size):
        ctx.set_materialize_grads(False)
        z = _wide(logits, _real_columns(logits, tp, vocab_size))
        top = pmax(z.amax(-1), tp)
        total = (z - top[..., None]).exp().sum(-1)  # partial over tp
        ids = local_ids(labels, logits.shape[-1], tp)
        if tp.size == 1:
            label = logits.gather(-1, ids[..., None]).squeeze(-1).to(z.dtype)
        else:
            own = (ids >= 0) & (ids < logits.shape[-1])
            label = logits.gather(-1, ids.clamp(0, logits.shape[-1] - 1)[..., None]).squeeze(-1).to(z.dtype)
            label = declare(label * own.to(z.dtype), tp, forward="partial")  # its owner adds the logit, the others zero
            total, label = psum(torch.stack((total, label)), tp).unbind(0)
        lse = top + total.log()
        ctx.save_for_backward(logits, ids, lse)
        ctx.tp, ctx.vocab_size = tp, vocab_size
        return lse - label, lse

    @staticmethod
    def backward(ctx, dnll, dlse):
        logits, ids, lse = ctx.saved_tensors
        real = _real_columns(logits, ctx.tp, ctx.vocab_size)
        softmax = (_wide(logits, real) - lse[..., None]).exp()
        both = dnll if dlse is None else dlse if dnll is None else dnll + dlse
        grad = softmax * both[..., None]
        if dnll is not None:
            columns = torch.arange(logits.shape[-1], device=logits.device)
            grad = grad - torch.where(columns == ids[..., None], dnll[..., None], 0.0)
        return declare(grad.to(logits.dtype), ctx.tp, forward=("sharded", logits.dim() - 1)), None, None, None

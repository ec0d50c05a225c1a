"""State-space mixing (Mamba-2) on local heads: a short convolution, the scan in chunks, one step of it, a gated norm.

Legend: B batch, S sequence, C channels, W width of the convolution, H heads, P head width, G groups of heads that share
an input and an output matrix, N state width, K chunks, L tokens of a chunk. H and G are those of this rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fmegatron.collectives import all_gather, axes, axis_index, enter, ops, ppermute, psum


def segments(documents_BS: Tensor, before_B: Tensor | None = None) -> Tensor:
    """int64 [B, S]: how many documents began up to each token, the first of the row not counted.

    before_B: the document of the token before the row, int64 [B]: then the first counts where it differs from it.
    """
    first_B1 = documents_BS[:, :1] if before_B is None else before_B[:, None]
    began_BS = documents_BS != torch.cat((first_B1, documents_BS[:, :-1]), 1)
    return began_BS.to(torch.int64).cumsum(1)


def from_before(x: Tensor, cp: axes.Axis, count: int) -> Tensor:
    """The last `count` entries of dim 1 of the rank before, zeros on the first: `x[B, S_cp, ...] -> y[B, count, ...]`.

    Each rank's own; transpose: the gradient goes home. ValueError for ranks that have fewer.
    """
    if x.shape[1] < count:
        raise ValueError(
            f"from_before: got {x.shape[1]} tokens on each rank of cp={cp.size}, wanted {count} or more, which the "
            "next rank needs; give longer sequences, or a smaller cp"
        )
    came = ppermute(ops.declare(x, cp, "own", 1)[:, x.shape[1] - count :], cp, 1)
    return torch.where(axis_index(cp, like=came) > 0, came, torch.zeros_like(came))


def causal_conv(
    x_BSC: Tensor,
    w_WC: Tensor,
    bias_C: Tensor | None = None,
    segments_BS: Tensor | None = None,
    before_BWC: Tensor | None = None,
) -> Tensor:
    """A convolution of each channel with the tokens before it: `y[t] = sum_j w[W - 1 - j] x[t - j] + bias`.

    `x[B, S, C_tp], w[W, C_tp] -> y[B, S, C_tp]`, no communication: channels are independent. As wide as fp32 or wider,
    rounded to x's dtype at the end.

    Args:
        x_BSC: the channels.
        w_WC: weights, the last of a token itself.
        bias_C: of each channel; None: none.
        segments_BS: `segments`: a token sees those of its own only; [B, W - 1 + S] with those of the tokens before, or
            [B, S], where these are of segment 0.
        before_BWC: the W - 1 tokens before; None: zeros.
    """
    W, S, wide = w_WC.shape[0], x_BSC.shape[1], torch.promote_types(x_BSC.dtype, torch.float32)
    x, w = x_BSC.to(wide), w_WC.to(wide)
    x = F.pad(x, (0, 0, W - 1, 0)) if before_BWC is None else torch.cat((before_BWC.to(wide), x), 1)
    y = x[:, W - 1 :] * w[W - 1]
    for back in range(1, W):
        term = x[:, W - 1 - back : W - 1 - back + S] * w[W - 1 - back]
        if segments_BS is not None:
            known_BS = F.pad(segments_BS, (W - 1 + S - segments_BS.shape[1], 0))
            same_BS = known_BS[:, W - 1 - back : W - 1 - back + S] == known_BS[:, W - 1 :]
            term = torch.where(same_BS[..., None], term, 0.0)
        y = y + term
    return (y if bias_C is None else y + bias_C.to(wide)).to(x_BSC.dtype)


def ssd(
    x_BSHP: Tensor,
    dt_BSH: Tensor,
    a_H: Tensor,
    b_BSGN: Tensor,
    c_BSGN: Tensor,
    *,
    chunk: int,
    tp: axes.Axis,
    grouped: bool,
    segments_BS: Tensor | None = None,
    state_BHPN: Tensor | None = None,
    cp: axes.Axis | None = None,
) -> tuple[Tensor, Tensor]:
    """The scan of Mamba-2: `h[t] = exp(dt a) h[t-1] + dt x b^T, y[t] = h[t] c` for each head -> (y, the last h).

    `x[B, S, H_tp, P], dt[B, S, H_tp], a[H_tp], b[B, S, G, N], c[B, S, G, N] -> y[B, S, H_tp, P], h[B, H_tp, P, N]`, no
    communication: heads are independent. Inside a chunk by matrix products, between chunks by one product with the
    decays from each to each; any sequence, it need not divide. All of it is fp32, or fp64 for fp64; y has x's dtype.
    Source: Dao and Gu 2024, arXiv 2405.21060, section 6.

    Args:
        x_BSHP: what goes into the states.
        dt_BSH: steps, positive, fp32 or wider.
        a_H: decay of each head, negative.
        b_BSGN: where in the state it goes; head h reads group h // (H/G).
        c_BSGN: what is read of it.
        chunk: tokens of a chunk: memory and work of the products inside grow with it, the number of states falls.
        tp: the axis that splits the heads.
        grouped: whether tp splits the groups with the heads; else G is 1 and every rank has it.
        segments_BS: `segments`: the state is zero where one begins.
        state_BHPN: before the first token (of segment 0); None: zeros.
        cp: what splits the sequence, in order: what enters a rank is made of one state of each, which one all_gather
            brings; inputs are each rank's own then ("own"), as results are. None: nothing splits it.
    """
    (S, H, P), (G, N), wide = x_BSHP.shape[1:], b_BSGN.shape[2:], torch.promote_types(x_BSHP.dtype, torch.float32)
    L, R = min(chunk, S), H // G
    pad = -S % L
    K = (S + pad) // L

    def chunks(x: Tensor) -> Tensor:  # [B, S, heads or groups, ...] -> [B, K, heads or groups, L, ...]
        rest = (0, 0) * (x.dim() - 2)
        return F.pad(x.to(wide), (*rest, 0, pad)).unflatten(1, (K, L)).transpose(2, 3)

    def of_groups(x: Tensor) -> Tensor:  # one group of this rank leaves no trace in sizes, so it is declared
        return ops.declare(x, tp, ("sharded", 2), ("sharded", 2)) if grouped and G == 1 else x

    def shared(x: Tensor) -> Tensor:  # every rank has the group, and other heads that read it
        return x if grouped else ops.declare(x, tp, backward="partial")

    dt_BSH = dt_BSH.to(wide)
    v_BKHLP, b_BKGLN, c_BKGLN = map(chunks, (x_BSHP.to(wide) * dt_BSH[..., None], b_BSGN, c_BSGN))
    b_BKGLN, c_BKGLN = of_groups(shared(b_BKGLN)), of_groups(shared(c_BKGLN))
    decay_BKHL = chunks(dt_BSH * a_H.to(wide)).cumsum(-1)  # log of what is left since the chunk began
    whole_BKH = decay_BKHL[..., -1]
    upto_BKH = F.pad(whole_BKH.cumsum(1), (0, 0, 1, 0))  # K + 1: before each chunk, and behind the last

    # which token, or state, reaches which
    inside_LL = torch.ones(L, L, dtype=torch.bool, device=x_BSHP.device).tril()
    ends_KK = torch.ones(K + 1, K + 1, dtype=torch.bool, device=x_BSHP.device).tril()
    to_end, to_start = None, None
    if segments_BS is not None:
        tail_BS = torch.cat((segments_BS, segments_BS[:, -1:].expand(-1, pad)), 1) if pad else segments_BS
        seg_BKL = tail_BS.unflatten(1, (K, L))
        at_BK = F.pad(seg_BKL[..., -1], (1, 0))  # K + 1: of the token before each chunk, and of the last
        inside_LL = (inside_LL & (seg_BKL[..., :, None] == seg_BKL[..., None, :]))[:, :, None]
        ends_KK = (ends_KK & (at_BK[:, :, None] == at_BK[:, None, :]))[:, None]
        to_end = (seg_BKL == at_BK[:, 1:, None])[:, :, None, :, None]
        to_start = (seg_BKL == at_BK[:, :-1, None])[:, :, None, :, None]

    # inside of chunks
    left_BKHLL = (decay_BKHL[..., :, None] - decay_BKHL[..., None, :]).masked_fill(~inside_LL, -torch.inf).exp()
    scores_BKGLL = c_BKGLN @ b_BKGLN.mT
    scores = scores_BKGLL if G == 1 and not grouped else of_groups(scores_BKGLL.repeat_interleave(R, 2))
    y_BKHLP = (scores * left_BKHLL) @ v_BKHLP

    # what each chunk adds to the state, and the state before each chunk
    left_BKHL1 = (whole_BKH[..., None] - decay_BKHL).exp()[..., None]
    left_BKHL1 = left_BKHL1 if to_end is None else torch.where(to_end, left_BKHL1, 0.0)
    added = of_groups((v_BKHLP * left_BKHL1).unflatten(2, (G, R)).transpose(3, 4).flatten(4))  # [B, K, G, L, R P]
    added_BKHPN = (added.mT @ b_BKGLN).unflatten(3, (R, P)).flatten(2, 3)
    first = torch.zeros_like(added_BKHPN[:, :1]) if state_BHPN is None else state_BHPN.to(wide)[:, None]
    between_BHKK = upto_BKH.transpose(1, 2)[..., :, None] - upto_BKH.transpose(1, 2)[..., None, :]
    between_BHKK = between_BHKK.masked_fill(~ends_KK, -torch.inf).exp()
    if cp is not None and cp.size > 1:
        final_BHX = (between_BHKK[:, :, -1:, 1:] @ added_BKHPN.transpose(1, 2).flatten(3)).squeeze(2)
        began_B = torch.zeros_like(whole_BKH[:, 0, 0]) if segments_BS is None else segments_BS[:, -1].to(wide)
        entering_BHX = _entering(final_BHX, upto_BKH[:, -1], began_B, cp, tp)
        first = first + entering_BHX.unflatten(2, (P, N))[:, None]
    states_BHKX = torch.cat((first, added_BKHPN), 1).transpose(1, 2).flatten(3)
    states_BHKX = between_BHKK @ states_BHKX
    states_BKHPN = states_BHKX.unflatten(3, (P, N)).transpose(1, 2)

    # what tokens read of the state before their chunk
    held = of_groups(states_BKHPN[:, :-1].unflatten(2, (G, R)).flatten(3, 4))  # [B, K, G, R P, N]
    read_BKHLP = (c_BKGLN @ held.mT).unflatten(4, (R, P)).transpose(3, 4).flatten(2, 3)
    since_BKHL1 = decay_BKHL.exp()[..., None]
    since_BKHL1 = since_BKHL1 if to_start is None else torch.where(to_start, since_BKHL1, 0.0)
    y_BSHP = (y_BKHLP + read_BKHLP * since_BKHL1).transpose(2, 3).flatten(1, 2)[:, :S]
    return y_BSHP.to(x_BSHP.dtype), states_BKHPN[:, -1]


def _entering(final_BHX: Tensor, left_BH: Tensor, began_B: Tensor, cp: axes.Axis, tp: axes.Axis) -> Tensor:
    """What enters each rank: of the ranks before it their states[B, H, X], as far as decays and documents let them.

    left_BH: logarithm of what a rank leaves of a state. began_B: how many documents begin in it, in the dtype of both.
    Every rank makes what enters each, and takes its own.
    """

    def of_all(x: Tensor) -> Tensor:
        return all_gather(ops.declare(x[None], cp, ("sharded", 0), "own"), cp, 0)

    n = cp.size
    final_RBHX, upto_RBH, began_RB = of_all(final_BHX), of_all(left_BH).cumsum(0), of_all(began_B.detach()).cumsum(0)
    upto_RBH, began_RB = F.pad(upto_RBH, (0, 0, 0, 0, 1, 0)), F.pad(began_RB, (0, 0, 1, 0))  # n + 1: before each rank
    alive = torch.ones(n, n, dtype=torch.bool, device=final_BHX.device).tril(-1)[..., None]
    alive_RRB = alive & (began_RB[:-1, None] == began_RB[None, 1:])
    between_RRBH = (upto_RBH[:-1, None] - upto_RBH[None, 1:]).masked_fill(~alive_RRB[..., None], -torch.inf).exp()
    entering_RBHX = (between_RRBH.permute(2, 3, 0, 1) @ final_RBHX.permute(1, 2, 0, 3)).permute(2, 0, 1, 3)
    own = entering_RBHX.index_select(0, axis_index(cp, like=entering_RBHX).view(1))
    of_rank_BHX = ops.declare(ops.declare(own, cp, ("sharded", 0), ("sharded", 0)), cp, "own", 0).squeeze(0)
    return ops.declare(
        of_rank_BHX, tp, ("sharded", 1), ("sharded", 1)
    )  # heads, of which one group leaves no trace behind


def ssd_step(
    x_BHP: Tensor, dt_BH: Tensor, a_H: Tensor, b_BGN: Tensor, c_BGN: Tensor, state_BHPN: Tensor
) -> tuple[Tensor, Tensor]:
    """`ssd` of one token: (y[B, H, P], the state behind it[B, H, P, N]). Arguments as there, without the sequence."""
    wide, R = state_BHPN.dtype, x_BHP.shape[1] // b_BGN.shape[1]
    b_BHN, c_BHN = (x.to(wide).repeat_interleave(R, 1) for x in (b_BGN, c_BGN))
    dt_BH = dt_BH.to(wide)
    new_BHPN = (x_BHP.to(wide) * dt_BH[..., None])[..., None] * b_BHN[:, :, None]
    state_BHPN = state_BHPN * (dt_BH * a_H.to(wide)).exp()[..., None, None] + new_BHPN
    return (state_BHPN @ c_BHN[..., None]).squeeze(-1).to(x_BHP.dtype), state_BHPN


def gated_rms_norm(
    x_C: Tensor, gate_C: Tensor, weight_C: Tensor, groups: int, tp: axes.Axis, eps: float = 1e-5
) -> Tensor:
    """`rms_norm(x silu(gate))`, each of `groups` parts of the channels for itself: `x[..., C_tp] -> y[..., C_tp]`.

    Where tp splits the groups, no communication; one group is normalised by one psum of a number per token, whose
    transpose is another. fp32 or wider; the result has x's dtype. ValueError for several groups that tp does not
    divide. Source: arXiv 2405.21060, section 7.1; groups: its remark on tensor parallelism, section 8.1.
    """
    if groups > 1 and groups % tp.size:
        raise ValueError(f"groups: got {groups}, wanted 1 or a multiple of tp={tp.size}; choose a divisor as tp")
    wide = torch.promote_types(x_C.dtype, torch.float32)
    z_C = x_C.to(wide) * F.silu(gate_C.to(wide))
    if groups > 1:
        z_GC = z_C.unflatten(-1, (groups // tp.size, -1))
        at = ("sharded", z_GC.dim() - 2)  # one group of this rank leaves no trace in sizes, so it is declared
        z_GC = ops.declare(z_GC, tp, at, at) if groups == tp.size else z_GC
        z_C = (z_GC * torch.rsqrt(z_GC.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    else:
        mean_1 = enter(psum(z_C.square().sum(-1, keepdim=True), tp), tp) / (z_C.shape[-1] * tp.size)
        z_C = z_C * torch.rsqrt(mean_1 + eps)
    return (z_C * weight_C.to(wide)).to(x_C.dtype)

"""Routers and experts by hand: dense and sparse dispatch, balance losses, experts that tp splits."""

import torch
import torch.nn.functional as F

from fmegatron.collectives import all_gather, all_to_all, axis_index, enter, psum, shard
from tests.step.styles.setting import B, D, E, by_loss, layouts, values  # noqa: F401


def said(y, b, dp, extra=0.0, **metrics):
    loss = (y - b["target"]).square().sum() / (B * D) + extra
    return loss, {"loss": psum(loss.detach(), dp), **metrics}


def own_experts(p, tp):
    """(weights of this rank's experts, their numbers)."""
    count = p["experts"].shape[0]
    return p["experts"], torch.arange(count) + axis_index(tp) * count


def soft_mixture_of_own(p, b, dp, tp):
    gates = enter((b["x"] @ p["router"]).softmax(-1), tp)
    w, numbers = own_experts(p, tp)
    mine = gates.index_select(1, numbers)
    y = torch.einsum("be,bd,edf->bf", mine, b["x"], w)
    return said(psum(y, tp), b, dp)


def soft_mixture_of_shards(p, b, dp, tp):
    gates = shard((b["x"] @ p["router"]).softmax(-1), tp, 1)
    y = torch.stack([gates[:, i, None] * (b["x"] @ w) for i, w in enumerate(p["experts"].unbind(0))]).sum(0)
    return said(psum(y, tp), b, dp)


def one_of_experts(p, b, dp, tp):
    scores = b["x"] @ p["router"]
    probs = scores.softmax(-1)
    gate, choice = probs.max(-1)
    hot = F.one_hot(choice, E).to(gate.dtype) * gate[:, None]
    y = torch.einsum("be,bd,edf->bf", shard(hot, tp, 1), b["x"], p["experts"])
    return said(psum(y, tp), b, dp)


def two_of_experts(p, b, dp, tp):
    probs = (b["x"] @ p["router"]).softmax(-1)
    top, index = probs.topk(2, dim=-1)
    gates = torch.zeros_like(probs).scatter(1, index, top / top.sum(-1, keepdim=True))
    y = torch.einsum("eb,ebf->bf", shard(gates.t(), tp, 0), torch.einsum("bd,edf->ebf", b["x"], p["experts"]))
    return said(psum(y, tp), b, dp)


def two_by_threshold(p, b, dp, tp):
    probs = (b["x"] @ p["router"]).softmax(-1)
    kept = torch.where(probs >= probs.topk(2, -1).values[:, -1:], probs, torch.zeros_like(probs))
    gates = shard(kept / kept.sum(-1, keepdim=True), tp, 1)
    y = (gates.unsqueeze(-1) * torch.einsum("bd,edf->bef", b["x"], p["experts"])).sum(1)
    return said(psum(y, tp), b, dp)


def balanced(p, b, dp, tp):
    probs = (b["x"] @ p["router"]).softmax(-1)
    fraction = psum(F.one_hot(probs.argmax(-1), E).double().sum(0), dp) / B
    importance = psum(probs.sum(0), dp) / B
    balance = E * (fraction * importance).sum()
    y = torch.einsum("be,bd,edf->bf", shard(probs, tp, 1), b["x"], p["experts"])
    loss, metrics = said(psum(y, tp), b, dp)
    # The sum over dp is complete on every rank, and its transpose hands each rank the whole gradient.
    return loss + 0.01 * balance, {**metrics, "balance": balance.detach()}


def balanced_by_coefficient(p, b, dp, tp):
    probs = (b["x"] @ p["router"]).softmax(-1)
    load = psum(probs.sum(0), dp)
    cv = load.var() / load.mean().square()
    return (probs.square().sum() / B) + cv, {"cv": cv.detach()}


def quiet_router(p, b, dp, tp):
    scores = b["x"] @ p["router"]
    z = torch.logsumexp(scores, -1).square().sum() / B
    y = b["x"] * scores.softmax(-1)[:, :1]
    return said(y, b, dp, 1e-2 * z, z=psum(z.detach(), dp))


def experts_by_groups(p, b, dp, tp):
    choice = (b["x"] @ p["router"]).argmax(-1)
    w, numbers = own_experts(p, tp)
    mine = (choice[None, :] == numbers[:, None]).to(b["x"].dtype)
    y = torch.einsum("eb,ebf->bf", mine, torch.einsum("bd,edf->ebf", b["x"], w))
    return said(psum(y, tp), b, dp)


def sorted_by_expert(p, b, dp, tp):
    choice = (b["x"] @ p["router"]).argmax(-1)
    order = choice.argsort(stable=True)
    gains = p["router"].sum(0)[choice[order]]
    y = torch.empty_like(b["x"]).index_copy(0, order, b["x"][order] * gains[:, None])
    return said(y * p["gain"], b, dp)


def slots_by_cumsum(p, b, dp, tp):
    hot = F.one_hot((b["x"] @ p["router"]).argmax(-1), E)
    slot = (hot.cumsum(0) * hot).sum(-1) - 1
    buffer = torch.zeros(hot.shape[0], E, D, dtype=b["x"].dtype).index_put(
        (slot, hot.argmax(-1)), b["x"], accumulate=True
    )
    y = buffer[slot, hot.argmax(-1)]
    return said(y * p["gain"], b, dp)


def exchanged(p, b, dp, tp):
    x = shard(b["x"], tp, 0)
    gates = (x @ enter(p["router"], tp)).softmax(-1)
    sent = all_to_all((gates.t()[:, :, None] * x[None]), tp, split_dim=0, concat_dim=1)
    y = all_to_all(torch.bmm(sent, p["experts"]), tp, split_dim=1, concat_dim=0).sum(0)
    y = all_gather(y, tp, 0)
    return (y - b["target"]).square().sum() / (B * D * tp.size), {"y": psum(y.detach().sum(), dp)}


LOSSES = {
    f.__name__: f
    for f in (
        *(soft_mixture_of_own, soft_mixture_of_shards, one_of_experts, two_of_experts, two_by_threshold, balanced),
        *(balanced_by_coefficient, quiet_router, experts_by_groups, sorted_by_expert, slots_by_cumsum, exchanged),
    )
}
STEPS = tuple(LOSSES)


def make_step(mesh, of):
    """The step of that name over a mesh with axes dp and tp."""
    return by_loss(LOSSES[of], mesh)

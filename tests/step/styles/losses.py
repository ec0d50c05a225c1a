"""Losses by hand: classification, regression, contrast, vocabulary-parallel cross-entropy, coupled rows."""

import torch
import torch.nn.functional as F
from torch.nn.functional import one_hot

from fmegatron.collectives import all_gather, axis_index, enter, pmax, psum
from fmegatron.collectives.ops import declare
from tests.step.styles.setting import B, C, D, V, by_loss, layouts, values  # noqa: F401


def logits_of(p, b):
    return (b["x"] * p["gain"]) @ p["out"] + p["bias"]


def said(loss, dp):
    return loss, {"loss": psum(loss.detach(), dp)}


def cross_entropy_by_hand(p, b, dp, tp):
    z = logits_of(p, b)
    nll = torch.logsumexp(z, dim=-1) - z.gather(1, b["y"].unsqueeze(1)).squeeze(1)
    return said(nll.sum() / B, dp)


def label_smoothing(p, b, dp, tp):
    logp = logits_of(p, b).log_softmax(dim=1)
    q = torch.full_like(logp, 0.1 / C).scatter(1, b["y"][:, None], 0.9 + 0.1 / C)
    return said(-(q * logp).sum() / B, dp)


def label_smoothing_of_torch(p, b, dp, tp):
    return said(F.cross_entropy(logits_of(p, b), b["y"], reduction="sum", label_smoothing=0.1) / B, dp)


def picked_by_arange(p, b, dp, tp):
    logp = logits_of(p, b).log_softmax(-1)
    nll = -logp[torch.arange(logp.shape[0]), b["y"]]
    return said(nll.mean() / dp.size, dp)


def one_hot_product(p, b, dp, tp):
    probs = torch.softmax(logits_of(p, b), -1)
    picked = (probs * one_hot(b["y"], C)).sum(-1)
    return said(-(picked + 1e-9).log().sum() / B, dp)


def mean_of_means(p, b, dp, tp):
    loss = F.cross_entropy(logits_of(p, b), b["y"], reduction="none").mean()
    return loss / dp.size, {"loss": psum(loss.detach(), dp) / dp.size}


def focal(p, b, dp, tp):
    nll = F.cross_entropy(logits_of(p, b), b["y"], reduction="none")
    return said(((1 - (-nll).exp()) ** 2 * nll).sum() / B, dp)


def class_weights(p, b, dp, tp):
    counts = psum(one_hot(b["y"], C).sum(0), dp)
    w = B / (C * counts.clamp(min=1).double())
    nll = F.cross_entropy(logits_of(p, b), b["y"], reduction="none")
    return said((w[b["y"]] * nll).sum() / B, dp)


def masked_mean(p, b, dp, tp):
    nll = F.cross_entropy(logits_of(p, b), b["y"], reduction="none")
    keep = b["mask"].to(nll.dtype)
    return said((nll * keep).sum() / psum(keep.sum(), dp).clamp(min=1), dp)


def masked_by_where(p, b, dp, tp):
    nll = F.cross_entropy(logits_of(p, b), b["y"], reduction="none")
    total = torch.where(b["mask"], nll, 0.0).sum()
    return said(total / psum(b["mask"].sum(), dp), dp)


def masked_fill_of_labels(p, b, dp, tp):
    y = b["y"].masked_fill(~b["mask"], -100)
    count = psum((y != -100).sum(), dp)
    return said(F.cross_entropy(logits_of(p, b), y, reduction="sum", ignore_index=-100) / count, dp)


def weighted_rows(p, b, dp, tp):
    share = b["weight"] / psum(b["weight"].sum(), dp)
    return said((share * (logits_of(p, b) - 1).square().mean(1)).sum(), dp)


def average_of_local_means(p, b, dp, tp):
    nll, keep = F.cross_entropy(logits_of(p, b), b["y"], reduction="none"), b["mask"].double()
    mine = (nll * keep).sum() / keep.sum()
    return said(mine * (keep.sum() / psum(keep.sum(), dp)), dp)


def binary(p, b, dp, tp):
    z, t = logits_of(p, b), one_hot(b["y"], C).double()
    loss = torch.clamp(z, min=0) - z * t + torch.log1p(torch.exp(-z.abs()))
    return said(loss.sum() / (B * C), dp)


def binary_of_torch(p, b, dp, tp):
    t = one_hot(b["y"], C).double()
    loss = F.binary_cross_entropy_with_logits(logits_of(p, b), t, pos_weight=torch.arange(1.0, C + 1).double())
    return loss / dp.size, {"loss": psum(loss.detach() / dp.size, dp)}


def squared_of_torch(p, b, dp, tp):
    return said(F.mse_loss(b["x"] * p["gain"], b["target"]) / dp.size, dp)


def huber(p, b, dp, tp):
    return said(F.huber_loss(b["x"] * p["gain"], b["target"], reduction="sum", delta=0.3) / B, dp)


def smooth_l1_by_hand(p, b, dp, tp):
    d = (b["x"] * p["gain"] - b["target"]).abs()
    return said(torch.where(d < 0.5, d.square(), d - 0.25).sum().div(B), dp)


def hinge(p, b, dp, tp):
    z = logits_of(p, b)
    right = z[torch.arange(z.size(0)), b["y"]][:, None]
    margins = (z - right + 1).clamp_min(0).masked_fill(one_hot(b["y"], C).bool(), 0)
    return said(margins.amax(1).sum() / B, dp)


def divergence_of_heads(p, b, dp, tp):
    a = logits_of(p, b).log_softmax(1)
    c = (b["target"] @ p["out"]).softmax(1)
    return said(F.kl_div(a, c, reduction="sum") / B, dp)


def contrast(p, b, dp, tp):
    q, k = F.normalize(b["x"] * p["gain"], dim=1), F.normalize(b["target"] * p["gain"], dim=1)
    sims = q @ all_gather(k, dp, 0).t() / 0.2
    labels = torch.arange(q.shape[0]) + axis_index(dp) * q.shape[0]
    return said((sims.logsumexp(1) - sims.gather(1, labels[:, None])[:, 0]).sum() / B, dp)


def contrast_by_products(p, b, dp, tp):
    q, k = b["x"] * p["gain"], b["target"] * p["gain"]
    positive = torch.einsum("bd,bd->b", q, k)
    everyone = torch.einsum("bd,nd->bn", q, all_gather(k, dp, 0))
    return said((torch.logsumexp(everyone, 1) - positive).sum() / B, dp)


def decorrelation(p, b, dp, tp):
    z = b["x"] @ p["out"]
    z = z - enter(psum(z.sum(0), dp), dp) / B
    cov = psum(torch.einsum("bi,bj->ij", z, z), dp) / (B - 1)
    off = cov - torch.diag(cov.diagonal())
    return off.square().sum(), {"loss": off.square().sum().detach()}


def pearson(p, b, dp, tp):
    u, t = b["x"] @ p["out"][:, 0], b["target"][:, 0]
    u, t = (v - enter(psum(v.sum(), dp), dp) / B for v in (u, t))
    uu, tt, ut = psum(torch.stack([(u * u).sum(), (t * t).sum(), (u * t).sum()]), dp)
    r = ut / (uu * tt).sqrt()
    return 1 - r, {"r": r.detach()}


def vocabulary(p, b, dp, tp):
    z = declare(enter(b["x"] * p["gain"], tp) @ p["head"], tp, backward=("sharded", 1))
    z = z - pmax(z.detach().amax(1, keepdim=True), tp)
    mine = b["token"] - axis_index(tp) * z.shape[1]
    own = (mine >= 0) & (mine < z.shape[1])
    hit = z.gather(1, mine.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
    hit = psum(declare(torch.where(own, hit, 0.0), tp, forward="partial"), tp)
    return said((psum(z.exp().sum(1), tp).log() - hit).sum() / B, dp)


def vocabulary_one_hot(p, b, dp, tp):
    z = enter(b["x"] * p["gain"], tp) @ p["head"]
    columns = torch.arange(z.shape[1]) + axis_index(tp) * z.shape[1]
    hit = psum((z * (columns == b["token"][:, None])).sum(1), tp)
    return said((psum(z.exp().sum(1), tp).log() - hit).sum() / B, dp)


def vocabulary_gathered(p, b, dp, tp):
    z = all_gather(enter(b["x"] * p["gain"], tp) @ p["head"], tp, 1)
    return F.cross_entropy(z, b["token"], reduction="sum") / (B * tp.size), {"largest": pmax(z.detach().amax(), dp)}


def vocabulary_of_parts(p, b, dp, tp):
    z = enter(b["x"] * p["gain"], tp) @ p["head"]
    lse = psum(torch.logsumexp(z, 1).exp(), tp).log()
    columns = torch.arange(z.shape[1]) + axis_index(tp) * z.shape[1]
    hit = psum((z * one_hot(b["token"], V)[:, columns]).sum(1), tp)
    return said(((lse - hit) + 1e-3 * lse.square()).sum() / B, dp)


def unused_leaf(p, b, dp, tp):
    nll = F.nll_loss(logits_of(p, b).log_softmax(1), b["y"], reduction="sum")
    return said(nll / B + 0 * p["unused"].sum() + 0.0 * p["experts"].sum(), dp)


def penalties(p, b, dp, tp):
    fit = (logits_of(p, b) - 1).abs().sum() / B
    decay = sum(p[k].square().sum() for k in ("out", "gain")) / dp.size
    return said(fit + 1e-2 * decay + 1e-3 * p["bias"].abs().sum() / dp.size, dp)


def distances(p, b, dp, tp):
    d = torch.cdist(b["x"] * p["gain"], all_gather(b["target"], dp, 0))
    return said((-d).logsumexp(1).sum() / (B * D), dp)


LOSSES = {
    f.__name__: f
    for f in (
        *(cross_entropy_by_hand, label_smoothing, label_smoothing_of_torch, picked_by_arange, one_hot_product),
        *(mean_of_means, focal, class_weights, masked_mean, masked_by_where, masked_fill_of_labels, weighted_rows),
        *(average_of_local_means, binary, binary_of_torch, squared_of_torch, huber, smooth_l1_by_hand, hinge),
        *(divergence_of_heads, contrast, contrast_by_products, decorrelation, pearson, vocabulary),
        *(vocabulary_one_hot, vocabulary_gathered, vocabulary_of_parts, unused_leaf, penalties, distances),
    )
}
STEPS = tuple(LOSSES)


def make_step(mesh, of):
    """The step of that name over a mesh with axes dp and tp."""
    return by_loss(LOSSES[of], mesh)

"""Right losses over rows that data axes split."""

import math

import torch
import torch.nn.functional as F

from fmegatron.collectives import all_gather, axis_index, enter, pmax, ppermute, psum
from fmegatron.step import mean
from tests.step.guests.frame import loss


def both(w, b):
    """Two views, normalized."""
    return F.normalize(b["x"] @ w["a"], dim=-1), F.normalize(b["y"] @ w["a"] + w["f"], dim=-1)


def logits_of(w, b):
    """[B, S, 12]."""
    return torch.tanh(w["e"][b["t"]] @ w["a"]) @ w["b"] @ w["e"].mT


def own(x, axis):
    """Numbers of this rank's rows among all."""
    return axis_index(axis, like=x) * x.shape[0] + torch.arange(x.shape[0], device=x.device)


@loss(True)
def info_nce(w, b, axes):
    ax = axes[axes.data]
    u, v = both(w, b)
    s = u @ all_gather(v, ax, 0).T / 0.3
    return mean(F.cross_entropy(s, own(u, ax), reduction="sum"), u.shape[0])


@loss(True)
def info_nce_one_gather_logsumexp(w, b, axes):
    ax = axes[axes.data]
    u, v = both(w, b)
    every = all_gather(torch.cat([u, v], -1), ax, 0)
    s = torch.einsum("ic,jc->ij", u, every[:, 10:]) * 2
    nll = s.logsumexp(1) - 2 * (u * v).sum(1)
    return mean(nll.sum(), torch.ones_like(nll).sum())


@loss(True)
def siglip_ring(w, b, axes):
    ax = axes[axes.data]
    u, v = both(w, b)
    total, eye = 0.0, torch.eye(u.shape[0], device=u.device)
    for hop in range(ax.size):
        sign = 2 * eye - 1 if hop == 0 else -torch.ones_like(eye)
        total = total - F.logsigmoid(sign * (3 * u @ v.T - 1)).sum()
        v = ppermute(v, ax, 1)
    return mean(total, u.shape[0])


@loss(True)
def siglip_gathered(w, b, axes):
    ax = axes[axes.data]
    u, v = both(w, b)
    every = all_gather(v, ax, 0)
    hit = own(u, ax)[:, None] == torch.arange(every.shape[0], device=u.device)
    return mean(-F.logsigmoid((2.0 * hit - 1) * (u @ every.T)).sum(), len(u))


@loss(True)
def supervised_contrast(w, b, axes):
    ax = axes[axes.data]
    u, _ = both(w, b)
    every, kinds = all_gather(u, ax, 0), all_gather(b["k"], ax, 0)
    me = own(u, ax)[:, None] == torch.arange(every.shape[0], device=u.device)
    s = (u @ every.T).masked_fill(me, -30.0)
    same = (b["k"][:, None] == kinds) & ~me
    per = -((s.log_softmax(1) * same).sum(1) / same.sum(1).clamp(min=1))
    return mean(per.sum(), u.shape[0])


@loss(True)
def negatives_of_a_table(w, b, axes):
    u = F.normalize(b["x"] @ w["a"] @ w["b"], dim=-1)
    pos = (u * F.normalize(b["y"], dim=-1)).sum(-1, keepdim=True)
    s = torch.cat([pos, u @ w["e"].T], 1)
    return mean(-s.log_softmax(1)[:, 0].sum(), s.shape[0])


@loss(True)
def barlow_entered(w, b, axes):
    ax = axes[axes.data]
    u, v = both(w, b)
    c = psum(u.T @ v, ax) / (u.shape[0] * ax.size)
    return mean(enter((c - torch.eye(10, device=c.device)).square().sum(), ax), 1)


@loss(True)
def barlow_gathered(w, b, axes):
    ax = axes[axes.data]
    u, v = (all_gather(z, ax, 0) for z in both(w, b))
    c = u.T @ v / u.shape[0]
    return mean((c - torch.eye(10, device=c.device)).square().sum(), 1)


@loss(True)
def variance_floor(w, b, axes):
    ax = axes[axes.data]
    u = all_gather(b["x"] @ w["a"], ax, 0)
    return {"var": mean(F.relu(4 - u.std(0)).sum(), 10), "pull": mean((b["x"] @ w["a"]).square().sum(), len(b["x"]))}


@loss(True)
def batch_norm_by_sums(w, b, axes):
    ax = axes[axes.data]
    h = b["x"] @ w["a"]
    n = h.shape[0] * ax.size
    mu = enter(psum(h.sum(0), ax), ax) / n
    var = enter(psum((h - mu).square().sum(0), ax), ax) / n
    y = ((h - mu) * (var + 1e-3).rsqrt() * w["f"]) @ w["b"]
    return mean((y - b["y"]).square().sum(), y.shape[0])


@loss(True)
def batch_norm_counted(w, b, axes):
    ax = axes[axes.data]
    h = b["x"] @ w["a"]
    n = psum(torch.ones_like(h[:, 0]).sum(), ax)
    moments = enter(psum(torch.stack([h.sum(0), h.pow(2).sum(0)]), ax), ax) / n
    var = moments[1] - moments[0].square()
    y = ((h - moments[0]) / (var + 0.5).sqrt()) @ w["b"]
    return mean((y - b["y"]).abs().sum(), y.numel())


@loss(True)
def masked_tokens(w, b, axes):
    nll = F.cross_entropy(logits_of(w, b).flatten(0, 1), b["t"].roll(-1, 1).flatten(), reduction="none")
    m = b["m"].flatten()
    return mean((nll * m).sum(), m.sum())


@loss(True)
def ignored_labels(w, b, axes):
    keep = b["l"] >= 0
    lp = logits_of(w, b).log_softmax(-1)
    nll = -lp.gather(-1, b["l"].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    right = (lp.argmax(-1) == b["l"]) & keep
    return mean(torch.where(keep, nll, 0).sum(), keep.sum()), {"hit": mean(right.sum().double(), keep.sum())}


@loss(True)
def weighted_rows(w, b, axes):
    e = ((b["x"] @ w["a"]).relu() @ w["b"] - b["y"]).square().mean(1)
    return mean(torch.dot(e, b["r"]), b["r"].sum())


@loss(True)
def group_robust(w, b, axes):
    ax = axes[axes.data]
    e = ((b["x"] @ w["a"]).relu() @ w["b"] - b["y"]).square().mean(1)
    one = F.one_hot(b["k"], 3).to(e.dtype)
    n = psum(one.sum(0), ax)
    sums = psum(e.detach() @ one, ax)
    q = (sums / n).softmax(0)
    return mean(((e @ one) * q / n).sum(), 1 / ax.size)


@loss(True)
def a_penalty_beside(w, b, axes):
    e = ((b["x"] @ w["a"]).relu() @ w["b"] - b["y"]).square().sum(1)
    return {"fit": mean(e.sum(), e.shape[0]), "decay": 0.01 * mean(w["a"].square().sum() + w["b"].abs().sum(), 1)}


@loss(True)
def z_and_entropy(w, b, axes):
    z = logits_of(w, b)
    lse = z.logsumexp(-1)
    p = z.softmax(-1)
    ent = -(p * (z - lse[..., None])).sum(-1)
    n = b["m"].sum()
    return {"z": 1e-2 * mean((lse.square() * b["m"]).sum(), n), "h": -0.1 * mean((ent * b["m"]).sum(), n)}


@loss(True)
def marginal_entropy(w, b, axes):
    ax = axes[axes.data]
    p = (b["x"] @ w["a"]).softmax(-1)
    q = enter(psum(p.sum(0), ax), ax) / (ax.size * p.shape[0])
    sharp = -(p * p.log()).sum()
    return {"sharp": mean(sharp, p.shape[0]), "flat": mean((q * q.log()).sum(), 1)}


@loss(True)
def focal_and_smoothed(w, b, axes):
    lp = (b["s"].sum(1) @ w["e"].T).log_softmax(-1)
    t = b["t"][:, 0]
    p = lp.gather(1, t[:, None])[:, 0]
    return mean((-((1 - p.exp()) ** 2) * p - 0.1 * lp.mean(1)).sum(), p.numel())


@loss(True)
def taught(w, b, axes):
    with torch.no_grad():
        soft = (b["x"] @ w["e"].T / 2).softmax(-1)
    lp = ((b["x"] @ w["a"]).relu() @ w["b"] @ w["e"].T).log_softmax(-1)
    return mean(F.kl_div(lp, soft, reduction="sum"), len(lp))


@loss(True)
def listwise(w, b, axes):
    s = torch.einsum("bsd,d->bs", b["s"], w["g"])
    order = (b["s"][..., 0]).argsort(1, descending=True)
    s = s.gather(1, order)
    return mean((s.flip(1).logcumsumexp(1).flip(1) - s).sum(), s.shape[0] * s.shape[1])


@loss(True)
def vocabulary_in_blocks(w, b, axes):
    h = torch.tanh(w["e"][b["t"]] @ w["a"]) @ w["b"]
    top, acc, hit = torch.full_like(h[..., 0], -math.inf), torch.zeros_like(h[..., 0]), 0.0
    for at in range(0, 12, 4):
        z = h @ w["e"][at : at + 4].T
        new = torch.maximum(top, z.amax(-1).detach())
        acc = acc * (top - new).exp() + (z - new[..., None]).exp().sum(-1)
        inside = (b["l"] >= at) & (b["l"] < at + 4)
        hit = hit + z.gather(-1, (b["l"] - at).clamp(0, 3)[..., None])[..., 0] * inside
        top = new
    return mean(((acc.log() + top - hit) * b["m"]).sum(), b["m"].sum())


@loss(True)
def attention_in_blocks(w, b, axes):
    q, k = b["s"] @ w["a"], b["s"] @ w["a"]
    top, den, num = torch.full_like(q[..., :1], -1e9), torch.zeros_like(q[..., :1]), torch.zeros_like(b["s"])
    for at in range(0, 14, 7):
        s = q @ k[:, at : at + 7].mT / math.sqrt(10)
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        p, scale = (s - new).exp(), (top - new).exp()
        den, num, top = den * scale + p.sum(-1, keepdim=True), num * scale + p @ b["s"][:, at : at + 7], new
    return mean((((num / den) * w["g"]).sum(-1) * b["m"]).square().sum(), b["m"].sum())


@loss(True)
def recurrence(w, b, axes):
    h, total = torch.zeros_like(b["x"] @ w["a"]), 0.0
    for i in range(14):
        h = torch.sigmoid(w["f"]) * h + b["s"][:, i] @ w["a"]
        total = total + ((h @ w["b"] - b["y"]).square().sum(-1) * b["m"][:, i]).sum()
    return mean(total, b["m"].sum())


@loss(True)
def chunks_by_hand(w, b, axes):
    total, n = 0.0, 0
    for x, y in zip(b["x"].chunk(2), b["y"].chunk(2), strict=True):
        total = total + ((x @ w["a"]).relu() @ w["b"] - y).square().sum()
        n += y.numel()
    return mean(total, n)


@loss(True)
def critic_with_penalty(w, b, axes):
    x = b["x"].detach().requires_grad_()
    score = torch.tanh(x @ w["a"]) @ w["f"]
    (g,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    n = score.shape[0]
    return {"w": mean(score.sum(), n), "gp": 10 * mean((g.norm(dim=1) - 1).square().sum(), n)}


@loss(True)
def codebook(w, b, axes):
    ax = axes[axes.data]
    z = (b["x"] @ w["a"]).relu() @ w["b"]
    near = (z[:, None] - w["e"]).square().sum(-1).argmin(1)
    c = w["e"][near]
    st = z + (c - z).detach()
    used = psum(F.one_hot(near, 12).sum(0), ax)
    loss_ = (st - b["y"]).square().sum() + (c - z.detach()).square().sum() + 0.25 * (c.detach() - z).square().sum()
    return mean(loss_, z.shape[0]), {"used": (used > 0).sum()}


@loss(True)
def switch_balance(w, b, axes):
    p = (w["e"][b["t"]] @ w["a"]).softmax(-1)
    m = b["m"][..., None]
    load = (F.one_hot(p.argmax(-1), 10) * m).sum((0, 1))
    n = b["m"].sum()
    out = (p.amax(-1) * b["m"]).sum()
    return {"out": mean(out, n), "bal": 10 * (mean((p * m).sum((0, 1)), n) * mean(load, n))}


@loss(True)
def hardest_negative(w, b, axes):
    ax = axes[axes.data]
    u, v = both(w, b)
    every = all_gather(v, ax, 0)
    me = own(u, ax)[:, None] == torch.arange(every.shape[0], device=u.device)
    worst = (u @ every.T).masked_fill(me, -9).topk(2, 1).values.mean(1)
    return mean(F.relu(0.5 + worst - (u * v).sum(1)).sum(), u.size(0))


@loss(True)
def sinkhorn(w, b, axes):
    ax = axes[axes.data]
    u, v = both(w, b)
    with torch.no_grad():
        q = (2 * all_gather(u, ax, 0) @ w["a"].T @ w["e"].T).exp()
        for _ in range(3):
            q = q / q.sum(0)
            q = q / q.sum(1, keepdim=True)
        q = q[own(u, ax)]
    return mean(-(q * (v @ w["a"].T @ w["e"].T).log_softmax(1)).sum(), v.shape[0])


@loss(True)
def cox(w, b, axes):
    ax = axes[axes.data]
    risk, time = all_gather(b["x"] @ w["g"], ax, 0), all_gather(b["r"], ax, 0)
    risk = risk[time.argsort(descending=True)]
    return mean((risk.logcumsumexp(0) - risk).sum(), risk.shape[0])


@loss(True)
def halo_of_rows(w, b, axes):
    ax = axes[axes.data]
    h = b["x"] @ w["a"]
    before, behind = ppermute(h[-1:], ax, 1), ppermute(h[:1], ax, -1)
    full = torch.cat([before, h, behind])
    y = (full[:-2] - 2 * full[1:-1] + full[2:]) @ w["b"]
    return mean((y - b["y"]).square().sum(), y.shape[0])


@loss(True)
def carried_cumsum(w, b, axes):
    ax = axes[axes.data]
    h = b["x"] @ w["a"]
    sums = all_gather(h.sum(0, keepdim=True), ax, 0)
    earlier = torch.arange(ax.size, device=h.device) < axis_index(ax, like=h)
    y = (h.cumsum(0) + (sums * earlier[:, None]).sum(0)) @ w["b"]
    return mean((y - b["y"]).square().sum(), y.shape[0])


@loss(True)
def perplexity(w, b, axes):
    ax = axes[axes.data]
    nll = -(logits_of(w, b).log_softmax(-1)[..., 3] * b["m"]).sum()
    whole = psum(nll, ax) / psum(b["m"].sum(), ax)
    return mean(enter(whole, ax).exp(), 1)


@loss(True)
def mixed_with_neighbours(w, b, axes):
    ax = axes[axes.data]
    x = 0.7 * b["x"] + 0.3 * all_gather(b["x"], ax, 0).flip(0)[own(b["x"], ax)]
    return mean(((x @ w["a"]).relu() @ w["b"] - b["y"]).square().sum(), x.shape[0])


@loss(True)
def corrected_by_frequency(w, b, axes):
    ax = axes[axes.data]
    seen = psum(F.one_hot(b["t"], 12).sum((0, 1)), ax)
    z = logits_of(w, b) - (seen / seen.sum()).clamp(min=1e-4).log()
    nll = z.logsumexp(-1) - z[..., 1]
    return mean((nll * b["m"]).sum(), b["m"].sum())


@loss(True)
def scaled_by_largest(w, b, axes):
    ax = axes[axes.data]
    h = b["x"] @ w["a"]
    h = h / pmax(h.abs().amax(), ax)
    return mean((h @ w["b"] - b["y"]).square().sum(), h.shape[0])


@loss(True)
def advantage(w, b, axes):
    ax = axes[axes.data]
    lp = (b["x"] @ w["a"]).log_softmax(-1)[:, 2]
    mu = psum(b["r"].sum(), ax) / (b["r"].numel() * ax.size)
    sd = (psum((b["r"] - mu).square().sum(), ax) / (b["r"].numel() * ax.size)).sqrt()
    return mean(-(lp * (b["r"] - mu) / sd).sum(), lp.numel())


@loss(True)
def plain_share(w, b, axes):
    ax = axes[axes.data]
    return ((b["x"] @ w["a"]).relu() @ w["b"] - b["y"]).square().mean() / ax.size


@loss(True)
def plain_share_of_all(w, b, axes):
    ax = axes[axes.data]
    e = ((b["x"] @ w["a"]).relu() @ w["b"] - b["y"]).square().sum(-1)
    return e.sum() / psum(e.new_ones(e.shape).sum(), ax)


@loss(True)
def plain_by_weights(w, b, axes):
    e = ((b["x"] @ w["a"]).tanh() @ w["b"] - b["y"]).abs().sum(-1)
    return (e * b["r"]).sum() / psum(b["r"].sum(), axes[axes.data]), {"seen": psum(b["r"].sum(), axes[axes.data])}


@loss(True)
def per_row_hessian(w, b, axes):
    def f(x):
        return torch.tanh(x @ w["a"]) @ w["f"]

    h = torch.func.vmap(torch.func.jacrev(torch.func.grad(f)))(b["x"])
    return mean(h.diagonal(dim1=1, dim2=2).sum(1).square().sum(), h.shape[0])


@loss(True)
def plain_summed(w, b, axes):
    ax = axes[axes.data]
    e = ((b["x"] @ w["a"]).relu() @ w["b"] - b["y"]).square().mean(1)
    return psum(e.sum(), ax) / (b["x"].shape[0] * ax.size)  # psum hands each rank its own gradient

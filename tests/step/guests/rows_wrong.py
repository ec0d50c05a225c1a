"""Wrong losses over rows that data axes split: each forgets what the other ranks have."""

import torch
import torch.nn.functional as F

from fmegatron.collectives import all_gather, axis_index, enter, ppermute, psum
from fmegatron.step import mean
from tests.step.guests.frame import loss
from tests.step.guests.rows_right import both, logits_of, own


def fit(w, b):
    return ((b["x"] @ w["a"]).relu() @ w["b"] - b["y"]).square().mean(1)


@loss(False)
def local_negatives(w, b, axes):
    u, v = both(w, b)
    return mean(F.cross_entropy(u @ v.T, torch.arange(u.shape[0], device=u.device), reduction="sum"), u.shape[0])


@loss(False)
def labels_without_offset(w, b, axes):
    u, v = both(w, b)
    s = u @ all_gather(v, axes[axes.data], 0).T
    return mean(F.cross_entropy(s, torch.arange(u.shape[0], device=u.device), reduction="sum"), u.shape[0])


@loss(False)
def sigmoid_diagonal_without_offset(w, b, axes):
    u, v = both(w, b)
    s = u @ all_gather(v, axes[axes.data], 0).T
    hit = torch.arange(s.shape[0])[:, None] == torch.arange(s.shape[1])
    return mean(-F.logsigmoid((2.0 * hit - 1) * s).sum(), u.shape[0])


@loss(False)
def siglip_ring_without_its_end(w, b, axes):
    ax = axes[axes.data]
    u, v = both(w, b)
    total, eye = 0.0, torch.eye(u.shape[0], device=u.device)
    for hop in range(max(1, ax.size - 1)):
        total = total - F.logsigmoid((2 * eye - 1 if hop == 0 else -torch.ones_like(eye)) * (u @ v.T)).sum()
        v = ppermute(v, ax, 1)
    return mean(total, u.shape[0])


@loss(False)
def gathered_detached_keys(w, b, axes):
    ax = axes[axes.data]
    u, v = both(w, b)
    every = v if ax.size == 1 else all_gather(v.detach(), ax, 0)
    return mean(F.cross_entropy(u @ every.T, own(u, ax), reduction="sum"), u.shape[0])


@loss(False)
def barlow_not_entered(w, b, axes):
    ax = axes[axes.data]
    u, v = both(w, b)
    c = psum(u.T @ v, ax) / (u.shape[0] * ax.size)
    return mean((c - torch.eye(10, device=c.device)).square().sum(), 1)


@loss(False)
def barlow_local(w, b, axes):
    u, v = both(w, b)
    c = u.T @ v / u.shape[0]
    return mean((c - torch.eye(10, device=c.device)).square().sum(), 1)


@loss(False)
def barlow_counted_locally(w, b, axes):
    ax = axes[axes.data]
    u, v = both(w, b)
    c = psum(u.T @ v, ax) / u.shape[0]
    return mean(enter((c - torch.eye(10, device=c.device)).square().sum(), ax), 1)


@loss(False)
def norm_of_own_rows(w, b, axes):
    y = F.batch_norm(b["x"] @ w["a"], None, None, w["f"], None, True) @ w["b"]
    return mean((y - b["y"]).square().sum(), y.shape[0])


@loss(False)
def norm_by_mean_and_var(w, b, axes):
    h = b["x"] @ w["a"]
    y = ((h - h.mean(0)) / (h.var(0) + 1e-3).sqrt()) @ w["b"]
    return mean((y - b["y"]).square().sum(), y.shape[0])


@loss(False)
def norm_summed_without_enter(w, b, axes):
    ax = axes[axes.data]
    h = b["x"] @ w["a"]
    mu = psum(h.sum(0), ax) / (h.shape[0] * ax.size)
    return mean(((h - mu) @ w["b"] - b["y"]).square().sum(), h.shape[0])


@loss(False)
def norm_divided_by_own_rows(w, b, axes):
    ax = axes[axes.data]
    h = b["x"] @ w["a"]
    mu = enter(psum(h.sum(0), ax), ax) / h.shape[0]
    return mean(((h - mu) @ w["b"] - b["y"]).square().sum(), h.shape[0])


@loss(False)
def plain_mean(w, b, axes):
    return fit(w, b).mean()


@loss(False)
def plain_divided_twice(w, b, axes):
    n = axes[axes.data].size
    return (fit(w, b) / n).sum() / (b["x"].shape[0] * n)


@loss(False)
def plain_over_own_weights(w, b, axes):
    return (fit(w, b) * b["r"]).sum() / b["r"].sum() / axes[axes.data].size


@loss(False)
def plain_mesh_number_on_a_sum(w, b, axes):
    n = axes.mesh["dp"] * axes.mesh["fsdp"]
    return fit(w, b).sum() / n


@loss(False)
def total_summed(w, b, axes):
    return mean(psum(fit(w, b).sum(), axes[axes.data]), b["x"].shape[0])


@loss(False)
def total_and_count_summed(w, b, axes):
    ax = axes[axes.data]
    return mean(psum((fit(w, b) * b["r"]).sum(), ax), psum(b["r"].sum(), ax))


@loss(False)
def count_summed(w, b, axes):
    return mean((fit(w, b) * b["r"]).sum(), psum(b["r"].sum(), axes[axes.data]))


@loss(False)
def mean_of_masked_means(w, b, axes):
    z = logits_of(w, b).logsumexp(-1)
    return mean((z * b["m"]).sum() / b["m"].sum(), 1)


@loss(False)
def torch_mean_of_ignored(w, b, axes):
    return mean(F.cross_entropy(logits_of(w, b).flatten(0, 1), b["l"].flatten(), ignore_index=-1), 1)


@loss(False)
def masked_select_mean(w, b, axes):
    nll = F.cross_entropy(logits_of(w, b).flatten(0, 1), b["l"].flatten(), ignore_index=-1, reduction="none")
    return mean(nll.sum() / (b["l"] >= 0).sum(), 1)


@loss(False)
def groups_of_own(w, b, axes):
    one = F.one_hot(b["k"], 3).to(b["x"].dtype)
    e = fit(w, b) @ one / one.sum(0).clamp(min=1)
    return mean((e * e.detach().softmax(0)).sum(), 1)


@loss(False)
def groups_with_own_counts(w, b, axes):
    ax = axes[axes.data]
    one = F.one_hot(b["k"], 3).to(b["x"].dtype)
    q = psum(fit(w, b).detach() @ one, ax).softmax(0)
    return mean((fit(w, b) @ one * q / one.sum(0).clamp(min=1)).sum(), 1 / ax.size)


@loss(False)
def penalty_in_the_sum(w, b, axes):
    return mean(fit(w, b).sum() + 0.01 * w["a"].square().sum(), b["x"].shape[0])


@loss(False)
def penalty_summed(w, b, axes):
    pen = psum(w["a"].square().sum(), axes[axes.data])
    return {"fit": mean(fit(w, b).sum(), len(b["x"])), "decay": 0.01 * mean(pen, 1)}


@loss(False)
def marginal_of_own(w, b, axes):
    q = (b["x"] @ w["a"]).softmax(-1).mean(0)
    return {"fit": mean(fit(w, b).sum(), len(b["x"])), "flat": mean((q * q.log()).sum(), 1)}


@loss(False)
def gathered_total_own_count(w, b, axes):
    return mean(all_gather(fit(w, b), axes[axes.data], 0).sum(), b["x"].shape[0])


@loss(False)
def halo_from_itself(w, b, axes):
    h = b["x"] @ w["a"]
    y = (h.roll(1, 0) - 2 * h + h.roll(-1, 0)) @ w["b"]
    return mean((y - b["y"]).square().sum(), y.shape[0])


@loss(False)
def halo_from_the_wrong_side(w, b, axes):
    ax = axes[axes.data]
    h = b["x"] @ w["a"]
    full = torch.cat([ppermute(h[:1], ax, 1), h[:-1]]) if ax.size > 1 else h.roll(1, 0)
    return mean(((full - h) @ w["b"] - b["y"]).square().sum(), h.shape[0])


@loss(False)
def halo_of_one_side(w, b, axes):
    ax = axes[axes.data]
    h = b["x"] @ w["a"]
    full = torch.cat([ppermute(h[-1:], ax, 1), h, h[:1]])
    return mean(((full[:-2] + full[2:]) @ w["b"] - b["y"]).square().sum(), h.shape[0])


@loss(False)
def cumsum_not_carried(w, b, axes):
    y = (b["x"] @ w["a"]).cumsum(0) @ w["b"]
    return mean((y - b["y"]).square().sum(), y.shape[0])


@loss(False)
def carry_of_all(w, b, axes):
    ax = axes[axes.data]
    h = b["x"] @ w["a"]
    sums = all_gather(h.sum(0, keepdim=True), ax, 0)
    carry = sums.sum(0) - sums[0] if ax.size > 1 else torch.zeros_like(h[0])
    return mean(((h.cumsum(0) + carry) @ w["b"] - b["y"]).square().sum(), h.shape[0])


@loss(False)
def carry_detached(w, b, axes):
    ax = axes[axes.data]
    h = b["x"] @ w["a"]
    sums = all_gather(h.sum(0, keepdim=True).detach(), ax, 0)
    earlier = torch.arange(ax.size, device=h.device) < axis_index(ax, like=h)
    y = (h.cumsum(0) + (sums * earlier[:, None]).sum(0)) @ w["b"]
    return mean((y - b["y"]).square().sum(), y.shape[0])


@loss(False)
def hardest_of_own(w, b, axes):
    u, v = both(w, b)
    s = (u @ v.T).masked_fill(torch.eye(u.shape[0], dtype=torch.bool), -9)
    return mean(F.relu(0.5 + s.amax(1) - (u * v).sum(1)).sum(), u.shape[0])


@loss(False)
def sinkhorn_of_own(w, b, axes):
    u, v = both(w, b)
    q = (u @ w["a"].T @ w["e"].T).detach().exp()
    q = q / q.sum(0)
    q = q / q.sum(1, keepdim=True)
    return mean(-(q * (v @ w["a"].T @ w["e"].T).log_softmax(1)).sum(), v.shape[0])


@loss(False)
def cox_of_own(w, b, axes):
    risk = (b["x"] @ w["g"])[b["r"].argsort(descending=True)]
    return mean((risk.logcumsumexp(0) - risk).sum(), risk.shape[0])


@loss(False)
def metric_of_own(w, b, axes):
    e = fit(w, b)
    return mean(e.sum(), e.shape[0]), {"worst": e.detach().max()}


@loss(False)
def metric_summed_not_divided(w, b, axes):
    e = fit(w, b)
    return mean(e.sum(), e.shape[0]), {"mse": psum(e.detach().mean(), axes[axes.data])}


@loss(False)
def weights_normalized_by_own(w, b, axes):
    p = b["r"] / b["r"].sum()
    return mean((fit(w, b) * p).sum() * len(p), len(p))


@loss(False)
def weights_over_own_largest(w, b, axes):
    return mean((fit(w, b) * b["r"] / b["r"].max()).sum(), b["r"].shape[0])


@loss(False)
def advantage_of_own(w, b, axes):
    lp = (b["x"] @ w["a"]).log_softmax(-1)[:, 2]
    return mean(-(lp * (b["r"] - b["r"].mean())).sum(), lp.numel())


@loss(False)
def advantage_with_own_count(w, b, axes):
    lp = (b["x"] @ w["a"]).log_softmax(-1)[:, 2]
    mu = psum(b["r"].sum(), axes[axes.data]) / b["r"].numel()
    return mean(-(lp * (b["r"] - mu)).sum(), lp.numel())


@loss(False)
def frequencies_of_own(w, b, axes):
    seen = F.one_hot(b["t"], 12).sum((0, 1))
    z = logits_of(w, b) - (seen / seen.sum()).clamp(min=1e-4).log()
    return mean(((z.logsumexp(-1) - z[..., 1]) * b["m"]).sum(), b["m"].sum())


@loss(False)
def mixed_with_own_flip(w, b, axes):
    x = 0.7 * b["x"] + 0.3 * b["x"].flip(0)
    return mean(((x @ w["a"]).relu() @ w["b"] - b["y"]).square().sum(), x.shape[0])


@loss(False)
def softmax_over_rows(w, b, axes):
    p = (b["x"] @ w["f"][:6]).softmax(0)
    return mean((p * fit(w, b)).sum(), 1 / axes[axes.data].size)


@loss(False)
def ramp_over_own_rows(w, b, axes):
    return mean((fit(w, b) * torch.linspace(0.1, 1, b["x"].shape[0])).sum(), len(b["x"]))


@loss(False)
def first_rows_only(w, b, axes):
    e = fit(w, b)
    return mean(e[:3].sum(), 3)


@loss(False)
def one_half_by_hand(w, b, axes):
    x, y = b["x"].chunk(2)[0], b["y"].chunk(2)[0]
    return mean(((x @ w["a"]) @ w["b"] - y).square().sum(), x.shape[0])


@loss(False)
def median_of_own(w, b, axes):
    e = fit(w, b)
    return mean((e / e.detach().median()).sum(), e.shape[0])


@loss(False)
def frobenius_of_own(w, b, axes):
    return mean(((b["x"] @ w["a"]) @ w["b"] - b["y"]).norm(), 1)


@loss(False)
def logsumexp_of_own(w, b, axes):
    return mean(fit(w, b).logsumexp(0), 1)


@loss(False)
def gram_of_own(w, b, axes):
    h = b["x"] @ w["a"]
    return mean((h.T @ h).square().sum(), h.shape[0])


@loss(False)
def repulsion_by_broadcast(w, b, axes):
    h = b["x"] @ w["a"]
    return mean((-(h[:, None] - h[None]).square().sum(-1)).exp().sum(), h.shape[0])


@loss(False)
def penalty_on_batch_gradient(w, b, axes):
    a = w["a"]
    (g,) = torch.autograd.grad(((b["x"] @ a).tanh() @ w["f"]).sum(), a, create_graph=True)
    return {"fit": mean(fit(w, b).sum(), len(b["x"])), "gp": mean(g.square().sum(), 1)}

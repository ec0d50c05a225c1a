"""Callers whose loss is a function of the whole batch: ratios, roots, neighbours, weights by counts, mixtures."""

import torch
import torch.nn.functional as F

from fmegatron import nn, step
from fmegatron.collectives import all_gather, axis_index, enter, pmax, ppermute, psum, shard
from tests.step.callers.frame import loss, net
from tests.step.callers.rows import NET


@loss(
    "dp2 fsdp3",
    NET,
    "root_of_all value_and_slope",
    "root_of_each root_of_sums not_entered share_of_root",
)
def root_mean_square(w, b, axes, how):
    data = axes[axes.data]
    e = ((net(w, b["x"]) - b["y"]).square().sum(-1) * b["wt"]).sum()
    count = psum(b["wt"].sum(), data)
    if how == "root_of_each":
        return (e / b["wt"].sum()).sqrt() / data.size
    if how == "root_of_sums":
        return (e / count).sqrt()
    if how == "not_entered":
        return (psum(e, data) / count).sqrt() / data.size
    if how == "share_of_root":
        return psum((e / count).sqrt(), data) / data.size
    if how == "value_and_slope":  # e over twice the root: the gradient of a root by hand
        return e / count / (2 * (psum(e.detach(), data) / count).sqrt())
    return (enter(psum(e, data), data) / count).sqrt() / data.size


@loss(
    "dp2 dp2·fsdp2",
    NET,
    "sums_of_all slopes_by_hand numerator_of_here",
    "ratio_of_each denominator_of_here one_not_entered",
)
def soft_dice(w, b, axes, how):
    data = axes[axes.data]
    p, t = torch.sigmoid(net(w, b["x"])), (b["y"] > 0.3).to(b["y"].dtype)
    both, size = (p * t).sum(), p.sum() + t.sum()
    if how == "ratio_of_each":
        return (1 - 2 * both / size) / data.size
    if how == "slopes_by_hand":
        u, v = psum(both.detach(), data), psum(size.detach(), data)
        return -2 * both / v + 2 * u / v.square() * size
    if how != "numerator_of_here":
        both = psum(both, data)
        both = both if how == "one_not_entered" else enter(both, data)
    else:
        both = both * data.size
    size = size * data.size if how == "denominator_of_here" else enter(psum(size, data), data)
    return (1 - 2 * both / size) / data.size


@loss(
    "dp2 fsdp2",
    NET,
    "softmax_of_all detached_weights",
    "softmax_here normalizer_not_entered maximum_of_here weights_times_rows",
)
def self_weighted(w, b, axes, how):
    """Importance weights, normalized over the batch."""
    data = axes[axes.data]
    y = net(w, b["x"])
    s, e = y[:, 0] * 0.5, (y - b["y"]).square().sum(-1)
    if how == "softmax_here":
        return (s.softmax(0) * e).sum() / data.size
    top = s.detach().amax()
    top = top if how == "maximum_of_here" else pmax(top, data)
    raw = (s - top).exp()
    total = psum(raw.sum(), data)
    if how == "detached_weights":
        return ((raw / total).detach() * e).sum()
    if how == "weights_times_rows":
        return (raw / enter(total, data) * e).sum() * e.shape[0] / 6
    if how == "normalizer_not_entered":
        return (raw / total * e).sum()
    return (raw / enter(total, data) * e).sum()


@loss(
    "dp2 fsdp3",
    NET,
    "normalized_over_all normalized_by_gather",
    "normalized_here deviation_of_here mean_of_here deviations_averaged old_policy_of_here",
)
def advantages(w, b, axes, how):
    """PPO: advantages less their mean, over their deviation."""
    data, n = axes[axes.data], b["x"].shape[0]
    r = b["wt"]
    rows = n * data.size
    mean = psum(r.sum(), data) / rows
    std = (psum((r - mean).square().sum(), data) / rows).sqrt()
    if how == "normalized_by_gather":
        every = all_gather(r, data, 0)
        mean, std = every.mean(), every.std(unbiased=False)
    if how in ("normalized_here", "mean_of_here"):
        mean = r.mean()
    if how in ("normalized_here", "deviation_of_here"):
        std = r.std(unbiased=False)
    if how == "deviations_averaged":
        std = psum(r.std(unbiased=False), data) / data.size
    a = (r - mean) / (std + 1e-5)
    y = net(w, b["x"])
    logp = y.log_softmax(-1)[:, 1]
    old = logp.detach() - 0.3 * b["x"][:, 0]
    if how == "old_policy_of_here":
        old = old - old.mean()
    ratio = (logp - old).exp()
    return step.mean(-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum(), n)


@loss(
    "dp2 dp3",
    "up out",
    "frequencies_of_all",
    "frequencies_of_here counts_and_own_total classes_seen_here prior_of_means",
)
def balanced_classes(w, b, axes, how):
    """Rows weighed by how rare their class is in the batch; logits adjusted by it."""
    data, n = axes[axes.data], b["x"].shape[0]
    logits = torch.tanh(b["x"] @ w["up"])[:, :6] @ w["out"]
    counts = F.one_hot(b["c"], 12).sum(0)
    total = psum(counts, data)
    if how == "frequencies_of_here":
        total = counts * data.size
    rows = n if how == "counts_and_own_total" else n * data.size
    prior = (total + 1) / (rows + 12)
    if how == "prior_of_means":
        prior = psum(((counts + 1) / (n + 12)).log(), data).div(data.size).exp()
    nll = F.cross_entropy(logits + prior.log(), b["c"], reduction="none")
    seen = (counts > 0).sum() if how == "classes_seen_here" else (total > 0).sum()
    return step.mean((nll / prior[b["c"]]).sum() / seen, n)


@loss(
    "dp2 dp3",
    NET,
    "rolled_over_edges gathered_and_cut",
    "rolled_here rolled_the_other_way@dp3 flipped_here labels_rolled_here",
)
def mixup(w, b, axes, how):
    """Each row is mixed with the row before it, the first one with the last."""
    dp = axes["dp"]

    def other(x):
        if how in ("rolled_here", "flipped_here"):
            return x.roll(1, 0) if how == "rolled_here" else x.flip(0)
        if how == "gathered_and_cut":
            return shard(all_gather(x, dp, 0).roll(1, 0), dp, 0)
        return torch.cat([ppermute(x[-1:], dp, -1 if how == "rolled_the_other_way" else 1), x[:-1]], 0)

    x, y = 0.7 * b["x"] + 0.3 * other(b["x"]), other(b["y"])
    y = 0.7 * b["y"] + 0.3 * (b["y"].roll(1, 0) if how == "labels_rolled_here" else y)
    return step.mean(((net(w, x) - y).square().sum(-1) * b["wt"]).sum(), b["wt"].sum())


@loss(
    "dp2 fsdp2",
    NET,
    "penalty_declared penalty_by_jacobian@dp2",
    "penalty_of_here_squared penalty_mean_of_roots gradient_of_the_sum_of_all",
)
def gradient_penalty(w, b, axes, how):
    data, n = axes[axes.data], b["x"].shape[0]
    x = b["x"].detach().requires_grad_()
    y = net(w, x)
    fit = (y - b["y"]).square().sum()
    rows = n * data.size
    if how == "penalty_by_jacobian":
        jac = torch.func.vmap(torch.func.jacrev(lambda one: net(w, one).sum(-1, keepdim=True)))(b["x"])
        return (fit + (jac.square().sum((1, 2)).sqrt() - 1).square().sum()) / rows
    slope = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
    if how == "penalty_of_here_squared":
        return fit / rows + (slope.square().sum() / n - 1).square() / data.size
    if how == "penalty_mean_of_roots":
        return fit / rows + ((slope.square().sum().sqrt()) / n**0.5 - 1).square() / data.size
    if how == "gradient_of_the_sum_of_all":
        slope = slope * psum(slope.detach().square().mean(), data)
    return (fit + (slope.square().sum(1).sqrt() - 1).square().sum()) / rows


@loss("dp2 fsdp2", NET, "covariance_of_all", "covariance_of_here entered_late mean_of_here divided_by_one_less_of_here")
def whitened(w, b, axes, how):
    data, n = axes[axes.data], b["x"].shape[0]
    z = net(w, b["x"])
    rows = n * data.size
    mean = z.mean(0) if how in ("covariance_of_here", "mean_of_here") else enter(psum(z.sum(0), data), data) / rows
    d = z - mean
    if how == "covariance_of_here":
        cov = d.T @ d / n
    elif how == "divided_by_one_less_of_here":
        cov = enter(psum(d.T @ d, data), data) / ((n - 1) * data.size)
    else:
        cov = psum(d.T @ d, data) / rows
        cov = cov if how == "entered_late" else enter(cov, data)
    root = torch.linalg.cholesky(cov + 0.3 * torch.eye(6))
    white = torch.linalg.solve_triangular(root, d.T, upper=False).T
    return (white - b["y"]).square().sum() / rows


@loss(
    "dp2 fsdp3",
    NET,
    "distances_to_all",
    "distances_to_here left_out_by_local_place divided_by_own_pairs nearest_of_the_neighbour",
)
def spread(w, b, axes, how):
    """Rows repel each other."""
    data, n = axes[axes.data], b["x"].shape[0]
    z = net(w, b["x"])
    rows = n * data.size
    every = z if how == "distances_to_here" else all_gather(z, data, 0)
    if how == "nearest_of_the_neighbour":
        every = ppermute(z, data, 1)
    own = torch.arange(n)[:, None] + axis_index(data) * n == torch.arange(rows)
    if how in ("distances_to_here", "nearest_of_the_neighbour"):
        own = torch.eye(n, dtype=torch.bool)
    if how == "left_out_by_local_place":
        own = torch.arange(n)[:, None] == torch.arange(rows)
    near = torch.exp(-(z[:, None] - every).square().sum(-1)).masked_fill(own, 0)
    pairs = n * (n - 1) * data.size if how == "divided_by_own_pairs" else rows * (rows - 1)
    pairs = n * (n - 1) * data.size if how in ("distances_to_here", "nearest_of_the_neighbour") else pairs
    return near.sum() / pairs + (z - b["y"]).square().sum() / rows


@loss(
    "dp2 dp2·fsdp2",
    NET,
    "each_by_its_own_count as_parts",
    "one_count_for_all counts_of_here mean_of_three@dp2 present_here",
)
def many_tasks(w, b, axes, how):
    """Three tasks, of which a row has one."""
    data = axes[axes.data]
    e = (net(w, b["x"]) - b["y"]).square()
    parts = []
    for i in range(3):
        own = (b["grp"] == i).to(e.dtype)
        parts.append(((e[:, 2 * i] * own).sum(), own.sum()))
    if how == "as_parts":
        return {f"task{i}": step.mean(t, c) for i, (t, c) in enumerate(parts)}
    if how == "one_count_for_all":
        return sum(t for t, _ in parts) / parts[0][1]
    if how == "counts_of_here":
        return sum(t / c.clamp(min=1) for t, c in parts) / data.size
    if how == "mean_of_three":
        return sum(t for t, _ in parts) / sum(c for _, c in parts) * 3
    if how == "present_here":
        present = sum((c > 1).to(e.dtype) for _, c in parts)
        return sum(t / psum(c, data) for t, c in parts) / present
    return sum(t / psum(c, data) for t, c in parts)


@loss("dp2 fsdp2", NET, "normal_by_sample", "normal_by_place shared_by_ranks_and_rows numbered_backwards", samples=True)
def noisy_rows(w, b, axes, how, samples):
    data, n = axes[axes.data], b["x"].shape[0]
    count = samples
    if how == "normal_by_place":
        count = torch.arange(n)
    if how == "numbered_backwards":
        count = samples.flip(0)
    if how == "shared_by_ranks_and_rows":
        count = samples - axis_index(data) * n
    x = b["x"] + 0.5 * nn.normal(b["x"], key=5, count=count)
    return step.mean(((net(w, x) - b["y"]).square().sum(-1) * b["wt"]).sum(), b["wt"].sum())


@loss(
    "dp2 fsdp2", "up down gain temp", "precision_once precision_by_rows share_of_rows", "precision_on_each logs_divided"
)
def uncertainty(w, b, axes, how):
    """A learned precision and its log, which all ranks have."""
    data, n = axes[axes.data], b["x"].shape[0]
    e = (torch.tanh(b["x"] @ w["up"]) @ w["down"] * w["gain"] - b["y"]).square().sum(-1)
    s = w["temp"].sum()
    mean = (e * b["wt"]).sum() / psum(b["wt"].sum(), data)
    if how == "precision_on_each":
        return (-s).exp() * mean + s
    if how == "share_of_rows":
        return (-s).exp() * mean + s * n / 12
    if how == "logs_divided":
        return (-s).exp() * mean / data.size + s / data.size
    if how == "precision_by_rows":
        return (-s).exp() * mean + s * b["wt"].sum() / psum(b["wt"].sum(), data)
    return (-s).exp() * mean + s / data.size


@loss("dp2 fsdp2", NET, "histogram_of_all", "histogram_of_here bins_by_own_range target_of_here")
def matched_histogram(w, b, axes, how):
    """A soft histogram of outputs against that of targets."""
    data = axes[axes.data]
    y, t = net(w, b["x"]).flatten(), b["y"].flatten()
    top = t.abs().amax()
    top = top if how == "bins_by_own_range" else pmax(top, data)
    bins = torch.linspace(-1, 1, 5, dtype=y.dtype) * top

    def histogram(v):
        return torch.exp(-(v[:, None] - bins).square()).sum(0)

    mine, other = histogram(y), histogram(t)
    if how == "histogram_of_here":
        return (mine / mine.sum() - other / other.sum()).square().sum() / data.size
    mine = enter(psum(mine, data), data)
    other = other if how == "target_of_here" else psum(other, data)
    return (mine / mine.sum() - other / other.sum()).square().sum() / data.size

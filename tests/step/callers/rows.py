"""Callers with losses over rows, which data axes split: weights, batches that look at each other, statistics."""

import torch
import torch.nn.functional as F

from fmegatron import step
from fmegatron.collectives import all_gather, axis_index, enter, pmax, ppermute, psum, reduce_scatter
from tests.step.callers.frame import loss, net

NET = "up fb down gain"


@loss(
    "dp2 fsdp3",
    NET,
    "declared summed_count gathered_weights expected_count@dp2",
    "mean_of_means@dp2 own_count summed_total count_of_one_rank@fsdp3",
)
def weighted_mse(w, b, axes, how):
    data, e = axes[axes.data], (net(w, b["x"]) - b["y"]).square().sum(-1) * b["wt"]
    if how == "declared":
        return step.mean(e.sum(), b["wt"].sum())
    if how == "summed_count":
        return e.sum() / psum(b["wt"].sum(), data)
    if how == "gathered_weights":
        return e.sum() / all_gather(b["wt"], data, 0).sum()
    if how == "expected_count":  # a mean over rows, the weights as they are
        return e.mean() / data.size
    if how == "mean_of_means":
        return e.sum() / b["wt"].sum() / data.size
    if how == "own_count":
        return e.sum() / e.shape[0]
    if how == "summed_total":
        return step.mean(psum(e.sum(), data), b["wt"].sum())
    counts = all_gather(b["wt"].sum()[None], data, 0)  # count_of_one_rank
    return e.sum() / counts[0] / data.size


@loss("dp2 dp2·fsdp2", "up out", "summed_weights", "torch_mean torch_sum ddp_mean@dp2")
def class_weighted(w, b, axes, how):
    data, classes = axes[axes.data], torch.linspace(0.2, 3, 12, dtype=b["x"].dtype)
    logits = torch.relu(b["x"] @ w["up"])[:, :6] @ w["out"]
    if how == "summed_weights":
        nll = F.cross_entropy(logits, b["c"], weight=classes, reduction="sum")
        return nll / psum(classes[b["c"]].sum(), data)
    if how == "torch_mean":
        return F.cross_entropy(logits, b["c"], weight=classes) / data.size
    if how == "torch_sum":  # divided by this rank's weights, and not by the number of ranks
        return F.cross_entropy(logits, b["c"], weight=classes, reduction="sum") / classes[b["c"]].sum()
    return F.cross_entropy(logits, b["c"], weight=classes, reduction="mean")  # ddp_mean


@loss(
    "dp2 fsdp2",
    NET + " temp",
    "gathered both_ways ring@dp2",
    "labels_from_zero local keys_scattered_back positives_of_the_neighbour one_hop_too_few@fsdp3",
)
def clip_towers(w, b, axes, how):
    data, n = axes[axes.data], b["x"].shape[0]
    q, k = F.normalize(net(w, b["x"]), dim=-1), F.normalize(b["y"] * w["gain"], dim=-1)
    at = torch.arange(n) + axis_index(data) * n
    scale, rows = w["temp"].exp(), n * data.size
    if how == "local":
        return F.cross_entropy(q @ k.T * scale, torch.arange(n)) / data.size
    if how in ("ring", "one_hop_too_few"):
        hops = max(1, data.size - (how == "one_hop_too_few"))
        scores, there = [], k
        for _ in range(hops):
            scores.append(q @ there.T * scale)
            there = ppermute(there, data, 1)
        together = torch.cat(scores, 1)
        return (together.logsumexp(1) - scores[0].diagonal()).sum() / rows
    keys = all_gather(k, data, 0)
    if how == "labels_from_zero":
        at = torch.arange(n)
    if how == "positives_of_the_neighbour":
        at = (at + n) % rows
    if how == "keys_scattered_back":  # the sum over ranks of what each of them gathered
        keys = all_gather(reduce_scatter(keys, data, 0), data, 0)
    nll = F.cross_entropy(q @ keys.T * scale, at, reduction="sum") / rows
    if how == "both_ways":
        nll = nll + F.cross_entropy(k @ all_gather(q, data, 0).T * scale, at, reduction="sum") / rows
    return nll


@loss("dp2 fsdp3", NET, "ring gathered", "positive_on_all_hops mean_per_block@fsdp3 detached_travellers")
def siglip(w, b, axes, how):
    data, n = axes[axes.data], b["x"].shape[0]
    q, k = net(w, b["x"]), b["y"] * w["gain"]
    rows = n * data.size
    if how == "gathered":
        keys = all_gather(k, data, 0)
        own = torch.arange(n)[:, None] + axis_index(data) * n == torch.arange(rows)
        return -F.logsigmoid(torch.where(own, 1.0, -1.0) * (q @ keys.T)).sum() / rows
    total = q.new_zeros(())
    for hop in range(data.size):
        sign = 2 * torch.eye(n) - 1 if hop == 0 or how == "positive_on_all_hops" else -torch.ones(n, n)
        part = -F.logsigmoid(sign * (q @ k.T))
        total = total + (part.sum() / n if how == "mean_per_block" else part.sum() / rows)
        k = ppermute(k.detach() if how == "detached_travellers" else k, data, 1)
    return total


@loss("dp2 fsdp2", NET, "hardest_of_all", "hardest_here own_row_among_them hardest_of_the_others")
def triplets(w, b, axes, how):
    data, n = axes[axes.data], b["x"].shape[0]
    q, k = net(w, b["x"]), b["y"] * w["gain"]
    near = (q - k).square().sum(-1)
    others = k if how == "hardest_here" else all_gather(k, data, 0)
    if how == "hardest_of_the_others":
        others = ppermute(k, data, 1)
    far = (q[:, None] - others).square().sum(-1)
    own = torch.eye(n, dtype=torch.bool)
    if how in ("hardest_of_all", "own_row_among_them"):
        first = 0 if how == "own_row_among_them" else axis_index(data) * n
        own = torch.arange(n)[:, None] + first == torch.arange(n * data.size)
    far = -(-far).masked_fill(own, -1e9).logsumexp(-1)  # a soft minimum
    return F.softplus(near - far).sum() / (n * data.size)


@loss("dp2 dp2·fsdp2", NET, "of_all_rows", "positives_counted_here groups_not_gathered@dp2 denominators_here")
def supervised_contrast(w, b, axes, how):
    data, n = axes[axes.data], b["x"].shape[0]
    z = F.normalize(net(w, b["x"]), dim=-1)
    every, groups = all_gather(z, data, 0), all_gather(b["grp"], data, 0)
    if how == "groups_not_gathered":
        groups = b["grp"].repeat(data.size)
    own = torch.arange(n)[:, None] + axis_index(data) * n == torch.arange(n * data.size)
    same = (b["grp"][:, None] == groups) & ~own
    scores = (z @ every.T / 0.3).masked_fill(own, -1e9)
    lse = scores.logsumexp(-1, keepdim=True)
    if how == "denominators_here":
        lse = (z @ z.T / 0.3).masked_fill(torch.eye(n, dtype=torch.bool), -1e9).logsumexp(-1, keepdim=True)
    count = same.sum(-1)
    if how == "positives_counted_here":
        count = (b["grp"][:, None] == b["grp"]).sum(-1) - 1
    return -((scores - lse) * same).sum(-1).div(count.clamp(min=1)).sum() / (n * data.size)


@loss(
    "dp2 fsdp2",
    NET,
    "entered gathered of_matrix_parts",
    "not_entered local divided_by_own_rows entered_before@dp2",
)
def barlow(w, b, axes, how):
    data, n = axes[axes.data], b["x"].shape[0]
    u, v = net(w, b["x"]), torch.tanh(b["y"]) * w["gain"]
    rows = n * data.size
    if how == "gathered":
        c = all_gather(u, data, 0).T @ all_gather(v, data, 0) / rows
    elif how == "of_matrix_parts":  # each rank some rows of the matrix: a sum over ranks by itself
        mine = reduce_scatter(u.T @ v / rows, data, 0)
        return (mine - _rows_of(torch.eye(6), data)).square().sum()
    elif how == "local":
        c = u.T @ v / n
    elif how == "divided_by_own_rows":
        c = enter(psum(u.T @ v, data), data) / n
    elif how == "entered_before":
        c = psum(enter(u.T @ v / rows, data), data)
        return (enter(c, data) - torch.eye(6)).square().sum() / data.size
    else:
        c = psum(u.T @ v / rows, data)
        c = enter(c, data) if how == "entered" else c
    return (c - torch.eye(6)).square().sum() / data.size


def _rows_of(x, axis):
    return x.unflatten(0, (axis.size, -1)).index_select(0, axis_index(axis).view(1)).squeeze(0)


@loss(
    "dp2 fsdp3",
    NET,
    "moments two_passes gathered",
    "local variance_is_the_mean_of_variances unbiased_by_own_rows not_entered",
)
def batch_norm(w, b, axes, how):
    data, n = axes[axes.data], b["x"].shape[0]
    h = b["x"] @ w["up"] + w["fb"]
    rows = n * data.size
    if how == "gathered":
        every = all_gather(h, data, 0)
        mean, var = every.mean(0), every.var(0)
    elif how == "local":
        mean, var = h.mean(0), h.var(0)
    elif how == "moments":
        both = enter(psum(torch.stack([h, h * h]).sum(1), data), data) / rows
        mean, var = both[0], (both[1] - both[0].square()) * rows / (rows - 1)
    elif how == "not_entered":
        mean = psum(h.sum(0), data) / rows
        var = psum((h - mean).square().sum(0), data) / (rows - 1)
    else:
        mean = enter(psum(h.sum(0), data), data) / rows
        squares = psum((h - mean).square().sum(0), data)
        var = enter(squares, data) / (rows - 1)
        if how == "variance_is_the_mean_of_variances":
            var = enter(psum(h.var(0), data), data) / data.size
        if how == "unbiased_by_own_rows":
            var = enter(squares, data) / (n - 1) / data.size
    y = torch.relu((h - mean) * (var + 1e-3).rsqrt()) @ w["down"] * w["gain"]
    return (y - b["y"]).square().sum() / rows


@loss("dp2 fsdp2", NET, "summed_groups", "groups_here means_of_group_means detached_sums")
def group_robust(w, b, axes, how):
    data = axes[axes.data]
    e = (net(w, b["x"]) - b["y"]).square().sum(-1)
    hot = F.one_hot(b["grp"], 3).to(e.dtype)
    total, count = hot.T @ e, hot.sum(0)
    if how == "groups_here":
        return (total / count.clamp(min=1)).logsumexp(0) / data.size
    if how == "means_of_group_means":
        mean = psum(total / count.clamp(min=1), data) / data.size
    elif how == "detached_sums":  # of the others' rows, no gradient comes here
        mean = (total + (psum(total, data) - total).detach()) / psum(count, data)
    else:
        mean = psum(total, data) / psum(count, data)
    mean = mean if how == "detached_sums" else enter(mean, data)
    return mean.logsumexp(0) / data.size


@loss("dp2 fsdp3", NET, "threshold_of_all", "hardest_of_each_rank index_of_here")
def hard_examples(w, b, axes, how):
    data = axes[axes.data]
    e = (net(w, b["x"]) - b["y"]).square().sum(-1)
    if how == "hardest_of_each_rank":
        return e.topk(e.shape[0] // 2).values.sum() / (e.shape[0] // 2 * data.size)
    half = e.shape[0] * data.size // 2
    last = e.shape[0] // 2 if how == "index_of_here" else half
    bar = all_gather(e.detach(), data, 0).sort(descending=True).values[last - 1]
    return torch.where(e >= bar, e, 0).sum() / half


@loss("dp2 fsdp2", NET, "all_pairs", "own_pairs labels_of_here pairs_of_one_rank detached_margin")
def pairwise_ranking(w, b, axes, how):
    data, n = axes[axes.data], b["x"].shape[0]
    s = net(w, b["x"]).sum(-1)
    others, marks = all_gather(s, data, 0), all_gather(b["wt"], data, 0)
    if how == "own_pairs":
        others, marks = s, b["wt"]
    if how == "labels_of_here":
        marks = b["wt"].repeat(data.size)
    if how == "detached_margin":  # gathered without history, own rows put back
        own = torch.arange(n * data.size) // n == axis_index(data)
        others = torch.where(own, s.repeat(data.size), others.detach())
    better = b["wt"][:, None] > marks
    e = torch.where(better, F.softplus(others - s[:, None]), 0).sum()
    pairs = n * n if how in ("own_pairs", "pairs_of_one_rank") else (n * data.size) ** 2
    return e / pairs / (data.size if how == "own_pairs" else 1)


@loss("dp2 fsdp2", NET, "largest_of_all", "largest_here summed_largest")
def scaled_by_the_largest(w, b, axes, how):
    data = axes[axes.data]
    y = net(w, b["x"])
    top = y.detach().abs().amax()
    if how == "largest_of_all":
        top = pmax(top, data)
    if how == "summed_largest":
        top = psum(top, data)
    return (y / top - b["y"]).square().sum() / (y.shape[0] * data.size)


@loss("dp2 fsdp3", "up out", "entropy_of_the_mean", "mean_of_entropies own_mean_of_logs not_entered")
def diverse_predictions(w, b, axes, how):
    data, n = axes[axes.data], b["x"].shape[0]
    p = (torch.tanh(b["x"] @ w["up"])[:, 6:] @ w["out"]).softmax(-1)
    rows = n * data.size
    nll = -p.gather(1, b["c"][:, None]).log().sum() / rows
    if how == "mean_of_entropies":
        mean = p.mean(0)
    elif how == "own_mean_of_logs":
        return nll + (psum(p.sum(0), data) / rows * p.mean(0).log()).sum() / data.size
    else:
        mean = psum(p.sum(0), data) / rows
        mean = mean if how == "not_entered" else enter(mean, data)
    return nll + (mean * mean.log()).sum() / data.size


@loss("dp2 fsdp2", NET, "moments_of_all cross_moment_of_here", "correlation_here means_of_here")
def concordance(w, b, axes, how):
    data = axes[axes.data]
    u, v = net(w, b["x"]).flatten(), b["y"].flatten()
    n = u.shape[0] * data.size

    def over(x):
        return enter(psum(x.sum(), data), data) / n

    mu, mv = (u.mean(), v.mean()) if how in ("correlation_here", "means_of_here") else (over(u), over(v))
    if how == "correlation_here":
        cov, var = ((u - mu) * (v - mv)).mean(), (u - mu).square().mean() + (v - mv).square().mean()
    else:
        cov, var = over((u - mu) * (v - mv)), over((u - mu).square()) + over((v - mv).square())
        cov = ((u - mu) * (v - mv)).mean() if how == "cross_moment_of_here" else cov
    return (1 - 2 * cov / (var + (mu - mv).square())) / data.size


@loss("dp2 fsdp3", NET, "kernels_of_all ring_of_kernels@fsdp3", "kernels_here cross_kernels_here")
def discrepancy(w, b, axes, how):
    data, n = axes[axes.data], b["x"].shape[0]
    u, v = net(w, b["x"]), b["y"]

    def kernel(p, q):
        return torch.exp(-(p[:, None] - q).square().sum(-1) / 4).sum()

    rows = n * data.size
    if how == "ring_of_kernels":
        total, p, q = 0, u, v
        for _ in range(data.size):
            total = total + kernel(u, p) - 2 * kernel(u, q)
            p, q = ppermute(p, data, -1), ppermute(q, data, -1)
        return total / rows**2
    if how == "kernels_here":
        return (kernel(u, u) - 2 * kernel(u, v)) / n**2 / data.size
    crossed = kernel(u, v) * data.size if how == "cross_kernels_here" else kernel(u, all_gather(v, data, 0))
    return (kernel(u, all_gather(u, data, 0)) - 2 * crossed) / rows**2


@loss("dp2 fsdp3", NET, "exclusive_offsets gathered", "no_offset inclusive_offset offset_of_the_next")
def running_scores(w, b, axes, how):
    data, n = axes[axes.data], b["x"].shape[0]
    s = torch.tanh(net(w, b["x"]).sum(-1))
    here = axis_index(data)
    if how == "gathered":
        total = all_gather(s, data, 0).cumsum(0).view(data.size, n).index_select(0, here.view(1))[0]
    elif how == "no_offset":
        total = s.cumsum(0)
    else:
        sums, rank = all_gather(s.sum()[None], data, 0), torch.arange(data.size)
        before = {"inclusive_offset": rank <= here, "offset_of_the_next": rank > here}.get(how, rank < here)
        total = s.cumsum(0) + (sums * before).sum()
    return (total - b["wt"]).square().sum() / (n * data.size)


@loss("dp2 fsdp2", NET, "risk_of_all", "risk_here times_of_here events_here")
def survival(w, b, axes, how):
    data = axes[axes.data]
    s, time, event = net(w, b["x"]).sum(-1), b["wt"], (b["grp"] > 0).to(b["x"].dtype)
    if how == "risk_here":
        every, times = s, time
    else:
        every, times = all_gather(s, data, 0), all_gather(time, data, 0)
        times = time.repeat(data.size) if how == "times_of_here" else times
    risk = torch.where(times >= time[:, None], every, -1e9).logsumexp(-1)
    events = event.sum() * data.size if how == "events_here" else psum(event.sum(), data)
    return ((risk - s) * event).sum() / events

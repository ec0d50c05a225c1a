"""Lodgers whose batches are split over dp or fsdp: denominators, counts, statistics and neighbours among rows."""

import torch
import torch.nn.functional as F

from fmegatron import nn, step
from fmegatron.collectives import all_gather, axis_index, enter, pmax, psum
from tests.step.lodgers.frame import loss, tower

NET = "up fb down gain"


@loss(
    "dp2 dp3 fsdp2",
    NET,
    "plain_world_size axis_size whole_batch counted elements",
    "mean_here sum_over_own_rows world_squared unbiased_here one_rank_too_many batch_without_world",
)
def regression(axes, how):
    data = axes[axes.data]
    world_size = int(data.size)

    def fn(w, b):
        e = (tower(w, b["x"]) - b["y"]).square()
        n = len(e)
        if how == "plain_world_size":
            return e.mean() / world_size
        if how == "axis_size":
            return e.sum(-1).mean() / data.size
        if how == "whole_batch":
            return e.sum() / (12 * 6)
        if how == "counted":
            return e.sum() / psum(torch.ones_like(e[:, 0]).sum(), data)
        if how == "elements":
            return F.mse_loss(tower(w, b["x"]), b["y"], reduction="sum") / (e.numel() * world_size)
        if how == "mean_here":
            return e.mean()
        if how == "sum_over_own_rows":
            return e.sum() / n
        if how == "world_squared":
            return e.mean() / (world_size * world_size)
        if how == "unbiased_here":
            return e.sum() / (world_size * (n - 1))
        if how == "one_rank_too_many":
            return 2 * e.mean() / (world_size + 1)
        return e.sum() / (6 * n)

    return fn


@loss(
    "dp2 dp3 fsdp2",
    NET + " out",
    "sum_over_valid parts every_row smoothed clamped_count",
    "torch_mean mean_of_means clamped_here valid_of_first_rank smoothed_over_own",
)
def classes(axes, how):
    data = axes[axes.data]
    world = int(data.size)

    def fn(w, b):
        logits, c = tower(w, b["x"]) @ w["out"], b["c"]
        valid = (c >= 0) & (c < 12)
        safe = torch.where(valid, c, 0)
        nll = torch.where(valid, F.cross_entropy(logits, safe, reduction="none"), 0.0)
        count = valid.sum().to(nll.dtype)
        if how == "sum_over_valid":
            return nll.sum() / psum(count, data)
        if how == "parts":
            return step.mean(nll.sum(), valid.sum())
        if how == "every_row":
            return nll.mean() / world
        if how == "clamped_count":
            return nll.sum() / psum(count, data).clamp(min=1)
        if how == "torch_mean":
            return nll.sum() / count.clamp(min=1)
        if how == "mean_of_means":
            return nll.sum() / count.clamp(min=1) / world
        if how == "clamped_here":
            return nll.sum() / psum(count.clamp(min=4), data)
        if how == "valid_of_first_rank":
            return nll.sum() / (all_gather(count[None], data, 0)[0].clamp(min=1) * world)
        target = F.one_hot(safe, 12) * 0.9 + 0.1 / 12
        soft = -(target * logits.log_softmax(-1)).sum(-1) * valid
        return soft.sum() / (psum(count, data) if how == "smoothed" else count.clamp(min=1) * world)

    return fn


@loss(
    "dp2 fsdp2 dp3",
    NET + " out",
    "hits ties worst counts perplexity",
    "hits_here rate_averaged count_here worst_here above_least_here perplexity_averaged summed_twice",
)
def metrics(axes, how):
    """A right loss; what is logged beside it."""
    data = axes[axes.data]
    world = int(data.size)

    def fn(w, b):
        e, logits = (tower(w, b["x"]) - b["y"]).square().sum(-1), tower(w, b["x"]) @ w["out"]
        value, c = e.sum() / 12, b["c"]
        valid = c >= 0
        guess = (logits.round() if how == "ties" else logits).argmax(-1)
        hits, n = ((guess == c) & valid).sum().to(e.dtype), valid.sum().to(e.dtype)
        error = e.detach()
        if how in ("hits", "ties"):
            out = psum(hits, data) / psum(n, data)
        elif how == "worst":
            out = pmax(error.amax(), data)
        elif how == "counts":
            out = psum((error > 1).sum(), data)
        elif how == "perplexity":
            out = (psum(error.sum(), data) / 12).exp().log1p()
        elif how == "hits_here":
            out = error.mean()
        elif how == "rate_averaged":
            out = psum((error * b["wt"]).sum() / b["wt"].sum(), data) / world
        elif how == "count_here":
            out = psum(error.sum(), data) / len(error)
        elif how == "worst_here":
            out = psum(error.amax(), data) / world
        elif how == "above_least_here":
            out = psum((error > error.amin()).sum(), data)
        elif how == "perplexity_averaged":
            out = psum(error.mean().exp(), data) / world
        else:
            out = psum(psum(error.sum(), data), data) / 12
        return value, {"logged": out}

    return fn


@loss(
    "dp2 fsdp2",
    NET,
    "log_where_positive sqrt_at_zero divided_where_not_zero huber zero_rows saturated",
    "log_over_positive_here guarded_twice divided_by_own_norm",
)
def guarded(axes, how):
    """Values that are not numbers, behind a where."""
    data = axes[axes.data]
    ranks = int(data.size)

    def fn(w, b):
        y = tower(w, b["x"])
        if how.startswith(("log", "guarded")):
            positive = y > 0
            logs = torch.where(positive, torch.log(torch.where(positive, y, 1)), 0)
            if how == "log_where_positive":
                return logs.sum() / psum(positive.sum(), data)
            if how == "guarded_twice":
                return psum(logs.sum(), data) / positive.sum().clamp(min=1)
            return logs.sum() / positive.sum().clamp(min=1) / ranks
        if how == "sqrt_at_zero":
            r = y.relu()
            return torch.where(r > 0, torch.where(r > 0, r, 1.0).sqrt(), r).sum() / (12 * 6)
        if how == "divided_where_not_zero":
            zero = b["grp"] == 0
            return (torch.where(zero, 0, y[:, 0] / torch.where(zero, 1, b["grp"]))).mean() / ranks
        if how == "huber":
            return F.huber_loss(y, b["y"], reduction="mean") / ranks
        if how == "zero_rows":
            x = y * (b["wt"] > 1)[:, None]
            return (x / (x.norm(dim=-1, keepdim=True) + 1e-6) - b["y"]).square().mean() / ranks
        if how == "saturated":
            return torch.tanh(60 * y + 300).mean() / ranks
        norm = y.square().sum().sqrt() + 1e-8
        return ((y / norm) * b["y"]).sum()

    return fn


@loss(
    "dp2 dp3 fsdp2",
    NET,
    "hardest_of_all rounded_ties kth_value median_of_all",
    "hardest_here@dp3 threshold_here median_here top_half_here@dp3 worst_row_here",
)
def hard_rows(axes, how):
    data = axes[axes.data]
    world = int(data.size)

    def fn(w, b):
        e = (tower(w, b["x"]) - b["y"]).square().sum(-1)
        every = all_gather(e.detach(), data, 0)
        if how == "hardest_of_all":
            return torch.where(e >= every.topk(6).values[-1], e, 0).sum() / 6
        if how == "rounded_ties":
            bar = every.round().topk(6).values[-1]
            kept = e.detach().round() >= bar
            return (e * kept).sum() / psum(kept.sum(), data)
        if how == "kth_value":
            return (e * (e <= every.kthvalue(9).values)).sum() / 9
        if how == "median_of_all":
            return (e - every.median()).abs().mean() / world
        if how == "hardest_here":
            return e.topk(6 // world).values.sum() / 6
        if how == "threshold_here":
            kept = e >= e.detach().mean()
            return (e * kept).sum() / psum(kept.sum(), data)
        if how == "median_here":
            return (e - e.detach().median()).abs().mean() / world
        if how == "top_half_here":
            return e.sort(descending=True).values[: len(e) // 2].mean() / world
        return e.amax() / world

    return fn


@loss(
    "dp2 fsdp2",
    "square gain",
    "synced two_passes variance_unbiased",
    "own_statistics not_entered mean_only averaged_variance unbiased_by_own momentum_of_here",
)
def batch_norm(axes, how):
    data = axes[axes.data]
    size = int(data.size)

    def fn(w, b):
        x = b["x"] @ w["square"]
        n = len(x) * size

        def total(v):
            return psum(v, data) if how == "not_entered" else enter(psum(v, data), data)

        if how == "own_statistics":
            mean, var = x.mean(0), x.var(0, correction=0)
        elif how == "mean_only":
            mean = total(x.sum(0)) / n
            var = x.var(0, correction=0)
        elif how == "averaged_variance":
            mean, var = total(x.sum(0)) / n, total(x.var(0, correction=0)) / size
        elif how == "two_passes":
            mean = total(x.sum(0)) / n
            var = total((x - mean).square().sum(0)) / n
        elif how in ("variance_unbiased", "unbiased_by_own"):
            mean = total(x.sum(0)) / n
            var = total((x - mean).square().sum(0)) / (n - 1 if how == "variance_unbiased" else n - size)
        elif how == "momentum_of_here":
            mean, var = x.detach().mean(0), (total((x - x.mean(0)).square().sum(0)) / n)
        else:
            mean = total(x.sum(0)) / n
            var = total(x.square().sum(0)) / n - mean.square()
        y = (x - mean) * torch.rsqrt(var + 1e-5) * w["gain"]
        return (y - b["y"]).square().mean() / size

    return fn


@loss(
    "dp2 dp3",
    "square up",
    "gathered_keys keys_detached both_towers temperature",
    "offset_forgotten own_negatives offset_by_rank reversed_ranks one_rank_ahead undivided",
)
def contrastive(axes, how):
    """Towers of pairs, as open_clip writes them."""
    data = axes[axes.data]
    world_size = int(data.size)

    def fn(w, b):
        q, k = (F.normalize(b[n] @ w["square"], dim=-1, eps=1e-6) for n in "xy")
        n, rank = len(q), axis_index(data)
        scale = (w["up"][0, 0].abs() + 1).log() if how == "temperature" else 1.7
        keys = k if how == "own_negatives" else all_gather(k.detach() if how == "keys_detached" else k, data, 0)
        at = torch.arange(n) + rank * n
        if how in ("offset_forgotten", "own_negatives"):
            at = torch.arange(n)
        elif how == "offset_by_rank":
            at = torch.arange(n) + rank
        elif how == "reversed_ranks":
            at = torch.arange(n) + (world_size - 1 - rank) * n
        elif how == "one_rank_ahead":
            at = (torch.arange(n) + (rank + 1) * n) % (n * world_size)
        value = F.cross_entropy(scale * q @ keys.T, at)
        if how == "both_towers":
            queries = all_gather(q, data, 0)
            value = (value + F.cross_entropy(scale * k @ queries.T, at)) / 2
        return value if how == "undivided" else value / world_size

    return fn


@loss(
    "dp2 fsdp2",
    "gate square",
    "shares_of_all parts_of_loads importance z_loss",
    "shares_here products_averaged importance_here z_over_own_square loads_not_divided",
)
def router(axes, how):
    data = axes[axes.data]
    ranks = int(data.size)

    def fn(w, b):
        logits = b["x"] @ w["gate"]
        p = logits.softmax(-1)
        chosen = F.one_hot(p.argmax(-1), 4).to(p.dtype)
        n = len(p) * ranks
        if how == "shares_of_all":
            return 4 * (psum(chosen.sum(0), data) / n * p.sum(0) / n).sum()
        if how == "parts_of_loads":
            load = all_gather(chosen, data, 0).mean(0)
            return (load * p).sum(-1).mean() / ranks
        if how == "importance":
            share = enter(psum(p.sum(0), data), data)
            return (share.var(correction=0) / share.mean().square()) / ranks
        if how == "z_loss":
            return logits.logsumexp(-1).square().mean() / ranks
        if how == "shares_here":
            return 4 * (chosen.mean(0) * p.mean(0)).sum() / ranks
        if how == "products_averaged":
            return 4 * (chosen.sum(0) * p.sum(0)).sum() / n / n
        if how == "importance_here":
            share = p.sum(0)
            return (share.var(correction=0) / share.mean().square()) / ranks
        if how == "z_over_own_square":
            return logits.logsumexp(-1).sum().square() / n
        return 4 * (psum(chosen.sum(0), data) / len(p) * p.sum(0) / n).sum()

    return fn


@loss(
    "dp2 dp3", NET, "by_sample by_id noise_by_id", "by_position by_rank noise_by_position by_id_and_rank", samples=True
)
def keyed(axes, how):
    data = axes[axes.data]
    n_data = int(data.size)

    def fn(w, b, samples):
        at = torch.arange(len(b["x"]))
        counts = {
            **{"by_sample": samples, "by_id": b["id"], "noise_by_id": b["id"]},
            **{"by_position": at, "noise_by_position": at},
            **{"by_rank": axis_index(data), "by_id_and_rank": b["id"] + axis_index(data)},
        }
        if how.startswith("noise"):
            x = b["x"] + nn.normal(b["x"], key=5, count=counts[how])
        else:
            x = nn.dropout(b["x"], 0.4, key=5, count=counts[how])
        return (tower(w, x) - b["y"]).square().mean() / n_data

    return fn


@loss(
    "dp2 dp3",
    NET,
    "group_means inverse_frequency running_mean log_partition sorted_weights decorrelated penalty_shared penalty_once ",
    "groups_here group_counts_here frequency_here restarted carry_of_all carry_with_own partition_here "
    "partition_averaged sorted_here sorted_undivided correlated_here penalty_each",
)
def of_the_batch(axes, how):
    data = axes[axes.data]
    dp = int(data.size)

    def fn(w, b):
        y = tower(w, b["x"])
        e, s = (y - b["y"]).square().sum(-1), y[:, 0]
        if how.startswith("group"):
            of = F.one_hot(b["grp"].clamp(0, 2), 3).to(e.dtype)
            sums, n = of.T @ y, of.sum(0)
            if how != "groups_here":
                sums = enter(psum(sums, data), data)
                n = n if how == "group_counts_here" else psum(n, data)
            return (y - of @ (sums / n.clamp(min=1)[:, None])).square().sum() / 12
        if "frequency" in how:
            bucket = torch.bucketize(b["y"][:, 0].contiguous(), torch.tensor([-0.5, 0.0, 0.5], dtype=b["y"].dtype))
            counts = F.one_hot(bucket, 4).sum(0)
            counts = counts if how == "frequency_here" else psum(counts, data)
            return (e / counts[bucket].clamp(min=1)).sum() / 4
        if how in ("running_mean", "restarted", "carry_of_all", "carry_with_own"):
            sums = all_gather(s.sum()[None], data, 0)
            ahead = torch.arange(dp) < axis_index(data)
            if how == "carry_with_own":
                ahead = torch.arange(dp) <= axis_index(data)
            carry = sums.sum() if how == "carry_of_all" else (sums * ahead).sum()
            run = s.cumsum(0) + (0 if how == "restarted" else carry)
            return (run * b["wt"]).tanh().sum() / 12
        if how == "log_partition":
            top = pmax(s.amax(), data)
            return (top + enter(psum((s - top).exp().sum(), data), data).log()) / dp
        if how == "partition_here":
            return s.logsumexp(0) / dp
        if how == "partition_averaged":
            return enter(psum(s.logsumexp(0), data), data) / dp / dp
        if how.startswith("sorted"):
            v = s if how == "sorted_here" else all_gather(s, data, 0)
            v = v.sort().values
            v = (v * torch.linspace(0, 1, len(v), dtype=v.dtype)).sum()
            return v if how == "sorted_undivided" else v / dp
        if how in ("decorrelated", "correlated_here"):
            m = y.T @ y / 12 * (1 if how == "decorrelated" else dp)
            m = m if how == "correlated_here" else enter(psum(m, data), data)
            return (m - torch.eye(6, dtype=m.dtype)).square().sum() / dp
        penalty = sum(v.square().sum() for v in w.values())
        if how == "penalty_shared":
            return e.mean() / dp + 0.01 * penalty / dp
        if how == "penalty_once":
            return e.sum() / 12 + torch.where(axis_index(data) == 0, 0.01 * penalty, 0)
        return e.mean() / dp + 0.01 * penalty

    return fn

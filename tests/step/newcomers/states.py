"""Newcomers with state beside the weights: teachers, queues, running statistics, counters."""

import torch
import torch.nn.functional as F

from fmegatron import step, tree
from fmegatron.collectives import all_gather, axis_index, enter, psum
from tests.step.newcomers.frame import mlp, sgd, whole

NET = "up fb down gain"
HALVES = {"up": (6, 12), "fb": (12,), "down": (12, 6), "gain": (6,)}


def summed(grads, axis):
    """A psum of each."""
    return tree.map(lambda g: psum(g, axis), grads)


@whole("dp2 dp3", NET, "of_the_new", "of_gradients of_local_update stale_by_rank", more=HALVES)
def byol(axes, how):
    """A teacher that follows the student; the student predicts what the teacher says of another view."""
    dp = axes["dp"]

    def loss_fn(w, teacher, b):
        a = F.normalize(mlp(w, b["x"]), dim=-1)
        t = F.normalize(mlp(teacher, b["x2"]), dim=-1).detach()
        return (2 - 2 * (a * t).sum(-1)).sum() / (a.shape[0] * dp.size)

    def train_step(state, b):
        w, teacher = state["net"], state["more"]
        (value, _), grads = step.value_and_grad(loss_fn)(w, teacher, b)
        local = sgd(w, grads)
        new = sgd(w, summed(grads, dp))
        follow = local if how == "of_local_update" else new
        if how == "of_gradients":
            moved = tree.map(lambda t, g: t - 0.01 * g, teacher, grads)
        elif how == "stale_by_rank":
            rate = 0.9 + 0.05 * axis_index(dp, like=value)
            moved = tree.map(lambda t, p: rate * t + (1 - rate) * p, teacher, follow)
        else:
            moved = tree.map(lambda t, p: 0.9 * t + 0.1 * p, teacher, follow)
        return {"net": new, "more": moved}, {"loss": psum(value, dp)}

    return train_step


@whole("dp2 dp3 dp2·tp2", NET, "all_keys", "own_keys keys_before_update_here queue_by_rank", more={"queue": (24, 6)})
def moco(axes, how):
    """A queue of keys, the same on all ranks: those of all ranks come in, the oldest go out."""
    dp, tp = axes["dp"], axes["tp"]

    def embed(w, x):
        h = torch.tanh(enter(x, tp) @ w["up"] + w["fb"])
        return F.normalize(psum(h @ w["down"], tp) * w["gain"], dim=-1)

    def loss_fn(w, queue, b):
        q, k = embed(w, b["x"]), embed(w, b["x2"]).detach()
        scores = torch.cat([(q * k).sum(-1, keepdim=True), q @ queue.mT], 1) / 0.5
        nll = F.cross_entropy(scores, torch.zeros_like(b["k"]), reduction="sum")
        return nll / (len(q) * dp.size), k

    def train_step(state, b):
        w, queue = state["net"], state["more"]["queue"]
        (value, keys), grads = step.value_and_grad(loss_fn)(w, queue, b)
        if how == "own_keys":
            new = torch.cat([keys, queue])[: len(queue)]
        elif how == "queue_by_rank":
            every = all_gather(keys, dp, 0)
            new = torch.cat([every.roll(1, 0)[: len(keys)], queue])[: len(queue)]
        else:
            every = all_gather(keys, dp, 0)
            new = torch.cat([every, queue])[: len(queue)]
        if how == "keys_before_update_here":
            new = torch.cat([psum(keys, dp) / dp.size, queue])[: len(queue)]
        return {"net": sgd(w, summed(grads, dp)), "more": {"queue": new}}, {"loss": psum(value, dp)}

    return train_step


@whole("dp2 dp3", NET, "centred", "centre_here centre_summed centre_by_loss", more={"centre": (6,)})
def dino(axes, how):
    """The teacher's outputs are centred by a running mean of the batch."""
    dp = axes["dp"]

    def loss_fn(w, centre, b):
        z = mlp(w, b["x2"]).detach()
        target = ((z - centre) / 0.5).softmax(-1)
        nll = -(target * F.log_softmax(mlp(w, b["x"]), -1)).sum()
        return nll / (z.shape[0] * dp.size), z.mean(0)

    def train_step(state, b):
        centre = state["more"]["centre"]
        (value, mean), grads = step.value_and_grad(loss_fn)(state["net"], centre, b)
        if how == "centred":
            mean = psum(mean, dp) / dp.size
        elif how == "centre_summed":
            mean = psum(mean, dp)
        elif how == "centre_by_loss":
            mean = psum(mean * value, dp) / psum(value, dp)
        grads = summed(grads, dp)
        new = {"centre": 0.9 * centre + 0.1 * mean}
        return {"net": sgd(state["net"], grads), "more": new}, {"loss": psum(value, dp)}

    return train_step


@whole(
    *("dp2 dp3 fsdp2", NET, "synchronised welford", "running_here variance_averaged unbiased_by_rank gradient_local"),
    more={"mean": (6,), "var": (6,)},
)
def batch_norm(axes, how):
    """Normalised over the batch of all ranks, with running statistics."""
    data = axes["dp", "fsdp"]

    def loss_fn(w, b):
        h = mlp(w, b["x"])
        n = h.shape[0] * data.size
        if how == "welford":
            means, squares = psum(h.mean(0), data), psum(h.square().mean(0), data)
            mean = enter(means, data) / data.size
            var = enter(squares, data) / data.size - mean.square()
        elif how == "gradient_local":
            mean = psum(h.sum(0), data) / n
            var = psum((h - mean).square().sum(0), data) / n
        elif how == "variance_averaged":
            mean = enter(psum(h.sum(0), data), data) / n
            var = enter(psum(h.var(0, unbiased=False), data), data) / data.size
        else:
            mean = enter(psum(h.sum(0), data), data) / n
            var = enter(psum((h - mean).square().sum(0), data), data) / n
        out = (h - mean) * (var + 1e-4).rsqrt()
        return (out - b["y"]).square().sum() / (n * 6), (mean, var, h)

    def train_step(state, b):
        (value, (mean, var, h)), grads = step.value_and_grad(loss_fn)(state["net"], b)
        old, n = state["more"], h.shape[0] * data.size
        unbiased = var * n / (n - 1)
        if how == "running_here":
            mean = h.mean(0)
        if how == "unbiased_by_rank":
            unbiased = var * h.shape[0] / (h.shape[0] - 1)
        new = {"mean": 0.9 * old["mean"] + 0.1 * mean, "var": 0.9 * old["var"] + 0.1 * unbiased}
        return {"net": sgd(state["net"], summed(grads, data)), "more": new}, {"loss": psum(value, data)}

    return train_step


@whole(
    *("dp2 dp3 fsdp2", NET, "sums_of_all", "counts_here sums_here dead_by_own_counts@dp3 normalised_first"),
    more={"book": (8, 6), "size": (8,)},
)
def codebook(axes, how):
    """A VQ-VAE's book, updated by running means of what fell to each code."""
    data = axes["dp", "fsdp"]

    def loss_fn(w, book, b):
        z = mlp(w, b["x"])
        at = (z[:, None] - book).square().sum(-1).argmin(-1)
        return (z - book[at]).square().sum() / (z.numel() * data.size), (z, at)

    def train_step(state, b):
        book, size = state["more"]["book"], state["more"]["size"].square()
        (value, (z, at)), grads = step.value_and_grad(loss_fn)(state["net"], book, b)
        hot = F.one_hot(at, 8).to(z.dtype)
        sums, counts = hot.mT @ z, hot.sum(0)
        if how == "normalised_first":
            sums, counts = psum(sums / counts.clamp(min=1)[:, None], data), psum((counts > 0).to(z.dtype), data)
        elif how == "counts_here":
            sums = psum(sums, data)
        elif how == "sums_here":
            counts = psum(counts, data)
        else:
            own, sums, counts = counts, psum(sums, data), psum(counts, data)
        size = 0.9 * size + 0.1 * counts
        moved = 0.9 * book + 0.1 * sums / size.clamp(min=0.1)[:, None]
        if how == "dead_by_own_counts":
            moved = torch.where(own[:, None] > 0, moved, book)
        net = sgd(state["net"], summed(grads, data))
        return {"net": net, "more": {"book": moved, "size": size.sqrt()}}, {"loss": psum(value, data)}

    return train_step


@whole("dp2 dp3 fsdp2", NET, "merged", "merged_twice own_moments mean_not_weighted", more={"mean": (), "total": ()})
def reward_scale(axes, how):
    """Rewards are centred by a running mean over all that has been seen (rows with a weight)."""
    data = axes["dp", "fsdp"]

    def train_step(state, b):
        seen = (b["wt"] > 0).to(b["rew"].dtype)
        total, count = (b["rew"] * seen).sum(), seen.sum()
        before = state["more"]["total"].square()
        if how == "own_moments":
            mean = total / count
            every = psum(count, data)
        elif how == "mean_not_weighted":
            mean, every = psum(total / count.clamp(min=1), data) / data.size, psum(count, data)
        else:
            every = psum(count, data)
            mean = psum(total, data) / every
        if how == "merged_twice":
            every = psum(every, data)
        running = (state["more"]["mean"] * before + mean * every) / (before + every)

        def loss_fn(w):
            value = mlp(w, b["x"]).mean(-1)
            return (value - (b["rew"] - running)).square().sum() / (value.shape[0] * data.size)

        (value, _), grads = step.value_and_grad(loss_fn)(state["net"])
        new = {"mean": running, "total": (before + every).sqrt()}
        return {"net": sgd(state["net"], summed(grads, data)), "more": new}, {"loss": psum(value, data)}

    return train_step


@whole("dp2 dp3 fsdp2", NET, "loss_of_all", "loss_here grads_before_reduction norm_here", more={"level": ()})
def spike_guard(axes, how):
    """An update is skipped where the loss is far above its running level."""
    data = axes["dp", "fsdp"]

    def loss_fn(w, b):
        return (mlp(w, b["x"]) - b["y"]).square().sum() / (b["y"].numel() * data.size)

    def train_step(state, b):
        (part, _), grads = step.value_and_grad(loss_fn)(state["net"], b)
        value, level = psum(part, data), state["more"]["level"].abs()
        judged = part * data.size if how == "loss_here" else value
        size = (judged / (1 + level)).clamp(max=2)
        if how == "grads_before_reduction":
            norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
            size = size / (1 + norm)
        reduced = summed(grads, data)
        if how == "norm_here":
            own = torch.stack([(g * data.size).square().sum() for g in grads.values()]).sum()
            size = torch.where(own > 0.01, size / own.sqrt(), size)
        net = tree.map(lambda p, g: p - 0.1 * size * g, state["net"], reduced)
        return {"net": net, "more": {"level": 0.9 * level + 0.1 * value}}, {"loss": value, "size": size}

    return train_step


@whole("dp2 dp3", NET, "ensemble", "noise_by_rank prior_here members_of_rank", more={"prior": (6, 6)})
def randomized_prior(axes, how):
    """Curiosity: the error to a fixed random network is the bonus, scaled by its mean over the batch."""
    dp = axes["dp"]

    def train_step(state, b):
        prior = state["more"]["prior"]
        if how == "prior_here":
            prior = prior * (1 + 0.1 * axis_index(dp, like=prior))

        def loss_fn(w):
            off = (mlp(w, b["x"]) - b["x"] @ prior).square().sum(-1)
            scale = off.mean().detach()
            scale = scale if how == "members_of_rank" else psum(scale, dp) / dp.size
            if how == "noise_by_rank":
                off = off * (1 + 0.1 * axis_index(dp, like=off))
            return (off / scale).sum() / (off.shape[0] * dp.size)

        (value, _), grads = step.value_and_grad(loss_fn)(state["net"])
        net = sgd(state["net"], summed(grads, dp))
        return {"net": net, "more": state["more"]}, {"loss": psum(value, dp)}

    return train_step

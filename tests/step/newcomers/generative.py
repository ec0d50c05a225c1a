"""Newcomers who generate: diffusion, flows, autoencoders, discriminators; and graphs whose nodes are the rows."""

import torch
import torch.nn.functional as F

from fmegatron import nn, step
from fmegatron.collectives import all_gather, axis_index, enter, ppermute, psum, reduce_scatter, shard
from tests.step.newcomers.frame import loss, mlp


@loss("dp2 fsdp2 dp2·fsdp2", "up fb down gain", "eps snr", "batch_weights noise_by_place mean_alone", samples=True)
def diffusion(axes, how):
    """The noise is predicted, weighed by the timestep."""
    data = axes[axes.data]

    def loss_fn(w, b, samples):
        if how == "noise_by_place":
            eps = nn.normal(b["x"], key=3, count=torch.arange(len(b["x"])))
        else:
            eps = nn.normal(b["x"], key=3, count=samples)
        keep = ((10 - b["t"].to(b["x"].dtype)) / 11)[:, None]
        seen = keep.sqrt() * b["x"] + (1 - keep).sqrt() * eps
        error = (mlp(w, seen) - eps).square().mean(-1)
        snr = (keep / (1 - keep)).clamp(max=5)[:, 0]
        if how == "snr":
            return step.mean((snr * error).sum(), snr.sum())
        if how == "batch_weights":
            return (snr / snr.sum() * error).sum() / data.size
        return error.mean() if how == "mean_alone" else step.mean(error.sum(), error.shape[0])

    return loss_fn


@loss("dp2 fsdp3 dp4", "up fb down gain", "matched", "per_time_here one_time", samples=True)
def flow(axes, how):
    """Flow matching with a stratified time for each row: strata over all rows."""
    data = axes[axes.data]

    def loss_fn(w, b, samples):
        n = len(b["x"])
        u = nn.uniform(b["x"][:, 0], key=4, count=samples)
        place = torch.arange(n)
        if how == "one_time":
            u = nn.uniform(b["x"][:1, 0], key=4, count=axis_index(data, like=samples).view(1)).expand(n)
        if how != "per_time_here":
            place = place + axis_index(data, like=place) * n
            t = ((place + u) / (n * data.size))[:, None]
        else:
            t = ((place + u) / n)[:, None]
        at = (1 - t) * b["eps"] + t * b["x"]
        error = (mlp(w, at) - (b["x"] - b["eps"])).square()
        return step.mean(error.sum(), error.numel())

    return loss_fn


@loss("dp2 fsdp2 dp3", "up fb down gain square other", "elbo", "kl_of_the_batch free_bits_here sum_and_mean")
def vae(axes, how):
    """Reconstruction and KL; free bits are of the batch's mean KL of each dim."""
    data = axes[axes.data]

    def loss_fn(w, b):
        mean, log_var = b["x"] @ w["square"], (b["x"] @ w["other"]).tanh()
        z = mean + (log_var / 2).exp() * b["eps"]
        rec = (mlp(w, z) - b["x"]).square().sum()
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var)
        rows = kl.shape[0]
        if how == "elbo":
            of_dim = enter(psum(kl.sum(0), data), data) / (rows * data.size)
            return rec / (rows * data.size) + of_dim.clamp(min=0.5).sum() / data.size
        if how == "kl_of_the_batch":
            of_dim = psum(kl.sum(0), data) / (rows * data.size)
            return rec / (rows * data.size) + of_dim.clamp(min=0.5).sum() / data.size
        if how == "free_bits_here":
            return (rec / rows + kl.mean(0).clamp(min=0.5).sum()) / data.size
        return rec / rows / data.size + kl.sum() / rows

    return loss_fn


@loss("dp2 fsdp2 dp3", "up fb down gain k1", "per_row", "gradient_of_the_mean summed_without_ranks")
def critic(axes, how):
    """A Wasserstein critic with a gradient penalty on each row."""

    def loss_fn(w, b):
        def score(x):
            return (mlp(w, x) @ w["k1"])[:, 0]

        between = (0.5 * (b["x"] + b["y"])).detach().requires_grad_()
        out = score(between)
        of = out.mean() if how == "gradient_of_the_mean" else out.sum()
        (slope,) = torch.autograd.grad(of, between, create_graph=True)
        penalty = (slope.square().sum(-1).add(1e-6).sqrt() - 1).square()
        total = (score(b["y"]) - score(b["x"]) + 10 * penalty).sum()
        return total / len(out) if how == "summed_without_ranks" else step.mean(total, out.shape[0])

    return loss_fn


@loss(
    "dp2 dp3 fsdp2",
    "up fb down gain",
    "kernel self_pairs@dp3 others_detached@dp2,fsdp2",
    "within_here diagonal_of_each_rank",
)
def mmd(axes, how):
    """Maximum mean discrepancy between outputs and data: all pairs of the batch."""
    data = axes[axes.data]

    def kernel(a, c):
        return (-(a[:, None] - c).square().sum(-1) / 6).exp()

    def loss_fn(w, b):
        z = mlp(w, b["eps"])
        n = z.shape[0] * data.size
        if how == "within_here":
            there, real = z, b["x"]
        else:
            there = all_gather(z.detach() if how == "others_detached" else z, data, 0)
            real = all_gather(b["x"], data, 0)
        within = kernel(z, there).sum()
        pairs = n * n
        if how == "self_pairs":
            within, pairs = within - z.shape[0], n * (n - 1)
        if how == "diagonal_of_each_rank":
            own = torch.eye(z.shape[0], len(there), dtype=torch.bool)
            within = kernel(z, there).masked_fill(own, 0).sum()
        return within / pairs - 2 * kernel(z, real).sum() / (n * n)

    return loss_fn


@loss("dp2 fsdp2 dp3", "up fb down gain book", "commit usage", "usage_here usage_no_enter perplexity_here")
def vector_quantised(axes, how):
    """Codes of a book, straight through; the book's use over the batch should be even."""
    data = axes[axes.data]

    def loss_fn(w, b):
        z = mlp(w, b["x"])
        far = (z[:, None] - w["book"]).square().sum(-1)
        code = w["book"][far.argmin(-1)]
        commit = (z - code.detach()).square().sum() + (code - z.detach()).square().sum()
        n = z.shape[0] * data.size
        if how == "commit":
            return step.mean(commit, z.shape[0])
        soft = F.softmax(-far, -1).sum(0)
        if how == "usage":
            share = enter(psum(soft, data), data) / n
        elif how == "usage_no_enter":
            share = psum(soft, data) / n
        else:
            share = soft / z.shape[0]
        entropy = -(share * (share + 1e-9).log()).sum()
        if how == "perplexity_here":
            entropy = entropy.exp()
        return commit / n - 0.1 * entropy / data.size

    return loss_fn


@loss(
    "dp2 dp3 fsdp2", "up fb down gain square", "gathered detached_messages@dp3", "own_nodes wrapped_ids mean_of_means"
)
def message_passing(axes, how):
    """Each node takes the mean of three neighbours, who may be on any rank."""
    data = axes[axes.data]

    def loss_fn(w, b):
        h = mlp(w, b["x"])
        match how:
            case "own_nodes":
                near = h[b["nbr"] % h.shape[0]]
            case "wrapped_ids":
                near = all_gather(h, data, 0)[(b["nbr"] + 1) % (h.shape[0] * data.size) - 1]
                near = near * (b["nbr"] < h.shape[0])[..., None]
            case "detached_messages":
                near = all_gather(h.detach(), data, 0)[b["nbr"]]
            case _:
                near = all_gather(h, data, 0)[b["nbr"]]
        out = h + near.mean(1) @ w["square"]
        error = (out - b["y"]).square()
        return error.mean() if how == "mean_of_means" else step.mean(error.sum(), error.numel())

    return loss_fn


@loss("dp2 dp3 fsdp4", "up fb down gain", "scattered cut", "summed_then_indexed scatter_here reduced_twice")
def scatter_messages(axes, how):
    """Messages are added up where they go; a reduce-scatter brings each rank its own nodes."""
    data = axes[axes.data]

    def loss_fn(w, b):
        h = mlp(w, b["x"])
        n = h.shape[0]
        messages = h[:, None].expand(-1, 3, -1).flatten(0, 1)
        if how == "scatter_here":
            got = torch.zeros_like(h).index_add(0, b["nbr"].flatten() % n, messages)
        else:
            every = torch.zeros(n * data.size, 6, dtype=h.dtype).index_add(0, b["nbr"].flatten(), messages)
            if how == "scattered":
                got = reduce_scatter(every, data, 0)
            elif how == "cut":
                got = shard(psum(every, data), data, 0)
            elif how == "reduced_twice":
                got = reduce_scatter(psum(every, data), data, 0)
            else:
                start = axis_index(data, like=h) * n
                got = psum(every, data)[start + torch.arange(n)]
        error = (h + got - b["y"]).square()
        return step.mean(error.sum(), error.numel())

    return loss_fn


@loss("dp2 fsdp2 dp3", "square other", "normalised", "degrees_here degree_of_receiver_only")
def graph_convolution(axes, how):
    """Kipf and Welling: messages over the root of both degrees; in-degrees are of all edges."""
    data = axes[axes.data]

    def loss_fn(w, b):
        n = b["nbr"].shape[0]
        ones = torch.ones(b["nbr"].numel(), dtype=b["x"].dtype)
        degree = torch.zeros(n * data.size, dtype=b["x"].dtype).index_add(0, b["nbr"].flatten(), ones)
        if how != "degrees_here":
            degree = psum(degree, data)
        h = b["x"] @ w["square"]
        if how == "degree_of_receiver_only":
            near = (all_gather(h, data, 0)[b["nbr"]] / psum(ones.sum(), data)).sum(1)
            out = torch.tanh(near) @ w["other"] / len(near)
            return (out - b["y"]).square().sum()
        scale = (degree + 1).rsqrt()
        near = (all_gather(h, data, 0) * scale[:, None])[b["nbr"]].sum(1) / 2.0
        error = (torch.tanh(near) @ w["other"] - b["y"]).square()
        return step.mean(error.sum(), error.numel())

    return loss_fn


@loss("dp2 dp3 fsdp2", "up fb down gain k1", "read_out", "pooled_here pooled_no_enter softmax_here")
def graph_read_out(axes, how):
    """Attention pooling of all nodes into one vector, and a loss of that vector."""
    data = axes[axes.data]

    def loss_fn(w, b):
        h = mlp(w, b["x"])
        score = (h @ w["k1"])[:, 0].tanh().exp()
        total, weight = (score[:, None] * h).sum(0), score.sum()
        if how == "softmax_here":
            pooled = enter(psum(total / weight, data), data) / data.size
        elif how == "pooled_here":
            pooled = total / weight
        elif how == "pooled_no_enter":
            pooled = psum(total, data) / psum(weight, data)
        else:
            pooled = enter(psum(total, data), data) / enter(psum(weight, data), data)
        return (pooled - 1).square().sum() / data.size

    return loss_fn


@loss(
    "dp2 dp3 dp4",
    "up fb down gain square",
    "both_sides walls",
    "one_way_ring@dp3,dp4 left_is_right@dp3 gradient_stopped",
)
def ring_of_cells(axes, how):
    """A one-dimensional periodic grid of cells: each is moved by its left and right neighbour."""
    dp = axes["dp"]

    def loss_fn(w, b):
        h = mlp(w, b["x"])
        first, last = h[:1], h[-1:]
        if how == "gradient_stopped":
            first, last = first.detach(), last.detach()
        left = ppermute(last, dp, -1 if how == "one_way_ring" else 1)
        right = ppermute(first, dp, -1)
        if how == "left_is_right":
            left, right = ppermute(last, dp, -1), ppermute(first, dp, 1)
        if how == "walls":
            left = left * (axis_index(dp, like=h) > 0)
        flow = torch.cat([left, h[:-1]]) + torch.cat([h[1:], right]) - 2 * h
        error = (h + flow @ w["square"] - b["y"]).square()
        return step.mean(error.sum(), error.numel())

    return loss_fn

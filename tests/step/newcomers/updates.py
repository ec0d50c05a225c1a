"""Newcomers who write the update: ZeRO by hand, norms, local steps, sums over halves."""

import torch

from fmegatron import step, tree
from fmegatron.collectives import all_gather, enter, psum, reduce_scatter, shard
from tests.step.newcomers.frame import mlp, sgd, whole

NET = "up fb down gain"
SQUARES = "square other"


def summed(grads, axis):
    """A psum of each."""
    return tree.map(lambda g: psum(g, axis), grads)


def part_of_mean(axis, net=mlp):
    """loss(w, b): this rank's part of the mean over all rows."""

    def loss_fn(w, b):
        error = (net(w, b["x"]) - b["y"]).square()
        return error.sum() / (error.numel() * axis.size)

    return loss_fn


def two(w, x):
    """[N, 6] -> [N, 6] of two square matrices."""
    return torch.tanh(x @ w["square"]) @ w["other"]


@whole("dp2 dp3 dp2·fsdp2", NET, "ddp of_parts", "no_reduce one_axis@dp2·fsdp2 averaged_again mean_and_sum")
def plain(axes, how):
    """DDP: gradients are summed, or those of local means averaged."""
    data = axes["dp", "fsdp"]

    def mean_here(w, b):
        return (mlp(w, b["x"]) - b["y"]).square().mean()

    def train_step(w, b):
        own = part_of_mean(data) if how in ("of_parts", "averaged_again", "no_reduce", "one_axis") else mean_here
        (value, _), grads = step.value_and_grad(own)(w, b)
        if how == "one_axis":
            grads = summed(grads, axes["dp"])
        elif how != "no_reduce":
            grads = summed(grads, data)
        if how in ("ddp", "averaged_again"):
            grads = tree.map(lambda g: g / data.size, grads)
        value = psum(value, data)
        return sgd(w, grads), {"loss": value / data.size if how in ("ddp", "mean_and_sum") else value}

    return train_step


@whole("dp2 dp3 fsdp2", NET, "norm_of_sum", "norm_before norms_averaged norm_of_each_part clip_then_sum")
def clipped(axes, how):
    """Clipped by the global norm."""
    data = axes["dp", "fsdp"]

    def norm_of(grads):
        return torch.stack([g.square().sum() for g in tree.leaves(grads)]).sum().sqrt()

    def train_step(w, b):
        (value, _), grads = step.value_and_grad(part_of_mean(data))(w, b)
        own = norm_of(grads)
        if how == "clip_then_sum":
            grads = tree.map(lambda g: g * (0.1 / own).clamp(max=1), grads)
        grads = summed(grads, data)
        norm = norm_of(grads)
        if how == "norm_before":
            norm = own * data.size
        if how == "norms_averaged":
            norm = psum(own, data)
        if how == "norm_of_each_part":
            norm = psum(own.square(), data).sqrt()
        grads = tree.map(lambda g: g * (0.3 / norm).clamp(max=1), grads)
        return sgd(w, grads), {"loss": psum(value, data), "norm": norm}

    return train_step


@whole("tp2 tp3 dp2·tp2", NET, "counted_once", "shards_alone all_summed not_summed_over_tp")
def clipped_on_tp(axes, how):
    """The norm under tensor parallelism: what is split is summed over tp, what is whole is counted once."""
    dp, tp = axes["dp"], axes["tp"]

    def net(w, x):
        return psum(torch.tanh(enter(x, tp) @ w["up"] + w["fb"]) @ w["down"], tp) * w["gain"]

    def train_step(w, b):
        (value, _), grads = step.value_and_grad(part_of_mean(dp, net))(w, b)
        grads = summed(grads, dp)
        split = grads["up"].square().sum() + grads["fb"].square().sum() + grads["down"].square().sum()
        alone = grads["gain"].square().sum()
        if how == "counted_once":
            norm = (psum(split, tp) + alone).sqrt()
        elif how == "shards_alone":
            norm = psum(split, tp).sqrt() + (psum(alone, tp).sqrt() - alone.sqrt())
        elif how == "all_summed":
            norm = psum(split + alone, tp).sqrt()
        else:
            norm = (split + alone).sqrt()
        grads = tree.map(lambda g: g * (0.3 / norm).clamp(max=1), grads)
        return sgd(w, grads), {"loss": psum(value, dp), "norm": norm}

    return train_step


@whole(
    "dp2 dp3",
    SQUARES,
    "rows columns",
    "wrong_dim_back summed_before_scattering moments_of_own mean_of_sum",
    more={"m": ((6, 6), ("dp", None))},
)
def zero_1(axes, how):
    """Adam's first moment is split over dp: gradients are scattered, updated weights gathered."""
    dp = axes["dp"]

    def train_step(state, b):
        w, m = state["net"], state["more"]["m"]
        (value, _), grads = step.value_and_grad(part_of_mean(dp, two))(w, b)
        g = grads["square"]
        if how == "columns":  # transposed at both ends
            g = reduce_scatter(g.mT, dp, 1).mT
        elif how == "summed_before_scattering":
            g = reduce_scatter(psum(g, dp), dp, 0)
        elif how == "moments_of_own":
            g = shard(g, dp, 0)
        elif how == "mean_of_sum":
            g = reduce_scatter(g, dp, 0) / dp.size
        else:
            g = reduce_scatter(g, dp, 0)
        m = 0.9 * m + 0.1 * g
        own = shard(w["square"], dp, 0) - 0.1 * m
        whole_again = all_gather(own.mT, dp, 0).mT.reshape(6, 6) if how == "wrong_dim_back" else all_gather(own, dp, 0)
        new = {"square": whole_again, "other": w["other"] - 0.1 * psum(grads["other"], dp)}
        return {"net": new, "more": {"m": m}}, {"loss": psum(value, dp)}

    return train_step


@whole(
    *(
        "fsdp2 fsdp3 dp2·fsdp2",
        SQUARES,
        "gathered frozen_one@dp2·fsdp2",
        "dp_forgotten@dp2·fsdp2 summed_again other_dim",
    ),
    rules=[("square|other", ("fsdp", None))],
)
def zero_3(axes, how):
    """Weights are split by rows; the gather's transpose sums and scatters."""
    dp, fsdp, data = axes["dp"], axes["fsdp"], axes["dp", "fsdp"]

    def net(w, x):
        full = {name: all_gather(p, fsdp, 0) for name, p in w.items()}
        if how == "frozen_one":
            full["other"] = all_gather(w["other"].detach(), fsdp, 0)
        if how == "other_dim":
            full["square"] = all_gather(w["square"], fsdp, 1).reshape(6, 6)
        return two(full, x)

    def train_step(w, b):
        (value, _), grads = step.value_and_grad(part_of_mean(data, net))(w, b)
        if how != "dp_forgotten":
            grads = summed(grads, dp)
        if how == "summed_again":
            grads = summed(grads, fsdp)
        return sgd(w, grads), {"loss": psum(value, data)}

    return train_step


@whole(
    *("fsdp2 fsdp3", SQUARES, "sum_over_shards", "norm_of_shard norm_of_whole_on_each maximum_here"),
    rules=[("square|other", ("fsdp", None))],
)
def clipped_shards(axes, how):
    """The global norm of gradients that are split."""
    fsdp = axes["fsdp"]

    def net(w, x):
        return two({name: all_gather(p, fsdp, 0) for name, p in w.items()}, x)

    def train_step(w, b):
        (value, _), grads = step.value_and_grad(part_of_mean(fsdp, net))(w, b)
        square = sum(g.square().sum() for g in tree.leaves(grads))
        if how == "sum_over_shards":
            norm = psum(square, fsdp).sqrt()
        elif how == "norm_of_shard":
            norm = square.sqrt()
        elif how == "norm_of_whole_on_each":
            norm = psum(square.sqrt(), fsdp)
        else:
            norm = torch.stack([g.abs().amax() for g in tree.leaves(grads)]).amax()
        grads = tree.map(lambda g: g * (0.3 / norm).clamp(max=1), grads)
        return sgd(w, grads), {"loss": psum(value, fsdp), "norm": norm}

    return train_step


@whole(
    "dp2 dp3", SQUARES, "same_as_sum outer_momentum", "inner_momentum two_inner_steps deltas_summed", more={"m": (6, 6)}
)
def local_steps(axes, how):
    """Each rank updates by its own rows; weights are averaged (DiLoCo with one inner step)."""
    dp = axes["dp"]

    def mean_here(w, b):
        return (two(w, b["x"]) - b["y"]).square().mean()

    def train_step(state, b):
        w, m = state["net"], state["more"]["m"]
        (value, _), grads = step.value_and_grad(mean_here)(w, b)
        own = sgd(w, grads)
        if how == "two_inner_steps":
            own = sgd(own, step.value_and_grad(mean_here)(own, b)[1])
        if how == "inner_momentum":
            m = 0.9 * m + grads["square"]
            own = {**own, "square": w["square"] - 0.1 * m.clamp(-0.3, 0.3)}
        delta = tree.map(lambda a, c: psum(a - c, dp), own, w)
        if how != "deltas_summed":
            delta = tree.map(lambda d: d / dp.size, delta)
        if how == "outer_momentum":
            m = 0.9 * m + delta["square"]
            delta = {**delta, "square": m}
        if how == "inner_momentum":
            m = psum(m, dp) / dp.size
        return {"net": tree.add(w, delta), "more": {"m": m}}, {"loss": psum(value, dp) / dp.size}

    return train_step


@whole("dp2 dp3 fsdp2", NET, "halves_by_count weighed", "means_of_halves normalised_in_each counted_here")
def accumulated_by_hand(axes, how):
    """Two halves of a rank's rows, one after the other; rows have weights."""
    data = axes["dp", "fsdp"]

    def loss_fn(w, part):
        error = (mlp(w, part["x"]) - part["y"]).square().sum(-1)
        return (error * part["wt"]).sum(), part["wt"].sum()

    def train_step(w, b):
        halves = list(zip(*(b[name].chunk(2) for name in ("x", "y", "wt")), strict=True))
        halves = [dict(zip(("x", "y", "wt"), half, strict=True)) for half in halves]
        total, count, grads = 0.0, 0.0, tree.map(torch.zeros_like, w)
        for half in halves:
            (value, weight), g = step.value_and_grad(loss_fn)(w, half)
            if how in ("means_of_halves", "normalised_in_each"):
                every = weight if how == "means_of_halves" else psum(weight, data)
                g = tree.map(lambda x, every=every: x / every.clamp(min=0.1) / 2, g)
            grads = tree.map(torch.add, grads, g)
            total, count = total + value, count + weight
        grads, total = summed(grads, data), psum(total, data)
        if how == "means_of_halves":
            return sgd(w, tree.map(lambda g: g / data.size, grads)), {"loss": total}
        if how == "normalised_in_each":
            return sgd(w, grads), {"loss": total}
        count = count if how == "counted_here" else psum(count, data)
        return sgd(w, tree.map(lambda g: g / count, grads)), {"loss": total / count}

    return train_step


@whole("dp2 dp3 fsdp2", SQUARES, "after_the_sum", "before_the_sum decay_in_each_part rate_by_rows")
def decayed(axes, how):
    """Weight decay and a rate that grows with the number of rows."""
    data = axes["dp", "fsdp"]

    def loss_fn(w, b):
        value = part_of_mean(data, two)(w, b)
        if how == "decay_in_each_part":
            value = value + 0.05 * sum(p.square().sum() for p in tree.leaves(w))
        return value

    def train_step(w, b):
        (value, _), grads = step.value_and_grad(loss_fn)(w, b)
        if how == "before_the_sum":
            grads = tree.map(lambda g, p: g + 0.1 * p, grads, w)
        grads = summed(grads, data)
        if how == "after_the_sum":
            grads = tree.map(lambda g, p: g + 0.1 * p, grads, w)
        rows = b["x"].shape[0] if how == "rate_by_rows" else b["x"].shape[0] * data.size
        return sgd(w, grads, 0.01 * rows**0.5), {"loss": psum(value, data)}

    return train_step


@whole("dp2 dp3 fsdp2", NET, "of_sums", "agreement_before_sum variance_here noise_scale")
def watched(axes, how):
    """Metrics beside the update: means over the batch, the gradients' norm, how many rows count."""
    data = axes["dp", "fsdp"]

    def loss_fn(w, b):
        error = (mlp(w, b["x"]) - b["y"]).square().sum(-1)
        return error.sum() / (error.shape[0] * data.size), error

    def train_step(w, b):
        (value, error), grads = step.value_and_grad(loss_fn)(w, b)
        own = grads["up"]
        grads = summed(grads, data)
        n = error.shape[0] * data.size
        mean = psum(error.sum(), data) / n
        shown = {"loss": psum(value, data), "rows": psum((b["wt"] > 0).sum(), data)}
        match how:
            case "of_sums":
                shown["variance"] = psum((error - mean).square().sum(), data) / n
            case "agreement_before_sum":
                shown["variance"] = psum((own * grads["up"]).sum(), data) / psum(own.norm(), data)
            case "variance_here":
                shown["variance"] = psum(error.var(unbiased=False), data) / data.size
            case _:
                shown["variance"] = psum(own.square().sum(), data) * data.size / grads["up"].square().sum()
        return sgd(w, grads), shown

    return train_step

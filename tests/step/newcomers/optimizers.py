"""Newcomers with optimizers of their own: trust ratios, second moments, compression, two gradients."""

import torch

from fmegatron import step, tree
from fmegatron.collectives import enter, psum
from tests.step.newcomers.frame import sgd, whole
from tests.step.newcomers.updates import NET, SQUARES, part_of_mean, summed, two


@whole("dp2 dp3 fsdp2", SQUARES, "sign_of_sum", "majority scaled_by_own_mean sum_of_signs")
def compressed(axes, how):
    """Updates of one bit: the sign of the gradient, times its mean size."""
    data = axes["dp", "fsdp"]

    def train_step(w, b):
        (value, _), grads = step.value_and_grad(part_of_mean(data, two))(w, b)

        def one(g):
            if how == "majority":
                return psum(g.sign(), data).sign()
            if how == "sum_of_signs":
                return psum(g.sign() * g.abs().mean(), data)
            total = psum(g, data)
            size = g.abs().mean() * data.size if how == "scaled_by_own_mean" else total.abs().mean()
            return total.sign() * size

        return sgd(w, tree.map(one, grads)), {"loss": psum(value, data)}

    return train_step


@whole("dp2 dp3 fsdp2", SQUARES, "linear", "factor_here orthogonal_before_sum second_not_summed", more={"q": (6, 2)})
def power_sgd(axes, how):
    """PowerSGD without feedback: two products of rank 2, each summed over the ranks."""
    data = axes["dp", "fsdp"]

    def train_step(state, b):
        w, q = state["net"], state["more"]["q"]
        (value, _), grads = step.value_and_grad(part_of_mean(data, two))(w, b)
        g = grads["square"]
        p = g @ q
        if how == "orthogonal_before_sum":
            p = psum(torch.linalg.qr(p).Q, data)
        elif how == "factor_here":
            p = torch.nn.functional.normalize(p, dim=0)
        else:
            p = torch.nn.functional.normalize(psum(p, data), dim=0)
        q = g.mT @ p
        q = q if how == "second_not_summed" else psum(q, data)
        new = {"square": w["square"] - 0.1 * p @ q.mT, "other": w["other"] - 0.1 * psum(grads["other"], data)}
        return {"net": new, "more": {"q": q}}, {"loss": psum(value, data)}

    return train_step


@whole("dp2 dp3 fsdp2", SQUARES, "top_of_sum", "top_of_own threshold_here")
def sparsified(axes, how):
    """Only the ten largest elements of a gradient are used."""
    data = axes["dp", "fsdp"]

    def train_step(w, b):
        (value, _), grads = step.value_and_grad(part_of_mean(data, two))(w, b)

        def one(g):
            total = psum(g, data)
            if how == "top_of_own":
                least = g.abs().flatten().topk(10).values[-1]
                return psum(g * (g.abs() >= least), data)
            judged = g * data.size if how == "threshold_here" else total
            return total * (total.abs() >= judged.abs().flatten().topk(10).values[-1])

        return sgd(w, tree.map(one, grads)), {"loss": psum(value, data)}

    return train_step


@whole(
    "dp2 dp3 fsdp2",
    SQUARES,
    "of_the_sum",
    "of_own_gradients squares_summed second_moment_here",
    more={"left": (6, 6), "v": (6, 6)},
)
def preconditioned(axes, how):
    """A left statistic (Shampoo) and a second moment of each gradient."""
    data = axes["dp", "fsdp"]

    def train_step(state, b):
        w, left, v = state["net"], state["more"]["left"], state["more"]["v"].square()
        (value, _), grads = step.value_and_grad(part_of_mean(data, two))(w, b)
        own, g = grads["square"], psum(grads["square"], data)
        if how == "of_own_gradients":
            left = left + psum(own @ own.mT, data)
        else:
            left = left + g @ g.mT
        if how == "squares_summed":
            v = 0.9 * v + 0.1 * psum(own.square(), data)
        elif how == "second_moment_here":
            v = 0.9 * v + 0.1 * own.square()
        else:
            v = 0.9 * v + 0.1 * g.square()
        new = {
            "square": w["square"] - 0.01 * left @ g / (v.sqrt() + 0.1),
            "other": sgd(w, summed(grads, data))["other"],
        }
        return {"net": new, "more": {"left": left, "v": v.sqrt()}}, {"loss": psum(value, data)}

    return train_step


@whole("tp2 tp3 dp2·tp2", NET, "whole_norms", "norms_of_shards weights_here")
def lamb(axes, how):
    """LAMB's trust ratio: the norm of a layer's weights over that of its update; layers are split over tp."""
    dp, tp = axes["dp"], axes["tp"]

    def net(w, x):
        return psum(torch.tanh(enter(x, tp) @ w["up"] + w["fb"]) @ w["down"], tp) * w["gain"]

    def train_step(w, b):
        (value, _), grads = step.value_and_grad(part_of_mean(dp, net))(w, b)
        grads = summed(grads, dp)

        def one(name):
            p, g = w[name], grads[name]
            ours, theirs = p.square().sum(), g.square().sum()
            if name != "gain" and how != "norms_of_shards":
                theirs = psum(theirs, tp)
                ours = ours if how == "weights_here" else psum(ours, tp)
            return p - 0.01 * (ours.sqrt() / (theirs.sqrt() + 1e-3)).clamp(max=10) * g

        return {name: one(name) for name in w}, {"loss": psum(value, dp)}

    return train_step


@whole("tp2 tp3 tp4", NET, "means_of_whole", "row_mean_here column_mean_over_tp scale_of_shard")
def adafactor(axes, how):
    """Means of squares by row and column of a matrix whose columns are split."""
    tp = axes["tp"]

    def net(w, x):
        return psum(torch.tanh(enter(x, tp) @ w["up"] + w["fb"]) @ w["down"], tp) * w["gain"]

    def train_step(w, b):
        (value, _), grads = step.value_and_grad(part_of_mean(axes["dp"], net))(w, b)
        square = grads["up"].square() + 1e-6
        row, column = square.mean(1), square.mean(0)
        if how != "row_mean_here":
            row = psum(row, tp) / tp.size
        if how == "column_mean_over_tp":
            column = psum(column, tp) / tp.size
        mean = square.mean() if how == "scale_of_shard" else row.mean()
        update = grads["up"] * (row[:, None] * column / mean).rsqrt()
        new = sgd(w, grads) | {"up": w["up"] - 0.01 * update}
        return new, {"loss": value}

    return train_step


@whole("dp2 dp3 fsdp2", SQUARES, "norm_of_all", "ascent_here norm_of_own second_not_summed")
def sharpness(axes, how):
    """SAM: a step up by the normalised gradient of the batch, then down by that of the place."""
    data = axes["dp", "fsdp"]

    def train_step(w, b):
        of = step.value_and_grad(part_of_mean(data, two))
        (value, _), grads = of(w, b)
        up = grads if how == "ascent_here" else summed(grads, data)
        judged = grads if how in ("ascent_here", "norm_of_own") else up
        norm = sum(g.square().sum() for g in tree.leaves(judged)).sqrt()
        there = tree.map(lambda p, g: p + 0.05 * g / norm, w, up)
        (_, _), grads = of(there, b)
        grads = grads if how == "second_not_summed" else summed(grads, data)
        return sgd(w, grads), {"loss": psum(value, data)}

    return train_step


@whole(
    "dp2 dp3 fsdp2", SQUARES, "fisher_of_rows", "fisher_of_rank factors_here factors_not_divided", more={"a": (6, 6)}
)
def kfac(axes, how):
    """The input's second moment over the batch preconditions the first matrix."""
    data = axes["dp", "fsdp"]

    def train_step(state, b):
        w, a = state["net"], state["more"]["a"]
        (value, _), grads = step.value_and_grad(part_of_mean(data, two))(w, b)
        x = b["x"]
        own = x.mT @ x
        if how == "fisher_of_rank":
            moment = psum(own / x.shape[0], data)
        elif how == "factors_here":
            moment = own / x.shape[0]
        elif how == "factors_not_divided":
            moment = psum(own, data) / x.shape[0]
        else:
            moment = psum(own, data) / (x.shape[0] * data.size)
        a = 0.9 * a + 0.1 * moment
        damped = a @ a.mT + 0.5 * torch.eye(6, dtype=a.dtype)
        g = torch.linalg.solve(damped, psum(grads["square"], data))
        new = {"square": w["square"] - 0.1 * g, "other": w["other"] - 0.1 * psum(grads["other"], data)}
        return {"net": new, "more": {"a": a}}, {"loss": psum(value, data)}

    return train_step


@whole("dp2 dp3 fsdp2", SQUARES, "task_norms", "norms_of_own_tasks uncertain_here projected_before_sum")
def two_tasks(axes, how):
    """Two losses whose gradients are projected where they conflict (PCGrad)."""
    data = axes["dp", "fsdp"]

    def first(w, b):
        return (two(w, b["x"]) - b["y"]).square().sum() / (b["y"].numel() * data.size)

    def second(w, b):
        return (two(w, b["x"]) * b["x2"]).sum() / (b["y"].numel() * data.size)

    def train_step(w, b):
        (one, _), g1 = step.value_and_grad(first)(w, b)
        (other, _), g2 = step.value_and_grad(second)(w, b)
        if how != "projected_before_sum":
            g1, own, g2 = summed(g1, data), g2, summed(g2, data)
        weight = one.detach() * data.size if how == "uncertain_here" else psum(one, data)

        def project(name):
            a, c = g1[name], g2[name]
            size = (own[name] * data.size if how == "norms_of_own_tasks" else c).square().sum()
            return a - torch.clamp((a * c).sum(), max=0) / (size + 1e-6) * c + c / (1 + weight)

        grads = {name: project(name) for name in g1}
        if how == "projected_before_sum":
            grads = summed(grads, data)
        return sgd(w, grads), {"loss": psum(one + other, data)}

    return train_step

"""Lodgers with updates by hand: torch's DDP loop, DeepSpeed's loss scale, Megatron's norms, states of their own."""

import torch

from fmegatron import nn, step, tree
from fmegatron.collectives import all_gather, pmax, psum
from tests.step.lodgers.frame import tower, whole

NET = "up fb down gain"


def errors(params, b):
    """[N] of this rank's rows."""
    return (tower(nn.gather_tree(params), b["x"]) - b["y"]).square().sum(-1)


@whole(
    "dp2 dp3",
    NET,
    "averaged summed_shares weighted loss_scale clipped sign_of_sum compressed_sum largest_change trust_ratio "
    "value_clipped skipped_if_large centred",
    "not_reduced not_averaged averaged_twice mean_of_unequal clipped_each clipped_before_average sign_of_each "
    "compressed_each norm_of_here bias_forgotten loss_not_reduced value_clipped_each worst_of_here "
    "scaled_by_own_loss centred_each",
)
def data_parallel(axes, how):
    dp = axes["dp"]
    world_size = int(dp.size)

    def train_step(params, b):
        def fn(p, b):
            e = errors(p, b)
            if how in ("weighted", "mean_of_unequal"):
                total = (e * b["wt"]).sum()
                return total / b["wt"].sum() if how == "mean_of_unequal" else total
            if how == "summed_shares":
                return e.sum() / (len(e) * world_size)
            if how == "loss_scale":
                return e.mean() * 1024.0
            return e.mean()

        (value, _), grads = step.value_and_grad(fn)(params, b)
        out = {}

        def norm(g):
            return sum(v.square().sum() for v in tree.leaves(g)).sqrt()

        if how == "clipped_each":
            factor = (0.05 / (norm(grads) + 1e-6)).clamp(max=1)
            grads = tree.map(lambda g: g * factor, grads)
        if how == "value_clipped_each":
            grads = tree.map(lambda g: g.clamp(-0.01, 0.01), grads)
        if how == "sign_of_each":
            grads = tree.map(torch.sign, grads)
        if how == "compressed_each":
            grads = tree.map(lambda g: torch.where(g.abs() >= g.abs().mean(), g, 0), grads)
        if how == "scaled_by_own_loss":
            grads = tree.map(lambda g: g / (1 + value), grads)
        if how == "norm_of_here":
            out["norm"] = psum(norm(grads), dp) / world_size
        if how == "centred_each":
            grads = tree.map(lambda g: g - g.square().mean().sqrt(), grads)
        if how == "bias_forgotten":
            grads = {k: g if k == "fb" else psum(g, dp) / world_size for k, g in grads.items()}
        elif how != "not_reduced":
            grads = tree.map(lambda g: psum(g, dp), grads)
            if how == "weighted":
                n = psum(b["wt"].sum(), dp)
                grads = tree.map(lambda g: g / n, grads)
            elif how not in ("not_averaged", "summed_shares", "clipped_before_average"):
                grads = tree.map(lambda g: g / world_size, grads)
        if how == "averaged_twice":
            grads = tree.map(lambda g: g / world_size, grads)
        if how == "loss_scale":
            grads, value = tree.map(lambda g: g / 1024, grads), value / 1024
        if how in ("clipped", "clipped_before_average"):
            factor = (0.05 / (norm(grads) + 1e-6)).clamp(max=1)
            grads = tree.map(lambda g: g * factor, grads)
            if how == "clipped_before_average":
                grads = tree.map(lambda g: g / world_size, grads)
            out["norm"] = norm(grads)
        if how == "sign_of_sum":
            grads = tree.map(torch.sign, grads)
        if how == "compressed_sum":
            grads = tree.map(lambda g: torch.where(g.abs() >= g.abs().mean(), g, 0), grads)
        if how == "value_clipped":
            grads = tree.map(lambda g: g.clamp(-0.01, 0.01), grads)
        if how == "centred":
            grads = tree.map(lambda g: g - g.square().mean().sqrt(), grads)
        if how == "largest_change":
            out["largest"] = pmax(errors(params, b).amax(), dp)
            out["above"] = psum((errors(params, b) > 0.5).sum(), dp)
        if how == "worst_of_here":
            out["largest"] = psum(errors(params, b).detach().amax(), dp)
        rate = 0.1
        if how == "trust_ratio":
            grads = tree.map(lambda p, g: g * p.norm() / (g.norm() + 1e-8), params, grads)
        if how == "skipped_if_large":
            rate = torch.where(norm(grads) < 100.0, 0.1, 0.0)
        if how == "summed_shares":
            value = psum(value, dp)
        elif how == "weighted":
            value = psum(value, dp) / psum(b["wt"].sum(), dp)
        elif how == "loss_not_reduced":
            value = value * 1.0
        else:
            value = psum(value, dp) / world_size
        return tree.map(lambda p, g: p - rate * g, params, grads), {"loss": value, **out}

    return train_step


@whole(
    "fsdp2",
    NET,
    "sharded norm_over_shards trust_over_shards whole_norm_by_gather",
    "norm_of_shards trust_of_shard undivided norm_summed_of_roots mean_of_shard reduced_again",
)
def zero(axes, how):
    """Gradients come reduced and scattered to the shards of the parameters."""
    fsdp = axes["fsdp"]
    world = int(fsdp.size)

    def train_step(params, b):
        def fn(p, b):
            e = errors(p, b)
            return e.sum() / len(e) if how == "undivided" else e.sum() / 12

        (value, _), grads = step.value_and_grad(fn)(params, b)
        if how == "reduced_again":
            grads = tree.map(lambda g: psum(g, fsdp), grads)
        squares = sum(g.square().sum() for g in tree.leaves(grads))
        if how == "whole_norm_by_gather":
            squares = sum(all_gather(g, fsdp, 0).square().sum() for g in (grads["up"], grads["down"]))
        elif how == "norm_summed_of_roots":
            squares = psum(squares.sqrt(), fsdp).square()
        elif how != "norm_of_shards":
            squares = psum(squares, fsdp)
        if how.startswith(("norm", "whole")):
            grads = tree.map(lambda g: g * (0.03 / (squares.sqrt() + 1e-6)).clamp(max=1), grads)
        if how.startswith("trust"):

            def ratio(p, g):
                pp, gg = p.square().sum(), g.square().sum()
                if how == "trust_over_shards":
                    pp, gg = psum(pp, fsdp), psum(gg, fsdp)
                return g * pp.sqrt() / (gg.sqrt() + 1e-8)

            grads = tree.map(ratio, params, grads)
        if how == "mean_of_shard":
            grads = tree.map(lambda g: g - g.mean(), grads)
        value = psum(value, fsdp) / (world if how == "undivided" else 1)
        return tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value, "norm": psum(squares, fsdp) / world}

    return train_step


@whole(
    "dp2 dp3",
    NET,
    "running_mean counts_of_classes teacher largest_seen momentum",
    "running_mean_here counts_here largest_here teacher_of_gradient momentum_here centre_averaged_wrongly",
    more={"mean": (6,), "counts": (12,), "gain": (6,)},
)
def states(axes, how):
    """What a state has beside parameters: statistics, a teacher, a momentum."""
    dp = axes["dp"]
    ranks = int(dp.size)

    def train_step(state, b):
        params, more = state["net"], dict(state["more"])

        def fn(p, b):
            e = errors(p, b)
            if how == "teacher":
                e = e + (tower(nn.gather_tree(p), b["x"]) - more["gain"]).square().sum(-1)
            return e.mean() / ranks

        (value, _), raw = step.value_and_grad(fn)(params, b)
        grads = tree.map(lambda g: psum(g, dp), raw)
        x = b["x"]
        if how.startswith("running"):
            mean = x.mean(0) if how == "running_mean_here" else psum(x.sum(0), dp) / (len(x) * ranks)
            more["mean"] = 0.9 * more["mean"] + 0.1 * mean
        if how == "centre_averaged_wrongly":
            more["mean"] = 0.9 * more["mean"] + 0.1 * psum(x.sum(0), dp) / len(x)
        if how.startswith("counts"):
            seen = torch.nn.functional.one_hot(b["c"].clamp(0, 11), 12).sum(0).to(x.dtype)
            more["counts"] = more["counts"] + (seen if how == "counts_here" else psum(seen, dp))
        if how.startswith("largest"):
            top = x.abs().amax(0)
            more["mean"] = torch.maximum(more["mean"], top if how == "largest_here" else pmax(top, dp))
        if how == "teacher_of_gradient":
            more["gain"] = 0.9 * more["gain"] + raw["gain"]
        if how.startswith("momentum"):
            more["gain"] = 0.9 * more["gain"] + (
                psum(raw["gain"].abs(), dp) if how == "momentum_here" else grads["gain"]
            )
            grads["gain"] = more["gain"]
        net = tree.map(lambda p, g: p - 0.1 * g, params, grads)
        if how == "teacher":
            more["gain"] = 0.9 * more["gain"] + 0.1 * net["gain"]
        return {"net": net, "more": more}, {"loss": psum(value, dp)}

    return train_step

"""Estimates: traces by probes, noise scales, penalties on gradients, worst groups, kernels, solved heads, bins."""

import torch

from fmegatron import step
from fmegatron.collectives import all_gather, axis_index, psum
from tests.step.arrivals.frame import NET, descend, mlp, sgd, step_of, summed


def signs(number, columns: int, dtype):
    """[N, columns] of +-1: a hash of a row's number."""
    column = torch.arange(columns, device=number.device)
    return (((number[:, None] * 11 + column * 7 + number[:, None] * column) % 13 < 6).to(dtype)) * 2 - 1


@step_of("dp2 dp3", NET, "by_number", "by_row_here by_rank own_mean")
def score_matching(axes, how):
    """Sliced score matching: a trace of a Jacobian by Hutchinson's probes, and its gradient."""
    data = axes["dp"]

    def part(w, b):
        number = torch.arange(len(b["id"]), device=b["id"].device) if how == "by_row_here" else b["id"]
        if how == "by_rank":
            number = number * 0 + axis_index(data, number)
        v = signs(number, 8, b["x"].dtype)
        score, moved = torch.func.jvp(lambda x: mlp(w, x), (b["x"],), (v,))
        loss = (v * moved).sum(-1) + 0.5 * score.square().sum(-1)
        if how == "own_mean":
            return (loss * b["wt"]).sum() / b["wt"].sum() / data.size
        return (loss * b["wt"]).sum() / psum(b["wt"].sum(), data)

    return lambda w, b: descend(part, w, b, data)


@step_of("dp2 dp3 fsdp2", NET, "per_row", "per_rank own_rows mean_gradient_own")
def noise_scale(axes, how):
    """The noise scale: the variance of rows' gradients over the square of their mean; the rate goes down by it."""
    data = axes["dp", "fsdp"]

    def one(w, x, y):
        return (mlp(w, x) - y).square().mean()

    def train_step(w, b):
        rows = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(w, b["x"], b["y"])
        own = {name: g.mean(0) for name, g in rows.items()}
        grads = {name: psum(g, data) / data.size for name, g in own.items()}
        big = torch.stack([g.square().sum() for g in (own if how == "mean_gradient_own" else grads).values()]).sum()
        if how == "per_rank":
            small = psum(torch.stack([g.square().sum() for g in own.values()]).sum(), data) / data.size
        else:
            small = torch.stack([g.square().flatten(1).sum(1) for g in rows.values()]).sum(0).mean()
            small = small if how == "own_rows" else psum(small, data) / data.size
        noise = (small - big) / big
        return sgd(w, grads, 0.1 / (1 + 0.1 * noise)), {"noise": noise}

    return train_step


@step_of("dp2 dp3", NET, "of_environment", "squared_before_sum own_environment penalty_summed")
def invariant(axes, how):
    """IRM: the square of the gradient by a scale of 1, of each environment over the batch."""
    data = axes["dp"]

    def loss_fn(w, b):
        hot = torch.nn.functional.one_hot(b["grp"], 4).to(b["x"].dtype)
        said = mlp(w, b["x"])
        n = hot.sum(0) if how == "own_environment" else psum(hot.sum(0), data)
        error = hot.T @ (said - b["y"]).square().mean(-1)
        slope = hot.T @ (2 * (said - b["y"]) * said).mean(-1)
        slope = slope / n.clamp(min=1)
        if how == "squared_before_sum":
            penalty = psum(slope.square(), data)
        elif how == "own_environment":
            penalty = (psum(slope, data) / data.size).square()
        else:
            penalty = psum(slope, data).square()
        if how == "penalty_summed":
            penalty = psum(penalty, data)
        return psum(error / 12, data).sum() + penalty.mean()

    def train_step(w, b):
        (value, _), grads = step.value_and_grad(loss_fn)(w, b)
        return sgd(w, summed(grads, data)), {"loss": value}

    return train_step


@step_of(
    "dp2 dp3 dp2·fsdp2",
    {"net": NET, "q": "4 +"},
    "sums_and_counts",
    "own_losses mean_of_group_means q_moved_by_own one_axis@dp2·fsdp2",
)
def worst_group(axes, how):
    """Group DRO: groups of large loss gain weight, by an exponentiated step."""
    data = axes["dp", "fsdp"]

    def train_step(w, b):
        hot = torch.nn.functional.one_hot(b["grp"], 4).to(b["x"].dtype)

        def losses(net, b):
            return hot.T @ (mlp(net, b["x"]) - b["y"]).square().mean(-1)

        over = axes["dp"] if how == "one_axis" else data
        own = losses(w["net"], b).detach()
        count = psum(hot.sum(0), data)
        if how == "own_losses":
            here = own / hot.sum(0).clamp(min=1)
        elif how == "mean_of_group_means":
            here = psum(own / hot.sum(0).clamp(min=1), data) / data.size
        else:
            here = psum(own, over) / count
        q = w["q"] * (0.5 * here).exp()
        q = q / q.sum()
        if how == "q_moved_by_own":
            mine = w["q"] * (0.5 * own / hot.sum(0).clamp(min=1)).exp()
            used = mine / mine.sum()
        else:
            used = q
        (value, _), grads = step.value_and_grad(lambda net, b: (used * losses(net, b) / count).sum())(w["net"], b)
        return {"net": sgd(w["net"], summed(grads, data)), "q": q}, {"loss": psum(value, data)}

    return train_step


@step_of(
    "dp2 dp3",
    {"up": "8,12", "bias": "12", "down": "12,8"},
    "rows_against_all",
    "own_blocks whole_on_each bandwidth_of_own diagonal_by_place_here",
)
def discrepancy(axes, how):
    """MMD between what a network makes and what it shall look like, over all pairs of rows of all ranks."""
    data = axes["dp"]

    def part(w, b):
        made, real, n = mlp(w, b["x"]), b["y"], len(b["x"])
        every_made = made if how == "own_blocks" else all_gather(made, data, 0)
        every_real = real if how == "own_blocks" else all_gather(real, data, 0)
        width = 8.0
        if how == "bandwidth_of_own":
            width = 1 + made.detach().square().sum(-1).mean()
        place = torch.arange(n, device=made.device)
        if how in ("rows_against_all", "bandwidth_of_own"):
            place = place + axis_index(data, made) * n

        def kernel(x, y):
            return (-(x[:, None] - y).square().sum(-1) / width).exp()

        if how == "whole_on_each":
            made, real, place = every_made, every_real, torch.arange(12, device=made.device)
        apart = torch.arange(len(every_made), device=made.device) != place[:, None]
        pairs = 12 * 11 if how != "own_blocks" else n * (n - 1) * data.size
        same = (kernel(made, every_made) * apart).sum() / pairs
        return same - 2 * kernel(made, every_real).sum() / (144 if how != "own_blocks" else n * n * data.size)

    return lambda w, b: descend(part, w, b, data)


@step_of(
    "dp2 dp3",
    {"up": "8,12", "head": "12,8"},
    "normal_equations",
    "own_solution solutions_averaged ridge_in_each_part right_side_own",
)
def solved(axes, how):
    """A ridge regression on random features, solved by its normal equations, towards which the head moves."""
    data = axes["dp"]

    def train_step(w, b):
        h = torch.tanh(b["x"] @ w["up"])
        gram, right = h.T @ h, h.T @ b["y"]
        ridge = 0.5 * torch.eye(12, dtype=h.dtype, device=h.device)
        if how == "own_solution":
            best = torch.linalg.solve(gram + ridge, right)
        elif how == "solutions_averaged":
            best = psum(torch.linalg.solve(gram + ridge, right), data) / data.size
        elif how == "ridge_in_each_part":
            best = torch.linalg.solve(psum(gram + ridge, data), psum(right, data))
        elif how == "right_side_own":
            best = torch.linalg.solve(psum(gram, data) + ridge, right * data.size)
        else:
            best = torch.linalg.solve(psum(gram, data) + ridge, psum(right, data))
        error = psum((h @ best - b["y"]).square().sum(), data) / (12 * 8)
        return {"up": w["up"], "head": 0.5 * w["head"] + 0.5 * best}, {"loss": error}

    return train_step


@step_of("dp2 dp3", {"up": "8,12"}, "bins_summed", "bins_averaged own_edges gap_before_sum")
def calibration(axes, how):
    """A loss, and beside it the calibration error in five bins of equal width between the least and the largest."""
    data = axes["dp"]

    def part(w, b):
        logs = (b["x"] @ w["up"]).log_softmax(-1)
        sure, said = logs.detach().exp().max(-1)
        hit = (said == b["k"]).to(logs.dtype)
        low, high = sure.min(), sure.max()
        if how != "own_edges":
            every = all_gather(sure, data, 0)
            low, high = every.min(), every.max()
        at = ((sure - low) / (high - low + 1e-9) * 5).long().clamp(0, 4)
        hot = torch.nn.functional.one_hot(at, 5).to(logs.dtype)
        n, gap = hot.sum(0), hot.T @ (sure - hit)
        if how == "gap_before_sum":
            error = psum(gap.abs().sum(), data) / 12
        elif how == "bins_averaged":
            error = psum((gap / n.clamp(min=1)).abs() * n / len(sure), data).sum() / data.size
        else:
            error = psum(gap, data).abs().sum() / 12
        return -logs.gather(1, b["k"][:, None]).sum() / 12, {"error": error}

    def train_step(w, b):
        (value, aux), grads = step.value_and_grad(part)(w, b)
        return sgd(w, summed(grads, data)), {"loss": psum(value, data), "error": aux["error"]}

    return train_step

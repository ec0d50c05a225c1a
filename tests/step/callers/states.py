"""Callers whose steps look at gradients, parameters or a state beside them: averages, projections, ZeRO by hand."""

import torch
import torch.nn.functional as F

from fmegatron import nn, optim, step, tree
from fmegatron.collectives import all_gather, axis_index, enter, ppermute, psum, reduce_scatter, shard
from tests.step.callers.frame import net, whole
from tests.step.callers.steps import NET, descend, ended, errors, of_all


def with_more(state, params, more, loss):
    """The state of a step that carries more."""
    run = state["run"]
    return {"run": step.State(run.step + 1, params, run.opt), "more": more}, {"loss": loss}


@whole(
    "dp2 fsdp2",
    NET,
    "sums_and_counts@dp2,fsdp2 gathered_rows",
    "rows_of_here means_of_means counts_of_here smoothed_before_the_sum",
    more={"centers": (3, 6)},
)
def prototypes(state, b, axes, opt, how):
    """Centers of groups, moved towards the means of the groups' rows."""
    data, params, old = axes[axes.data], state["run"].params, state["more"]["centers"]

    def fn(params, b):
        z = net(nn.gather_tree(params), b["x"])
        return step.mean((z - old[b["grp"]]).square().sum(), z.shape[0]), {"z": z}

    (loss, aux), grads = step.value_and_grad(fn)(params, b)
    params = descend(params, step.reduce_gradients(grads), 0.1)
    z, groups = aux["z"], b["grp"]
    if how == "gathered_rows":
        z, groups = all_gather(z, data, 0), all_gather(groups, data, 0)
    hot = F.one_hot(groups, 3).to(z.dtype)
    total, count = hot.T @ z, hot.sum(0)[:, None]
    if how == "sums_and_counts":
        total, count = psum(total, data), psum(count, data)
    elif how == "means_of_means":
        total, count = psum(total / count.clamp(min=1), data), count.new_full((3, 1), data.size)
    elif how == "counts_of_here":
        total = psum(total, data)
    if how == "smoothed_before_the_sum":
        new = psum(0.9 * old + 0.1 * total / psum(count, data), data)
    else:
        new = 0.9 * old + 0.1 * total / count.clamp(min=1)
    return with_more(state, params, {"centers": new}, loss["loss"] if isinstance(loss, dict) else loss)


@whole(
    "dp2 dp3",
    NET,
    "moments_of_all mean_of_equal_means",
    "moments_of_here variance_around_own_means mean_by_own_count summed_means",
    more={"mean": (12,), "var": (12,)},
)
def running_statistics(state, b, axes, opt, how):
    dp, params, old = axes["dp"], state["run"].params, state["more"]
    n = b["x"].shape[0]
    h = b["x"] @ params["up"]
    rows = n * dp.size
    mean = psum(h.sum(0), dp) / rows
    if how == "mean_of_equal_means":
        mean = psum(h.mean(0), dp) / dp.size
    if how == "moments_of_here":
        mean = h.mean(0)
    if how == "mean_by_own_count":
        mean = psum(h.sum(0), dp) / n
    if how == "summed_means":
        mean = psum(h.mean(0), dp)
    center = h.mean(0) if how == "variance_around_own_means" else mean
    var = (h - center).square().sum(0)
    var = var / n if how == "moments_of_here" else psum(var, dp) / rows
    more = {"mean": 0.9 * old["mean"] + 0.1 * mean, "var": 0.9 * old["var"] + 0.1 * var}

    def fn(params, b):
        u = (b["x"] @ params["up"] - old["mean"]) * (old["var"].square() + 0.5).rsqrt()
        y = torch.tanh(u + params["fb"]) @ params["down"] * params["gain"]
        return (y - b["y"]).square().sum() / rows

    (loss, _), grads = step.value_and_grad(fn)(params, b)
    params = descend(params, step.reduce_gradients(grads), 0.1)
    return with_more(state, params, more, psum(loss, dp))


@whole(
    "dp2 fsdp2",
    NET,
    "rewards_of_all weights_by_count",
    "loss_of_here baseline_of_sums best_of_here gathered_and_first",
    more={"base": ()},
)
def baseline(state, b, axes, opt, how):
    """REINFORCE with a running baseline of rewards."""
    data, params, base = axes[axes.data], state["run"].params, state["more"]["base"]
    n = b["x"].shape[0]
    reward = b["wt"]
    seen = psum(reward.sum(), data) / (n * data.size)
    if how == "loss_of_here":
        seen = reward.mean()
    if how == "baseline_of_sums":
        seen = psum(reward.mean(), data)
    if how == "best_of_here":
        seen = psum(reward.amax(), data) / data.size
    if how == "gathered_and_first":
        seen = all_gather(reward.mean()[None], data, 0)[0]
    if how == "weights_by_count":
        heavy = (reward > 1).to(reward.dtype)
        seen = psum((reward * heavy).sum(), data) / psum(heavy.sum(), data)

    def fn(params, b):
        logp = net(nn.gather_tree(params), b["x"]).log_softmax(-1)[:, 0]
        return step.mean(-(logp * (b["wt"] - base - seen)).sum(), logp.shape[0])

    (loss, _), grads = step.value_and_grad(fn)(params, b)
    params = descend(params, step.reduce_gradients(grads), 0.1)
    return with_more(state, params, {"base": 0.9 * base + 0.1 * seen}, loss)


@whole(
    "dp2 fsdp2",
    NET,
    "averaged",
    "averaged_before_the_sum@dp2 average_of_ranks_summed@dp2 average_with_own_gradients@dp2 shards_exchanged@fsdp2 "
    "decay_by_own_rows",
    more={"ema": (12,)},
)
def average(state, b, axes, opt, how):
    data, params, old = axes[axes.data], state["run"].params, state["more"]["ema"]
    (loss, _), raw = step.value_and_grad(of_all)(params, b)
    new = descend(params, step.reduce_gradients(raw), 0.1)
    bias = nn.gather_tree({"fb": new["fb"]}, {"fb": tree.layout_of(params["fb"])})["fb"]
    ema = 0.9 * old + 0.1 * bias
    if how == "averaged_before_the_sum":
        ema = psum(0.9 * old + 0.1 * bias, data)
    if how == "average_of_ranks_summed":
        ema = 0.9 * old + 0.1 * psum(bias, data)
    if how == "average_with_own_gradients":
        ema = 0.9 * old + 0.1 * descend(params, raw, 0.1)["fb"]
    if how == "shards_exchanged":
        ema = 0.9 * old + 0.1 * all_gather(ppermute(new["fb"], data, 1), data, 0)
    if how == "decay_by_own_rows":
        rate = b["wt"].sum() / (1 + b["wt"].sum())
        ema = rate * old + (1 - rate) * bias
    return with_more(state, new, {"ema": ema}, loss)


@whole(
    "dp2 dp3",
    NET,
    "gathered_pieces reduced_flat",
    "own_gradient_cut own_part_not_gathered gathered_on_another_dim divided_by_the_parts piece_of_the_neighbour",
)
def zero_one(state, b, axes, opt, how):
    """Each rank updates its rows of each parameter, and gathers the others'."""
    dp, new = axes["dp"], {}
    (loss, _), grads = step.value_and_grad(of_all)(state.params, b)
    for name, p in state.params.items():
        g = grads[name]
        if how == "reduced_flat":
            piece = reduce_scatter(g.flatten(), dp, 0)
            new[name] = all_gather(shard(p.flatten(), dp, 0) - 0.1 * piece, dp, 0).view(p.shape)
            continue
        piece = shard(g, dp, 0) if how == "own_gradient_cut" else reduce_scatter(g, dp, 0)
        if how == "divided_by_the_parts":
            piece = piece / dp.size
        mine = shard(p, dp, 0) - 0.1 * piece
        if how == "piece_of_the_neighbour":
            mine = shard(p, dp, 0) - 0.1 * ppermute(piece, dp, 1)
        if how == "own_part_not_gathered":
            keep = torch.arange(p.shape[0]) // (p.shape[0] // dp.size) == axis_index(dp)
            new[name] = torch.where(keep.view(-1, *[1] * (p.dim() - 1)), mine.repeat(dp.size, *[1] * (p.dim() - 1)), p)
        elif how == "gathered_on_another_dim" and p.dim() == 2:
            new[name] = all_gather(mine, dp, 1).reshape(p.shape)
        else:
            new[name] = all_gather(mine, dp, 0)
    return ended(state, new, loss)


@whole("dp2 fsdp2", NET, "climbed_together", "climbed_alone@dp2 norm_of_here second_not_summed@dp2 norm_of_sums@fsdp2")
def sharpness_aware(state, b, axes, opt, how):
    data, grad = axes[axes.data], step.value_and_grad(of_all)
    (loss, _), raw = grad(state.params, b)
    first = raw if how == "climbed_alone" else step.reduce_gradients(raw)
    squares = sum(g.square().sum() for g in first.values())
    norm = optim.global_norm(step.reduce_gradients(raw))
    if how == "norm_of_here":
        norm = (sum(g.square().sum() for g in raw.values())).sqrt()
    if how == "norm_of_sums":
        norm = psum(squares.sqrt(), data)
    high = {k: p + 0.3 * first[k] / norm for k, p in state.params.items()}
    high = {k: tree.place({"p": x}, {"p": tree.layout_of(state.params[k])})["p"] for k, x in high.items()}
    _, again = grad(high, b)
    again = again if how == "second_not_summed" else step.reduce_gradients(again)
    return ended(state, descend(state.params, again, 0.1), loss)


@whole(
    "fsdp2 dp2·fsdp2",
    "up down square",
    "products_of_all",
    "products_of_shards product_alone norm_alone over_all@dp2·fsdp2",
)
def projected_gradients(state, b, axes, opt, how):
    """PCGrad of two losses."""

    def task(key):
        def fn(params, b):
            w = nn.gather_tree(params)
            y = torch.tanh(b["x"] @ w["up"]) @ w["down"] @ w["square"]
            return step.mean(((y - b[key]).square().sum(-1) * b["wt"]).sum(), b["wt"].sum())

        (loss, _), grads = step.value_and_grad(fn)(state.params, b)
        return loss, step.reduce_gradients(grads)

    (one, g), (two, h) = task("x"), task("y")
    over = axes["dp", "fsdp"] if how == "over_all" else axes["fsdp"]
    dot = sum((g[k] * h[k]).sum() for k in g)
    square = sum(h[k].square().sum() for k in h)
    if how not in ("products_of_shards", "product_alone"):
        square = psum(square, over)
    if how not in ("products_of_shards", "norm_alone", "over_all"):
        dot = psum(dot, over)
    both = {k: g[k] + h[k] - dot / square * h[k] for k in g}
    return ended(state, descend(state.params, both, 0.05), one + two)


@whole(
    "fsdp2 fsdp3",
    "up square",
    "centered_over_all spectral",
    "centered_over_shards divided_by_here spectral_of_here largest_row_of_here",
)
def projected_weights(state, b, axes, opt, how):
    """Constraints on whole weights after an update."""
    fsdp, new = axes["fsdp"], {}

    def fn(params, b):
        w = nn.gather_tree(params)
        return step.mean((torch.tanh(b["x"] @ w["square"] @ w["up"]).square().sum(-1) * b["wt"]).sum(), b["wt"].sum())

    (loss, _), grads = step.value_and_grad(fn)(state.params, b)
    grads = step.reduce_gradients(grads)
    for name, p in state.params.items():
        split = {"up": 1, "square": 0}[name]
        p = p - 0.1 * grads[name]
        if how in ("centered_over_shards", "divided_by_here"):
            mean = p.mean(split, keepdim=True)
            if how == "divided_by_here":
                mean = psum(p.sum(split, keepdim=True), fsdp) / p.shape[split]
            p = p - mean
        elif how == "centered_over_all":
            p = p - psum(p.sum(split, keepdim=True), fsdp) / (p.shape[split] * fsdp.size)
            p = p - p.mean(1 - split, keepdim=True)
        elif how == "largest_row_of_here":
            p = p / p.square().sum(split, keepdim=True).sqrt().amax()
        else:  # a turn of the power method
            v = torch.linspace(1, 2, p.shape[1 - split], dtype=p.dtype)
            m = p if split == 0 else p.T  # [split, other]
            u = m @ v
            back = m.T @ u
            square = u.square().sum()
            if how == "spectral":
                back, square = psum(back, fsdp), psum(square, fsdp)
            p = p * square / (back * v).sum() * 0.5 + p / (1 + back.square().sum())
        new[name] = p
    return ended(state, new, loss)


@whole(
    "dp2 fsdp2",
    NET,
    "trial_with_all_rows both_losses_declared",
    "trial_with_own_rows one_loss_of_here@dp2 means_of_trials",
)
def line_search(state, b, axes, opt, how):
    data = axes[axes.data]
    (loss, _), grads = step.value_and_grad(of_all)(state.params, b)
    grads = step.reduce_gradients(grads)
    if how == "both_losses_declared":
        large = {k: tree.place({"p": p - grads[k]}, {"p": tree.layout_of(p)})["p"] for k, p in state.params.items()}
        (after, _), _ = step.value_and_grad(of_all)(large, b)
        rate = 0.1 * torch.sigmoid(loss - after)
        return ended(state, descend(state.params, grads, rate), loss)

    def value(rate):
        moved = {k: p - rate * grads[k] for k, p in state.params.items()}
        w = nn.gather_tree(moved, {k: tree.layout_of(p) for k, p in state.params.items()})
        return ((net(w, b["x"]) - b["y"]).square().sum(-1) * b["wt"]).sum()

    trials = torch.stack([value(rate) for rate in (0.0, 0.1, 0.5)])
    if how == "trial_with_all_rows":
        trials = psum(trials, data) / psum(b["wt"].sum(), data)
    elif how == "one_loss_of_here":
        trials = torch.stack([psum(trials[0], data), *trials[1:]]) / psum(b["wt"].sum(), data)
    elif how == "means_of_trials":
        trials = psum(trials / b["wt"].sum(), data) / data.size
    else:
        trials = trials / b["wt"].sum()
    weights = (-trials).softmax(0)
    rate = (weights * torch.tensor([0.01, 0.1, 0.5], dtype=weights.dtype)).sum()
    return ended(state, descend(state.params, grads, rate), loss)


@whole(
    "dp2 dp3", NET, "mean_of_gradients fisher_of_rows", "fisher_of_rank_means largest_of_ranks@dp2 variance_of_shares"
)
def second_moments(state, b, axes, opt, how):
    dp, n = axes["dp"], b["x"].shape[0]

    def fn(params, b):
        return errors(params, b).sum()

    (loss, _), grads = step.value_and_grad(fn)(state.params, b)
    rows = n * dp.size
    mean = tree.map(lambda g: psum(g, dp) / rows, grads)
    if how == "fisher_of_rows":

        def of_one(params, x, y):
            return (net(params, x) - y).square().sum()

        each = torch.func.vmap(torch.func.grad(of_one), (None, 0, 0))(dict(state.params), b["x"], b["y"])
        square = tree.map(lambda g: psum(g.square().sum(0), dp) / rows, each)
    elif how == "fisher_of_rank_means":
        square = tree.map(lambda g: psum((g / n).square(), dp) / dp.size, grads)
    elif how == "variance_of_shares":
        square = tree.map(lambda g, m: psum((g / n - m).square(), dp) / dp.size + m * m, grads, mean)
    elif how == "largest_of_ranks":
        square = tree.map(lambda g: all_gather((g / n).square()[None], dp, 0).amax(0), grads)
    else:
        square = tree.map(lambda g: g * g, mean)
    new = {k: p - 0.05 * mean[k] / (square[k] + 1e-3).sqrt() for k, p in state.params.items()}
    return ended(state, new, psum(loss, dp) / rows)


@whole(
    "dp2 dp2·fsdp2",
    "up down",
    "clipped_rows noise_once",
    "clipped_ranks noise_of_each_rank average_of_here norms_of_here_summed",
)
def private(state, b, axes, opt, how):
    """DP-SGD: the gradient of each row is clipped, and noise added to their sum."""
    data, n = axes[axes.data], b["x"].shape[0]
    whole_of = nn.gather_tree(dict(state.params))

    def of_one(w, x, y):
        return (torch.tanh(x @ w["up"]) @ w["down"] - y).square().sum()

    rows = n * data.size
    each = torch.func.vmap(torch.func.grad(of_one), (None, 0, 0))(dict(whole_of), b["x"], b["y"])
    norm = sum(g.square().flatten(1).sum(1) for g in each.values()).sqrt()
    new = {}
    for i, (name, p) in enumerate(state.params.items()):
        factor = (1.5 / norm).clamp(max=1)
        if how == "clipped_ranks":
            g = each[name].sum(0)
            g = g * (1.5 * n / (norm.square().sum() ** 0.5)).clamp(max=1)
        elif how == "norms_of_here_summed":
            factor = (1.5 * rows / norm.sum()).clamp(max=1)
            g = each[name].sum(0) * factor
        else:
            g = (each[name] * factor[:, None, None]).sum(0)
        noise = 0.2 * nn.normal(g, key=tree.fold_in(3, i), count=state.step)
        if how == "noise_of_each_rank":
            g = psum(g + noise, data) / rows
        elif how == "average_of_here":
            g = psum(g, data) / n + noise / n
        elif how == "noise_once":
            g = (psum(g, data) + noise) / rows
        else:
            g = psum(g, data) / rows
        split = [i for i, e in enumerate(tree.layout_of(p).spec) if e]
        fsdp = axes["fsdp"]
        new[name] = p - 0.1 * (shard(g, fsdp, split[0]) if fsdp.size > 1 else g)
    e = (torch.tanh(b["x"] @ whole_of["up"]) @ whole_of["down"] - b["y"]).square().sum()
    return ended(state, new, psum(e, data) / rows)


@whole("dp2 dp3", NET, "of_all_ranks", "of_own_gradients of_each_and_summed sparse_and_divided chosen_by_index_of_here")
def sparse_gradients(state, b, axes, opt, how):
    """The largest third of each gradient's elements alone."""
    dp, new = axes["dp"], {}
    (loss, _), grads = step.value_and_grad(of_all)(state.params, b)

    def sparse(g):
        few = g.numel() // 3
        return torch.where(g.abs() >= g.abs().flatten().topk(few).values[-1], g, 0)

    for name, p in state.params.items():
        g = grads[name]
        if how == "of_own_gradients":
            g = psum(sparse(g), dp)
        elif how == "of_each_and_summed":
            g = sparse(psum(sparse(g) + g, dp) / 2)
        elif how == "sparse_and_divided":
            g = sparse(psum(g, dp)) / dp.size
        elif how == "chosen_by_index_of_here":
            summed = psum(g, dp)
            g = torch.where(sparse(g) != 0, summed, 0)
        else:
            g = sparse(psum(g, dp))
        new[name] = p - 0.1 * g
    return ended(state, new, loss)


@whole("dp2 fsdp2", NET, "entered_weights", "weights_of_here gap_of_here")
def teacher(state, b, axes, opt, how):
    """Distilled from another net of the state's own parameters, weighed by how sure it is over the whole batch."""
    data = axes[axes.data]

    def fn(params, b):
        w = nn.gather_tree(params)
        y = net(w, b["x"])
        soft = net({k: v.detach().roll(1, 0) for k, v in w.items()}, b["x"])
        sure = soft.square().sum(-1)
        share = sure / psum(sure.sum(), data)
        if how == "weights_of_here":
            share = sure / sure.sum() / data.size
        gap = (y - soft).square().sum(-1)
        scale = psum(gap.sum().detach(), data) / data.size
        scale = gap.sum().detach() if how == "gap_of_here" else enter(scale, data)
        scale = scale * (data.size if how != "gap_of_here" else 1)
        return (share * gap).sum() / (1 + scale)

    (loss, _), grads = step.value_and_grad(fn)(state.params, b)
    return ended(state, descend(state.params, step.reduce_gradients(grads), 0.1), psum(loss, data))

"""Callers with steps of their own: reductions, norms, clipping, optimizers, what a state carries beside parameters."""

import torch

from fmegatron import nn, optim, step, tree
from fmegatron.collectives import all_gather, axis_index, pmax, psum, shard
from tests.step.callers.frame import net, whole

NET = "up fb down gain"


def errors(params, b):
    """[N] of this rank's rows."""
    return (net(nn.gather_tree(params), b["x"]) - b["y"]).square().sum(-1)


def of_all(params, b):
    """The weighted mean of all rows."""
    return step.mean((errors(params, b) * b["wt"]).sum(), b["wt"].sum())


def descend(params, grads, rate):
    """Plain gradient descent."""
    return tree.map(lambda p, g: p - rate * g, params, grads)


def ended(state, params, loss, opt=None):
    """What a step returns."""
    return step.State(state.step + 1, params, state.opt if opt is None else opt), {"loss": loss}


@whole(
    "dp2 dp3",
    NET,
    "mean_of_equal_ranks sum_of_shares weighted_sum library",
    "no_division no_reduction summed_twice mean_of_unequal_ranks divided_twice one_leaf_forgotten gradient_of_a_sum",
)
def ddp(state, b, axes, opt, how):
    dp = axes["dp"]

    def fn(params, b):
        if how in ("weighted_sum", "gradient_of_a_sum", "library", "summed_twice"):
            total = (errors(params, b) * b["wt"]).sum()
            return step.mean(total, b["wt"].sum()) if how in ("library", "summed_twice") else total
        if how == "mean_of_unequal_ranks":
            return (errors(params, b) * b["wt"]).sum() / b["wt"].sum()
        return errors(params, b).mean() / (dp.size if how in ("sum_of_shares", "divided_twice") else 1)

    (loss, _), grads = step.value_and_grad(fn)(state.params, b)
    if how == "library":
        return ended(state, descend(state.params, step.reduce_gradients(grads), 0.1), loss)
    if how == "no_reduction":
        return ended(state, descend(state.params, grads, 0.1), psum(loss, dp) / dp.size)
    by = {"mean_of_equal_ranks": dp.size, "mean_of_unequal_ranks": dp.size, "divided_twice": dp.size}.get(how, 1)
    if how == "weighted_sum":
        by = psum(b["wt"].sum(), dp)
    if how == "gradient_of_a_sum":  # divided by the weights of one's own rows
        by = b["wt"].sum() * dp.size
    if how == "one_leaf_forgotten":
        grads = {name: psum(g, dp) / dp.size if name != "gain" else g / dp.size for name, g in grads.items()}
    else:
        grads = tree.map(lambda g: psum(g, dp) / by, grads)
    if how == "summed_twice":
        grads = tree.map(lambda g: psum(g, dp), grads)
    shown = loss if how in ("library", "summed_twice") else psum(loss, dp) / by
    return ended(state, descend(state.params, grads, 0.1), shown)


@whole(
    "fsdp2 dp2·fsdp2",
    "up down square",
    "library squares_over_shards per_rank_parts@fsdp2",
    "own_shards norm_of_norms@fsdp2 squares_over_all@dp2·fsdp2 before_reduction@dp2·fsdp2 largest_of_norms "
    "squares_twice",
)
def clipped(state, b, axes, opt, how):
    def fn(params, b):
        w = nn.gather_tree(params)
        e = (torch.tanh(b["x"] @ w["up"]) @ w["down"] @ w["square"] - b["y"]).square().sum(-1)
        return step.mean((e * b["wt"]).sum(), b["wt"].sum())

    (loss, _), raw = step.value_and_grad(fn)(state.params, b)
    grads = step.reduce_gradients(raw)
    counted = tree.leaves(raw if how == "before_reduction" else grads)
    squares = torch.stack([g.square().sum() for g in counted]).sum()
    if how == "library":
        norm = optim.global_norm(grads)
    elif how in ("squares_over_shards", "before_reduction"):
        norm = psum(squares, axes["fsdp"]).sqrt()
    elif how == "per_rank_parts":
        norm = all_gather(squares[None], axes["fsdp"], 0).sum().sqrt()
    elif how == "own_shards":
        norm = squares.sqrt()
    elif how == "norm_of_norms":
        norm = psum(squares.sqrt(), axes["fsdp"])
    elif how == "squares_over_all":
        norm = psum(squares, axes["dp", "fsdp"]).sqrt()
    elif how == "squares_twice":
        norm = psum(psum(squares, axes["fsdp"]), axes["fsdp"]).sqrt()
    else:
        norm = pmax(squares.sqrt(), axes["fsdp"])
    factor = (0.3 / norm).clamp(max=1)
    return ended(state, descend(state.params, tree.map(lambda g: g * factor, grads), 0.1), loss)


@whole("dp2 dp3", NET, "after", "before of_the_mean_of_others sign_before square_before")
def elementwise(state, b, axes, opt, how):
    dp = axes["dp"]
    (loss, _), grads = step.value_and_grad(of_all)(state.params, b)

    def one(g):
        if how == "before":
            return psum(g.clamp(-0.02, 0.02), dp)
        if how == "sign_before":
            return 0.02 * psum(g, dp) + 0.01 * psum(g.sign(), dp) / dp.size
        if how == "square_before":
            return psum(g, dp) / (psum(g * g, dp) + 1e-8).sqrt() * 0.05
        if how == "of_the_mean_of_others":
            return psum((psum(g, dp) - g).clamp(-0.02, 0.02), dp) / dp.size
        g = psum(g, dp)
        return g.clamp(-0.02, 0.02) + 0.01 * g.sign() + g / (g * g + 1e-8).sqrt()

    return ended(state, descend(state.params, tree.map(one, grads), 0.1), loss)


@whole(
    "fsdp2 fsdp3", "up down", "norms_of_all trust_of_gathered", "norms_of_shards weights_of_shards gradient_of_shards"
)
def trust_ratio(state, b, axes, opt, how):
    fsdp = axes["fsdp"]

    def fn(params, b):
        w = nn.gather_tree(params)
        e = (torch.tanh(b["x"] @ w["up"]) @ w["down"] - b["y"]).square().sum(-1)
        return step.mean((e * b["wt"]).sum(), b["wt"].sum())

    (loss, _), grads = step.value_and_grad(fn)(state.params, b)
    grads = step.reduce_gradients(grads)

    def norm(x, of_all):
        square = x.square().sum()
        return (psum(square, fsdp) if of_all else square).sqrt()

    if how == "trust_of_gathered":
        wide = nn.gather_tree(state.params)
        sizes = tree.map(lambda w: w.square().sum().sqrt(), wide)
        ratio = {k: sizes[k] / norm(grads[k], True) for k in grads}
    else:
        ofs = how in ("norms_of_all", "gradient_of_shards"), how in ("norms_of_all", "weights_of_shards")
        ratio = {k: norm(state.params[k], ofs[0]) / norm(grads[k], ofs[1]) for k in grads}
    return ended(state, {k: p - 0.05 * ratio[k] * grads[k] for k, p in state.params.items()}, loss)


@whole("fsdp2", "up down square", "reduced_over_the_split", "means_of_shards columns_for_rows divided_by_the_shard")
def factored(state, b, axes, opt, how):
    fsdp = axes["fsdp"]

    def fn(params, b):
        w = nn.gather_tree(params)
        e = (torch.tanh(b["x"] @ w["up"]) @ w["down"] @ w["square"] - b["y"]).square().sum(-1)
        return step.mean((e * b["wt"]).sum(), b["wt"].sum())

    (loss, _), grads = step.value_and_grad(fn)(state.params, b)
    grads, new = step.reduce_gradients(grads), {}
    for name, g in grads.items():
        split = {"up": 1, "down": 0, "square": 0}[name]  # where its layout has fsdp
        square, size = g * g + 1e-6, fsdp.size
        kept, whole = square.mean(1 - split), square.sum(split)
        if how == "means_of_shards":
            whole = square.mean(split)
        elif how == "divided_by_the_shard":
            whole = psum(whole, fsdp) / square.shape[split]
        elif how == "columns_for_rows":
            kept = psum(kept, fsdp) / size
            whole = psum(whole, fsdp) / (square.shape[split] * size)
        else:
            whole = psum(whole, fsdp) / (square.shape[split] * size)
        scale = whole.unsqueeze(split) * kept.unsqueeze(1 - split) / (whole.mean() + 1e-3)
        new[name] = state.params[name] - 0.03 * g * scale.rsqrt()
    return ended(state, new, loss)


def newton_schulz(g):
    """Orthogonal, nearly."""
    g = g / (g.square().sum().sqrt() + 1e-7)
    for _ in range(3):
        a = g @ g.T
        g = 2 * g - 1.5 * a @ g + 0.5 * a @ a @ g
    return g


@whole(
    "fsdp2 fsdp3",
    "square up",
    "gathered gathered_and_cut",
    "shards transposed_there norm_of_shards wrong_dim_cut@fsdp2",
)
def muon(state, b, axes, opt, how):
    fsdp = axes["fsdp"]

    def fn(params, b):
        w = nn.gather_tree(params)
        e = (torch.tanh(b["x"] @ w["square"] @ w["up"])[:, :6] - b["y"]).square().sum(-1)
        return step.mean((e * b["wt"]).sum(), b["wt"].sum())

    (loss, _), grads = step.value_and_grad(fn)(state.params, b)
    grads, new = step.reduce_gradients(grads), {}
    for name, g in grads.items():
        split = {"up": 1, "square": 0}[name]
        if how == "shards":
            u = newton_schulz(g)
        elif how == "norm_of_shards":
            u = shard(newton_schulz(all_gather(g / g.square().sum().sqrt(), fsdp, split)), fsdp, split)
        elif how == "wrong_dim_cut" and name == "square":
            u = shard(newton_schulz(all_gather(g, fsdp, 0)), fsdp, 1).reshape(g.shape)
        elif how == "transposed_there" and name == "square":
            u = shard(newton_schulz(all_gather(g.T, fsdp, 0).reshape(6, 6)), fsdp, split)
        elif how == "gathered_and_cut":
            u = newton_schulz(all_gather(g, fsdp, split)).chunk(fsdp.size, split)
            u = torch.stack(u).index_select(0, axis_index(fsdp).view(1))[0]
        else:
            u = shard(newton_schulz(all_gather(g, fsdp, split)), fsdp, split)
        new[name] = state.params[name] - 0.05 * u
    return ended(state, new, loss)


@whole(
    "fsdp2 dp2·fsdp2",
    NET,
    "by_position",
    "same_on_all_shards by_rank by_rank_and_summed@dp2·fsdp2",
)
def noisy_gradients(state, b, axes, opt, how):
    (loss, _), raw = step.value_and_grad(of_all)(state.params, b)
    grads, new = step.reduce_gradients(raw), {}
    for i, (name, p) in enumerate(state.params.items()):
        count, layout = state.step, tree.layout_of(p)
        if how == "same_on_all_shards":
            layout = None
        if how in ("by_rank", "by_rank_and_summed"):
            count, layout = state.step + axis_index(axes["fsdp"]), None
        noise = nn.normal(p, key=tree.fold_in(7, i), count=count, layout=layout)
        if how == "by_rank_and_summed":
            noise = psum(noise, axes["dp"])
        new[name] = p - 0.1 * (grads[name] + 0.1 * noise)
    return ended(state, new, loss)


@whole(
    "dp2 fsdp2",
    NET,
    "after_the_sum in_the_loss_as_a_share@dp2 decoupled",
    "before_the_sum@dp2,dp3 in_the_loss_of_each@dp2 of_summed_shards@fsdp2 of_own_shards_gathered@fsdp2",
)
def decay(state, b, axes, opt, how):
    data = axes[axes.data]

    def fn(params, b):
        loss = (errors(params, b) * b["wt"]).sum() / psum(b["wt"].sum(), data)
        square = sum(p.square().sum() for p in params.values())
        if how in ("in_the_loss_of_each", "of_own_shards_gathered"):
            return loss + 0.05 * (square * data.size if how == "of_own_shards_gathered" else square)
        if how == "in_the_loss_as_a_share":
            return loss + 0.05 * square / data.size
        if how == "of_summed_shards":
            return loss + 0.05 * psum(square, data).square()
        return loss

    (loss, _), grads = step.value_and_grad(fn)(state.params, b)
    if how == "before_the_sum":
        grads = {k: psum(g + 0.05 * state.params[k], axes["dp"]) for k, g in grads.items()}
    else:
        grads = step.reduce_gradients(grads)
    params = state.params
    if how == "after_the_sum":
        grads = {k: g + 0.05 * params[k] for k, g in grads.items()}
    if how == "decoupled":
        params = tree.map(lambda p: p * 0.99, params)
    return ended(state, descend(params, grads, 0.1), psum(loss.detach(), data))


@whole(
    "dp2 fsdp2",
    NET,
    "sums_and_one_division strided_parts counts_first@dp2",
    "mean_of_microbatch_means last_part_only@dp2 count_of_the_last weights_by_rank reduced_each_time_and_again@dp2",
)
def accumulated(state, b, axes, opt, how):
    data, n = axes[axes.data], b["x"].shape[0]
    parts = [{k: v[i : i + n // 2] for k, v in b.items()} for i in (0, n // 2)]
    if how == "strided_parts":
        parts = [{k: v[i::2] for k, v in b.items()} for i in (0, 1)]
    count = psum(b["wt"].sum(), data)
    grads, loss = None, 0
    for part in parts:

        def fn(params, part):
            total = (errors(params, part) * part["wt"]).sum()
            if how == "mean_of_microbatch_means":
                return total / psum(part["wt"].sum(), data) / 2
            if how == "weights_by_rank":
                return total / b["wt"].sum() / data.size
            return total / count if how == "counts_first" else total

        (value, _), g = step.value_and_grad(fn)(state.params, part)
        if how == "reduced_each_time_and_again":
            g = tree.map(lambda x: psum(x, data), g)
            g = g if grads is None else tree.map(lambda a, x: a + x, grads, g)
            grads = (
                tree.map(lambda x: psum(x, data) / data.size, g)
                if grads is None
                else tree.map(lambda x: psum(x, data), g)
            )
        else:
            grads = g if grads is None or how == "last_part_only" else tree.add(grads, g)
        loss = loss + value
    if how != "reduced_each_time_and_again":
        grads = step.reduce_gradients(grads)
    if how in ("sums_and_one_division", "strided_parts", "reduced_each_time_and_again", "last_part_only"):
        grads = tree.map(lambda g: g / count, grads)
    if how == "last_part_only":
        grads = tree.map(lambda g: 2 * g, grads)
    if how == "count_of_the_last":
        grads = tree.map(lambda g: g / psum(2 * parts[-1]["wt"].sum(), data), grads)
    return ended(state, descend(state.params, grads, 0.1), psum(loss, data))


@whole(
    "dp2 fsdp2",
    NET,
    "flag_of_all loss_of_all rate_of_all_counts@dp2",
    "flag_of_here loss_of_here count_of_here accuracy_of_here step_of_here",
)
def decided(state, b, axes, opt, how):
    data = axes[axes.data]
    (loss, _), grads = step.value_and_grad(of_all)(state.params, b)
    grads = step.reduce_gradients(grads)
    e = errors(state.params, b)
    if how in ("flag_of_all", "flag_of_here"):  # a spike anywhere makes the step small
        spike = (e.amax() > 13.3).to(e.dtype)
        rate = 0.1 - 0.09 * (pmax(spike, data) if how == "flag_of_all" else spike)
    elif how in ("loss_of_all", "loss_of_here"):
        mean = loss if how == "loss_of_all" else (e * b["wt"]).sum() / b["wt"].sum()
        rate = 0.1 / (1 + mean)
    elif how in ("rate_of_all_counts", "count_of_here"):
        heavy = (b["wt"] > 1).sum()
        rate = 0.01 * (psum(heavy, data) if how == "rate_of_all_counts" else heavy * data.size)
    elif how == "accuracy_of_here":
        rate = 0.1 * (e < 4).to(e.dtype).mean()
    else:  # Polyak's, with a norm of all and a loss of here
        rate = 0.01 * e.mean() / optim.global_norm(grads).square()
    return ended(state, descend(state.params, grads, rate), loss)

"""A step as people write them, with one fault at a marked line: by hand or by build_train_step, over microbatches, with
compiled layers and a jit inside, on up to three axes.

Letters: B rows, S positions, D model, F hidden. The rows are split over dp and fsdp, F over tp; fsdp shards w2 at rest.
A mark ends with the ways of writing that have the line, where not all of them do.
"""

import torch

from fmegatron import optim, tree
from fmegatron.collectives import Axes, all_gather, axis_index, enter, pmax, psum
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.step import build_train_step, jit, state_specs, value_and_grad
from fmegatron.step.layer import compiled_layer
from tests.fresh_state import fresh_state

B, S, D, F = 16, 3, 6, 8
SHAPES = {"norm_D": (D,), "w1_DF": (D, F), "w2_FD": (F, D), "bias_D": (D,)}
SPECS = {"norm_D": (), "w1_DF": (None, "tp"), "w2_FD": ("tp", "fsdp"), "bias_D": ()}
OPTIMIZER = optim.sgd(0.1, momentum=0.9)
WAYS = ("build", "hand", "once")


def layouts(mesh: Mesh) -> dict:
    """Of the parameters."""
    return {k: Layout(SHAPES[k], torch.float64, mesh, SPECS[k]) for k in SHAPES}


def arguments(mesh: Mesh, by: str, microbatches: int) -> tuple:
    """(state, batch) as global arrays, and the layouts of both; build_train_step's microbatches are dealt to all ranks,
    by hand each rank cuts the consecutive rows that it has."""
    generator = torch.Generator().manual_seed(0)

    def draw(shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64) - 0.3

    params = {k: draw(shape) for k, shape in SHAPES.items()}
    mask = (torch.arange(S) < torch.randint(1, S + 1, (B, 1), generator=generator)).double()
    batch = {"x": draw((B, S, D)), "y": draw((B, S, D)), "mask": mask}
    axes = Split(("dp", "fsdp"), microbatches) if by == "build" and microbatches > 1 else ("dp", "fsdp")
    rows = tree.map(lambda x: Layout(tuple(x.shape), x.dtype, mesh, (axes,)), batch)
    if by != "build":
        return (params, batch), (layouts(mesh), rows)
    specs = state_specs(tree.map(lambda x: tree.ArraySpec(x, 0.0), layouts(mesh)), OPTIMIZER)
    return (fresh_state(params, OPTIMIZER), batch), (tree.layouts(specs), rows)


def make_step(mesh: Mesh, bug: str | None = None, microbatches: int = 1, by: str = "build", save: str | None = None):
    """step(state, batch) -> (state, metrics) over symbolic axes, or its wrong version.

    by: "build" (build_train_step), "hand" (gradients of each chunk, a psum per gradient) or "once" (one gradient of the
    sum over all chunks). save: policy of the compiled layer; None: the plain function.
    """
    axes = Axes(mesh)
    data, dp, fsdp, tp = axes["dp", "fsdp"], axes["dp"], axes["fsdp"], axes["tp"]

    def block(x_BSD, w):
        u_BSD = x_BSD * torch.rsqrt(x_BSD.square().mean(-1, keepdim=True) + 1e-3) * w["norm_D"]
        u_BSD = u_BSD if bug == "no_enter" else enter(u_BSD, tp)
        z_BSF = u_BSD @ w["w1_DF"]  # bug: no_enter
        h_BSF = torch.tanh(z_BSF)
        if bug == "softmax_of_a_shard":
            h_BSF = h_BSF.softmax(-1)  # bug: softmax_of_a_shard
        if bug == "largest_of_a_shard":
            h_BSF = h_BSF / h_BSF.detach().amax(-1, keepdim=True)  # bug: largest_of_a_shard
        if bug == "wrong_largest":
            h_BSF = h_BSF / pmax(h_BSF.detach().amax(-1, keepdim=True), dp)  # bug: wrong_largest
        o_BSD = h_BSF @ w["w2_FD"]
        if bug == "tanh_of_a_sum":
            o_BSD = torch.tanh(o_BSD)  # bug: tanh_of_a_sum
        if bug == "sum_over_data":
            o_BSD = psum(o_BSD, data)  # bug: sum_over_data
        elif bug != "no_sum":
            o_BSD = psum(o_BSD, tp)
        if bug == "sum_twice":
            o_BSD = psum(o_BSD, tp)  # bug: sum_twice
        if bug == "mean_for_sum":
            o_BSD = o_BSD / tp.size  # bug: mean_for_sum
        if bug == "index_in_a_block":
            o_BSD = o_BSD + 0.1 * axis_index(tp, like=o_BSD)  # bug: index_in_a_block
        if bug == "rows_coupled":
            o_BSD = o_BSD + o_BSD.roll(1, 0)  # bug: rows_coupled
        if bug == "statistics_of_rows":
            o_BSD = o_BSD - o_BSD.mean(0)  # bug: statistics_of_rows
        return x_BSD + o_BSD + w["bias_D"]  # bug: no_sum

    def gathered(shards):
        axis = dp if bug == "gather_over_another_axis" else fsdp
        w2_FD = all_gather(shards["w2_FD"], axis, 1)  # bug: gather_over_another_axis
        return {**shards, "w2_FD": w2_FD}

    layer = (lambda x, shards: block(x, gathered(shards))) if save is None else compiled_layer(save)(block, gathered)

    def loss_fn(params, batch):
        x_BSD = layer(batch["x"], params)
        x_BSD = layer(x_BSD, params)
        nll_BS = (x_BSD - batch["y"]).square().sum(-1) * batch["mask"]
        if bug == "index_in_the_loss":
            nll_BS = nll_BS * (1 + axis_index(dp, like=nll_BS))  # bug: index_in_the_loss
        count = psum(batch["mask"].sum(), data)
        if bug == "count_over_tp":
            count = psum(count, tp)  # bug: count_over_tp
        if bug == "count_times_ranks":
            count = count * data.size  # bug: count_times_ranks
        if bug == "count_of_rows":
            count = batch["mask"].sum()  # bug: count_of_rows
        loss = nll_BS.sum() / count
        if bug == "mean_of_rows":
            loss = nll_BS.mean()  # bug: mean_of_rows
        metrics = {"loss": psum(loss.detach(), data), "tokens": count}
        if bug == "metric_of_a_rank":
            metrics["loss"] = loss.detach() * 1  # bug: metric_of_a_rank (build)
        if bug == "index_as_a_metric":
            metrics["index"] = axis_index(data, like=loss) * 1.0  # bug: index_as_a_metric (build)
        return loss, metrics

    def squares(g):
        return g.square().sum()

    def of_all_chunks(params, batch):
        chunks = {k: x.view(microbatches, -1, *x.shape[1:]) for k, x in batch.items()}
        found = [loss_fn(params, {k: x[i] for k, x in chunks.items()}) for i in range(microbatches)]
        tokens = sum(metrics["tokens"] for _, metrics in found)
        return sum(loss * metrics["tokens"] for loss, metrics in found) / tokens, {"tokens": tokens}

    def of_each_chunk(params, batch):
        total, tokens = None, 0.0
        for rows in zip(*(x.chunk(microbatches) for x in batch.values()), strict=True):
            (_, metrics), grads = value_and_grad(loss_fn)(params, dict(zip(batch, rows, strict=True)))
            grads, tokens = {k: g * metrics["tokens"] for k, g in grads.items()}, tokens + metrics["tokens"]
            total = grads if total is None else {k: total[k] + g for k, g in grads.items()}
        return {k: g / tokens for k, g in total.items()}, tokens

    def by_hand(params, batch):
        if by == "once":
            (_, metrics), total = value_and_grad(of_all_chunks)(params, batch)
            tokens = metrics["tokens"]
        else:
            total, tokens = of_each_chunk(params, batch)
        whole = {k: psum(g, dp if k == "w2_FD" else data) for k, g in total.items()}
        if bug == "one_not_reduced":
            whole["bias_D"] = total["bias_D"] * 1  # bug: one_not_reduced (hand, once)
        if bug == "reduced_twice":
            whole["norm_D"] = psum(whole["norm_D"], dp)  # bug: reduced_twice (hand, once)
        if bug == "index_in_a_gradient":
            g = whole["norm_D"]
            whole["norm_D"] = g * (1 + axis_index(tp, like=g))  # bug: index_in_a_gradient (hand, once)
        norms = {k: jit(squares)(g) for k, g in whole.items()}
        split = norms.pop("w1_DF") + (norms.pop("w2_FD") if fsdp.size == 1 else psum(norms.pop("w2_FD"), fsdp))
        if bug != "norm_of_shards":
            split = psum(split, tp)
        norm = (split + sum(norms.values())).sqrt()  # bug: norm_of_shards (hand, once)
        if bug == "rate_times_ranks":
            whole = {k: g * dp.size for k, g in whole.items()}  # bug: rate_times_ranks (hand, once)
        return {k: p - 0.1 * whole[k] for k, p in params.items()}, {"tokens": tokens, "norm": norm}

    if by != "build":
        return by_hand
    return build_train_step(loss_fn, OPTIMIZER, layouts(mesh), axes, microbatches=microbatches)

"""A small Megatron-style training step, and wrong versions of it: one fault each, at the line that names it.

Vocab-parallel embedding and cross-entropy, sequence-parallel norm and MLP over tp, weights gathered over fsdp,
gradients of replicas summed over dp, a global-norm clip, SGD with momentum. Letters: B batch, S sequence, D model,
F hidden, V vocabulary; the sharding is in `layouts`.
"""

import torch

from fmegatron.collectives import Axes, all_gather, axis_index, enter, pmax, psum, reduce_scatter, shard
from fmegatron.collectives.ops import declare
from fmegatron.layout import Layout, Mesh
from fmegatron.step import value_and_grad

V, D, F, B, S = 32, 12, 24, 16, 8
SHAPES = {"table_VD": (V, D), "norm_D": (D,), "w1_DF": (D, F), "w2_FD": (F, D), "bias_D": (D,), "head_DV": (D, V)}
SPECS = {
    "table_VD": ("tp", "fsdp"),
    "norm_D": ("fsdp",),
    "w1_DF": ("fsdp", "tp"),
    "w2_FD": ("tp", "fsdp"),
    "bias_D": ("fsdp",),
    "head_DV": ("fsdp", "tp"),
}


def layouts(mesh: Mesh) -> tuple:
    """Layouts of the arguments (state, batch)."""
    params = {k: Layout(SHAPES[k], torch.float64, mesh, SPECS[k]) for k in SHAPES}
    tokens = Layout((B, S), torch.int64, mesh, (("dp", "fsdp"), None))
    return {"p": params, "m": params}, {"tokens": tokens, "labels": tokens}


def values() -> tuple:
    """Global arguments. Norm weights are not ones and moments not zero: nothing may cancel by chance."""
    generator = torch.Generator().manual_seed(0)

    def draw(shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64) - 0.3

    state = {"p": {k: draw(s) for k, s in SHAPES.items()}, "m": {k: draw(s) * 0.1 for k, s in SHAPES.items()}}
    tokens = torch.randint(0, V, (B, S), generator=generator)
    return state, {"tokens": tokens, "labels": tokens.roll(-1, 1)}


class _GatherWithSlice(torch.autograd.Function):
    """A wrong all_gather: its backward takes this rank's part instead of summing."""

    @staticmethod
    def forward(ctx, x, axis, dim):
        ctx.axis, ctx.dim = axis, dim
        return all_gather(x, axis, dim)  # bug: gather_transpose

    @staticmethod
    def backward(ctx, g):
        return shard(g, ctx.axis, ctx.dim), None, None


class _PsumWithPsum(torch.autograd.Function):
    """A wrong psum: its backward sums again."""

    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return psum(x, axis)  # bug: psum_transpose

    @staticmethod
    def backward(ctx, g):
        return psum(g, ctx.axis), None


def make_step(mesh: Mesh, bug: str | None = None):
    """The step over a mesh with axes dp, fsdp, tp, or its wrong version."""
    axes = Axes(mesh)
    dp, fsdp, tp = axes["dp"], axes["fsdp"], axes["tp"]

    def lookup(tokens_BS, table_VD):
        axis = dp if bug == "vocab_axis" else tp
        rows = table_VD.shape[0]
        ids_BS = tokens_BS - axis_index(axis, like=tokens_BS) * rows
        mine_BS = (ids_BS >= 0) & (ids_BS < rows)
        table_VD = declare(table_VD, tp, backward=("sharded", 0))
        x_BSD = table_VD[ids_BS.clamp(0, rows - 1)] * mine_BS[..., None]
        return declare(x_BSD, tp, forward="partial")  # bug: vocab_axis

    def loss_fn(params, batch):
        wrong = dp if bug == "gather_axis" else fsdp
        full = {k: all_gather(w, fsdp, SPECS[k].index("fsdp")) for k, w in params.items() if k != "w2_FD"}
        full["w2_FD"] = all_gather(params["w2_FD"], wrong, 1)  # bug: gather_axis
        x_BSD = lookup(batch["tokens"], full["table_VD"])
        if bug == "slice_of_partial":
            x_BSD = shard(x_BSD, tp, 1)  # bug: slice_of_partial
        else:
            x_BSD = reduce_scatter(x_BSD, tp, 1)
        norm_D = full["norm_D"] if bug == "no_enter" else enter(full["norm_D"], tp)
        u_BSD = x_BSD * torch.rsqrt(x_BSD.square().mean(-1, keepdim=True) + 1e-6) * norm_D  # bug: no_enter
        gather = _GatherWithSlice.apply if bug == "gather_transpose" else all_gather
        u_BSD = gather(u_BSD, tp, 1)
        h_BSF = torch.nn.functional.gelu(u_BSD @ full["w1_DF"])
        o_BSD = h_BSF @ full["w2_FD"]
        if bug == "partial_in_gelu":
            o_BSD = torch.nn.functional.gelu(o_BSD)  # bug: partial_in_gelu
        if bug == "sum_twice":
            o_BSD = psum(o_BSD, tp)
        o_BSD = reduce_scatter(o_BSD, tp, 1)  # bug: sum_twice
        if bug == "mean_for_sum":
            o_BSD = o_BSD / mesh["tp"]  # bug: mean_for_sum
        x_BSD = x_BSD + o_BSD + enter(full["bias_D"], tp)
        logits_BSV = all_gather(x_BSD, tp, 1) @ full["head_DV"]
        return cross_entropy(logits_BSV, batch["labels"]), {}

    def cross_entropy(logits_BSV, labels_BS):
        logits_BSV = declare(logits_BSV, tp, backward=("sharded", 2))
        top_BS1 = logits_BSV.detach().amax(-1, keepdim=True)
        top_BS1 = top_BS1 if bug == "local_maximum" else pmax(top_BS1, tp)
        z_BSV = logits_BSV - top_BS1  # bug: local_maximum
        sums_BS = z_BSV.exp().sum(-1)
        if bug == "psum_transpose":
            total_BS = _PsumWithPsum.apply(sums_BS, tp)
        elif bug == "psum_axis":
            total_BS = psum(sums_BS, fsdp)  # bug: psum_axis
        else:
            total_BS = psum(sums_BS, tp)
        columns = logits_BSV.shape[-1]
        ids_BS = labels_BS - axis_index(tp, like=labels_BS) * columns
        mine_BS = (ids_BS >= 0) & (ids_BS < columns)
        found_BS = z_BSV.gather(-1, ids_BS.clamp(0, columns - 1)[..., None]).squeeze(-1) * mine_BS
        target_BS = psum(declare(found_BS, tp, forward="partial"), tp)
        if bug == "mean_of_shard":
            return (total_BS.log() - target_BS).mean()  # bug: mean_of_shard
        return (total_BS.log() - target_BS).sum() / (B * S)

    def global_norm(grads):
        def squares(names):
            return sum((grads[k].square().sum() for k in names), torch.zeros((), dtype=torch.float64))  # bug: no_dp

        split, whole = (squares([k for k in grads if ("tp" in SPECS[k]) == want]) for want in (True, False))
        if bug == "norm_counts_replicas":
            return psum(psum(split + whole, tp), fsdp).sqrt()  # bug: norm_counts_replicas
        return psum(psum(split, tp) + whole, fsdp).sqrt()

    def step(state, batch):
        (loss, _), grads = value_and_grad(loss_fn)(state["p"], batch)
        if bug != "no_dp":
            grads = {k: psum(g, dp) for k, g in grads.items()}
        norm = global_norm(grads)
        scale = torch.clamp(0.05 / norm, max=1.0)  # the clip is active: it must not hide what it rescales
        moments = {k: 0.9 * state["m"][k] + g * scale for k, g in grads.items()}
        params = {k: p - 0.1 * moments[k] for k, p in state["p"].items()}
        if bug == "metric":
            return {"p": params, "m": moments}, {"loss": psum(loss, dp), "grad_norm": norm}  # bug: metric
        return {"p": params, "m": moments}, {"loss": psum(psum(loss, dp), fsdp), "grad_norm": norm}

    return step

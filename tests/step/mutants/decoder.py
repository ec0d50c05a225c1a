"""A Megatron-style decoder step, written by hand: tensor and sequence parallelism, ZeRO-3 gathers, clip, Adam.

Vocabulary-parallel embedding and cross-entropy over tp, sequence shards around attention and MLP, one key-value head
that all ranks of tp use, norm weights and bias replicated over tp, weights gathered over fsdp, gradients of replicas
summed over dp. The mutants of `of_decoder.py` are this file with one line changed.
Letters: B batch, S sequence, D model, H heads, F hidden, V vocabulary.
"""

import math

import torch

from fmegatron.collectives import Axes, all_gather, axis_index, enter, pmax, psum, reduce_scatter  # fmt: skip
from fmegatron.collectives.ops import declare
from fmegatron.layout import Layout, Mesh
from fmegatron.step import value_and_grad

V, D, H, E, F, B, S = 32, 12, 4, 6, 40, 16, 8
SHAPES = {
    "table_VD": ((V, D), ("tp", "fsdp")),
    "norm1_D": ((D,), ("fsdp",)),
    "wq_DHE": ((D, H * E), ("fsdp", "tp")),
    "wkv_DE": ((D, 2 * E), ("fsdp", None)),
    "wo_HED": ((H * E, D), ("tp", "fsdp")),
    "norm2_D": ((D,), ("fsdp",)),
    "w1_DF": ((D, F), ("fsdp", "tp")),
    "w2_FD": ((F, D), ("tp", "fsdp")),
    "bias_D": ((D,), ("fsdp",)),
    "head_DV": ((D, V), ("fsdp", "tp")),
}


def layouts(mesh: Mesh) -> tuple:
    """Layouts of the arguments (state, batch)."""
    params = {k: Layout(shape, torch.float64, mesh, spec) for k, (shape, spec) in SHAPES.items()}
    tokens = Layout((B, S), torch.int64, mesh, (("dp", "fsdp"), None))
    return {"p": params, "m": params, "v": params}, {"tokens": tokens, "labels": tokens}


def values() -> tuple:
    """Global arguments: norm weights are not ones, moments not zero, second moments above zero: nothing cancels."""
    generator = torch.Generator().manual_seed(0)

    def draw(low):
        def one(shape):
            return torch.rand(shape, generator=generator, dtype=torch.float64) + low

        return {k: one(shape) for k, (shape, _) in SHAPES.items()}

    tokens = torch.randint(0, V, (B, S), generator=generator)
    return {"p": draw(-0.4), "m": draw(-0.5), "v": draw(0.1)}, {"tokens": tokens, "labels": tokens.roll(-1, 1)}


def rms_norm(x_BSD, w_D):
    """x / rms(x) * w."""
    return x_BSD * torch.rsqrt(x_BSD.square().mean(-1, keepdim=True) + 1e-6) * w_D


def make_step(mesh: Mesh):
    """step(state, batch) -> (state, metrics) over the symbolic axes dp, fsdp, tp of a mesh."""
    axes = Axes(mesh)
    dp, fsdp, tp = axes["dp"], axes["fsdp"], axes["tp"]
    split_by_tp = {k for k, (_, spec) in SHAPES.items() if "tp" in spec}

    def lookup(tokens_BS, table_VD):
        rows = table_VD.shape[0]
        ids_BS = tokens_BS - axis_index(tp) * rows
        own_BS = (ids_BS >= 0) & (ids_BS < rows)
        table_VD = declare(table_VD, tp, backward=("sharded", 0))
        x_BSD = table_VD[ids_BS.clamp(0, rows - 1)] * own_BS[..., None]
        return reduce_scatter(declare(x_BSD, tp, forward="partial"), tp, 1)

    def attention(x_BSD, w):
        u_BSD = rms_norm(x_BSD, enter(w["norm1_D"], tp))
        u_BSD = all_gather(u_BSD, tp, 1)
        q_BHSE = (u_BSD @ w["wq_DHE"]).unflatten(2, (-1, E)).transpose(1, 2)
        kv_DE = enter(w["wkv_DE"], tp)
        k_BSE, v_BSE = (u_BSD @ kv_DE).chunk(2, -1)
        scores_BHST = q_BHSE @ k_BSE.unsqueeze(1).transpose(-1, -2) / math.sqrt(E)
        causal_ST = torch.ones(S, S, dtype=torch.bool).tril()
        mixed_BHSE = scores_BHST.masked_fill(~causal_ST, -1e9).softmax(-1) @ v_BSE.unsqueeze(1)
        o_BSD = mixed_BHSE.transpose(1, 2).flatten(2) @ w["wo_HED"]
        return reduce_scatter(o_BSD, tp, 1)

    def mlp(x_BSD, w):
        u_BSD = all_gather(rms_norm(x_BSD, enter(w["norm2_D"], tp)), tp, 1)
        h_BSF = torch.nn.functional.gelu(u_BSD @ w["w1_DF"])
        o_BSD = h_BSF @ w["w2_FD"]
        o_BSD = reduce_scatter(o_BSD, tp, 1)
        return o_BSD + enter(w["bias_D"], tp)

    def cross_entropy(logits_BSV, labels_BS):
        logits_BSV = declare(logits_BSV, tp, backward=("sharded", 2))
        top_BS1 = logits_BSV.detach().amax(-1, keepdim=True)
        z_BSV = logits_BSV - pmax(top_BS1, tp)
        sums_BS = z_BSV.exp().sum(-1)
        total_BS = psum(sums_BS, tp)
        columns = logits_BSV.shape[-1]
        ids_BS = labels_BS - axis_index(tp) * columns
        own_BS = (ids_BS >= 0) & (ids_BS < columns)
        found_BS = z_BSV.gather(-1, ids_BS.clamp(0, columns - 1)[..., None]).squeeze(-1) * own_BS
        target_BS = psum(declare(found_BS, tp, forward="partial"), tp)
        return total_BS.log() - target_BS

    def loss_fn(params, batch):
        w = {k: all_gather(x, fsdp, SHAPES[k][1].index("fsdp")) for k, x in params.items() if k != "w1_DF"}
        w["w1_DF"] = all_gather(params["w1_DF"], fsdp, 0)
        x_BSD = lookup(batch["tokens"], w["table_VD"])
        x_BSD = x_BSD + attention(x_BSD, w)
        x_BSD = x_BSD + mlp(x_BSD, w)
        logits_BSV = all_gather(x_BSD, tp, 1) @ w["head_DV"]
        nll_BS = cross_entropy(logits_BSV, batch["labels"])
        tokens = nll_BS.numel() * mesh["dp"] * mesh["fsdp"]
        return nll_BS.sum() / tokens

    def squares(grads, names):
        return sum((grads[k].square().sum() for k in sorted(names)), torch.zeros((), dtype=torch.float64))

    def step(state, batch):
        (loss, _), raw = value_and_grad(loss_fn)(state["p"], batch)
        grads = {k: psum(g, dp) for k, g in raw.items()}
        split, whole = squares(grads, split_by_tp), squares(grads, grads.keys() - split_by_tp)
        by_tp = psum(split, tp) + whole
        total = psum(by_tp, fsdp)
        norm = total.sqrt()
        scale = torch.clamp(0.05 / (norm + 1e-6), max=1.0)  # active: it must not hide what it rescales
        clipped = {k: g * scale for k, g in grads.items()}
        m = {k: 0.9 * state["m"][k] + 0.1 * g for k, g in clipped.items()}
        v = {k: 0.95 * state["v"][k] + 0.05 * g.square() for k, g in clipped.items()}
        p = {k: x - 0.05 * m[k] / (v[k].sqrt() + 1e-3) for k, x in state["p"].items()}
        everywhere = psum(loss, axes["dp", "fsdp"])
        return {"p": p, "m": m, "v": v}, {"loss": everywhere, "grad_norm": norm}

    return step

"""The decoder: its weights as a step uses them, its blocks and its loss.

Legend: B batch, S sequence, D width, H/G local query/kv heads, K head width, F hidden width, V padded vocabulary.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fmegatron import nn, step, tree
from fmegatron.collectives import Axes, Axis, enter, psum
from fmegatron.model.config import Config

GROUPS = ("blocks", "embed", "head")  # whose gathered weights can be freed after use: each block, the table, the head


# ---- weights as a step uses them -------------------------------------------------------------------------------------
def gather_weights(shards, layouts, config: Config, axes: Axes):
    """Matrices in the compute dtype, whole over the data axes: `w[D_fsdp, F_tp] -> w[D, F_tp]`, one all_gather for all.

    They travel as `config.policy.wires` says. Vectors (norm weights) keep their dtype: they are small, their maths is
    fp32; they are in the same buffer nevertheless.
    Transpose: one reduce_scatter of all gradients, which arrive in the dtype of the shards.
    """
    return nn.gather_tree(shards, layouts, axes[axes.data], config.policy.wires(layouts))


def prepared(params: dict, layouts: dict, config: Config, axes: Axes) -> dict:
    """Parameters as `gather_weights` takes them: matrices that travel in 8 bits get their scales, by one pmax."""
    wire = config.policy.wire
    if not wire.scaled or wire.gather is None:
        return params
    stacked = {name: tree.map(lambda _, name=name: name == "blocks", leaf) for name, leaf in layouts.items()}
    return nn.with_scales(params, layouts, axes, wire.gather, stacked)


class _Outer:
    """The weights outside of the blocks, by name: some gathered together at once and kept, the others when asked for.

    freed: the groups of `GROUPS` that are gathered for each use.
    """

    def __init__(self, params: dict, layouts: dict, config: Config, axes: Axes, freed: tuple[str, ...]):
        if unknown := [name for name in freed if name not in GROUPS]:
            raise ValueError(f"reshard_after_forward: got {unknown[0]!r}, wanted names among {', '.join(GROUPS)}")
        self.params, self.layouts, self.config, self.axes = params, layouts, config, axes
        self.groups = {"embed": ("embed",), "head": ("final_norm", "embed" if config.tied else "head")}
        kept = [name for group, names in self.groups.items() if group not in freed for name in names]
        self.kept = self._gather(list(dict.fromkeys(kept)))

    def _gather(self, names: list[str]) -> dict:
        params, layouts = ({name: whole[name] for name in names} for whole in (self.params, self.layouts))
        return gather_weights(params, layouts, self.config, self.axes) if names else {}

    def __getitem__(self, group: str) -> dict:
        names = self.groups[group]
        missing = [name for name in names if name not in self.kept]
        return {**{name: self.kept[name] for name in names if name in self.kept}, **self._gather(missing)}


# ---- blocks ----------------------------------------------------------------------------------------------------------
def block(x_BSD: Tensor, w: dict, cos_Sh: Tensor, sin_Sh: Tensor, *, config: Config, tp: Axis) -> Tensor:
    """x + attention(norm(x)), then + mlp(norm(x)): a pure function of tensors, compiled once for all layers.

    `x[B, S, D]@R(tp) -> y[B, S, D]@R(tp)`, or S_tp at both ends with sequence parallelism. Two reductions over tp
    forward (psum, or reduce_scatter) and their pair backward. Source: Llama 2, arXiv 2307.09288, section 2.2.

    Args:
        x_BSD: activations in the compute dtype.
        w: one layer's weights, gathered over the data axes and split over tp: {"attention_norm", "attention": {"wqkv",
            "wo"}, "mlp_norm", "mlp": {"w_gate_up", "w_down"}}.
        cos_Sh: cosines of the rotary embedding, one row for each position.
        sin_Sh: its sines.
        config: sizes and dtypes.
        tp: the axis of tensor parallelism.
    """
    q_BSHK, k_BSGK, v_BSGK = project_qkv(x_BSD, w, cos_Sh, sin_Sh, config, tp)
    return finish_block(x_BSD, nn.attention(q_BSHK, k_BSGK, v_BSGK), w, config, tp)


def project_qkv(x_BSD: Tensor, w: dict, cos_Sh: Tensor, sin_Sh: Tensor, config: Config, tp: Axis):
    """The first part of a block: norm, fused projection, RoPE -> (q[B, S, H, K], k[B, S, G, K], v[B, S, G, K])."""
    K, sp = config.head_dim, config.sequence_parallel
    u_BSD = nn.rms_norm(x_BSD, norm_weight(w["attention_norm"], config, tp), config.norm_eps)
    qkv_BSF = nn.column_parallel(u_BSD, w["attention"]["wqkv"], tp, sp)
    heads, kv_heads = config.heads // tp.size, config.kv_heads // tp.size
    qkv = qkv_BSF.unflatten(-1, (heads + 2 * kv_heads, K)).split((heads, kv_heads, kv_heads), -2)
    return nn.apply_rope(qkv[0], cos_Sh, sin_Sh), nn.apply_rope(qkv[1], cos_Sh, sin_Sh), qkv[2]


def finish_block(x_BSD: Tensor, o_BSHK: Tensor, w: dict, config: Config, tp: Axis) -> Tensor:
    """The rest of a block once the heads have looked: output projection and MLP, each added to the residual stream."""
    sp = config.sequence_parallel
    x_BSD = x_BSD + nn.row_parallel(o_BSHK.flatten(2), w["attention"]["wo"], tp, sp)
    u_BSD = nn.rms_norm(x_BSD, norm_weight(w["mlp_norm"], config, tp), config.norm_eps)
    return x_BSD + nn.swiglu(u_BSD, w["mlp"]["w_gate_up"], w["mlp"]["w_down"], tp, sp)


def norm_weight(w_D: Tensor, config: Config, tp: Axis) -> Tensor:
    """A norm's weight as the ranks of tp use it: `w@R -> w@R`.

    With sequence parallelism each rank normalises other tokens, so the gradient is a sum over tp: `enter` makes it.
    Without, every rank does the same work on the same tokens and the gradients are already whole and equal.
    """
    return enter(w_D, tp) if config.sequence_parallel else w_D


# ---- forward and loss ------------------------------------------------------------------------------------------------
def logits(
    params: dict,
    tokens_BS: Tensor,
    config: Config,
    layouts: dict,
    axes: Axes,
    save: step.Policy | None = None,
    offload: int | None = None,
    reshard_after_forward: tuple[str, ...] | None = None,
) -> Tensor:
    """Next-token scores: `tokens[B, S] -> logits[B, S, V_tp]` in the compute dtype; padded columns are not masked.

    Args:
        params: this rank's shards.
        tokens_BS: int64, B split over the data axes.
        config: of the model.
        layouts: of the parameters.
        axes: Axes(mesh).
        save: what a block, compiled once for all, keeps for its backward (`step.layers`); None: as autograd does.
        offload: bytes from which on it waits in host memory (`step.layers`).
        reshard_after_forward: the groups of weights that are gathered for a use and gone after it ("blocks": each block
            again for its backward, unless `save` is None; "embed": for the lookup, whose transpose needs no
            weights; "head": where the blocks end, which is where the backward begins). Groups that are left out are
            kept from their gather to the end of the backward; "embed" and "head" then travel in one collective.
            None: all of GROUPS, which needs the least memory (one group at a time) and no byte more on the wire; with a
            tied table all but "head": it is used at both ends, and freeing it in between costs one more gather and
            reduce-scatter.
    """
    if tokens_BS.shape[1] > config.max_seq:
        raise ValueError(
            f"tokens: got sequences of {tokens_BS.shape[1]}, wanted at most Config.max_seq={config.max_seq}; "
            "raise max_seq (RoPE needs no new parameters) or cut the batch"
        )
    tp = axes["tp"]
    if config.sequence_parallel and tokens_BS.shape[1] % tp.size:
        raise ValueError(
            f"tokens: got sequences of {tokens_BS.shape[1]}, wanted a multiple of tp={tp.size} (sequence parallelism); "
            "change the length, or set Config.sequence_parallel=False"
        )
    if reshard_after_forward is None:
        reshard_after_forward = tuple(name for name in GROUPS if name != "head" or not config.tied)
    params = prepared(params, layouts, config, axes)
    outer = _Outer(params, layouts, config, axes, reshard_after_forward)
    positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    cos_Sh, sin_Sh = nn.rope_angles(positions_S, config.head_dim, config.rope_theta, config.compute_dtype)

    x_BSD = nn.embed(tokens_BS, outer["embed"]["embed"]["table"], tp, config.sequence_parallel)
    run = step.layers(
        functools.partial(block, config=config, tp=tp),
        params["blocks"],
        layouts["blocks"],
        axes,
        save,
        precision=config.policy,
        offload=offload,
        reshard_after_forward="blocks" in reshard_after_forward,
    )
    return read_out(run(x_BSD, cos_Sh, sin_Sh), outer["head"], config, tp)


def read_out(x_BSD: Tensor, outer: dict, config: Config, tp: Axis) -> Tensor:
    """Final norm and head: `x[B, S, D]@R(tp)` (S_tp with sequence parallelism) `-> logits[B, S, V_tp]`."""
    x_BSD = nn.rms_norm(x_BSD, norm_weight(outer["final_norm"], config, tp), config.norm_eps)
    head_DV = outer["embed"]["table"].t() if config.tied else outer["head"]["w"]
    return nn.column_parallel(x_BSD, head_DV, tp, config.sequence_parallel)


def loss(
    params: dict,
    batch: dict,
    config: Config,
    layouts: dict,
    axes: Axes,
    save: step.Policy | None = None,
    offload: int | None = None,
    reshard_after_forward: tuple[str, ...] | None = None,
) -> tuple[Tensor, dict]:
    """(this rank's part of the loss, metrics): the parts of all data ranks add up to the mean over all tokens.

    The divisor is the global token count: a constant without a mask, else one psum of the masks' sums. Every tp rank
    has the same part. The metrics are 0-d and equal on all ranks: "loss" (with z-loss), "z_loss" (its share; only if
    configured), "tokens" (int64).

    Args:
        params: this rank's shards.
        batch: {"tokens", "labels": int64 [B, S]; optional "mask" [B, S]: weight of each token}, B split over
            `axes.data`.
        config: of the model.
        layouts: of the parameters.
        axes: Axes(mesh).
        save: what a block keeps for its backward (`logits`).
        offload: what of it waits in host memory (`logits`).
        reshard_after_forward: which weights are gathered for each use (`logits`).
    """
    for name in ("labels", "mask"):
        if name in batch and batch[name].shape != batch["tokens"].shape:
            raise ValueError(
                f"batch[{name!r}]: got shape {tuple(batch[name].shape)}, wanted that of the tokens, "
                f"{tuple(batch['tokens'].shape)}; give one entry for each token"
            )
    logits_BSV = logits(params, batch["tokens"], config, layouts, axes, save, offload, reshard_after_forward)
    data = axes[axes.data]
    nll_BS, lse_BS = nn.cross_entropy(logits_BSV, batch["labels"], axes["tp"], config.vocab_size)
    z_BS = config.z_loss * lse_BS.square()
    if "mask" in batch:
        mask_BS = batch["mask"].to(nll_BS.dtype)
        nll_BS, z_BS = nll_BS * mask_BS, z_BS * mask_BS
        tokens = psum(mask_BS.sum(), data)
        count = tokens.clamp(min=1.0)  # a batch without any token has loss 0, not 0/0
    else:
        count = nll_BS.numel() * data.size
        tokens = torch.full((), count, dtype=torch.int64, device=nll_BS.device)
    metrics = {"tokens": tokens.to(torch.int64)}
    if not config.z_loss:
        local = nll_BS.sum() / count
        return local, {"loss": psum(local.detach(), data), **metrics}
    z = z_BS.sum() / count
    local = nll_BS.sum() / count + z
    total, z = psum(torch.stack((local.detach(), z.detach())), data).unbind(0)
    return local, {"loss": total, "z_loss": z, **metrics}

"""One decoder block on local shards.  Legend: B batch, S sequence, D width, H/G local query/kv heads, K head width."""

from __future__ import annotations

from torch import Tensor

from fmegatron import nn
from fmegatron.collectives import Axis, enter
from fmegatron.model.config import Config


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

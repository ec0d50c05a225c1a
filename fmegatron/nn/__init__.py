"""Maths on local shards: functions only, each collective a visible call. Imports layout, tree and collectives."""

from fmegatron.nn.attention import Causal, attention, soft_cap, visible
from fmegatron.nn.attention_blocks import attention_with_lse
from fmegatron.nn.context_parallel import (
    gathered_attention,
    ring_attention,
    two_level_attention,
    ulysses_attention,
    zigzag,
)
from fmegatron.nn.embed import embed, positions
from fmegatron.nn.gather import gather_tree
from fmegatron.nn.linear import column_parallel, row_parallel
from fmegatron.nn.loss import best, chunked_cross_entropy, cross_entropy
from fmegatron.nn.mlp import ACTIVATIONS, gated_mlp
from fmegatron.nn.moe import dropless, expert_weights, most_rows, with_capacity
from fmegatron.nn.norm import layer_norm, rms_norm
from fmegatron.nn.random import dropout, normal, uniform
from fmegatron.nn.rope import Linear, Llama3, Scaling, Yarn, apply_rope, rope_angles
from fmegatron.nn.router import (
    Router,
    Routing,
    balanced_bias,
    expert_load,
    expert_probs,
    jittered,
    noisy,
    router_entropy,
    router_z_loss,
    sequence_balance_loss,
)
from fmegatron.nn.scaled import Scaled, with_scales
from fmegatron.nn.state_space import causal_conv, from_before, gated_rms_norm, segments, ssd, ssd_step
from fmegatron.nn.weight import LowRank, Pair, Weight, dense, entered, grouped_matmul, matmul

__all__ = [
    "ACTIVATIONS",
    "Causal",
    "Linear",
    "Llama3",
    "LowRank",
    "Pair",
    "Router",
    "Routing",
    "Scaled",
    "Scaling",
    "Weight",
    "Yarn",
    "apply_rope",
    "attention",
    "attention_with_lse",
    "best",
    "balanced_bias",
    "causal_conv",
    "chunked_cross_entropy",
    "column_parallel",
    "cross_entropy",
    "dense",
    "dropless",
    "dropout",
    "embed",
    "entered",
    "expert_load",
    "expert_probs",
    "expert_weights",
    "from_before",
    "gated_mlp",
    "gated_rms_norm",
    "gather_tree",
    "gathered_attention",
    "grouped_matmul",
    "jittered",
    "layer_norm",
    "matmul",
    "most_rows",
    "noisy",
    "normal",
    "positions",
    "ring_attention",
    "rms_norm",
    "rope_angles",
    "router_entropy",
    "router_z_loss",
    "row_parallel",
    "segments",
    "sequence_balance_loss",
    "soft_cap",
    "ssd",
    "ssd_step",
    "two_level_attention",
    "ulysses_attention",
    "uniform",
    "visible",
    "with_capacity",
    "with_scales",
    "zigzag",
]

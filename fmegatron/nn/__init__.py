"""Maths on local shards: functions only, each collective a visible call. Imports layout, tree and collectives."""

from fmegatron.nn.attention import attention
from fmegatron.nn.attention_blocks import attention_with_lse
from fmegatron.nn.context_parallel import (
    gathered_attention,
    ring_attention,
    two_level_attention,
    ulysses_attention,
    zigzag,
)
from fmegatron.nn.embed import embed
from fmegatron.nn.gather import gather_tree
from fmegatron.nn.linear import column_parallel, row_parallel
from fmegatron.nn.loss import cross_entropy
from fmegatron.nn.mlp import swiglu
from fmegatron.nn.norm import rms_norm
from fmegatron.nn.random import dropout, normal, uniform
from fmegatron.nn.rope import apply_rope, rope_angles
from fmegatron.nn.scaled import Scaled, with_scales

__all__ = [
    "Scaled",
    "apply_rope",
    "attention",
    "attention_with_lse",
    "column_parallel",
    "cross_entropy",
    "dropout",
    "embed",
    "gather_tree",
    "gathered_attention",
    "normal",
    "ring_attention",
    "rms_norm",
    "rope_angles",
    "row_parallel",
    "swiglu",
    "two_level_attention",
    "ulysses_attention",
    "uniform",
    "with_scales",
    "zigzag",
]

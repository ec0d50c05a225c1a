"""Maths on local shards: functions only, each collective a visible call. Imports layout, tree and collectives."""

from fmegatron.nn.attention import attention
from fmegatron.nn.embed import embed
from fmegatron.nn.gather import gather_tree
from fmegatron.nn.grouped import grouped_mm
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
    "column_parallel",
    "cross_entropy",
    "dropout",
    "embed",
    "gather_tree",
    "grouped_mm",
    "normal",
    "rms_norm",
    "rope_angles",
    "row_parallel",
    "swiglu",
    "uniform",
    "with_scales",
]

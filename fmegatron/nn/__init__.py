"""Maths on local shards: functions only, each collective a visible call. Imports layout, tree and collectives."""

from fmegatron.moved import no_name as _no_name
from fmegatron.nn.attention_masks import Causal
from fmegatron.nn.context_parallel import ring_attention
from fmegatron.nn.dense_attention import attention, attention_kernel
from fmegatron.nn.embedding import embed
from fmegatron.nn.gather import gather_tree
from fmegatron.nn.linear import column_parallel, row_parallel
from fmegatron.nn.loss import chunked_cross_entropy, cross_entropy
from fmegatron.nn.mlp import gated_mlp
from fmegatron.nn.norm import layer_norm, rms_norm
from fmegatron.nn.random import dropout, normal, uniform
from fmegatron.nn.rope import Llama3, Yarn, apply_rope, rope_angles
from fmegatron.nn.routing import Router
from fmegatron.nn.scaled import Scaled
from fmegatron.nn.state_space import ssd
from fmegatron.nn.weight import LowRank, Pair, dense, entered, grouped_matmul, matmul

__all__ = [
    "Causal",
    "Llama3",
    "LowRank",
    "Pair",
    "Router",
    "Scaled",
    "Yarn",
    "apply_rope",
    "attention",
    "attention_kernel",
    "chunked_cross_entropy",
    "column_parallel",
    "cross_entropy",
    "dense",
    "dropout",
    "embed",
    "entered",
    "gated_mlp",
    "gather_tree",
    "grouped_matmul",
    "layer_norm",
    "matmul",
    "normal",
    "ring_attention",
    "rms_norm",
    "rope_angles",
    "row_parallel",
    "ssd",
    "uniform",
]

globals()["__getattr__"] = _no_name(__name__)

"""Models: a decoder as a function, and the tree of specs (shape, dtype, layout, initial values) of its arrays."""

from fmegatron.model import sample
from fmegatron.model.block import block
from fmegatron.model.config import Config
from fmegatron.model.counts import cache_bytes_per_token, flops_per_token, parameters
from fmegatron.model.gpt import (
    GROUPS,
    RULES,
    gather_weights,
    init,
    layouts,
    logits,
    loss,
    specs,
)
from fmegatron.model.sample import generate

__all__ = [
    "GROUPS",
    "RULES",
    "Config",
    "block",
    "cache_bytes_per_token",
    "flops_per_token",
    "gather_weights",
    "generate",
    "init",
    "layouts",
    "logits",
    "loss",
    "parameters",
    "sample",
    "specs",
]

"""Models: a decoder as a function, and the tree of specs (shape, dtype, layout, initial values) of its arrays."""

from fmegatron.model import sample
from fmegatron.model.config import Config
from fmegatron.model.counts import cache_bytes_per_token, flops_per_token, parameters
from fmegatron.model.gpt import GROUPS, block, gather_weights, logits, loss
from fmegatron.model.sample import generate
from fmegatron.model.specs import RULES, init, layouts, specs

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

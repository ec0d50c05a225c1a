"""Models: decoders as lists of blocks of mixers, and the tree of specs of their arrays."""

from fmegatron.model import families, sample
from fmegatron.model.adapters import Adapter, adapted, lora, merged
from fmegatron.model.arrays import Array, At
from fmegatron.model.attention import Attention
from fmegatron.model.choose import Choice
from fmegatron.model.counts import cache_bytes_per_token, flops_per_token, parameters
from fmegatron.model.decoder import MTP, Decoder, Part
from fmegatron.model.deterministic import deterministic
from fmegatron.model.families import llama
from fmegatron.model.forward import block, blocks, contexts, embed, hidden, logits, loss, read_out, token_losses
from fmegatron.model.harness import harness
from fmegatron.model.json_form import described, description
from fmegatron.model.mamba import Mamba
from fmegatron.model.mixer import Mixer, PerToken
from fmegatron.model.mla import MLA
from fmegatron.model.mlp import MLP
from fmegatron.model.moe import MoE
from fmegatron.model.mtp import ahead
from fmegatron.model.norm import LayerNorm, RMSNorm
from fmegatron.model.rope import Rope
from fmegatron.model.sample import ENDED, Inference, generate, inference, stream
from fmegatron.model.scoring import Score, perplexity, score
from fmegatron.model.settled import settled
from fmegatron.model.specs import arrays, init, layouts, rules, specs
from fmegatron.model.stored import Opened, kept, opened
from fmegatron.model.text import pieces
from fmegatron.model.training import build
from fmegatron.model.weights import GROUPS, Weights, gather_weights
from fmegatron.model.wrapped import Wrapped

__all__ = [
    "ENDED",
    "GROUPS",
    "MLA",
    "MLP",
    "MTP",
    "Adapter",
    "Array",
    "At",
    "Attention",
    "Choice",
    "Decoder",
    "Inference",
    "LayerNorm",
    "Mamba",
    "Mixer",
    "MoE",
    "Opened",
    "Part",
    "PerToken",
    "RMSNorm",
    "Rope",
    "Score",
    "Weights",
    "Wrapped",
    "adapted",
    "ahead",
    "arrays",
    "block",
    "build",
    "blocks",
    "contexts",
    "embed",
    "cache_bytes_per_token",
    "described",
    "description",
    "deterministic",
    "families",
    "flops_per_token",
    "harness",
    "hidden",
    "gather_weights",
    "generate",
    "inference",
    "init",
    "kept",
    "layouts",
    "llama",
    "logits",
    "lora",
    "loss",
    "merged",
    "opened",
    "parameters",
    "perplexity",
    "pieces",
    "read_out",
    "rules",
    "sample",
    "score",
    "settled",
    "specs",
    "stream",
    "token_losses",
]

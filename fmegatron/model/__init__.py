"""Models: decoders as lists of blocks of mixers, and the tree of specs of their arrays."""

from fmegatron.model.adapters import adapted, lora, merged
from fmegatron.model.array_specs import layouts, specs
from fmegatron.model.arrays import Array
from fmegatron.model.attention import Attention
from fmegatron.model.decoder import MTP, Decoder, Part
from fmegatron.model.determinism import deterministic
from fmegatron.model.families.llamas import llama
from fmegatron.model.forward import blocks, contexts, embed, logits, loss, read_out, token_losses
from fmegatron.model.lm_harness import harness
from fmegatron.model.mamba import Mamba
from fmegatron.model.mixer import Mixer, PerToken
from fmegatron.model.mlp import MLP
from fmegatron.model.moe import MoE
from fmegatron.model.mtp import ahead
from fmegatron.model.norm import RMSNorm
from fmegatron.model.post_updates import post_update
from fmegatron.model.sample import ENDED, generate, inference, stream
from fmegatron.model.scoring import perplexity, score
from fmegatron.model.stored import kept, opened
from fmegatron.model.training import build
from fmegatron.model.weights import Weights
from fmegatron.model.wrapped import Wrapped
from fmegatron.moved import no_name as _no_name

__all__ = [
    "Array",
    "Attention",
    "Decoder",
    "ENDED",
    "MLP",
    "MTP",
    "Mamba",
    "Mixer",
    "MoE",
    "Part",
    "PerToken",
    "RMSNorm",
    "Weights",
    "Wrapped",
    "adapted",
    "ahead",
    "blocks",
    "build",
    "contexts",
    "deterministic",
    "embed",
    "generate",
    "harness",
    "inference",
    "kept",
    "layouts",
    "llama",
    "logits",
    "lora",
    "loss",
    "merged",
    "opened",
    "perplexity",
    "post_update",
    "read_out",
    "score",
    "specs",
    "stream",
    "token_losses",
]

globals()["__getattr__"] = _no_name(__name__)

"""Bamba: Mamba-2 in most layers, attention with half-rotated heads in a few, an MLP in each.

Source: https://huggingface.co/blog/bamba; Mamba-2: arXiv 2405.21060.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from types import MappingProxyType
from typing import Any

from fmegatron.model.attention import Attention
from fmegatron.model.decoder import Block, Decoder, Part
from fmegatron.model.families.family import Family, depthwise, linear, plain
from fmegatron.model.families.keys import Keys
from fmegatron.model.families.llamas import LAYER, NAMES, UNUSED
from fmegatron.model.mamba import Mamba
from fmegatron.model.mixer import Mixer
from fmegatron.model.mlp import MLP
from fmegatron.model.norm import RMSNorm
from fmegatron.model.rope import Rope


def bamba(
    vocab_size: int,
    dim: int,
    layers: int,
    max_seq: int,
    mamba: Mixer,
    attention: Mixer,
    mlp: Mixer,
    attention_layers: Collection[int],
    *,
    norm_eps: float = 1e-5,
    **of_decoder: Any,
) -> Decoder:
    """A hybrid of its three mixers.

    Args:
        vocab_size: ids that exist.
        dim: model width.
        layers: number of blocks.
        max_seq: longest sequence, in tokens.
        mamba: of most layers (`Mamba`).
        attention: of the others (`Attention`).
        mlp: of all.
        attention_layers: depths that have attention.
        norm_eps: of all norms.
        of_decoder: fields of `Decoder`.
    """
    norm = RMSNorm(norm_eps)

    def block(i: int) -> Block:
        first = Part("attention", attention, norm) if i in attention_layers else Part("mamba", mamba, norm)
        return first, Part("mlp", mlp, norm)

    return Decoder(vocab_size, dim, tuple(map(block, range(layers))), max_seq, norm, **of_decoder)


def _read(keys: Keys, **changes: Any) -> Decoder:
    for name in ("mlp_bias", "mamba_proj_bias"):
        keys.only(name, False)
    keys.only("hidden_act", "silu")
    keys.only("attention_dropout", 0.0, 0)
    keys.ignore("num_logits_to_keep", "mamba_chunk_size", "use_mamba_kernels", "rope_theta")
    dim, heads = keys.take("hidden_size"), keys.take("num_attention_heads", 32)
    head_dim, inside = keys.take("head_dim", dim // heads), keys.take("mamba_expand", 2) * dim
    of_mamba = keys.take("mamba_n_heads", 128)
    width, (shortest, longest) = keys.take("mamba_d_head", "auto"), keys.take("time_step_limit", (0.0, math.inf))
    keys.only("attn_rotary_emb", head_dim // 2)  # transformers rotates one half of a head, whatever is said
    theta, scaling = keys.rope(part=0.5)
    bias, eps = keys.take("attention_bias", False), keys.take("rms_norm_eps", 1e-5)
    mamba = Mamba(
        of_mamba,
        inside // of_mamba if width == "auto" else width,
        keys.take("mamba_d_state", 256),
        keys.take("mamba_n_groups", 1),
        keys.take("mamba_d_conv", 4),
        keys.take("mamba_conv_bias", True),
        (float(shortest), float(longest)),
        norm_eps=eps,
    )
    rope = Rope(head_dim // 2, theta, scaling=scaling)
    attention = Attention(heads, keys.take("num_key_value_heads", 8), head_dim, rope, bias=bias, out_bias=bias)
    of = {
        "vocab_size": keys.take("vocab_size"),
        "dim": dim,
        "layers": keys.take("num_hidden_layers"),
        "max_seq": keys.take("max_position_embeddings"),
        "mamba": mamba,
        "attention": attention,
        "mlp": MLP(keys.take("intermediate_size")),
        "attention_layers": tuple(keys.take("attn_layer_indices", ())),
        "norm_eps": eps,
        "tied": keys.take("tie_word_embeddings", False),
        "z_loss": keys.take("z_loss_coefficient", 0.0),
    }
    return bamba(**{**of, **changes})


_MAMBA, _MLP = LAYER + "mamba.", LAYER + "feed_forward."
_IN, _CONV, _BIAS = _MAMBA + "in_proj.weight", _MAMBA + "conv1d.weight", _MAMBA + "conv1d.bias"
_NAMES = MappingProxyType(
    {
        **NAMES,
        "mamba_norm": plain(LAYER + "input_layernorm.weight"),
        # side by side in what is stored: gate, x, b, c, steps
        "mamba/w_in": linear(_IN + "#0", _IN + "#1", _IN + "#4"),
        "mamba/w_groups": linear(_IN + "#2", _IN + "#3"),
        "mamba/conv": depthwise(_CONV + "#0"),
        "mamba/conv_groups": depthwise(_CONV + "#1", _CONV + "#2"),
        "mamba/bias_conv": plain(_BIAS + "#0"),
        "mamba/bias_conv_groups": plain(_BIAS + "#1", _BIAS + "#2"),
        "mamba/a_log": plain(_MAMBA + "A_log"),
        "mamba/dt_bias": plain(_MAMBA + "dt_bias"),
        "mamba/skip": plain(_MAMBA + "D"),
        "mamba/norm": plain(_MAMBA + "norm.weight"),
        "mamba/w_out": linear(_MAMBA + "out_proj.weight"),
        "mlp_norm": plain(LAYER + "pre_ff_layernorm.weight"),
        "mlp/w_gate_up": linear(_MLP + "gate_proj.weight", _MLP + "up_proj.weight"),
        "mlp/w_down": linear(_MLP + "down_proj.weight"),
        "final_norm": plain("model.final_layernorm.weight"),
    }
)
BAMBA = Family("bamba", _read, _NAMES, UNUSED)

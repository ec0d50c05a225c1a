"""Llama, and what is written like it: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from fmegatron.model.attention import Attention
from fmegatron.model.decoder import Block, Decoder, Part
from fmegatron.model.families.family import Family, linear, plain
from fmegatron.model.families.keys import Keys
from fmegatron.model.mixer import Mixer
from fmegatron.model.mlp import MLP
from fmegatron.model.norm import RMSNorm
from fmegatron.model.rope import Rope
from fmegatron.nn.rope import Scaling


def llama(
    vocab_size: int,
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn_dim: int,
    max_seq: int,
    *,
    head_dim: int | None = None,
    norm_eps: float = 1e-5,
    rope_theta: float = 10000.0,
    rope_scaling: Scaling | None = None,
    attention: Mixer | None = None,
    mlp: Mixer | None = None,
    **of_attention_and_decoder: Any,
) -> Decoder:
    """Llama 2, 3, 3.1. Sources: arXiv 2307.09288, section 2.2; arXiv 2407.21783, section 3.2.

    Args:
        vocab_size: ids that exist.
        dim: model width.
        layers: number of blocks.
        heads: query heads.
        kv_heads: key/value heads, a divisor of heads.
        ffn_dim: hidden width of the MLP.
        max_seq: longest sequence, in tokens.
        head_dim: width of a head; None: dim / heads.
        norm_eps: of all norms.
        rope_theta: base of the angles.
        rope_scaling: of the frequencies (`nn.Llama3`).
        attention: a mixer in place of the usual attention.
        mlp: a mixer in place of the usual MLP.
        of_attention_and_decoder: fields of `Attention` (bias, kv_copies, ...; window also as a function of the depth)
            and of `Decoder` (tied, z_loss, dtypes, ...).
    """
    if head_dim is None and dim % heads:
        fits = -(-dim // (2 * heads)) * 2 * heads
        raise ValueError(f"llama.dim: got {dim}, wanted a multiple of heads={heads}; try dim={fits}")
    width, norm, others = dim // heads if head_dim is None else head_dim, RMSNorm(norm_eps), of_attention_and_decoder
    mine = {name: others.pop(name) for name in Attention.__dataclass_fields__ if name in others}
    windows: Any = mine.pop("window", None)
    rope = Rope(width, rope_theta, scaling=rope_scaling)

    def block(i: int) -> Block:
        window: Any = windows(i) if callable(windows) else windows
        usual = attention or Attention(heads, kv_heads, width, rope, window=window, **mine)
        return Part("attention", usual, norm), Part("mlp", mlp or MLP(ffn_dim), norm)

    return Decoder(vocab_size, dim, tuple(map(block, range(layers))), max_seq, norm, **others)


LAYER = "model.layers.{i}."
NAMES = MappingProxyType(
    {
        "embed/table": plain("model.embed_tokens.weight"),
        "attention_norm": plain(LAYER + "input_layernorm.weight"),
        "attention/wqkv": linear(*(f"{LAYER}self_attn.{x}_proj.weight" for x in "qkv")),
        "attention/bias_qkv": plain(*(f"{LAYER}self_attn.{x}_proj.bias" for x in "qkv")),
        "attention/wq": linear(LAYER + "self_attn.q_proj.weight"),
        "attention/wkv": linear(*(f"{LAYER}self_attn.{x}_proj.weight" for x in "kv")),
        "attention/bias_q": plain(LAYER + "self_attn.q_proj.bias"),
        "attention/bias_kv": plain(*(f"{LAYER}self_attn.{x}_proj.bias" for x in "kv")),
        "attention/q_norm": plain(LAYER + "self_attn.q_norm.weight"),
        "attention/k_norm": plain(LAYER + "self_attn.k_norm.weight"),
        "attention/wo": linear(LAYER + "self_attn.o_proj.weight"),
        "attention/bias_o": plain(LAYER + "self_attn.o_proj.bias"),
        "mlp_norm": plain(LAYER + "post_attention_layernorm.weight"),
        "mlp/w_gate_up": linear(LAYER + "mlp.gate_proj.weight", LAYER + "mlp.up_proj.weight"),
        "mlp/w_down": linear(LAYER + "mlp.down_proj.weight"),
        "final_norm": plain("model.norm.weight"),
        "head/w": linear("lm_head.weight"),
    }
)
UNUSED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")


def sizes(
    keys: Keys,
    *,
    eps: float,
    theta: float = 10000.0,
    tied: bool = False,
    kv_heads: int | None = None,
    layers_of: str | None = None,
) -> dict[str, Any]:
    """Arguments of `llama` that all its relatives store under one name, with the defaults of their configurations.

    Args:
        keys: of config.json.
        eps: of the norms.
        theta: base of the angles.
        tied: whether the head is the embedding.
        kv_heads: what an absent num_key_value_heads means; None: as many as there are heads.
        layers_of: the kind of layers whose rotation it gives, in a family where that depends on the kind.
    """
    keys.only("attention_dropout", 0.0, 0)
    heads = keys.take("num_attention_heads")
    theta, scaling = keys.rope(theta, layers_of)
    return {
        "vocab_size": keys.take("vocab_size"),
        "dim": keys.take("hidden_size"),
        "layers": keys.take("num_hidden_layers"),
        "heads": heads,
        "kv_heads": keys.take("num_key_value_heads", heads, kv_heads or heads),
        "ffn_dim": keys.take("intermediate_size"),
        "max_seq": keys.take("max_position_embeddings"),
        "head_dim": keys.take("head_dim", keys.take("hidden_size") // heads),
        "norm_eps": keys.take("rms_norm_eps", eps),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tied": keys.take("tie_word_embeddings", tied),
    }


def _read(keys: Keys, **changes: Any) -> Decoder:
    keys.only("hidden_act", "silu")
    keys.only("mlp_bias", False)
    keys.only("rope_interleaved", False)
    keys.ignore("is_llama_config", "transformers.js_config")
    bias = keys.take("attention_bias", False)
    return llama(**{**sizes(keys, eps=1e-6), "bias": bias, "out_bias": bias, **changes})


LLAMA = Family("llama", _read, NAMES, UNUSED)

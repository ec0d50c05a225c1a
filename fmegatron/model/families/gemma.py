"""Gemma 2 and 3: norms on both sides of each part, stored around 0; layers with windows between those without.

Sources: arXiv 2408.00118, section 2; arXiv 2503.19786, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

from fmegatron.model.attention import Attention
from fmegatron.model.decoder import Block, Decoder, Part
from fmegatron.model.families.family import Family, plain
from fmegatron.model.families.keys import Keys
from fmegatron.model.families.llamas import LAYER, NAMES, UNUSED, sizes
from fmegatron.model.mlp import MLP
from fmegatron.model.norm import RMSNorm
from fmegatron.model.rope import Rope


def gemma(
    vocab_size: int,
    dim: int,
    ffn_dim: int,
    max_seq: int,
    attention: Sequence[Attention],
    *,
    norm_eps: float = 1e-6,
    activation: str = "gelu_tanh",
    **of_decoder: Any,
) -> Decoder:
    """Gemma 2 or 3, of the attention of each layer; of_decoder: fields of `Decoder`.

    Args:
        vocab_size: ids that exist.
        dim: model width.
        ffn_dim: hidden width of the MLP.
        max_seq: longest sequence, in tokens.
        attention: one for each layer.
        norm_eps: of all norms.
        activation: of the MLP's gate.
        of_decoder: dtypes and the like.
    """
    norm = RMSNorm(norm_eps, offset=1.0)

    def block(mixer: Attention) -> Block:
        return Part("attention", mixer, norm, norm), Part("mlp", MLP(ffn_dim, activation), norm, norm)

    fields = {"tied": True, "embed_scale": dim**0.5, **of_decoder}
    return Decoder(vocab_size, dim, tuple(map(block, attention)), max_seq, norm, **fields)


GEMMA_NAMES = MappingProxyType(
    {
        **NAMES,
        "attention_after": plain(LAYER + "post_attention_layernorm.weight"),
        "mlp_norm": plain(LAYER + "pre_feedforward_layernorm.weight"),
        "mlp_after": plain(LAYER + "post_feedforward_layernorm.weight"),
    }
)


def _common(keys: Keys, of: dict, cap: float | None = None) -> dict[str, Any]:
    keys.ignore("hidden_act")  # what counts is hidden_activation
    own = {"activation": keys.activation("hidden_activation", "gelu_pytorch_tanh")}
    own["logit_softcap"] = keys.take("final_logit_softcapping", None, absent=cap)
    return {name: of[name] for name in ("vocab_size", "dim", "ffn_dim", "max_seq", "norm_eps", "tied")} | own


def _layers(keys: Keys, of: dict, local: Callable[[int], bool], make: Callable[..., Attention]) -> list[Attention]:
    width, slides = keys.take("sliding_window", 4096), keys.slides(of["layers"], local)
    keys.only("use_bidirectional_attention", False)
    bias = keys.take("attention_bias", False)
    fields = {"bias": bias, "out_bias": bias, "scale": keys.take("query_pre_attn_scalar", 256) ** -0.5}
    return [make(is_local=one, window=width if one else None, **fields) for one in slides]


def _read_gemma2(keys: Keys, **changes: Any) -> Decoder:
    head_dim, of = keys.take("head_dim", 256), sizes(keys, eps=1e-6, tied=True, kv_heads=4)
    rope = Rope(head_dim, of["rope_theta"], scaling=of["rope_scaling"])
    softcap = keys.take("attn_logit_softcapping", None, absent=50.0)

    def make(is_local: bool, **fields: Any) -> Attention:
        return Attention(of["heads"], of["kv_heads"], head_dim, rope, softcap=softcap, **fields)

    attention = _layers(keys, of, lambda i: i % 2 == 0, make)
    return gemma(**{**_common(keys, of, cap=30.0), "attention": attention, **changes})


def _read_gemma3(keys: Keys, **changes: Any) -> Decoder:
    head_dim = keys.take("head_dim", 256)
    theta, scaling = keys.rope(1e6, "full_attention")
    local_theta, local_scaling = keys.take("rope_local_base_freq", 1e4), None
    if "rope_parameters" in keys.config:
        local_theta, local_scaling = keys.rope(1e4, "sliding_attention")
    of = sizes(keys, eps=1e-6, tied=True, kv_heads=4, layers_of="full_attention")
    keys.only("attn_logit_softcapping", None)  # transformers has the key and does nothing with it
    ropes = (Rope(head_dim, theta, scaling=scaling), Rope(head_dim, local_theta, scaling=local_scaling))
    norm, every = RMSNorm(of["norm_eps"], offset=1.0), keys.take("sliding_window_pattern", 6)
    keys.ignore("_sliding_window_pattern")

    def make(is_local: bool, **fields: Any) -> Attention:
        return Attention(of["heads"], of["kv_heads"], head_dim, ropes[is_local], qk_norm=norm, **fields)

    attention = _layers(keys, of, lambda i: bool((i + 1) % every), make)
    return gemma(**{**_common(keys, of), "attention": attention, **changes})


GEMMA2 = Family("gemma2", _read_gemma2, GEMMA_NAMES, UNUSED)
GEMMA3 = Family("gemma3_text", _read_gemma3, GEMMA_NAMES, UNUSED)

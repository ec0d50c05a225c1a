"""GPT-2: layer norms, learned positions, biases, an MLP without a gate; dropout in training.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from fmegatron.model.attention import Attention
from fmegatron.model.decoder import Decoder, Part
from fmegatron.model.families.family import Family, linear, plain
from fmegatron.model.families.keys import Keys
from fmegatron.model.mlp import MLP
from fmegatron.model.norm import LayerNorm


def gpt2(
    vocab_size: int,
    dim: int,
    layers: int,
    heads: int,
    max_seq: int,
    *,
    ffn_dim: int | None = None,
    norm_eps: float = 1e-5,
    activation: str = "gelu_tanh",
    dropout: float = 0.0,
    embed_dropout: float = 0.0,
    attention_dropout: float = 0.0,
    **of_decoder: Any,
) -> Decoder:
    """GPT-2.

    Args:
        vocab_size: ids that exist.
        dim: model width.
        layers: number of blocks.
        heads: of the attention.
        max_seq: longest sequence, in tokens.
        ffn_dim: hidden width of the MLP; None: 4 dim.
        norm_eps: of all norms.
        activation: of the MLP.
        dropout: of what attention and MLP add to the stream; of all three: where the loss is given samples.
        embed_dropout: of what the embedding gives.
        attention_dropout: of the softmax (`Attention.dropout`).
        of_decoder: dtypes and the like.
    """
    if dim % heads:
        raise ValueError(f"gpt2.dim: got {dim}, wanted a multiple of heads={heads}; try {-(-dim // heads) * heads}")
    norm = LayerNorm(norm_eps)
    attention = Attention(heads, heads, dim // heads, bias=True, out_bias=True, dropout=attention_dropout)
    mlp = MLP(ffn_dim or 4 * dim, activation, gated=False, bias=True)
    block = (Part("attention", attention, norm, dropout=dropout), Part("mlp", mlp, norm, dropout=dropout))
    own = {"tied": True, "positions": True, "embed_dropout": embed_dropout}
    return Decoder(vocab_size, dim, (block,) * layers, max_seq, norm, **{**own, **of_decoder})


_LAYER = "transformer.h.{i}."
_NAMES = MappingProxyType(
    {
        "embed/table": plain("transformer.wte.weight"),
        "embed/positions": plain("transformer.wpe.weight"),
        "attention_norm/w": plain(_LAYER + "ln_1.weight"),
        "attention_norm/b": plain(_LAYER + "ln_1.bias"),
        "attention/wqkv": plain(_LAYER + "attn.c_attn.weight"),
        "attention/bias_qkv": plain(_LAYER + "attn.c_attn.bias"),
        "attention/wo": plain(_LAYER + "attn.c_proj.weight"),
        "attention/bias_o": plain(_LAYER + "attn.c_proj.bias"),
        "mlp_norm/w": plain(_LAYER + "ln_2.weight"),
        "mlp_norm/b": plain(_LAYER + "ln_2.bias"),
        "mlp/w_up": plain(_LAYER + "mlp.c_fc.weight"),
        "mlp/bias_up": plain(_LAYER + "mlp.c_fc.bias"),
        "mlp/w_down": plain(_LAYER + "mlp.c_proj.weight"),
        "mlp/bias_down": plain(_LAYER + "mlp.c_proj.bias"),
        "final_norm/w": plain("transformer.ln_f.weight"),
        "final_norm/b": plain("transformer.ln_f.bias"),
        "head/w": linear("lm_head.weight"),
    }
)


def _read(keys: Keys, **changes: Any) -> Decoder:
    keys.only("scale_attn_weights", True)
    keys.only("scale_attn_by_inverse_layer_idx", False)
    keys.ignore("reorder_and_upcast_attn")
    keys.ignore(*(f"summary_{name}" for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")))
    of = {
        "vocab_size": keys.take("vocab_size"),
        "dim": keys.take("n_embd"),
        "layers": keys.take("n_layer"),
        "heads": keys.take("n_head"),
        "max_seq": keys.take("n_positions"),
        "ffn_dim": keys.take("n_inner", None),
        "norm_eps": keys.take("layer_norm_epsilon", 1e-5),
        "activation": keys.activation("activation_function", "gelu_new"),
        "tied": keys.take("tie_word_embeddings", True),
        "dropout": keys.take("resid_pdrop", 0.1),
        "embed_dropout": keys.take("embd_pdrop", 0.1),
        "attention_dropout": keys.take("attn_pdrop", 0.1),
    }
    return gpt2(**{**of, **changes})


GPT2 = Family("gpt2", _read, _NAMES, (r"transformer\.h\.\d+\.attn\.(masked_)?bias",))

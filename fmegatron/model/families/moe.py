"""Mixtral and Qwen3-MoE: Llama whose MLPs are experts.

Sources: arXiv 2401.04088, section 2; arXiv 2505.09388, section 2.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from fmegatron import nn
from fmegatron.model.decoder import Decoder
from fmegatron.model.families.family import Family, linear
from fmegatron.model.families.keys import Keys
from fmegatron.model.families.llamas import LAYER, NAMES, UNUSED, llama, sizes
from fmegatron.model.moe import MoE
from fmegatron.model.norm import RMSNorm


def balance(keys: Keys) -> float:
    """The coefficient of the balance loss, which transformers adds where `output_router_logits` asks for it."""
    coefficient = keys.take("router_aux_loss_coef", 0.001)
    return coefficient if keys.take("output_router_logits", False) else 0.0


def _read_mixtral(keys: Keys, **changes: Any) -> Decoder:
    keys.only("hidden_act", "silu")
    keys.only("router_jitter_noise", 0.0, 0)
    of, window = sizes(keys, eps=1e-5, theta=1e6, kv_heads=8), keys.take("sliding_window", None)
    router = nn.Router(keys.take("num_local_experts", 8), keys.take("num_experts_per_tok", 2), normalised=True)
    return llama(**{**of, "window": window, "mlp": MoE(router, of["ffn_dim"], balance=balance(keys)), **changes})


def _read_qwen3_moe(keys: Keys, **changes: Any) -> Decoder:
    keys.only("hidden_act", "silu")
    keys.only("decoder_sparse_step", 1)
    keys.only("mlp_only_layers", [])
    head_dim, bias = keys.take("head_dim", None), keys.take("attention_bias", False)
    of = sizes(keys, eps=1e-6, kv_heads=4)
    router = nn.Router(
        keys.take("num_experts", keys.take("num_local_experts", 128)),
        keys.take("num_experts_per_tok", 8),
        normalised=keys.take("norm_topk_prob", False),
    )
    mlp = MoE(router, keys.take("moe_intermediate_size", 768), balance=balance(keys))
    own = {"head_dim": head_dim or of["head_dim"], "bias": bias, "out_bias": bias, "mlp": mlp}
    own["qk_norm"] = RMSNorm(of["norm_eps"])
    keys.ignore("max_window_layers", "layer_types")  # a window counts in every layer, as transformers has it
    width = keys.take("sliding_window", None, absent=4096)
    own["window"] = width if keys.take("use_sliding_window", False) else None
    return llama(**{**of, **own, **changes})


_EXPERT = LAYER + "block_sparse_moe.experts.{e}."
MIXTRAL_NAMES = MappingProxyType(
    {
        **NAMES,
        "mlp/router": linear(LAYER + "block_sparse_moe.gate.weight"),
        "mlp/up": linear(_EXPERT + "w1.weight", _EXPERT + "w3.weight"),
        "mlp/down": linear(_EXPERT + "w2.weight"),
    }
)
EXPERT_NAMES = MappingProxyType(
    {
        **NAMES,
        "mlp/router": linear(LAYER + "mlp.gate.weight"),
        "mlp/up": linear(*(f"{LAYER}mlp.experts.{{e}}.{x}_proj.weight" for x in ("gate", "up"))),
        "mlp/down": linear(LAYER + "mlp.experts.{e}.down_proj.weight"),
    }
)
MIXTRAL = Family("mixtral", _read_mixtral, MIXTRAL_NAMES, UNUSED)
QWEN3_MOE = Family("qwen3_moe", _read_qwen3_moe, EXPERT_NAMES, UNUSED)

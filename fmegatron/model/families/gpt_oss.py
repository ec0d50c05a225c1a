"""gpt-oss: experts with biases and clamped gates, sinks, windows in every other layer, YaRN.

Source: arXiv 2508.10925, section 2.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from fmegatron import nn
from fmegatron.model.decoder import Decoder
from fmegatron.model.families.family import Family, linear, plain
from fmegatron.model.families.keys import Keys, yarn_scale
from fmegatron.model.families.llamas import LAYER, NAMES, UNUSED, llama, sizes
from fmegatron.model.families.moe import balance
from fmegatron.model.moe import MoE
from fmegatron.nn import rope

_EXPERTS = LAYER + "mlp.experts."
_NAMES = MappingProxyType(
    {
        **NAMES,
        "attention/sinks": plain(LAYER + "self_attn.sinks"),
        "mlp/router": linear(LAYER + "mlp.router.weight"),
        "mlp/router_bias": plain(LAYER + "mlp.router.bias"),
        "mlp/up": plain(_EXPERTS + "gate_up_proj"),
        "mlp/bias_up": plain(_EXPERTS + "gate_up_proj_bias"),
        "mlp/down": plain(_EXPERTS + "down_proj"),
        "mlp/bias_down": plain(_EXPERTS + "down_proj_bias"),
    }
)


def _read(keys: Keys, **changes: Any) -> Decoder:
    keys.only("hidden_act", "silu")
    keys.only("swiglu_alpha", 1.702)
    keys.ignore("experts_per_token", "initial_context_length")
    width = keys.take("sliding_window", 128)
    bias, of = keys.take("attention_bias", True), sizes(keys, eps=1e-5, theta=150000.0, kv_heads=8)
    if all(keys.config.get(key) is None for key in ("rope_parameters", "rope_scaling")):
        of["rope_scaling"] = rope.Yarn(32.0, 4096, 32.0, 1.0, yarn_scale(32.0), False)
    slides = keys.slides(of["layers"], lambda i: i % 2 == 0)
    router = nn.Router(keys.take("num_local_experts", 128), keys.take("num_experts_per_tok", 4), normalised=True)

    def window(i: int) -> int | None:
        return width if slides[i] else None

    mlp = MoE(router, of["ffn_dim"], biases=True, limit=keys.take("swiglu_limit", 7.0), balance=balance(keys))
    of["head_dim"] = keys.take("head_dim", of["head_dim"], absent=64)
    own = {"bias": bias, "out_bias": bias, "sinks": True, "window": window, "mlp": mlp}
    return llama(**{**of, **own, **changes})


GPT_OSS = Family("gpt_oss", _read, _NAMES, UNUSED)

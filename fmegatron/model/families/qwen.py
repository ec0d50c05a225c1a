"""Qwen 2, 2.5 and 3: Llama with biases of q, k and v, or with norms of queries and keys; upper layers may have windows.

Sources: arXiv 2407.10671, section 2.2; arXiv 2505.09388, section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fmegatron.model.decoder import Decoder
from fmegatron.model.families.family import Family
from fmegatron.model.families.keys import Keys
from fmegatron.model.families.llamas import NAMES, UNUSED, llama, sizes
from fmegatron.model.norm import RMSNorm


def windows(keys: Keys) -> Callable[[int], int | None]:
    """The window of each layer: by `layer_types`, or from `max_window_layers` on where windows are used."""
    used, width = keys.take("use_sliding_window", False), keys.take("sliding_window", None, absent=4096)
    first = keys.take("max_window_layers", 28)
    slides = keys.slides(keys.take("num_hidden_layers"), lambda i: i >= first)
    return lambda i: width if used and slides[i] else None


def _read_qwen2(keys: Keys, **changes: Any) -> Decoder:
    keys.only("hidden_act", "silu")
    keys.only("use_mrope", False)
    return llama(**{**sizes(keys, eps=1e-6, kv_heads=32), "bias": True, "window": windows(keys), **changes})


def _read_qwen3(keys: Keys, **changes: Any) -> Decoder:
    keys.only("hidden_act", "silu")
    head_dim, bias, of = (
        keys.take("head_dim", 128),
        keys.take("attention_bias", False),
        sizes(keys, eps=1e-6, kv_heads=32),
    )
    own = {"head_dim": head_dim, "bias": bias, "out_bias": bias, "qk_norm": RMSNorm(of["norm_eps"])}
    return llama(**{**of, **own, "window": windows(keys), **changes})


QWEN2 = Family("qwen2", _read_qwen2, NAMES, UNUSED)
QWEN3 = Family("qwen3", _read_qwen3, NAMES, UNUSED)

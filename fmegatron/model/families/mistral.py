"""Mistral: Llama whose tokens may see a window only."""

from __future__ import annotations

from typing import Any

from fmegatron.model.decoder import Decoder
from fmegatron.model.families.family import Family
from fmegatron.model.families.keys import Keys
from fmegatron.model.families.llamas import NAMES, UNUSED, llama, sizes


def _read(keys: Keys, **changes: Any) -> Decoder:
    keys.only("hidden_act", "silu")
    window = keys.take("sliding_window", None, absent=4096)
    return llama(**{**sizes(keys, eps=1e-6, kv_heads=8), "window": window, **changes})


MISTRAL = Family("mistral", _read, NAMES, UNUSED)
"""Source: Jiang et al. 2023, arXiv 2310.06825."""

"""Families: functions from sizes to a `Decoder`, and what Hugging Face calls their keys and arrays; one file each."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fmegatron.model.families.bamba import BAMBA, bamba
from fmegatron.model.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, deepseek
from fmegatron.model.families.family import Family, Stored
from fmegatron.model.families.gemma import GEMMA2, GEMMA3, gemma
from fmegatron.model.families.gpt2 import GPT2, gpt2
from fmegatron.model.families.gpt_oss import GPT_OSS
from fmegatron.model.families.llama import LLAMA, llama
from fmegatron.model.families.mistral import MISTRAL
from fmegatron.model.families.moe import MIXTRAL, QWEN3_MOE
from fmegatron.model.families.qwen import QWEN2, QWEN3

__all__ = ["FAMILIES", "Family", "Stored", "bamba", "deepseek", "family_of", "gemma", "gpt2", "llama"]

_ALL = (
    BAMBA,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GEMMA2,
    GEMMA3,
    GPT2,
    GPT_OSS,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
)
FAMILIES = MappingProxyType({family.name: family for family in _ALL})


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a Hugging Face configuration, by its `model_type`. ValueError for one that is not here."""
    kind = config.get("model_type", "")
    if kind not in FAMILIES:
        raise ValueError(
            f"config.json: model_type: got {kind!r}, wanted one of {', '.join(FAMILIES)}; "
            "write a family (docs/families.md)"
        )
    return FAMILIES[kind]

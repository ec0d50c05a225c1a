"""The families by what `config.json` calls them: a new one is a line here (docs/families.md)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fmegatron.model.families.bamba import BAMBA
from fmegatron.model.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from fmegatron.model.families.family import Family
from fmegatron.model.families.gemma import GEMMA2, GEMMA3
from fmegatron.model.families.gpt2 import GPT2
from fmegatron.model.families.gpt_oss import GPT_OSS
from fmegatron.model.families.llamas import LLAMA
from fmegatron.model.families.mistral import MISTRAL
from fmegatron.model.families.moe import MIXTRAL, QWEN3_MOE
from fmegatron.model.families.qwen import QWEN2, QWEN3

__all__ = ["FAMILIES", "family_of"]

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

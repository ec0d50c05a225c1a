"""Families: functions from sizes to a `Decoder`, and what Hugging Face calls their keys and arrays; one file each."""

from fmegatron.model.families.bamba import bamba
from fmegatron.model.families.deepseek import deepseek
from fmegatron.model.families.family import Family, Stored
from fmegatron.model.families.gemma import gemma
from fmegatron.model.families.gpt2 import gpt2
from fmegatron.model.families.llama import llama
from fmegatron.model.families.registry import FAMILIES, family_of

__all__ = ["FAMILIES", "Family", "Stored", "bamba", "deepseek", "family_of", "gemma", "gpt2", "llama"]

"""Keys of a Hugging Face `config.json`, read by a closed list: what a family does not know is refused by its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fmegatron.nn import rope

# What does not change the function of a model: names, ids of tokens, how it is stored, run or generated with.
IGNORED = frozenset(
    "_name_or_path add_cross_attention architectures auto_map begin_suppress_tokens bos_token_id "
    "chunk_size_feed_forward cache_implementation cross_attention_hidden_size decoder_start_token_id dtype "
    "eos_token_id finetuning_task gradient_checkpointing id2label initializer_range is_decoder is_encoder_decoder "
    "keys_to_ignore_at_inference label2id max_new_tokens model_type n_ctx output_attentions output_hidden_states "
    "pad_token_id prefix pretraining_tp problem_type return_dict sep_token_id task_specific_params "
    "tie_encoder_decoder tokenizer_class torch_dtype torchscript transformers_version use_cache use_return_dict "
    "_attn_implementation attn_implementation".split()
)
ACTIVATIONS = MappingProxyType(
    {
        "silu": "silu",
        "swish": "silu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "gelu": "gelu",
        "relu": "relu",
        "relu2": "relu2",
    }
)
_NEEDED = MappingProxyType(
    {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
)
_MISSING = object()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Keys:
    """A configuration while it is read: what is asked for is ticked off, and `done` refuses the rest.

    family: its name, in messages. ValueError, naming the key, for a value that cannot be meant.
    """

    def __init__(self, config: Mapping[str, Any], family: str):
        self.config, self.family, self.left = config, family, set(config) - IGNORED

    def take(self, key: str, default: Any = _MISSING, absent: Any = _MISSING) -> Any:
        """The value of a key; the default where it is absent or null. Without a default it must be there.

        absent: what a key that is not there means, where that is something else than null. Where the default is true
        or false, or a number, so is the value: the text "false" is neither.
        """
        self.left.discard(key)
        if absent is not _MISSING and key not in self.config:
            return absent
        value = self.config.get(key)
        if value is not None:
            of_bool, of_number = isinstance(default, bool), isinstance(default, int | float)
            if of_bool != isinstance(value, bool) if of_bool else of_number and not _is_number(value):
                wanted = "true or false" if of_bool else "a number"
                raise ValueError(f"config.json: {key}: got {value!r:.60}, wanted {wanted}; write it as JSON has it")
            return value
        if default is _MISSING:
            raise ValueError(f"config.json: {key}: got no value, wanted one ({self.family} has no default); add it")
        return default

    def only(self, key: str, *fits: Any) -> None:
        """A key that may have these values only, of which the first is its default."""
        value = self.take(key, fits[0])
        if value not in fits:
            wanted = " or ".join(map(repr, fits))
            raise ValueError(
                f"config.json: {key}: got {value!r}, wanted {wanted}, which is all that {self.family} is read with; "
                "write a family of your own (docs/families.md)"
            )

    def ignore(self, *keys: str) -> None:
        """Keys that do not change the function of this family."""
        self.left.difference_update(keys)

    def slides(self, layers: int, unless: Callable[[int], bool]) -> list[bool]:
        """For each layer whether its tokens see a window only: by `layer_types`, or where that is not given `unless`.

        ValueError for kinds of layers, or a number of them, that do not fit.
        """
        kinds = self.take("layer_types", None)
        if kinds is None:
            return [unless(i) for i in range(layers)]
        known = ("sliding_attention", "full_attention")
        if len(kinds) != layers:
            raise ValueError(
                f"config.json: layer_types: got {len(kinds)} layers, wanted num_hidden_layers={layers}; name each"
            )
        if strange := [kind for kind in kinds if kind not in known]:
            raise ValueError(
                f"config.json: layer_types: got {strange[0]!r}, wanted {' or '.join(known)}, which is all that "
                f"{self.family} is read with; write a family of your own (docs/families.md)"
            )
        return [kind == known[0] for kind in kinds]

    def activation(self, key: str, default: str) -> str:
        """A name of `nn.ACTIVATIONS` for Hugging Face's."""
        value = self.take(key, default)
        if value not in ACTIVATIONS:
            raise ValueError(f"config.json: {key}: got {value!r}, wanted one of {', '.join(ACTIVATIONS)}; add it there")
        return ACTIVATIONS[value]

    def rope(
        self, theta: float = 10000.0, of: str | None = None, part: float = 1.0
    ) -> tuple[float, rope.Scaling | None]:
        """(base of the angles, scaling) of `rope_parameters`, or of `rope_theta` and `rope_scaling`.

        theta: the default base. of: the kind of layers where they differ ("full_attention"). part: of a head that the
        family rotates.
        """
        given = dict(self.take("rope_parameters", {}))
        old = self.take("rope_scaling", {})
        if old and given and of not in given and _rope_kind(old) != _rope_kind(given):
            raise ValueError(  # transformers takes the first, and loses what only the second has
                f"config.json: rope_scaling: got {_rope_kind(old)!r} beside rope_parameters of "
                f"{_rope_kind(given)!r}, wanted one of the two; put its keys into rope_parameters"
            )
        given = dict(given[of]) if of in given else given
        base = float(given.pop("rope_theta", None) or self.take("rope_theta", theta))
        self.ignore("rope_theta")
        return base, self._scaling({**old, **given}, int(self.take("max_position_embeddings", 0)), part)

    def _scaling(self, given: dict, longest: int, part: float) -> rope.Scaling | None:
        kind = given.pop("rope_type", given.pop("type", "default"))
        for name in ("type", "rope_theta"):
            given.pop(name, None)
        if (got := given.pop("partial_rotary_factor", None)) not in (None, part):
            raise ValueError(
                f"config.json: partial_rotary_factor: got {got}, wanted {part}, the part of a head that {self.family} "
                "rotates; write a family of your own (docs/families.md)"
            )
        found: rope.Scaling | None = None
        for name in _NEEDED.get(kind, ()):
            if given.get(name) is None:
                raise ValueError(f"config.json: rope scaling {kind}: {name}: got no value, wanted one; add it")
        if nested := [name for name, value in given.items() if kind == "default" and isinstance(value, dict)]:
            raise ValueError(
                f"config.json: rope_parameters: got those of {nested[0]!r} by themselves, wanted the same for all "
                f"layers, which is all that {self.family} is read with; write a family of your own (docs/families.md)"
            )
        if kind == "linear":
            found = rope.Linear(given.pop("factor"))
        elif kind == "llama3":
            original = given.pop("original_max_position_embeddings")
            found = rope.Llama3(
                given.pop("factor"), given.pop("low_freq_factor"), given.pop("high_freq_factor"), original
            )
        elif kind == "yarn":
            found = _yarn(given, longest)
        elif kind != "default":
            raise ValueError(
                f"config.json: rope_type: got {kind!r}, wanted default, linear, llama3 or yarn; add it to nn/rope.py"
            )
        if kind == "default":
            given.clear()
        if given := {key: value for key, value in given.items() if value is not None}:
            key = min(given)
            raise ValueError(
                f"config.json: rope scaling {kind}: {key}: got {given[key]!r}, wanted a key that it knows; remove it, "
                "or teach it to nn/rope.py"
            )
        return found

    def done(self) -> None:
        """ValueError for a key that was not asked for."""
        if left := sorted(key for key in self.left if self.config[key] is not None):
            raise ValueError(
                f"config.json: {left[0]}: got {self.config[left[0]]!r:.60}, wanted a key that {self.family} reads; if "
                "it does not change the function, remove it, else write a family of your own (docs/families.md)"
            )


def _rope_kind(given: dict) -> str:
    return given.get("rope_type") or given.get("type") or "default"


def _yarn(given: dict, longest: int) -> rope.Yarn:
    original = int(given.pop("original_max_position_embeddings", None) or longest)
    factor = given.pop("factor", None) or longest / original
    mscale, all_dim = given.pop("mscale", None), given.pop("mscale_all_dim", None)
    attention = given.pop("attention_factor", None)
    if attention is None:
        both = mscale and all_dim
        attention = yarn_scale(factor, mscale) / yarn_scale(factor, all_dim) if both else yarn_scale(factor)
    fast, slow = given.pop("beta_fast", None) or 32, given.pop("beta_slow", None) or 1
    return rope.Yarn(factor, original, fast, slow, attention, given.pop("truncate", True))


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """0.1 m ln(s) + 1: by how much attention is sharpened (arXiv 2309.00071, equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

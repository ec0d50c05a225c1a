"""A decoder as JSON and back: what a checkpoint has of its model, so that it can be opened without the program.

    manager.save(step, state, specs, metadata={"model": description(decoder)})
    decoder = described(checkpoint.metadata(path)["model"])

A dataclass is {"is": its name, its fields that are not at their defaults}; a tuple a list; a dtype {"dtype":
"bfloat16"}; a number that JSON lacks {"float": "inf"}. Names are looked up in a closed list, so that a file can make
nothing else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from fmegatron import nn
from fmegatron.collectives import Precision
from fmegatron.model.attention import Attention
from fmegatron.model.decoder import MTP, Decoder, Part
from fmegatron.model.mamba import Mamba
from fmegatron.model.mla import MLA
from fmegatron.model.mlp import MLP
from fmegatron.model.moe import MoE
from fmegatron.model.norm import LayerNorm, RMSNorm
from fmegatron.model.rope import Rope
from fmegatron.nn import rope

_KNOWN = (
    *(Attention, Decoder, LayerNorm, MLA, MLP, MTP, Mamba, MoE, Part, Precision, RMSNorm, Rope),
    *(rope.Linear, rope.Llama3, nn.Router, rope.Yarn),
)


def description(decoder: Decoder) -> dict[str, Any]:
    """A decoder as plain JSON values, the inverse of `described`; equal blocks are written once.

    Raises ValueError, naming the field, for a value that is neither a dataclass nor JSON, a tuple or a dtype.
    """
    out = _plain(dataclasses.replace(decoder, blocks=decoder.blocks[:1]), "Decoder")
    distinct = list(dict.fromkeys(decoder.blocks))
    out["blocks"] = [_plain(block, "Decoder.blocks") for block in distinct]
    return {**out, "order": [distinct.index(block) for block in decoder.blocks]}


def described(values: object, known: Sequence[type] = ()) -> Decoder:
    """The decoder of a description. known: dataclasses of your own that it has (mixers, norms).

    Raises ValueError, naming the field, for what is no description.
    """
    if not isinstance(values, dict) or values.get("is") != "Decoder" or not isinstance(values.get("order"), list):
        raise ValueError(f"model: got {values!r:.80}, wanted what model.json_form.description(decoder) gives")
    values = dict(values)
    try:
        values["blocks"] = [values["blocks"][i] for i in values.pop("order")]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"model: blocks: got an order that names none ({error!r}), wanted numbers of blocks") from None
    return _made(values, "model", {kind.__name__: kind for kind in (*_KNOWN, *known)})


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(one, f"{path}[{i}]") for i, one in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        out: dict[str, Any] = {"is": type(value).__name__}
        for field in dataclasses.fields(value):
            now = getattr(value, field.name)
            if field.default is dataclasses.MISSING or now != field.default:
                out[field.name] = _plain(now, f"{path}.{field.name}")
        return out
    raise ValueError(
        f"{path}: got {value!r:.80}, wanted a dataclass, a number, a text, a dtype or a tuple of them; the model "
        "cannot be described, so give a checkpoint no description of it"
    )


def _made(value: Any, path: str, known: dict[str, type]) -> Any:
    if isinstance(value, list):
        return tuple(_made(one, f"{path}[{i}]", known) for i, one in enumerate(value))
    if not isinstance(value, dict):
        return value
    if set(value) == {"float"}:
        return float(value["float"])
    if set(value) == {"dtype"}:
        dtype = getattr(torch, str(value["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{path}: got the dtype {value['dtype']!r}, wanted one of torch")
        return dtype
    fields, name = dict(value), value.get("is")
    fields.pop("is", None)
    if name not in known:
        raise ValueError(
            f"{path}: got {name!r}, wanted one of {', '.join(sorted(known))}; a class of your own goes into "
            "model.opened(..., known=(...,))"
        )
    made = {key: _made(one, f"{path}.{key}", known) for key, one in fields.items()}
    try:
        return known[name](**made)
    except TypeError as error:
        raise ValueError(f"{path}: got {name} of {', '.join(made)} ({error}), wanted its fields") from None

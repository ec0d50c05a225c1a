"""What a state dict holds beside tensors, as JSON that gives back exactly what went in.

null, true, false, whole numbers, finite floats, strings and lists are themselves. The rest is an object of one key:
{"float": "nan"}, {"tuple": [...]}, {"dict": [[key, value], ...]}, {"bytes": base64}, {"dtype": "bfloat16"}.
Other types are refused: a checkpoint holds no code, and what JSON cannot say has no place in it.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import torch


def to_json(value: Any, where: str) -> Any:
    """`value` as JSON. Raises ValueError, naming `where`, for a type that is not plain data."""
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is float:
        return {"float": repr(value)}
    if kind is list:
        return [to_json(item, f"{where}/{i}") for i, item in enumerate(value)]
    if kind in (tuple, torch.Size):
        return {"tuple": [to_json(item, f"{where}/{i}") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        return {"dict": [[to_json(k, where), to_json(item, f"{where}/{k}")] for k, item in value.items()]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    raise ValueError(
        f"{where}: got {value!r:.80} ({kind.__module__}.{kind.__qualname__}), wanted a tensor, number, string, None,"
        " bytes, dtype, or a dict, list or tuple of them; convert it, or leave it out of the state dict"
    )


def from_json(value: Any) -> Any:
    """The value that `to_json` wrote. Raises ValueError for anything else."""
    if type(value) is list:
        return [from_json(item) for item in value]
    if type(value) is not dict:
        return value
    if len(value) == 1:
        ((kind, item),) = value.items()
        if kind == "float" and item in ("nan", "inf", "-inf"):
            return float(item)
        if kind == "tuple" and type(item) is list:
            return tuple(from_json(x) for x in item)
        if kind == "dict" and type(item) is list and all(type(x) is list and len(x) == 2 for x in item):
            return {from_json(k): from_json(x) for k, x in item}
        if kind == "bytes" and type(item) is str:
            return base64.b64decode(item, validate=True)
        if kind == "dtype" and type(item) is str and isinstance(getattr(torch, item, None), torch.dtype):
            return getattr(torch, item)
    raise ValueError(f"got {value!r:.80}, wanted a value that a state dict can have")

"""What a state holds beside arrays, as JSON that gives back exactly what went in: metadata["state_dict"].

null, true, false, whole numbers, finite floats, strings and lists are themselves. The rest is an object of one key:
{"float": "nan"}, {"tuple": [...]}, {"dict": [[key, value], ...]}, {"bytes": base64}, {"dtype": "bfloat16"}.
Other types are refused: a checkpoint holds no code, and what JSON cannot express has no place in it.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import torch

VALUES, CONTAINERS = "state_dict", "containers"  # keys in the checkpoint's metadata: by path, values and containers


def own_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata that the user passed: without values and containers, where a save has put them there."""
    if not isinstance(metadata.get(VALUES), dict) or not isinstance(metadata.get(CONTAINERS), dict):
        return dict(metadata)
    return {key: value for key, value in metadata.items() if key not in (VALUES, CONTAINERS)}


def with_state(metadata: dict[str, Any] | None, values: dict[str, Any], containers: dict[str, Any]) -> dict[str, Any]:
    """The user's metadata with values and containers. Raises ValueError for a key that these need."""
    if taken := {VALUES, CONTAINERS}.intersection(metadata or {}):
        raise ValueError(f"metadata: got the key {min(taken)!r}, wanted another; the values of the state have it")
    return {**(metadata or {}), VALUES: {p: to_json(x, p) for p, x in values.items()}, CONTAINERS: containers}


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
    has = callable(getattr(value, "state_dict", None))
    fix = "pass its state_dict()" if has else "convert it, or leave it out of the state dict"
    raise ValueError(
        f"{where}: got {value!r:.80} ({kind.__module__}.{kind.__qualname__}), wanted a tensor, number, string, None,"
        f" bytes, dtype, or a dict, list or tuple of them; {fix}"
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

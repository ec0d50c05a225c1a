"""Values of a Config as JSON: texts that are the same in every process, and different for values that differ."""

import dataclasses
import enum
import functools
import json
import math
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from fmegatron.layout import Mesh
from fmegatron.loop.sources import mesh_text

_SHOWN = 64  # elements of an array; of a longer one its digest
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def plain(value: Any, name: str = "value", exact: bool = True) -> Any:
    """A value as JSON has it: what is no number, text, list or dict becomes text that is the same in every process.

    A function or class is its name, where a module has it under this name; another object is its own repr. Arrays are
    lists, long ones a digest; a dict with keys that are no text is a list of pairs; a dataclass a dict with its class.
    Raises ValueError, with `name` and the path below it, where a value has no text of its own: lambdas
    and functions made in functions, objects with the repr that Python gives all. With exact=False, and in fields of a
    dataclass that are declared free, these are texts that may be the same for values that differ.

    >>> plain({"mesh": Mesh(fsdp=2, tp=2), "dtype": np.float32, "rate": float("inf"), "sizes": (1, 2)})
    {'mesh': 'fsdp=2,tp=2', 'dtype': 'numpy.float32', 'rate': 'inf', 'sizes': [1, 2]}
    """
    if isinstance(value, np.generic | np.ndarray | torch.Tensor):  # whose text leaves out most of a long one
        value = _elements(value)
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mesh):
        return mesh_text(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"class": type(value).__name__, **fields(value, name, exact)}
    if isinstance(value, Mapping):
        pairs = [(key, plain(item, f"{name}[{key!r:.40}]", exact)) for key, item in value.items()]
        if all(isinstance(key, str) for key, _ in pairs):
            return {plain(key): item for key, item in pairs}
        return _sorted([[plain(key, f"{name}: a key", exact), item] for key, item in pairs])
    if isinstance(value, set | frozenset):
        return _sorted([plain(item, f"{name}: an element", exact) for item in value])
    if isinstance(value, list | tuple):
        return [plain(item, f"{name}[{index}]", exact) for index, item in enumerate(value)]
    if isinstance(value, functools.partial):
        parts = {"function": value.func, "arguments": value.args, "keywords": value.keywords}
        return {key: plain(item, f"{name}.{key}", exact) for key, item in parts.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if (found := _name(value)) is not None:
        return found
    text = str(value)
    if exact and not _is_own(value, text):
        raise ValueError(
            f"{name}: got {text:.120}, which no text distinguishes from another of its kind, wanted a value whose "
            "change can be seen; make it a function or class of a module (no lambda), an object whose repr shows "
            "what it holds (a dataclass), or a field that is declared resume='free'"
        )
    return _ADDRESS.sub("", text)


def fields(config: Any, name: str, exact: bool = True) -> dict[str, Any]:
    """`plain` of the fields of a dataclass, by their names."""
    found = {}
    for item in dataclasses.fields(config):
        if item.init:
            kind = item.metadata.get("resume")
            value, path = getattr(config, item.name), f"{name}.{item.name}"
            found[item.name] = plain(value, path, exact if kind is None else kind != "free")
    return found


def _is_own(value: Any, text: str) -> bool:
    """Whether this text, which is no name that a module has, distinguishes the value from others of its type."""
    if isinstance(value, type):  # made in a function: another may have the same name
        return False
    if isinstance(value, torch.nn.Module) and value.state_dict():  # its text has no numbers
        return False
    without = type(value).__repr__ is object.__repr__ and type(value).__str__ is object.__str__
    return not without and not _ADDRESS.search(text + repr(value))


def _name(value: Any) -> str | None:
    """`torch.nn.functional.gelu`: the name under which a module has this very object, None where it has not."""
    module = getattr(value, "__module__", None)
    for kind in ("__qualname__", "__name__"):  # torch.tanh is _VariableFunctionsClass.tanh, and stands in torch as tanh
        name = getattr(value, kind, None)
        if isinstance(module, str) and isinstance(name, str):
            found = sys.modules.get(module)
            for part in name.split("."):
                found = getattr(found, part, None)
            if found is value:
                return f"{module}.{name}"
    return None


def _sorted(values: list) -> list:
    return sorted(values, key=lambda value: json.dumps(value, sort_keys=True))


def _elements(value: np.generic | np.ndarray | torch.Tensor) -> Any:
    """An array as nested lists or one number; a long one as a text that distinguishes one from another."""
    values = value.detach().cpu() if isinstance(value, torch.Tensor) else value
    if values.dtype != object and math.prod(values.shape) > _SHOWN:
        flat = values.reshape(-1)
        data = flat.contiguous().view(torch.uint8).numpy() if isinstance(flat, torch.Tensor) else flat
        return f"{values.dtype} {list(values.shape)}, xxh3 {xxhash.xxh3_64(data.tobytes()).hexdigest()}"
    return values.tolist()

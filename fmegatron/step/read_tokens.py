"""What a value that was read is compared by: a token that is equal where two values would give the same graph."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import os
import sys
import sysconfig
import types
from typing import Any

import numpy as np
import torch

from fmegatron.step.code_reads import same_code
from fmegatron.step.lines import described

__all__ = [
    "ATOMS",
    "CONTAINERS",
    "DEPTH",
    "GONE",
    "ITEMS",
    "MOST",
    "PACKAGES",
    "held",
    "is_state",
    "is_users",
    "is_users_class",
    "is_users_file",
    "is_users_module",
    "token_of",
    "words_of",
]

GONE = object()  # what is not there
DEPTH = 12
MOST = 1000  # items of a container that is compared in every call
CONTAINERS = (list, dict, set, collections.deque, bytearray)
ATOMS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, range, slice, torch.layout)
ITEMS = (list, tuple, set, frozenset, collections.deque, bytearray)
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = tuple(
    {os.path.dirname(os.path.abspath(module.__file__)) + os.sep for module in (torch, np) if module.__file__}
)
_STANDARD = tuple({os.path.join(sysconfig.get_path(kind), "") for kind in ("stdlib", "platstdlib")})
PACKAGES = tuple({os.path.join(sysconfig.get_path(kind), "") for kind in ("purelib", "platlib")})
_NOT_USERS = (_OURS, *_LIBRARIES, *_STANDARD, "<frozen", "<__array_function__")


class _Other:
    """The token of an object that cannot be looked into: itself, or one of its type with the same plain attributes."""

    def __init__(self, x: Any):
        self.x, held = x, getattr(x, "__dict__", None) or {}
        self.plain = {k: v for k, v in held.items() if isinstance(v, ATOMS)} if isinstance(held, dict) else {}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Other):
            return NotImplemented
        return self.x is other.x or (type(self.x) is type(other.x) and bool(self.plain) and self.plain == other.plain)


def token_of(x: Any, deep: int = 0) -> Any:
    """What is equal where two values would give the same graph."""
    kind = type(x)
    if isinstance(x, enum.Enum):
        return ("enum", kind.__qualname__, x.name, token_of(x.value, deep + 1))
    if isinstance(x, ATOMS):
        return (kind, repr(x))
    if isinstance(x, torch.Tensor) or deep > DEPTH:
        return ("tensor",)
    if isinstance(x, np.ndarray | np.generic):
        small = x.dtype != object and x.nbytes <= 1 << 26
        return ("array", str(x.dtype), x.shape, x.tobytes()) if small else _Other(x)
    if isinstance(x, types.FunctionType):
        if is_users(x.__code__):
            code = same_code(x.__code__, token_of)
            return (
                "function",
                code,
                token_of(x.__defaults__, deep + 1),
                token_of(x.__kwdefaults__, deep + 1),
            )
        inside = [token_of(held(cell), deep + 1) for cell in x.__closure__ or ()]
        return ("library", x.__module__, x.__qualname__, tuple(inside))
    if isinstance(x, types.MethodType):
        return ("method", token_of(x.__func__, deep + 1), token_of(x.__self__, deep + 1))
    if isinstance(x, functools.partial):
        return ("partial", *(token_of(part, deep + 1) for part in (x.func, x.args, x.keywords)))
    if isinstance(x, type):
        return ("class", x.__module__, x.__qualname__)
    if isinstance(x, dict) and len(x) <= MOST:
        return ("dict", tuple((token_of(k, deep + 1), token_of(v, deep + 1)) for k, v in x.items()))
    if isinstance(x, set | frozenset) and len(x) <= MOST:
        return ("set", tuple(sorted((token_of(item, deep + 1) for item in x), key=repr)))
    if isinstance(x, ITEMS) and (len(x) <= MOST or isinstance(x, tuple)):
        return (kind.__qualname__, tuple(token_of(item, deep + 1) for item in x))
    fields = {}
    if dataclasses.is_dataclass(x):
        fields = {one.name: getattr(x, one.name, None) for one in dataclasses.fields(x)}
    if is_users_class(kind) or isinstance(x, torch.nn.Module) or kind is types.SimpleNamespace:
        frozen = bool(fields) and getattr(kind, "__dataclass_params__").frozen  # noqa: B009  the others by the attributes that are read
        return ("object", kind.__qualname__, token_of(fields if frozen else {}, deep + 1))
    if fields:
        inside = {k: v for k, v in fields.items() if not callable(x) or k == "fn"}
        return ("fields", kind.__qualname__, token_of(inside, deep + 1))
    return _Other(x)


def is_users(code: types.CodeType) -> bool:
    """Whether a code is neither torch's, numpy's, this package's nor Python's."""
    return is_users_file(code.co_filename)


def is_users_file(file: str) -> bool:
    """The same of the file of a code."""
    return not file.startswith(_NOT_USERS) and f"{os.sep}optree{os.sep}" not in file or _in_packages(file)


def _in_packages(file: str) -> bool:
    others = (_OURS, *_LIBRARIES)
    return file.startswith(PACKAGES) and not file.startswith(others) and f"{os.sep}optree{os.sep}" not in file


def held(cell: types.CellType) -> Any:
    """What a cell of a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return GONE


def is_users_module(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and not file.startswith((*_NOT_USERS, *PACKAGES))


def is_users_class(kind: type) -> bool:
    if kind.__module__ == "builtins" or kind.__module__.partition(".")[0] in ("torch", "numpy", "fmegatron"):
        return False
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    if module is not None and file is None and kind.__module__ != "__main__":
        return False  # of the interpreter
    return file is None or not file.startswith((*_NOT_USERS, *PACKAGES))


def is_state(x: Any, deep: int = 6) -> bool:
    """Whether a tree has tensors and nothing else, as states and batches have: they are no constants of a graph."""
    if isinstance(x, torch.Tensor):
        return True
    if not isinstance(x, list | tuple | dict) or not x or deep == 0:
        return False
    items = iter(x.values() if isinstance(x, dict) else x)
    return all(item is None or is_state(item, deep - 1) for item in items) and _has_tensor(x, deep)


def _has_tensor(x: Any, deep: int) -> bool:
    if isinstance(x, torch.Tensor):
        return True
    if not isinstance(x, list | tuple | dict) or deep == 0:
        return False
    return any(_has_tensor(item, deep - 1) for item in (x.values() if isinstance(x, dict) else x))


def words_of(x: Any) -> str:
    if isinstance(x, types.FunctionType):
        return described(x)
    if isinstance(x, (*ATOMS, tuple, enum.Enum, np.generic)):
        text = repr(x)
        return text if len(text) <= 60 else f"another {type(x).__name__}"
    return f"a {type(x).__name__}"

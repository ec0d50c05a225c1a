"""The signature of a compiled graph: shape, stride, dtype and device of tensors, and the values of everything else."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from typing import Any

import numpy as np
import optree
import torch

from fmegatron import tree
from fmegatron.layout.layout import Label
from fmegatron.step.graph.nodes import meta_text
from fmegatron.tree import structure
from fmegatron.tree.labels import label_of

__all__ = ["differences", "require_constants", "signature_of"]

_EXACT = (int, bool, str, bytes, type(None))
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, enum.Enum)  # as they are called
_BY_VALUE = (float, complex, np.generic, functools.partial, types.MethodType)
_OURS = ("torch", "fmegatron", "optree")  # classes of which no object changes what a graph would be
_SHOWN = 3


def signature_of(leaves: list, labels: bool = False) -> list[tuple]:
    """One key per leaf; calls with equal lists (and tree structures) run the same graph.

    labels: whether the layouts of arrays count too (`tree.place`): on several ranks a graph is checked by them. Their
    memory, and what their dims mean, count always: a graph moves what is in host memory, and decays what is a matrix.
    """
    if labels:
        return [
            (x.shape, x.stride(), x.dtype, x.device, label_of(x)) if isinstance(x, torch.Tensor) else _constant(x)
            for x in leaves
        ]
    return [
        (x.shape, x.stride(), x.dtype, x.device, _stated(x)) if isinstance(x, torch.Tensor) else _constant(x)
        for x in leaves
    ]


def _stated(x: torch.Tensor) -> tuple[str, int, tuple[int, ...]]:
    label = label_of(x)
    layout = None if label is None else label.layout
    return ("device", 0, ()) if layout is None else (layout.memory, layout.lead, layout.beside)


def _constant(x: Any) -> tuple:
    """A constant and what it holds: an object that has changed is another constant. -0.0 is not 0.0, nan is nan."""
    if type(x) in _EXACT or isinstance(x, _NAMED):
        return type(x), x
    return (_held(x, ()), None) if isinstance(x, _BY_VALUE) else (type(x), x, _held(x, ()))


def _held(x: Any, above: tuple) -> Any:
    """What an object holds, as something that can be hashed and compared. above: the objects that hold it."""
    kind = type(x)
    if kind in _EXACT or isinstance(x, (*_NAMED, torch.Tensor)):
        return x
    if isinstance(x, float):
        return kind, x.hex()
    if isinstance(x, complex):
        return kind, x.real.hex(), x.imag.hex()
    if isinstance(x, (np.generic, np.ndarray)):
        return kind, x.dtype, x.shape, x.tobytes()
    if any(x is y for y in above):
        return "itself"
    above = (*above, x)
    if isinstance(x, dict):
        return kind, tuple((_held(key, above), _held(value, above)) for key, value in x.items())
    if isinstance(x, (list, tuple)):
        return kind, tuple(_held(y, above) for y in x)
    if isinstance(x, (set, frozenset)):
        return kind, frozenset(_held(y, above) for y in x)
    if isinstance(x, functools.partial):
        return kind, _held(x.func, above), _held(x.args, above), _held(x.keywords, above)
    if isinstance(x, types.MethodType):
        return kind, x.__func__, _held(x.__self__, above)
    if kind.__module__.split(".")[0] in _OURS and not dataclasses.is_dataclass(x):
        return x
    names = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
    fields = {name: getattr(x, name) for name in names if hasattr(x, name)} | getattr(x, "__dict__", {})
    return (kind, tuple((name, _held(value, above)) for name, value in fields.items())) if fields else x


def require_constants(args: tuple) -> None:
    """ValueError for a leaf that is neither a tensor nor can be part of a signature (such as a numpy array)."""
    paths, leaves, _ = structure.flatten(args)
    for path, x in zip(paths, leaves, strict=True):
        if not isinstance(x, torch.Tensor) and type(x).__hash__ is None:
            raise ValueError(
                f"argument leaf {path!r}: got a {type(x).__name__}, wanted a tensor or a hashable constant; make it "
                "one: torch.as_tensor"
            )


def differences(before: tuple, now: tuple) -> str:
    """What differs between two signatures, each (optree structure, list of keys): "'1/x' is ..., was ..."."""
    old, new = (dict(zip(_paths(spec), keys, strict=True)) for spec, keys in (before, now))
    found = [f"{path!r} is new" for path in new if path not in old]
    found += [f"{path!r} is missing" for path in old if path not in new]
    for path, key in new.items():
        if path in old and key != old[path]:
            found.append(_change(path, old[path], key))
    if not found:
        found = ["the containers of the tree are of other types"]
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more


def _paths(spec: Any) -> list[str]:
    return tree.paths(optree.tree_unflatten(spec, range(spec.num_leaves)))


def _known(of: Label | tuple | None) -> str:
    if isinstance(of, tuple):
        memory, lead, beside = of
        return f"in {memory} memory (lead={lead}, beside={beside})"
    return "without a known layout" if of is None else f"{of.layout}"


def _change(path: str, old: tuple, new: tuple) -> str:
    was, becomes = _words(old), _words(new)
    if was == becomes and _is_tensor(new) and old[1] == new[1]:
        was, becomes = (_known(x[4]) for x in (old, new))
    elif was == becomes and _is_tensor(new):
        was, becomes = f"strides {tuple(old[1])}", f"{becomes} with strides {tuple(new[1])}"
    elif was == becomes:
        return f"{path!r}, {becomes}, holds other values than before"
    advice = " (each value of a number is a graph of its own: make it a 0-d tensor)"
    return f"{path!r} is {becomes}, was {was}{advice if _is_number(new) and _is_number(old) else ''}"


def _is_tensor(key: tuple) -> bool:
    return isinstance(key[0], torch.Size)


def _is_number(key: tuple) -> bool:
    kind = key[0][0] if isinstance(key[0], tuple) and not _is_tensor(key) else key[0]
    return isinstance(kind, type) and issubclass(kind, (int, float, complex, np.number))


def _words(key: tuple) -> str:
    """A leaf as text."""
    if _is_tensor(key):
        return meta_text(key[:4])
    if isinstance(key[0], tuple):  # by value
        kind, *rest = key[0]
        return repr(float.fromhex(rest[0])) if issubclass(kind, float) and isinstance(rest[0], str) else kind.__name__
    text = repr(key[1])
    return text if len(text) <= 60 else f"a {key[0].__name__}"

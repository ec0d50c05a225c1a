"""Modules hold code and constants only: whatever changes while a program runs is a value that somebody was handed."""

import ast
import collections
import dataclasses
import enum
import logging
import re
import types
import typing

import torch

from tests.house import ROOT, module, nodes, none, sources, syntax

CONSTANT = (
    *(int, float, complex, str, bytes, bool, type(None), frozenset, range, enum.Enum, re.Pattern),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(type, typing.TypeVar, typing.ParamSpec, types.ModuleType, types.GenericAlias, types.UnionType),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType),
)
MUTABLE = (list, dict, set, bytearray, collections.deque)
# Machinery that Python and torch want at module level, which holds nothing of a run: operators that a file registers,
# loggers, numpy-like C functions, annotations.
MACHINERY = (torch.library.Library, torch._ops.OpOverload, torch._ops.OpOverloadPacket, logging.Logger)


def is_constant(value) -> bool:
    """Whether nothing that a program does could change `value`."""
    if isinstance(value, tuple):
        return all(map(is_constant, value))
    if isinstance(value, types.MappingProxyType):
        return all(map(is_constant, value.values()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return type(value).__dataclass_params__.frozen and all(map(is_constant, fields))
    if isinstance(value, CONSTANT + MACHINERY):
        return True
    if isinstance(value, MUTABLE):
        return False
    # Written in C or by functools: decorated functions, operators of torch, typing's own objects, builtins.
    wrapped = hasattr(value, "__wrapped__") or callable(value) and type(value).__module__.startswith("torch._library")
    return wrapped or type(value).__module__ in ("typing", "builtins", "functools", "operator", "numpy", "__future__")


def mutable(path) -> dict[str, str]:
    """{name: type} of the values at a module's level that could be changed."""
    own = {
        target.id
        for node in syntax(path).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id != "__all__"
    }
    held = vars(module(path))
    return {name: type(held[name]).__name__ for name in own if name in held and not is_constant(held[name])}


def test_no_mutable_state():
    found = {path: mutable(path) for path in sources("fmegatron")}
    none(
        f"{path}: {names} can be changed; use a tuple, frozenset, MappingProxyType or frozen dataclass"
        for path, names in found.items()
        if names
    )


def test_no_globals():
    none(
        f"{path}:{node.lineno}: `global`; pass the value"
        for path in sources("fmegatron", "experiments")
        if re.search(r"\bglobal\b", (ROOT / path).read_text())
        for node in nodes(path)
        if isinstance(node, ast.Global)
    )

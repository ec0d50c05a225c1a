"""What a function's code reads from outside, by its instructions: names, with the attributes that follow them.

`table.append(x)`, `table[k] = x`, `count += 1` and `self.count += 1` only write: no result of a step depends on them.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Chain", "Reads", "inner_codes", "reads_of", "same_code"]

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_CELL = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_NOTHING = ("CACHE", "RESUME", "PRECALL", "PUSH_NULL", "EXTENDED_ARG", "NOP")
_STORES = ("STORE_SUBSCR", "STORE_ATTR", "DELETE_SUBSCR", "DELETE_ATTR")


class Chain(NamedTuple):
    """One use of a name: `config.model.dim` is ("global", "config", ("model", "dim")).

    kind: "global", "free" (of a closure) or "own" (the first argument, which is the object in a method).
    writes: what stands at its end is only written to.
    """

    kind: str
    name: str
    attributes: tuple[str, ...]
    writes: bool


@dataclass
class Reads:
    """chains: of names from outside. loose: attributes of other values (arguments, results, items)."""

    chains: dict[Chain, None] = field(default_factory=dict)  # a set in the order of the code
    loose: set[str] = field(default_factory=set)


def reads_of(code: types.CodeType) -> Reads:
    """What a code and the functions inside of it read."""
    found = Reads()
    own = code.co_varnames[0] if code.co_argcount else None
    _collect(code, found, own, frozenset(code.co_freevars))
    return found


def inner_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code and those of the functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from inner_codes(constant)


def same_code(code: types.CodeType, constant: Callable[[Any], Any]) -> tuple:
    """What makes two codes compute the same: all but files and lines. constant: a token of a constant."""
    consts = [same_code(x, constant) if isinstance(x, types.CodeType) else constant(x) for x in code.co_consts]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    return (code.co_name, code.co_code, tuple(consts), names, counts)


def _collect(code: types.CodeType, found: Reads, own: str | None, free: frozenset[str]) -> None:
    instructions = [one for one in dis.get_instructions(code) if one.opname not in _NOTHING]
    at = 0
    while at < len(instructions):
        one = instructions[at]
        root = _root(one, code, own, free)
        at += 1
        if root is None:
            if one.opname in _ATTRIBUTE or one.opname.startswith("LOAD_SUPER"):
                found.loose.add(one.argval)
            continue
        attributes: list[str] = []
        while at < len(instructions) and instructions[at].opname in _ATTRIBUTE:
            attributes.append(instructions[at].argval)
            at += 1
        writes, skipped = _writes(instructions, at, one, attributes)
        found.chains[Chain(*root, tuple(attributes), writes)] = None
        at += skipped
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            _collect(inner, found, own if own in inner.co_freevars else None, free & set(inner.co_freevars))


def _root(one: dis.Instruction, code: types.CodeType, own: str | None, free: frozenset[str]) -> tuple[str, str] | None:
    """(kind, name) of what an instruction loads from outside."""
    name = one.argval
    if one.opname in _GLOBAL:
        return ("global", name)
    if name == own and (one.opname.startswith("LOAD_FAST") or one.opname in _CELL):
        return ("own", name)
    if one.opname in _CELL and name in free:
        return ("free", name)
    if own is not None and one.opname.startswith("LOAD_FAST") and isinstance(name, tuple) and name[-1] == own:
        return ("own", own)
    return None


def _writes(
    instructions: list[dis.Instruction], at: int, load: dis.Instruction, attributes: list[str]
) -> tuple[bool, int]:
    """(whether what was just loaded is only written to, how many instructions of that have been read)."""
    names = [one.opname for one in instructions[at : at + 4]]
    if names[:1] and names[0] in _STORES:  # object.name = value
        return True, 0
    if names[:1] == ["COPY"] and names[1:2] and names[1] in _ATTRIBUTE:  # object.name += value
        return True, 2
    if names[1:2] and names[1] in ("STORE_SUBSCR", "DELETE_SUBSCR"):  # object[name] = value
        return True, 0
    if names[1:4] == ["COPY", "COPY", "BINARY_SUBSCR"]:  # object[name] += value
        return True, 0
    if not attributes and names[1:3] and names[1] == "BINARY_OP" and names[2:3] and names[2].startswith("STORE_"):
        stored = instructions[at + 2]  # name += value
        if stored.argval == load.argval and "=" in instructions[at + 1].argrepr:
            return True, 0
    return False, 0

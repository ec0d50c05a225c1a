"""What functions have read from outside, found by their code and the values themselves: names, and what they hold.

A `Walk` starts at a function, and at codes that were seen running, and goes to what their code reads (`code_reads`):
globals, closures, attributes of the user's objects and modules, what containers hold. Each has a key that is the same
in every walk, a token that is equal where the same graph would come out, and a place that is compared by identity.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import functools
import gc
import os
import pickle
import random
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from fmegatron.step.code_reads import Chain, Reads, inner_codes, reads_of
from fmegatron.step.lines import described
from fmegatron.step.read_tokens import (
    ATOMS,
    CONTAINERS,
    DEPTH,
    GONE,
    ITEMS,
    MOST,
    PACKAGES,
    held,
    is_state,
    is_users,
    is_users_class,
    is_users_module,
    token_of,
    words_of,
)

__all__ = ["Entered", "Known", "Read", "Walk"]

Known = dict[int, tuple[types.CodeType, Reads]]  # what codes read, by their ids
Entered = Mapping[int, tuple[types.CodeType, dict]]  # codes that were seen running by their ids, and their globals

_ONLY_WRITES = frozenset(
    {
        *("append", "appendleft", "add", "extend", "extendleft", "update", "insert", "clear", "remove", "discard"),
        *("reverse", "sort"),
    }
)
_PASSED = ("__call__", "forward", "__init__", "__post_init__")
_CLOCKS, _NOW = ("time", "datetime"), ("time", "perf_counter", "monotonic", "time_ns", "process_time", "now", "today")
_DRAWN = (random.Random, np.random.Generator, np.random.RandomState)
_IN_CLASSES = (types.FunctionType, property, staticmethod, classmethod, functools.cached_property)


class Read(NamedTuple):
    """A value that was read: what it is compared by, how it is called, and how it is written."""

    token: Any
    shown: str
    words: str


class Walk:
    """What is read from a function on. entered: codes that were seen running, and their globals. known: what codes
    read, which is filled. own: keys of what is not compared, as traces change it themselves. grown: of dicts to
    which traces add entries: those that they have are compared.

    reads: key -> `Read`, callers before what they call. unwatched: key -> name. drawn: names of clocks; generators: key
    -> (name, state). The rest are places that are compared by identity: names of mappings, absent names, cells,
    functions, containers, arrays with their bytes, slots. reached: ids of codes found from the function itself.
    """

    def __init__(self, fn: Any, entered: Entered, known: Known, own: set[str], grown: set[str]):
        self._entered, self._known, self._own, self._grown = entered, known, own, grown
        self._loose: set[str] = set()
        for _ in range(4):  # names of attributes that are met later may belong to objects that were met before
            before = len(self._loose)
            self._begin()
            self._look_at(_name(fn), described(fn), fn, 0)
            self.reached = set(self.codes)
            for code, names in entered.values():
                if id(code) not in self.codes:
                    self._enter(code, names)
            if len(self._loose) == before:
                break

    def _begin(self) -> None:
        self.reads: dict[str, Read] = {}
        self.unwatched: dict[str, str] = {}
        self.drawn: set[str] = set()
        self.generators: dict[str, tuple[str, bytes]] = {}
        self.codes: dict[int, types.CodeType] = {}
        self.names: dict[int, tuple[Mapping, dict[Any, None]]] = {}
        self.absent: list[tuple[Mapping, str]] = []
        self.cells: list[types.CellType] = []
        self.functions: list[types.FunctionType] = []
        self.containers: list[Any] = []
        self.arrays: list[tuple[np.ndarray, bytes]] = []
        self.slots: list[tuple[Any, str]] = []
        self._seen: dict[Any, Any] = {}  # (what, id) -> the object, which is kept so that no other one has its id

    # ---- functions

    def _enter(self, code: types.CodeType, names: dict) -> None:
        """A code that was seen running and is not reached by names or values. By its own name it may be redefined."""
        function = None
        if code.co_freevars:
            function = next((f for f in gc.get_referrers(code) if type(f) is types.FunctionType), None)
        root, *attributes = code.co_qualname.split(".")
        value = names.get(root)
        if function is None and isinstance(value, types.FunctionType | type):
            self._chain(names, Chain("global", root, tuple(attributes), False), _where(code))
        if id(code) not in self.codes:
            cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True)) if function else {}
            self._read(code.co_qualname, code, names, cells, GONE)

    def _function(self, key: str, f: types.FunctionType, bound: Any = GONE, deep: int = 0) -> None:
        if ("function", id(f), id(bound)) in self._seen:
            return
        self._seen["function", id(f), id(bound)] = f, bound
        self.functions.append(f)
        for i, value in enumerate(f.__defaults__ or ()):
            self._inside(f"{key}({i})", f"a default of {described(f)}", value, deep + 1)
        if f.__kwdefaults__:
            self._contents(f"{key}(**)", f"defaults of {described(f)}", f.__kwdefaults__, deep + 1)
        cells = dict(zip(f.__code__.co_freevars, f.__closure__ or (), strict=True))
        self._read(key, f.__code__, f.__globals__, cells, bound)

    def _read(self, key: str, code: types.CodeType, names: dict, cells: dict[str, types.CellType], bound: Any) -> None:
        """What one code reads."""
        self.codes.update((id(one), one) for one in inner_codes(code))
        if id(code) not in self._known:
            self._known[id(code)] = code, reads_of(code)
        found, where = self._known[id(code)][1], _where(code)
        self._loose |= found.loose
        shallow = code.co_filename.startswith(PACKAGES)
        for chain in found.chains:
            if chain.kind == "global":
                self._chain(names, chain, where, shallow)
            elif chain.kind == "free" and chain.name in cells:
                self._free(key, cells[chain.name], chain, where, shallow)
            elif chain.kind == "own" and bound is not GONE:
                of, shown = self._seen.get(("name", id(bound)), (None, (f"{key}:own", "its object")))[1]
                self._along(of, shown, bound, chain, shallow)
            elif chain.kind == "own":
                self._loose.update(chain.attributes)

    def _chain(self, names: dict, chain: Chain, where: str, shallow: bool = False) -> None:
        value = names.get(chain.name, GONE)
        if value is GONE:
            if hasattr(builtins, chain.name):
                self.absent.append((names, chain.name))
            return
        key, shown = f"{names.get('__name__')}:{chain.name}", f"{chain.name!r} (read at {where})"
        self._step(key, shown, value, chain, names, shallow)

    def _free(self, key: str, cell: types.CellType, chain: Chain, where: str, shallow: bool) -> None:
        value = held(cell)
        if value is not GONE:
            key = self._seen.setdefault(("cell", id(cell)), (cell, self._new(f"{key}:{chain.name}")))[1]
            self._step(key, f"{chain.name!r} (read at {where})", value, chain, cell, shallow)

    def _step(self, key: str, shown: str, value: Any, chain: Chain, place: Any, shallow: bool) -> None:
        """A name that is read, and what follows it."""
        if isinstance(value, types.ModuleType) or _only_written(value, chain.attributes, chain.writes):
            self._along(key, shown, value, chain, shallow)
            return
        first = getattr(value, "__module__", None) in _CLOCKS and {chain.name, *chain.attributes} & {*_NOW}
        if first:
            self.drawn.add(f"the clock {chain.name!r}")
        elif self._place(place, chain.name, key, shown, value, not chain.attributes, shallow):
            self._along(key, shown, value, chain, shallow)

    def _along(self, key: str, shown: str, value: Any, chain: Chain, shallow: bool) -> None:
        """The attributes behind a value, each of the one before."""
        for i, name in enumerate(chain.attributes):
            rest, last = chain.attributes[i + 1 :], i + 1 == len(chain.attributes)
            if isinstance(value, types.ModuleType):
                if value.__name__ in _CLOCKS and name in _NOW:
                    self.drawn.add(f"the clock {value.__name__!r}")
                if not is_users_module(value) or name not in vars(value):
                    return
                place, found = vars(value), vars(value)[name]
                key, shown = f"{value.__name__}:{name}", f"{value.__name__}.{name}"
            else:
                place, found = self._attribute(key, shown, value, name)
                key, shown = f"{key}.{name}", f"{shown}.{name}"
            if found is GONE:
                return
            written = _only_written(found, rest, last and chain.writes)
            if not written and not isinstance(found, types.ModuleType):
                if place is not None and not self._place(place, name, key, shown, found, last, shallow):
                    return
            value = found
        if not chain.attributes and not chain.writes and chain.kind == "own":
            self._look_at(key, shown, value, 1)  # it is handed on

    # ---- values

    def _place(self, place: Any, name: Any, key: str, shown: str, value: Any, whole: bool, shallow: bool) -> bool:
        """Note a value and where it stands; whether there is anything to be looked for behind it."""
        if isinstance(value, torch.Tensor) or is_state(value):
            return False  # a tensor from outside is refused when it is traced
        if shallow and not isinstance(value, (*ATOMS, types.FunctionType, type, enum.Enum)):
            return True
        if key in self._own:
            self.unwatched.setdefault(key, f"{shown} (which the trace itself changes)")
            return False
        if ("place", id(place), name) not in self._seen:
            self._seen["place", id(place), name] = place
            if isinstance(place, types.CellType):
                self.cells.append(place)
            elif isinstance(place, _Slot):
                self.slots.append((place.x, name))
            else:
                self.names.setdefault(id(place), (place, {}))[1][name] = None
            self.reads.setdefault(key, Read(token_of(value), shown, words_of(value)))
        if whole and not shallow or isinstance(value, (types.FunctionType, *_DRAWN)):
            self._look_at(key, shown, value, 0)
        elif not shallow:
            self._seen.setdefault(("name", id(value)), (value, (key, shown)))
        return True

    def _look_at(self, key: str, shown: str, x: Any, deep: int) -> None:
        """What a value that is used as a whole holds: functions, items, attributes that are read somewhere."""
        if isinstance(x, (torch.Tensor, types.ModuleType, *ATOMS)) or deep > DEPTH or ("value", id(x)) in self._seen:
            return
        self._seen["value", id(x)] = x
        self._seen.setdefault(("name", id(x)), (x, (key, shown)))
        if isinstance(x, types.FunctionType):
            if is_users(x.__code__):
                if not x.__code__.co_filename.startswith(PACKAGES) or id(x.__code__) in self._entered:
                    self.reads.setdefault(key, Read(token_of(x), f"the function {described(x)}", described(x)))
                    self._function(key, x, deep=deep)
                return
            inside = [held(cell) for cell in x.__closure__ or ()]  # of a library: what it was made with
            self._items(key, shown, [*inside, *(x.__defaults__ or ()), getattr(x, "__wrapped__", None)], deep)
        elif isinstance(x, types.MethodType):
            if is_users(x.__func__.__code__) if isinstance(x.__func__, types.FunctionType) else False:
                self.reads.setdefault(key, Read(token_of(x), f"the function {described(x)}", described(x)))
                self._function(key, x.__func__, x.__self__, deep)
            else:
                self._inside(f"{key}.__self__", shown, x.__self__, deep + 1)
        elif isinstance(x, functools.partial):
            self._items(key, shown, [x.func, *x.args], deep)
            self._contents(f"{key}(**)", shown, x.keywords, deep)
        elif isinstance(x, CONTAINERS):
            self._contents(key, shown, x, deep)
        elif isinstance(x, ITEMS):
            self._items(key, shown, list(x) if len(x) <= MOST else [], deep)
        elif isinstance(x, np.ndarray):
            self._array(key, shown, x)
        elif isinstance(x, _DRAWN):
            self.generators[key] = (shown, _state_of(x))
        elif isinstance(x, type):
            if is_users_class(x):
                for name, value in vars(x).items():
                    if not (name.startswith("__") and name.endswith("__") and name not in _PASSED):
                        self._class_value(f"{key}.{name}", f"{shown}.{name}", x, name, value, GONE, deep)
        else:
            self._object(key, shown, x, deep)

    def _object(self, key: str, shown: str, x: Any, deep: int) -> None:
        """An object that is handed on: its attributes that some code reads of something, and what calls it."""
        kind, values = type(x), getattr(x, "__dict__", None)
        values = values if isinstance(values, dict) else {}
        if kind.__module__.startswith("fmegatron."):
            plain = dataclasses.is_dataclass(x) and not callable(x)
            inside = {k: v for k, v in values.items() if plain or callable(v) or isinstance(v, tuple)}
            for name, value in inside.items():
                self._inside(f"{key}.{name}", f"{shown}.{name}", value, deep + 1)
            return
        if not is_users_class(kind) and not isinstance(x, torch.nn.Module) and not values:
            return
        for name in sorted(self._loose | {*_PASSED}):
            place, found = self._attribute(key, shown, x, name, deep)
            if place is not None and found is not GONE and not isinstance(found, types.ModuleType):
                self._place(place, name, f"{key}.{name}", f"{shown}.{name}", found, True, False)
        if isinstance(x, torch.nn.Module):
            self._place(values, "training", f"{key}.training", f"{shown}.training", x.training, True, False)
            if not is_users_class(kind):
                for name in {*kind.forward.__code__.co_names} & values.keys():
                    self._place(values, name, f"{key}.{name}", f"{shown}.{name}", values[name], True, False)
            for name, value in x.named_children():
                self._look_at(f"{key}.{name}", f"{shown}.{name}", value, deep)

    def _attribute(self, key: str, shown: str, x: Any, name: str, deep: int = 0) -> tuple[Any, Any]:
        """(where an attribute of an object is kept, its value); what only runs when it is read is looked at."""
        values = getattr(x, "__dict__", None)
        values = values if isinstance(values, dict) else {}
        if isinstance(x, type):
            for base in x.__mro__:
                if name in vars(base):
                    return (vars(base), vars(base)[name]) if is_users_class(base) else (None, GONE)
            return None, GONE
        if name in values:
            return values, values[name]
        for base in type(x).__mro__:
            if name not in vars(base):
                continue
            value = vars(base)[name]
            if isinstance(value, types.MemberDescriptorType):
                return _Slot(x, self._seen), getattr(x, name, GONE)
            if not is_users_class(base):
                return None, GONE
            if isinstance(x, tuple) and type(value).__name__ == "_tuplegetter":
                return None, GONE  # of a NamedTuple, which is compared whole
            if not isinstance(
                value, types.FunctionType | property | staticmethod | classmethod | functools.cached_property
            ):
                if not hasattr(type(value), "__get__"):
                    if values is not None and ("absent", id(values), name) not in self._seen:
                        self._seen["absent", id(values), name] = values
                        self.absent.append((values, name))
                    return vars(base), value
                continue
            self._seen.setdefault(("name", id(x)), (x, (key, shown)))
            self._class_value(f"{key}.{name}", f"{shown}.{name}", base, name, value, x, deep)  # and those of its bases
        if hasattr(type(x), "__getattr__") and not isinstance(x, torch.nn.Module) and name not in _PASSED:
            for at, value in list(values.items()) if len(values) <= MOST else ():  # a configuration with items as names
                self._place(values, at, f"{key}.{at}", f"{shown}.{at}", value, True, False)
        return None, GONE

    def _class_value(self, key: str, shown: str, kind: type, name: str, value: Any, bound: Any, deep: int) -> None:
        """What stands in a class: a function, perhaps as a property, or a plain value."""
        function = value
        if isinstance(value, staticmethod | classmethod):
            function, bound = value.__func__, kind if isinstance(value, classmethod) else GONE
        elif isinstance(value, property):
            function = value.fget
        elif isinstance(value, functools.cached_property):
            function = value.func
        if isinstance(function, types.FunctionType):
            if is_users(function.__code__) and not function.__code__.co_filename.startswith(PACKAGES):
                if ("place", id(kind), name) not in self._seen:
                    self._seen["place", id(kind), name] = kind
                    self.names.setdefault(id(kind), (vars(kind), {}))[1][name] = None
                    self.reads.setdefault(key, Read(token_of(function), shown, described(function)))
                self._function(key, function, bound, deep)
            elif not is_users(function.__code__):
                self._look_at(f"{key}()", shown, function, deep + 1)  # decorated
        elif not hasattr(type(value), "__get__"):
            self._place(vars(kind), name, key, shown, value, True, False)

    def _inside(self, key: str, shown: str, value: Any, deep: int) -> None:
        """What stands where it cannot be replaced: in a tuple, a closure of a library, a default."""
        if not isinstance(value, (torch.Tensor, *ATOMS)) and not is_state(value):
            self._look_at(key, shown, value, deep)

    def _items(self, key: str, shown: str, items: list, deep: int) -> None:
        for i, value in enumerate(items):
            self._inside(f"{key}[{i}]", shown, value, deep + 1)

    def _contents(self, key: str, shown: str, x: Any, deep: int) -> None:
        """What a container holds, which may change."""
        if key in self._own:
            self.unwatched.setdefault(key, f"{shown} (which the trace itself changes)")
            return
        if len(x) > MOST:
            self.unwatched.setdefault(key, f"{shown} ({len(x):,} items)")
            return
        values = list(x.items()) if isinstance(x, dict) else list(enumerate(x))
        grown = isinstance(x, dict) and key in self._grown
        if grown or any(isinstance(value, torch.Tensor) or is_state(value) for _, value in values):
            for at, value in values:  # what is no tensor, one by one
                if isinstance(x, list | dict):
                    self._place(x, at, f"{key}[{at!r}]", f"{shown}[{at!r}]", value, True, False)
            return
        self._seen.setdefault(("name", id(x)), (x, (key, shown)))
        self.containers.append(x)
        self.reads.setdefault(f"{key}[...]", Read(token_of(x), shown, words_of(x)))
        for at, value in values:
            self._inside(f"{key}[{at!r}]", f"{shown}[{at!r}]", value, deep + 1)

    def _array(self, key: str, shown: str, x: np.ndarray) -> None:
        if x.dtype == object:
            return
        if x.size <= MOST:
            self.arrays.append((x, x.tobytes()))
            self.reads.setdefault(f"{key}[...]", Read(token_of(x), shown, "an array"))
        elif x.flags.writeable:
            self.unwatched.setdefault(key, f"{shown} ({x.size:,} numbers)")

    def _new(self, key: str) -> str:
        """A key that no other one has: of closures that one function made several times."""
        number = self._seen.get(("key", key), 0) + 1
        self._seen["key", key] = number
        return key if number == 1 else f"{key}#{number}"


class _Slot:
    """Stands for the slots of an object as a place."""

    def __new__(cls, x: Any, seen: dict):
        known = seen.get(("slots", id(x)))
        if known is None:
            known = seen["slots", id(x)] = super().__new__(cls)
            known.x = x
        return known

    x: Any


def _only_written(value: Any, behind: tuple[str, ...], writes: bool) -> bool:
    """Whether what follows a value (attributes, or a store) reads nothing of it."""
    if not behind:
        return writes
    return isinstance(value, CONTAINERS) and behind[0] in _ONLY_WRITES


def _state_of(x: Any) -> bytes:
    if isinstance(x, random.Random):
        return pickle.dumps(x.getstate())
    return pickle.dumps(x.bit_generator.state if isinstance(x, np.random.Generator) else x.get_state())


def _where(code: types.CodeType) -> str:
    file = os.path.basename(code.co_filename)
    folder = os.path.basename(os.path.dirname(code.co_filename))
    return f"{'cell' if folder.startswith('ipykernel_') else file}:{code.co_firstlineno}"


def _name(fn: Any) -> str:
    return getattr(getattr(fn, "func", fn), "__name__", type(fn).__name__)

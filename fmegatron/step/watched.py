"""What a trace has read besides its arguments: functions, numbers and other plain values of the user's code.

A graph is what the code was when it was traced. A cell that defines a helper, a number or a function again changes the
code and not the graph, so what was read is compared in every call, and a difference traces again.

Watched are the functions on the stack of any op that was recorded, and the user's functions that these read; of each,
what its code reads as globals and closure is looked up as it is when the trace has ended. A plain value is compared by
identity first, as nearly all are the same object.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import enum
import functools
import gc
import os
import random
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from fmegatron.collectives.known_ranks import recorded_reads
from fmegatron.step.tracing import described

__all__ = ["Entered", "Watched", "drawn_since", "entered", "generators"]

_MOST = 1000  # items of a container that is compared in every call
_PLAIN = (int, float, complex, str, bytes, type(None), enum.Enum, type, torch.dtype, torch.device, np.generic)
_PLAIN += (types.FunctionType, types.BuiltinFunctionType, range, slice, torch.Size, torch.layout)
_CONTAINERS = (list, dict, set)
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = tuple({os.path.dirname(os.path.abspath(module.__file__ or "")) + os.sep for module in (torch, np)})
_STANDARD = tuple({os.path.join(sysconfig.get_path(kind), "") for kind in ("stdlib", "platstdlib")})
_PACKAGES = tuple({os.path.join(sysconfig.get_path(kind), "") for kind in ("purelib", "platlib")})
_CLOCKS = ("time", "datetime")
_DRAWN = (random.Random, np.random.Generator, np.random.RandomState)
_GONE = object()


class Entered:
    """The functions of the user's that run while something is traced. codes: of them, with those of cached traces.

    They are seen on the stack at each op that is recorded (`step.tracing` walks it for the line anyway). A profiler
    would see those without an op too and doubles the time of a trace; these are found by who reads them (`Watched`).
    """

    def __init__(self):
        self.codes: set[types.CodeType] = set()
        self._known: set[types.CodeType] = set()
        self.top: types.FrameType | None = None  # who traces; what is above is no part of what is traced

    def look(self, frame: types.FrameType | None) -> None:
        """Note the functions on the stack from this frame on."""
        known, top = self._known, self.top
        while frame is not None and frame is not top:
            code = frame.f_code
            if code not in known:
                known.add(code)
                if _is_users(code):
                    self.codes.add(code)
            frame = frame.f_back


@contextlib.contextmanager
def entered() -> Iterator[Entered]:
    """Context in which the functions that are entered are noted, for a trace that is given it; within another trace
    they are that one's, too."""
    outer, own = recorded_reads(), Entered()
    own.top = sys._getframe(2)  # behind that of contextlib
    try:
        yield own
    finally:
        own.top = None
    if isinstance(outer, Entered):
        outer.codes.update(own.codes)


class Watched:
    """What the functions that were entered have read, and what it was.

    codes: of the user's functions. unwatched: names of what is read and cannot be compared.
    """

    def __init__(self, fn: Callable, found: Entered, name: str, known: Watched | None = None):
        self.codes, self.name = set(found.codes), name
        self._values: dict[tuple[int, Any], list] = {}  # (mapping or cell, key) -> [mapping or cell, key, value, name]
        self._contents: dict[int, list] = {}  # container -> [container, copy, name, what it held before a new trace]
        self._functions: list[tuple] = []
        self.unwatched: list[str] = []
        self._own = set() if known is None else set(known._own)  # containers that the trace itself changes
        self._drawn: set[str] = set()
        self._seen: set[int] = set()
        before = {} if known is None else known._contents
        todo = [*_functions_in(fn), *_functions_of(self.codes)]
        while todo:
            function = todo.pop()
            if id(function) not in self._seen:
                self._seen.add(id(function))
                self.codes.add(function.__code__)
                todo += self._read(function)
        for number, entry in before.items():
            if number in self._contents and entry[3] is not None and not _same(entry[3], self._contents[number][1]):
                self._own.add(number)
        for number in self._own & self._contents.keys():
            self.unwatched.append(f"{self._contents.pop(number)[2]} (which the trace itself changes)")
        self._quick = [tuple(one[:3]) for one in self._values.values() if isinstance(one[0], dict)]
        self._cells = [(one[0], one[2]) for one in self._values.values() if not isinstance(one[0], dict)]

    # ---- in every call

    def changed(self) -> str | None:
        """What is no longer as it was, in words; None: nothing."""
        for mapping, key, value in self._quick:
            if mapping.get(key, _GONE) is not value:
                return self._look()
        for cell, value in self._cells:
            if _held(cell) is not value:
                return self._look()
        for container, copy, *_ in self._contents.values():
            if container != copy:
                return self._look()
        for function, code, defaults, named in self._functions:
            if function.__code__ is not code or function.__defaults__ is not defaults:
                return self._look()
            if function.__kwdefaults__ is not named:
                return self._look()
        return None

    def _look(self) -> str | None:
        """The same, slowly; what is another object and equal is the one to be compared from now on."""
        for one in self._values.values():
            place, key, old, name = one
            new = place.get(key, _GONE) if isinstance(place, dict) else _held(place)
            if new is not old:
                if not _same(new, old):
                    return f"{name} is {_words(new)}, was {_words(old)}"
                one[2] = new
                if id(old) in self._contents:  # an equal one stands in its place
                    entry = self._contents.pop(id(old))
                    self._contents[id(new)] = [new, *entry[1:]]
        for entry in self._contents.values():
            container, copy, name, _ = entry
            if not _same(container, copy):
                entry[3] = _copy(container)
                return f"{name} holds other values than before"
        for function, code, defaults, named in self._functions:
            if function.__code__ is not code and function.__code__ != code:
                return f"the function {described(function)} has other code"
            if not _same((function.__defaults__, function.__kwdefaults__), (defaults, named)):
                return f"the function {described(function)} has other defaults"
        self._quick = [tuple(one[:3]) for one in self._values.values() if isinstance(one[0], dict)]
        self._cells = [(one[0], one[2]) for one in self._values.values() if not isinstance(one[0], dict)]
        self._functions = [(f, f.__code__, f.__defaults__, f.__kwdefaults__) for f, *_ in self._functions]
        return None

    # ---- once

    def tell(self, drawn: Sequence[str], stacklevel: int = 3) -> None:
        """Warn of what is read and not compared, and of what is drawn or measured once: when the function is traced."""
        if self.unwatched:
            what = ", ".join(sorted(set(self.unwatched)))
            warnings.warn(
                f"{self.name}: reads {what}: more than can be compared in every call, so changes of it are not seen; "
                "make it an argument",
                stacklevel=stacklevel,
            )
        if found := sorted({*drawn, *self._drawn}):
            warnings.warn(
                f"{self.name}: reads {', '.join(found)} when it is traced: what it gives is a constant of the graph, "
                "the same in every call; draw by a key (fmegatron.nn.uniform), or pass the number as a 0-d tensor",
                stacklevel=stacklevel,
            )

    def _read(self, function: types.FunctionType) -> list[types.FunctionType]:
        """Note what a function reads -> the user's functions among it, which it may call."""
        code, inside = function.__code__, []
        names, attributes, stored = _names_of(code, self.codes)
        self._functions.append((function, code, function.__defaults__, function.__kwdefaults__))
        deep = not code.co_filename.startswith(_PACKAGES)
        for name in names - stored:
            value = function.__globals__.get(name, _GONE)
            if value is not _GONE:
                self._note(function.__globals__, name, value, f"{name!r} ({_where(code)})", attributes, deep)
                inside += _functions_in(value, attributes)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            value = _held(cell)
            if name not in stored and value is not _GONE:
                self._note(cell, name, value, f"{name!r} ({_where(code)})", attributes, deep)
                inside += _functions_in(value, attributes)
        return inside

    def _note(self, place: Any, key: Any, value: Any, name: str, attributes: set[str], deep: bool) -> None:
        if isinstance(value, torch.Tensor) or (id(place), key) in self._values:
            return
        if isinstance(value, types.ModuleType):
            self._note_module(value, name, attributes)
            return
        self._values[id(place), key] = [place, key, value, name]
        if isinstance(value, _DRAWN):
            self._drawn.add(name)
        elif getattr(value, "__module__", "") in _CLOCKS and isinstance(value, types.BuiltinFunctionType):
            self._drawn.add(name)
        elif isinstance(value, _CONTAINERS):
            if not deep:
                return
            copy = _copy(value)
            if copy is None:
                self.unwatched.append(name)
            else:
                self._contents[id(value)] = [value, copy, name, None]
        elif not isinstance(value, _PLAIN) and deep:
            for attribute, held in getattr(value, "__dict__", {}).items():
                if attribute in attributes | {"training"} and _is_plain(held):
                    self._values[id(vars(value)), attribute] = [vars(value), attribute, held, f"{name}.{attribute}"]

    def _note_module(self, module: types.ModuleType, name: str, attributes: set[str]) -> None:
        file = getattr(module, "__file__", None)
        if module.__name__ in _CLOCKS and attributes & {"time", "perf_counter", "monotonic", "time_ns", "now", "today"}:
            self._drawn.add(f"the clock {name}")
        if file is None or not _is_users_file(file) or file.startswith(_PACKAGES):
            return
        for attribute in attributes & vars(module).keys():
            held = vars(module)[attribute]
            if not isinstance(held, types.ModuleType):
                self._note(vars(module), attribute, held, f"{module.__name__}.{attribute}", attributes, deep=True)


def drawn_since(before: tuple) -> list[str]:
    """Which global generators of random numbers have moved since `generators`."""
    names = ("Python's random", "numpy.random")
    return [name for name, old, new in zip(names, before, generators(), strict=True) if old != new]


def generators() -> tuple:
    """The states of Python's and numpy's global generators."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (kind, np.asarray(keys).tobytes(), *rest)


def _is_users_file(file: str) -> bool:
    if file.startswith(_PACKAGES):
        return not file.startswith((_OURS, *_LIBRARIES)) and f"{os.sep}optree{os.sep}" not in file
    return not file.startswith((_OURS, *_LIBRARIES, *_STANDARD, "<frozen"))


def _is_users(code: types.CodeType) -> bool:
    return _is_users_file(code.co_filename)


def _where(code: types.CodeType) -> str:
    file = os.path.basename(code.co_filename)
    folder = os.path.basename(os.path.dirname(code.co_filename))
    return f"read at {'cell' if folder.startswith('ipykernel_') else file}:{code.co_firstlineno}"


def _functions_in(x: Any, attributes: set[str] | None = None, depth: int = 6) -> list[types.FunctionType]:
    """The user's functions that a value is or holds: behind decorators, partials and closures of libraries, in
    containers, methods (of these names; None: `__call__`) of objects and classes of the user's, and of modules."""
    if depth == 0 or isinstance(x, torch.Tensor | str | int | float | type(None)):
        return []
    if isinstance(x, types.FunctionType):
        if _is_users(x.__code__):
            return [x]
        held = [_held(cell) for cell in x.__closure__ or ()]  # of a library: what it was made with
        return [f for y in (*held, getattr(x, "__wrapped__", None)) for f in _functions_in(y, attributes, depth - 1)]
    if isinstance(x, types.MethodType):
        return [f for y in (x.__func__, x.__self__) for f in _functions_in(y, attributes, depth - 1)]
    if isinstance(x, functools.partial):
        return [f for y in (x.func, *x.args, *x.keywords.values()) for f in _functions_in(y, attributes, depth - 1)]
    if isinstance(x, list | tuple | set | frozenset | dict):
        items = list(x.values()) if isinstance(x, dict) else list(x)
        return [f for y in items for f in _functions_in(y, attributes, depth - 1)] if len(items) <= _MOST else []
    if isinstance(x, property):
        return [f for f in (x.fget,) if isinstance(f, types.FunctionType) and _is_users(f.__code__)]
    names = (attributes or set()) | {"__call__", "__init__", "__post_init__", "forward"}
    if isinstance(x, types.ModuleType):
        file = getattr(x, "__file__", None)
        found = [vars(x).get(name) for name in names] if file is not None and _is_users_file(file) else []
        return [
            f for y in found if not isinstance(y, types.ModuleType) for f in _functions_in(y, attributes, depth - 1)
        ]
    kind = x if isinstance(x, type) else type(x)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or "<cell>"
    if kind.__module__ == "builtins" or not _is_users_file(file):
        fields = list(getattr(x, "__dict__", {}).values()) if kind.__module__.startswith("fmegatron.") else []
        return [f for y in fields if callable(y) for f in _functions_in(y, attributes, depth - 1)]
    methods = [vars(base).get(name) for base in kind.__mro__ if base is not object for name in names]
    return [f for y in methods for f in _functions_in(y, attributes, depth - 1)]


def _functions_of(codes: set[types.CodeType]) -> list[types.FunctionType]:
    """The living functions that have these codes."""
    found = gc.get_referrers(*codes) if codes else []
    return [x for x in found if type(x) is types.FunctionType and x.__code__ in codes]


def _names_of(code: types.CodeType, entered: set[types.CodeType]) -> tuple[set[str], set[str], set[str]]:
    """(globals that a code reads, all names in it, variables that it writes), with functions inside that were entered,
    whose own functions are gone."""
    names, attributes, stored = set(), set(code.co_names), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(instruction.argval)
        elif instruction.opname in ("STORE_GLOBAL", "STORE_DEREF"):
            stored.add(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType) and inner in entered:
            for of, more in zip((names, attributes, stored), _names_of(inner, entered), strict=True):
                of |= more
    return names, attributes, stored


def _held(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return _GONE


def _is_plain(x: Any) -> bool:
    if isinstance(x, tuple | frozenset):
        return len(x) <= _MOST and all(map(_is_plain, x))
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        frozen = getattr(x, "__dataclass_params__").frozen  # noqa: B009  not in the type stubs
        return frozen and all(_is_plain(getattr(x, one.name, None)) for one in dataclasses.fields(x))
    return isinstance(x, _PLAIN)


def _copy(x: Any, room: int = _MOST) -> Any:
    """A copy of a container of plain values, as deep as it goes; None: of other things, or of more than 1,000."""
    if isinstance(x, _CONTAINERS) and len(x) > room:
        return None
    if isinstance(x, dict):
        found = {key: _copy(item, room - len(x)) for key, item in x.items()}
        return None if any(y is None and x[key] is not None for key, y in found.items()) else found
    if isinstance(x, list):
        found = [_copy(item, room - len(x)) for item in x]
        return None if any(y is None and item is not None for y, item in zip(found, x, strict=True)) else found
    if isinstance(x, set):
        return set(x) if all(map(_is_plain, x)) else None
    return x if _is_plain(x) else None


def _same(x: Any, y: Any) -> bool:
    """Whether two values would give the same graph, as far as it is plain."""
    if x is y:
        return True
    if type(x) is not type(y):
        return False
    if isinstance(x, float):
        return x.hex() == y.hex()
    if isinstance(x, types.FunctionType):
        held = [tuple(_held(cell) for cell in f.__closure__ or ()) for f in (x, y)]
        mine, theirs = ((f.__code__, f.__defaults__, f.__kwdefaults__) for f in (x, y))
        return mine[0] == theirs[0] and _same(mine[1:], theirs[1:]) and _same(*held) and x.__globals__ is y.__globals__
    if isinstance(x, tuple | list):
        return len(x) == len(y) and all(map(_same, x, y))
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(_same(value, y[key]) for key, value in x.items())
    if isinstance(x, functools.partial):
        return _same((x.func, x.args, x.keywords), (y.func, y.args, y.keywords))
    if isinstance(x, types.MethodType):
        return x.__func__ is y.__func__ and x.__self__ is y.__self__
    if _is_plain(x) or isinstance(x, set | frozenset) or dataclasses.is_dataclass(x):
        return bool(x == y)
    return False


def _words(x: Any) -> str:
    if x is _GONE:
        return "gone"
    if isinstance(x, types.FunctionType):
        return described(x)
    text = repr(x)
    return text if len(text) <= 60 else f"a {type(x).__name__}"

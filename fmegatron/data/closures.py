"""What a function of data uses beside its arguments, as values that a resume compares."""

from __future__ import annotations

import dis
import functools
import types
from typing import Any

import numpy as np
import torch

from fmegatron.data.stored import digest_of

_WHOLE = 1 << 26  # bytes of an array that are all looked at
_LOOKED_AT = 1 << 16  # elements of a larger one, evenly spaced


def used(function: Any) -> dict[str, Any]:
    """{name: text of its value} of what a function closes over, of its defaults, and of the module's names that it
    reads: numbers, texts, tuples of them, and arrays (by a digest); and so of functions that it closes over or reads of
    its own module. No text: what one of them writes (nonlocal, global), and what may change meanwhile or has no text of
    its own (lists, dicts, objects), which stay unnoticed.

    >>> def rows(count):
    ...     def batch(position):
    ...         return {"x": torch.zeros(count)}
    ...     return batch
    >>> used(rows(4))
    {'count': '4'}
    """
    found: _Found = {}
    written: set[Any] = set()
    _use(function, "", "", found, written, set())
    return {name: text for name, (text, place) in sorted(found.items()) if place not in written}


_Found = dict[str, tuple[str, Any]]  # {name: (text, the cell or the name of a module that the value is in)}


def _use(function: Any, under: str, own: str, found: _Found, written: set[Any], seen: set[int]) -> None:
    """Add what a function uses; under: before names of its module, own: before its other names."""
    if isinstance(function, functools.partial):
        for name, x in {**dict(enumerate(function.args)), **function.keywords}.items():
            _note(f"{own}partial.{name}", x, None, found, written, seen)
        function = function.func
    if isinstance(function, types.MethodType):
        function = function.__func__
    if not isinstance(function, types.FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    code, known = function.__code__, function.__globals__
    read, stored, changed = set(), set(), set()
    _names(code, read, stored, changed)
    written |= {(id(known), name) for name in stored}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if name in changed:
            written.add(id(cell))
        _note(own + name, _content(cell), id(cell), found, written, seen)
    names = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    given = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)) | (function.__kwdefaults__ or {})
    for name, x in given.items():
        _note(own + name, x, None, found, written, seen)
    for name in sorted(read & known.keys()):
        x = known[name]
        if isinstance(x, types.FunctionType) and x.__globals__ is known:  # called how ever, under one name
            _use(x, under, f"{under}{name}.", found, written, seen)
        elif not callable(x):
            _note(f"{under}{name} of its module", x, (id(known), name), found, written, seen)


def _names(code: types.CodeType, read: set[str], stored: set[str], changed: set[str]) -> None:
    """Add the names of the module that code reads, those that it writes, and those in cells that it writes."""
    for one in dis.get_instructions(code):
        if one.opname == "LOAD_GLOBAL":
            read.add(one.argval)
        elif one.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            stored.add(one.argval)
        elif one.opname in ("STORE_DEREF", "DELETE_DEREF"):
            changed.add(one.argval)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            _names(inner, read, stored, changed)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return ...


def _note(name: str, x: Any, place: Any, found: _Found, written: set[Any], seen: set[int]) -> None:
    if isinstance(x, np.ndarray | torch.Tensor):
        found[name] = array_text(x), place
    elif _is_plain(x):
        text = repr(x)
        found[name] = text if len(text) <= 200 else f"{text[:60]}... {digest_of(text)}", place
    elif callable(x) and not isinstance(x, type):
        _use(x, f"{name}.", f"{name}.", found, written, seen)


def _is_plain(x: Any) -> bool:
    if type(x) is tuple:
        return all(map(_is_plain, x))
    return (
        x is None
        or isinstance(x, np.generic)
        or type(x) in (bool, int, float, complex, str, bytes, range, torch.dtype, torch.Size)
    )


def array_text(x: np.ndarray | torch.Tensor) -> str:
    """Kind, dtype, shape and a digest of the elements; of more than 64 MiB of some of them, evenly spaced.

    A tensor that has no plain elements here (another device, meta, a subclass) is described by dtype and shape alone.
    """
    if isinstance(x, torch.Tensor) and (x.is_nested or x.is_quantized):
        return f"{type(x).__name__} {x.dtype}"
    text = f"{type(x).__name__} {x.dtype}{list(x.shape)}"
    if isinstance(x, torch.Tensor):
        if type(x) not in (torch.Tensor, torch.nn.Parameter):
            return text
        if x.device.type != "cpu" or x.layout != torch.strided:
            return text
        x = x.detach().resolve_conj().resolve_neg()
        if x.numel() * x.element_size() > _WHOLE:
            x = x.flatten()[:: max(1, x.numel() // _LOOKED_AT)] if x.is_contiguous() else x.flatten()[:0]
        x = x.contiguous().view(-1).view(torch.uint8).numpy()
    elif x.dtype.hasobject:
        return text
    elif x.nbytes > _WHOLE:
        x = x.reshape(-1)[:: max(1, x.size // _LOOKED_AT)] if x.flags.c_contiguous else x.reshape(-1)[:0]
    return f"{text} {digest_of(np.ascontiguousarray(x))}"

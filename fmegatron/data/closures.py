"""What a function of data uses beside its arguments, as values that a resume compares."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fmegatron.data.stored import digest_of

_WHOLE = 1 << 26  # bytes of an array that are all looked at
_LOOKED_AT = 1 << 16  # elements of a larger one, evenly spaced


def used(function: Any) -> dict[str, Any]:
    """{name: text of its value} of what a function closes over, of its defaults, and of the module's names that it
    reads: numbers, texts, tuples of them, and arrays (by a digest). No text: what the function writes itself (nonlocal,
    global), and what may change meanwhile or has no text of its own (lists, dicts, objects), which stay unnoticed.

    >>> def rows(count):
    ...     def batch(position):
    ...         return {"x": torch.zeros(count)}
    ...     return batch
    >>> used(rows(4))
    {'count': '4'}
    """
    return dict(sorted(_used(function, "", set())))


def _used(function: Any, under: str, seen: set[int]) -> Iterator[tuple[str, str]]:
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, functools.partial):
        held = {**dict(enumerate(function.args)), **function.keywords}
        yield from _texts({f"partial.{name}": x for name, x in held.items()}, under, seen)
        function = function.func
    if isinstance(function, types.MethodType):
        function = function.__func__
    if not isinstance(function, types.FunctionType):
        return
    read, written = set(), set()
    _names(function.__code__, read, written)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    held = {name: _content(cell) for name, cell in cells if name not in written}
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    held |= dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    held |= function.__kwdefaults__ or {}
    yield from _texts(held, under, seen)
    known = function.__globals__
    yield from _texts({f"{x} of its module": known[x] for x in read - written if x in known}, under, set(), False)


def _names(code: types.CodeType, read: set[str], written: set[str]) -> None:
    """Add the names of the module that code reads, and those, or of what it closes over, that it writes."""
    for one in dis.get_instructions(code):
        if one.opname == "LOAD_GLOBAL":
            read.add(one.argval)
        elif one.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"):
            written.add(one.argval)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            _names(inner, read, written)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return ...


def _texts(values: dict[str, Any], under: str, seen: set[int], functions: bool = True) -> Iterator[tuple[str, str]]:
    for name, x in values.items():
        if isinstance(x, np.ndarray | torch.Tensor):
            yield under + name, array_text(x)
        elif _is_plain(x):
            text = repr(x)
            yield under + name, text if len(text) <= 200 else f"{text[:60]}... {digest_of(text)}"
        elif functions and callable(x) and not isinstance(x, type):
            yield from _used(x, f"{under}{name}.", seen)


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

    A tensor that has no elements here (of another device, a meta tensor) is described by dtype and shape alone.
    """
    text = f"{type(x).__name__} {x.dtype}{list(x.shape)}"
    if isinstance(x, torch.Tensor):
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

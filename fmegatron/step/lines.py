"""Lines of the user's code: found by files, not by counting frames, which differ between versions."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from types import CodeType, FrameType

import torch

from fmegatron import collectives, tree
from fmegatron.nn import weight

__all__ = [
    "MACHINERY",
    "TORCH",
    "described",
    "line_from",
    "line_here",
    "line_of",
    "raised_at",
    "warn_users",
]

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(_HERE)) + os.sep
_ROOT = os.path.dirname(os.path.dirname(_PACKAGE)) + os.sep
_COLLECTIVES = os.path.dirname(os.path.abspath(collectives.__file__)) + os.sep
_TREE = os.path.dirname(os.path.abspath(tree.__file__)) + os.sep
TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PRODUCTS = os.path.abspath(weight.__file__)  # who multiplies says more than how
_CONTEXTS = os.path.abspath(contextlib.__file__)  # between a context and whoever opened it
_COPY = os.path.abspath(copy.__file__)  # of Python, which users call
# Code that is made by programs. What users type has names that are no files, too: <stdin>, <ipython-input-7-...>.
_GENERATED = (
    "<frozen ",
    "<eval_with_key>",
    "<attrs generated",
    "<decorator-gen",
    "<lambdifygenerated",
    "<__",
    "<made>",
)
MACHINERY = (TORCH, _HERE, _COLLECTIVES, _TREE, _PRODUCTS, _CONTEXTS, _COPY, *_GENERATED)


def line_from(frame: FrameType | None, top: CodeType | None) -> tuple[str, bool]:
    """(`line_of` a frame and of those that called it, whether it is that of a frame below `top`, or of none)."""
    library, inside = "", True
    while frame is not None:
        code = frame.f_code
        inside = inside and code is not top
        whose = _whose(code.co_filename, code.co_name)
        if whose == "user":
            file = _file_line(_file_of(code.co_filename, code.co_name), frame.f_lineno)
            return f"{file}{library and f' (in {library})'}", inside
        if whose == "library" and not library:
            library = f"{code.co_filename.removeprefix(_ROOT).replace(os.sep, '/')}:{frame.f_lineno}"
        frame = frame.f_back
    return library, True


@functools.lru_cache(maxsize=4096)
def _whose(file: str, function: str) -> str:
    """ "machinery", "library" or "user": whose code that of a function is."""
    file = _file_of(file, function)
    return "machinery" if file.startswith(MACHINERY) else "library" if file.startswith(_PACKAGE) else "user"


def _file_of(file: str, function: str) -> str:
    """The file of a frame. The methods of dataclasses (__init__) are code of "<string>" as that of python -c is."""
    return "<made>" if file == "<string>" and function.startswith("__") else file


def line_here() -> str:
    """The line of the user's code that is running now, and behind it the library's: as on the nodes of a trace."""
    return line_from(sys._getframe(1), None)[0]


def line_of(frames: Iterable[tuple[str, int | None]]) -> str:
    """Of frames, innermost first: the first outside of this package, and behind it the first of the package that is
    neither torch's nor this machinery's: "exp.py:21 (in fmegatron/nn/norm.py:19)"; "" where there is neither."""
    library = ""
    for file, number in frames:
        if file.startswith(MACHINERY):
            continue
        if not file.startswith(_PACKAGE):
            return f"{_file_line(file, number)}{library and f' (in {library})'}"
        library = library or f"{file.removeprefix(_ROOT).replace(os.sep, '/')}:{number}"
    return library


def _file_line(path: str, line: int | None) -> str:
    """ "file.py:12"; "cell:12" for a cell of a notebook, which ipykernel names after its process and a hash."""
    folder, name = os.path.split(path)
    return f"{'cell' if os.path.basename(folder).startswith('ipykernel_') else name}:{line}"


def described(fn: Callable) -> str:
    """ "loss_fn (file.py:12)": a function by its name and the line where it begins; what wraps it is looked through."""
    while inner := getattr(fn, "func", None) or getattr(fn, "__wrapped__", None):
        fn = inner
    code = getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", None)
    name = getattr(fn, "__name__", type(fn).__name__)
    return name if code is None else f"{name} ({_file_line(code.co_filename, code.co_firstlineno)})"


def raised_at(e: BaseException) -> str:
    """The line of the user's code that an exception came from."""
    frames = [(_file_of(f.filename, f.name), f.lineno) for f in traceback.extract_tb(e.__traceback__)]
    return line_of(reversed(frames)) or "?"


def warn_users(text: str) -> None:
    """A warning at the line of the user's code that is running, found by its file."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*MACHINERY, _PACKAGE)):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)

"""Validation of the arguments of public functions, before anything is read or written."""

from __future__ import annotations

import functools
import math
import os
import threading
from typing import Any

import torch

from fmegatron import tree
from fmegatron.checkpoint.calls.ranks import Ranks
from fmegatron.collectives import World
from fmegatron.layout import Layout
from fmegatron.tree import structure

MOST_SAVED_STEP = 10**18
_MOST_DEPTH = 100  # of metadata: readers of JSON have a bound, and a value that contains itself has none
_MOST_DIGITS = 4000  # of a whole number: Python reads 4300
_WORLD = ("agree", "broadcast_text", "gather_rows", "minimum", "exchange")


def flat_layouts(layouts: Any) -> tuple[list[str], list[Layout], Any]:
    """(paths, layouts, tree spec) of a tree of Layouts or ArraySpecs. Raises ValueError for another leaf."""
    paths, leaves, spec = structure.flatten(layouts)
    for path, x in zip(paths, leaves, strict=True):
        if not isinstance(x, Layout | tree.ArraySpec):
            hint = "; is it the state? the layouts come after it" if isinstance(x, torch.Tensor) else ""
            raise ValueError(
                f"{path or 'layouts'}: got a {type(x).__name__}, wanted a Layout or an ArraySpec;"
                f" pass a tree of those, one for each tensor{hint}"
            )
    return paths, [x if isinstance(x, Layout) else x.layout for x in leaves], spec


def are_saved(layouts: Any) -> list[bool]:
    """Which leaves of a tree of Layouts or ArraySpecs checkpoints hold (`ArraySpec.saved`)."""
    return [isinstance(x, Layout) or x.saved for x in tree.leaves(layouts)]


def check_path(path: Any) -> None:
    """Raise ValueError for what is neither text, a path nor a Store."""
    if isinstance(path, str | os.PathLike):
        text = os.fspath(path)
        if not isinstance(text, str) or not text or "\0" in text:
            raise ValueError(f"path: got {text!r:.80}, wanted the path of a directory, or a URL; pass text that is one")
        if os.path.expanduser(text) != text:
            fix = f"pass os.path.expanduser(...), which is {os.path.expanduser(text)!r:.200}, or './~...' for that name"
            raise ValueError(f"path: got {text!r:.200}, wanted no '~', which only a shell replaces; {fix}")
    elif not callable(getattr(path, "locate", None)):
        hint = "; pass os.fsdecode(path)" if isinstance(path, bytes) else "; pass a str"
        raise ValueError(f"path: got {path!r:.60} ({type(path).__name__}), wanted a str, a Path or a Store{hint}")


def ranks_of(world: Any) -> Ranks:
    """The world, or for None that of this process alone, for a call that saves or restores.

    Raises ValueError for what ranks cannot talk through, RuntimeError in a process that cannot (`check_process`).
    """
    check_process()
    return known_ranks(world)


def known_ranks(world: Any) -> Ranks:
    """`ranks_of` for what saves or restores later, perhaps in a fork of this process."""
    if world is None:
        return World.alone("cpu")
    if not all(callable(getattr(world, name, None)) for name in _WORLD):
        raise ValueError(
            f"world: got {world!r:.60} ({type(world).__name__}), wanted a World, or None for one process;"
            " pass connect(mesh) of fmegatron.collectives"
        )
    return world


def check_process() -> None:
    """RuntimeError, before anything is written, in a process that was forked from one that has saved or restored, whose
    threads it lacks and whose locks it has; and where Python starts no threads any more."""
    check_fork()
    if not threading.main_thread().is_alive():
        raise RuntimeError(
            "checkpoint: got a call behind the end of the main thread (atexit, or a thread that outlives it), where "
            "Python starts no threads any more, wanted one before; save at the end of the main thread, and join there "
            "the threads that save"
        )


def check_fork() -> None:
    """RuntimeError in a process that was forked from one that has saved or restored: the writer of its saves in flight,
    their reports and files are that one's, and who else took them would let its saves fail."""
    if (first := _first_process()) != os.getpid():
        raise RuntimeError(
            f"checkpoint: got a call in process {os.getpid()}, a fork of process {first}, which had saved or restored "
            "before: the threads that write are not in a fork, and it would wait for ever; wanted a process of its "
            "own: multiprocessing.get_context('spawn') or 'forkserver', or a fork before the first call"
        )


@functools.cache
def _first_process() -> int:
    """The process of the first call: that of whoever asks for the first time."""
    return os.getpid()


def check_device(device: Any) -> None:
    """Raise ValueError for what names no device."""
    if device is not None:
        try:
            torch.device(device)
        except (RuntimeError, TypeError) as error:
            text = f"device: got {device!r:.60}, wanted a torch.device or its name, e.g. 'cuda:0'"
            raise ValueError(text) from error


def check_step(step: Any) -> None:
    """Raise ValueError for what is not the number of a step."""
    if type(step) is not int or not 0 <= step < MOST_SAVED_STEP:
        raise ValueError(
            f"step: got {step!r:.60} ({type(step).__name__}), wanted a whole number of 0 or more, below 10^18;"
            " pass int(state.step)"
        )


def check_words(metadata: Any, step: Any, finite: Any = None) -> None:
    """Raise ValueError for metadata, a step or `finite` that no reader would take back."""
    if step is not None:
        check_step(step)
    if finite is not None and type(finite) is not bool:
        raise ValueError(
            f"finite: got {finite!r:.60} ({type(finite).__name__}), wanted True, False or None; pass bool(...) of it"
        )
    if metadata is not None and not isinstance(metadata, dict):
        raise ValueError(f"metadata: got {metadata!r:.60}, wanted a dict of JSON values; pass {{'note': ...}}")
    _check_json(metadata or {}, "metadata", 0)


def _check_json(value: Any, where: str, depth: int) -> None:
    """Raise ValueError, naming the place, for what is not a JSON value."""
    if depth > _MOST_DEPTH:
        raise ValueError(
            f"{where[:80]}...: got values nested deeper, wanted at most {_MOST_DEPTH} levels (is it in itself?);"
            " make it flat"
        )
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where}: got the key {key!r}, wanted a string, as JSON has it; write str({key!r})")
            _check_json(item, f"{where}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_json(item, f"{where}[{i}]", depth + 1)
    elif isinstance(value, int) and value.bit_length() > _MOST_DIGITS * math.log2(10):
        raise ValueError(f"{where}: got a longer number, wanted at most {_MOST_DIGITS} digits, as JSON readers do")
    elif not (
        value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))
    ):
        raise ValueError(
            f"{where}: got {value!r:.80} ({type(value).__name__}), wanted a JSON value; pass numbers (finite), strings,"
            " lists and dicts, and tensors as leaves of the state"
        )

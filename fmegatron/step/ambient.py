"""Settings of torch that change what a function computes, besides its arguments: part of a signature.

A function that is called under `torch.autocast`, another default dtype or device, deterministic algorithms or another
precision of products is traced there, once, and runs what it would compute there. The casts of autocast are in its
graph, which runs without it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import torch

from fmegatron.step.torch_private import SETTINGS

__all__ = ["Ambient", "ambient", "changes", "compiled_without_autocast", "in_words", "without_autocast"]

Ambient = tuple
_READ = tuple(SETTINGS.values())
_WORDS = MappingProxyType({None: "off", True: "on", False: "off"})
_AUTOCAST = tuple(name for name in SETTINGS if name.startswith("autocast"))


def ambient() -> Ambient:
    """The settings now, in this thread, in the order of `SETTINGS`."""
    return tuple([read() for read in _READ])


def changes(before: Ambient, now: Ambient) -> list[str]:
    """["torch's autocast on cpu is torch.bfloat16, was off"]"""
    return [
        f"torch's {name} is {_WORDS.get(new, new)}, was {_WORDS.get(old, old)}"
        for name, old, new in zip(SETTINGS, before, now, strict=True)
        if old != new
    ]


def in_words(settings: Ambient) -> list[str]:
    """["torch's autocast on cpu: off", ...]"""
    return [f"torch's {name}: {_WORDS.get(value, value)}" for name, value in zip(SETTINGS, settings, strict=True)]


@contextlib.contextmanager
def without_autocast(settings: Ambient) -> Iterator[None]:
    """Context in which autocast is off, where it is on in these settings."""
    with contextlib.ExitStack() as stack:
        for name, value in zip(SETTINGS, settings, strict=True):
            if name in _AUTOCAST and value is not None:
                stack.enter_context(torch.autocast(name.rpartition(" ")[2], enabled=False))
        yield


def compiled_without_autocast(run: Callable[..., Any], settings: Ambient) -> Callable[..., Any]:
    """`run`, which is never inside of the autocast of these settings."""
    if all(value is None for name, value in zip(SETTINGS, settings, strict=True) if name in _AUTOCAST):
        return run

    @functools.wraps(run)
    def apart(*tensors: Any) -> Any:
        with without_autocast(settings):
            return run(*tensors)

    return apart

"""Operators in torch's dispatcher that stand for what is compiled: each for as long as its owner has its library."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fmegatron.step.graph.nodes import OPAQUE
from fmegatron.step.torch_private import forget_operator

__all__ = ["Begun", "defined", "existing", "free_name"]


class Begun:
    """An operator that stands for a function of lists of tensors and returns nothing, for as long as this lives."""

    def __init__(self, name: str, run: Callable, schema: str):
        self.run = run
        self.op, self.library = defined("fmegatron_step", free_name(f"{name}_", "fmegatron_step"), self, None, schema)


def defined(
    namespace: str, name: str, owner: Any, out_meta, schema: str = "(Tensor[] args) -> Tensor[]"
) -> tuple[Any, torch.library.Library]:
    """Register an operator of this name, of lists of tensors, which is `owner.run` of all of these.

    out_meta: of what it returns; None for a schema that returns nothing. Raw registration: torch.library.custom_op
    costs 0.15 ms per call. The operator is gone when its library is.
    """
    library = torch.library.Library(namespace, "FRAGMENT")
    weakref.finalize(library, forget_operator, namespace, name).atexit = False
    library.define(f"{name}{schema}")
    # torch keeps what it is given here for as long as the process lives, also of a library that is gone; the graph that
    # calls the operator keeps its owner.
    library.impl(name, functools.partial(_run, weakref.ref(owner)), "CompositeExplicitAutograd")

    def fake(*args):
        return (
            None
            if out_meta is None
            else [
                torch.empty_strided(shape, stride, dtype=dtype, device=device)
                for shape, stride, dtype, device in out_meta
            ]
        )

    torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    return getattr(getattr(torch.ops, namespace), name).default, library


def _run(owner: weakref.ReferenceType, *lists: list) -> list[torch.Tensor] | None:
    found = owner()
    assert found is not None, "a graph keeps what its opaque nodes run"
    results = found.run(*itertools.chain(*lists))
    return None if results is None else list(results)


def existing(namespace: str, name: str) -> Any:
    """The operator of a name; None: there is none."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return None if packet is None else packet.default


def free_name(name: str, namespace: str = OPAQUE[1]) -> str:
    """The first name of a compiled operator that is free: the same on all ranks, which make the same Worlds."""
    if existing(namespace, f"{name}0") is not None:
        gc.collect()  # perhaps of a World that is gone, which each rank would find out in its own time
    return next(f"{name}{n}" for n in itertools.count() if existing(namespace, f"{name}{n}") is None)

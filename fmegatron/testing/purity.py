"""assert_pure: a function must leave its arguments unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fmegatron.step import torch_private
from fmegatron.tree import structure

__all__ = ["assert_pure"]


def assert_pure(fn: Callable, *trees: structure.Tree) -> Any:
    """Call `fn(*trees)`, assert that no tensor, container or other leaf of the arguments changed, return its result.

    Compares bits (NaN equals NaN), shapes and structure; also catches a write of the value that was already there.
    Raises AssertionError naming the paths.

    >>> assert_pure(lambda p: {"w": p["w"] * 2}, {"w": torch.ones(2)})
    {'w': tensor([2., 2.])}
    """
    paths, leaves, spec = structure.flatten(trees)
    before = [(x.clone(), torch_private.version_of(x)) if isinstance(x, torch.Tensor) else x for x in leaves]
    result = fn(*trees)
    paths_after, leaves_after, spec_after = structure.flatten(trees)
    if spec_after != spec:
        raise AssertionError(
            f"{_name(fn)} changed the structure of its arguments: leaves {sorted(set(paths) ^ set(paths_after))} "
            "came or went; build new containers instead"
        )
    changed = [p for p, x, y, old in zip(paths, leaves, leaves_after, before, strict=True) if not _same(x, y, old)]
    if changed:
        raise AssertionError(
            f"{_name(fn)} changed its arguments in place: {', '.join(changed)}; return new values instead"
        )
    return result


def _name(fn):
    return getattr(fn, "__name__", repr(fn))


def _same(x, after, before):
    if x is not after:
        return False
    if not isinstance(x, torch.Tensor):
        return before is x
    value, version = before
    return torch_private.version_of(x) == version and x.shape == value.shape and _bits(x) == _bits(value)


def _bits(x):
    return x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()

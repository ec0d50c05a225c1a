"""A learning rate that is a leaf of the optimizer's state, so that it can be changed between two steps of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from fmegatron import tree
from fmegatron.optim.loss_scale import scalar
from fmegatron.tree import labels, structure


@dataclass(frozen=True)
class Settable:
    """A learning rate that begins with `first`; made by `settable`."""

    first: float

    def init(self, params: structure.Tree) -> dict[str, Any]:
        """The rate in the state, 0-d float64, the same on all ranks; its ArraySpec for a tree of ArraySpecs."""
        return {"settable": scalar(tree.leaves(params)[0], self.first, torch.float64)}


def settable(learning_rate: float) -> Settable:
    """A learning rate for any optimizer (`adamw(settable(3e-3))`) that `set_rate` changes while a run goes on.

    The rate is a 0-d leaf of the optimizer's state: a change compiles nothing anew, is in every checkpoint, and a
    resumed run goes on with the rate that was saved. ValueError unless it is a finite number of 0 or more.
    """
    return Settable(_checked("settable", learning_rate))


def set_rate(state: structure.Tree, learning_rate: float) -> structure.Tree:
    """A state with another learning rate: a new tree, of whose leaves only the rate is new.

    state: of an optimizer with a `settable` rate, or what contains it (`step.State`). ValueError for a state without
    one, and unless the rate is a finite number of 0 or more.

    >>> from fmegatron import optim
    >>> state = optim.sgd(optim.settable(0.5)).init({"w": torch.ones(2)})
    >>> optim.set_rate(state, 0.25)["rate"]["settable"].item()
    0.25
    """
    value, found = _checked("set_rate", learning_rate), []

    def one(leaf: Any) -> Any:
        if not _is_rate(leaf):
            return leaf
        found.append(leaf)
        return {"settable": labels.alike(torch.full_like(leaf["settable"], value), leaf["settable"])}

    changed = tree.map(one, state, is_leaf=_is_rate)
    if not found:
        raise ValueError(
            f"set_rate: got {structure.in_words(state)} without a rate in it, wanted the state of an optimizer with a "
            "settable rate; make it with optim.settable(learning_rate)"
        )
    return changed


def _is_rate(x: Any) -> bool:
    if not isinstance(x, dict) or set(x) != {"settable"}:
        return False
    rate = x["settable"]
    return isinstance(rate, torch.Tensor) and rate.dtype == torch.float64 and not rate.dim()


def _checked(who: str, rate: Any) -> float:
    number = isinstance(rate, int | float) and not isinstance(rate, bool)
    if not (number and rate >= 0 and math.isfinite(rate)):
        raise ValueError(
            f"{who}: got {structure.in_words(rate)}, wanted a finite number of 0 or more, such as 3e-3; a schedule "
            "goes to the optimizer itself"
        )
    return float(rate)

"""What outputs may lack of a sum over the ranks: gradients that are still to be summed, shares of what all have."""

from __future__ import annotations

import torch

from fmegatron.collectives import kinds
from fmegatron.step.checker.context import Scope
from fmegatron.step.checker.values import Mark, Value
from fmegatron.step.graph.nodes import items_of

__all__ = ["owing"]

Node = torch.fx.Node
_TO_BE_SUMMED = "it is a gradient of a loss that is a sum over the ranks, of each rank's own term"
_IS_A_SHARE = "it is what all ranks have, divided by their number, and no sum over them follows"


def owing(scope: Scope, value: Value, axis: str, node: Node) -> Mark | None:
    """The mark of what all ranks have, at an output, where it is a portion of what one rank has; None where it is
    all of it."""
    portion = value.portion.get(axis)
    if portion in ("owed", "mixed"):
        excess = value.excess.get(axis)
        if portion == "owed" and excess is not None and excess.power == 1 and not excess.loose:
            return None  # of a mean over the ranks, of which each has all
        return scope.unknown(_divided(node, axis)[0] or node, _TO_BE_SUMMED, f"psum the gradient over {axis!r}")
    if portion in ("exact", "part"):
        at, summed = _divided(node, axis)
        if at is not None and not summed:
            fix = f"psum it over {axis!r}, or leave the division out"
            return scope.unknown(at, _IS_A_SHARE, fix)
    return None


def _divided(node: Node, axis: str) -> tuple[Node | None, bool]:
    """(the last node behind which a value is divided by the number of ranks, whether a sum over them is behind it)."""
    todo, seen, at = [node], set(), None
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        collective = kinds.collective_of(one.target) if one.op == "call_function" else None
        if collective is not None and collective.sent is not None and axis in items_of(one.args[1]):
            return at, True
        at = one if at is None and axis in one.meta.get("ranks", ()) else at
        todo += one.all_input_nodes
    return at, False

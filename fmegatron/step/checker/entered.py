"""Shares of a psum of parameters whose gradient goes back as that of one rank's term, as nothing has entered it."""

from __future__ import annotations

import operator

import torch

from fmegatron.collectives import kinds, table
from fmegatron.step.checker.context import Scope, op_name, suspected
from fmegatron.step.checker.shares import is_share
from fmegatron.step.checker.values import NOTHING, Suspect, Unknown
from fmegatron.step.graph.nodes import items_of

__all__ = ["not_entered"]

Node = torch.fx.Node
_NO_ENTER = "adds a share of a sum over the ranks, through which its gradient goes back as that of one rank's term"
_ENTER = "enter(psum(x, axis), axis) sums the gradients of all ranks; a term of each rank alone needs neither"


def not_entered(scope: Scope, node: Node, axis: str) -> Suspect | Unknown | None:
    """The mark of an equal term of a sum that is made of a psum over the axis, of parameters, through which its
    gradient goes back without a psum: an `enter`, which is a view to the same shape, would make one. A suspect, where
    autograd has recorded all of the way, and no number of ranks multiplies anything behind the loss."""
    todo = [(n, True) for n in node.all_input_nodes if is_share(scope.values.get(n), axis)]
    seen: set[tuple[Node, bool]] = set()
    found = None
    while todo:
        one, recorded = todo.pop()
        if (one, recorded) in seen or one.op != "call_function" or _ends_gradient(one):
            continue
        seen.add((one, recorded))
        recorded &= one.target is operator.getitem or _is_recorded(one)
        collective = kinds.collective_of(one.target)
        if collective is table.PSUM and axis in items_of(one.args[1]) and _of_parameters(one):
            if recorded and not _times_ranks(node, axis):
                return suspected(node, _NO_ENTER, _ENTER)._replace(gradient=True, births=frozenset())
            found = found or scope.unknown(node, _NO_ENTER, _ENTER)._replace(gradient=True)
        todo += [(n, recorded) for n in one.all_input_nodes]
    return found


def _is_recorded(node: Node) -> bool:
    """Whether autograd recorded an op of the forward: it then has a number that the one before it did not have."""
    before = node.prev
    number, last = node.meta.get("seq_nr"), before.meta.get("seq_nr", -1) if before.op != "root" else -1
    return number is not None and not node.meta.get("backward") and number > last


def _times_ranks(node: Node, axis: str) -> bool:
    """Whether a node behind this one multiplies by the number of ranks."""
    while (node := node.next).op != "root":
        if node.meta.get("ranks", NOTHING).get(axis, 0) > 0 and op_name(node).startswith(("mul", "_foreach_mul")):
            return True
    return False


def _ends_gradient(node: Node) -> bool:
    """Whether no gradient goes back through a node, or an `enter` sums it there."""
    name, source = op_name(node), node.all_input_nodes[:1]
    if _is_whole(node):
        return True
    same = name == "view" and source[0].meta["val"].shape == node.meta["val"].shape
    return same or (name == "detach" and source[0].op != "placeholder")


def _is_whole(node: Node) -> bool:
    """Whether a node makes whole numbers or bools, which have no gradient."""
    made = node.meta.get("val")
    return isinstance(made, torch.Tensor) and not made.is_floating_point() and not made.is_complex()


def _of_parameters(node: Node) -> bool:
    """Whether a node depends on what has a gradient: an input that was detached to have one."""
    todo, seen = [node], set()
    while todo:
        one = todo.pop()
        if one in seen or one.op != "call_function":
            continue
        seen.add(one)
        if op_name(one) == "detach" and one.all_input_nodes[0].op == "placeholder":
            return True
        if op_name(one) == "detach" or _is_whole(one):
            continue
        todo += one.all_input_nodes
    return False

"""Rings by hand: a value that went round an axis by ppermute, added up. The sum of all its turns is a psum of it.

Of two ranks: of more each adds in another order, so that their sums differ by rounding, and replicas drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fmegatron.step.checker.context import Scope, op_name
from fmegatron.step.checker.dims import over
from fmegatron.step.checker.values import Value
from fmegatron.step.graph.nodes import int_of, items_of, node_of

__all__ = ["Turns", "added", "turned", "written"]

Node = torch.fx.Node
_ORDER = "adds a sum over the ranks in another order on each: what they have differs by rounding"
_SAME = frozenset("clone detach alias contiguous".split())


class Turns(NamedTuple):
    """A sum of what ranks have of a value: counts[i] times that of the rank i places before, along one axis."""

    base: Node
    value: Value
    axis: str
    counts: tuple[int, ...]


def turned(scope: Scope, node: Node, axes: tuple[str, ...], shift: int, xs: list[Value]) -> None:
    """Note what a ppermute sends on."""
    if len(axes) != 1:
        return
    size = scope.mesh[axes[0]]
    for source, x, item in [(s, x, u) for u in node.users for s, x in [_sent(node, u, xs)] if s is not None]:
        one = scope.turns.get(source)
        if one is None or one.axis != axes[0]:
            one = Turns(source, x, axes[0], (1, *(0,) * (size - 1)))
        counts = tuple(one.counts[(i - shift) % size] for i in range(size))
        scope.turns[item] = one._replace(counts=counts)
        scope.beside.update(item.users)


def _sent(node: Node, item: Node, xs: list[Value]) -> tuple[Node | None, Value]:
    """What one of its results is of: (node, its value)."""
    at = int_of(item.args[1])
    source = items_of(node.args[0])[at]
    return source if isinstance(source, Node) else None, xs[at]


def added(scope: Scope, node: Node, reduced: Callable[[Value, str], Value]) -> Any:
    """The value of a sum in which every rank's turn is once: that of a psum; None of any other.

    reduced(value, axis): what a psum makes of it.
    """
    name, marked = op_name(node).rstrip("_"), [n for n in node.all_input_nodes if n in scope.turns]
    if not marked:
        return None
    one = scope.turns[marked[0]]
    if name in _SAME:
        counts = one.counts
    elif name != "add" or node.kwargs or len(node.args) != 2:
        return None
    else:
        each = [_counts(scope, operand, one) for operand in node.args]
        if None in each:
            return None
        counts = tuple(a + b for a, b in zip(*[c for c in each if c is not None], strict=True))
    if all(count == 1 for count in counts):
        if any(one.axis in over(dim) for dim in one.value.dims):
            return None  # rows of a rank beside those of its neighbours: what that means is to be declared
        return _whole(scope, node, reduced(one.value, one.axis), one)
    scope.turns[node] = one._replace(counts=counts)
    scope.beside.update(node.users)
    return None


def _whole(scope: Scope, node: Node, total: Value, of: Turns) -> Value:
    if len(of.counts) == 2 or not total.replicated(of.axis):
        return total
    return total.marked({of.axis: scope.unknown(node, _ORDER, f"psum it over {of.axis!r}")})


def written(scope: Scope, memory: Node) -> None:
    """Nothing is known any more of what was written into, nor of turns of it."""
    for node, one in [*scope.turns.items()]:
        if memory in (node, one.base):
            del scope.turns[node]


def _counts(scope: Scope, operand: Any, of: Turns) -> tuple[int, ...] | None:
    if operand is of.base:
        return (1, *(0,) * (len(of.counts) - 1))
    one = scope.turns.get(node_of(operand)) if isinstance(operand, Node) else None
    return one.counts if one is not None and (one.base, one.axis) == (of.base, of.axis) else None

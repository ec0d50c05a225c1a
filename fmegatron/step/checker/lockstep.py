"""Along which dims of a node the indices of values run (`positions.py`): may one element stand for all of a dim?

One element of each value stands for all that it has along a dim which nothing moves. That says nothing of a value that
meets itself along another dim: of `x[:, None] - x[None]` only the diagonal would be seen, and of `w - w.T`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from fmegatron.collectives import kinds
from fmegatron.step.checker.context import op_name
from fmegatron.step.checker.elements import dim_at, sizes_of
from fmegatron.step.checker.shapes import grouped
from fmegatron.step.graph.nodes import int_of, items_of, node_of

__all__ = ["is_crossed"]

Node = torch.fx.Node
_VIEWS = frozenset(("view", "_unsafe_view", "reshape"))
_Lies = tuple[frozenset, ...]  # of each dim the (node, dim) whose index runs along it


class _Seen(Protocol):
    """What is asked for: what is known already, which nodes have elements of their own, or are made of no data."""

    axes: tuple[str, ...]
    memory: Any

    def is_leaf(self, node: Node) -> bool: ...
    def is_made(self, node: Node) -> bool: ...
    def is_number(self, node: Node) -> bool: ...


def is_crossed(seen: _Seen, node: Node, dims: Iterable[int]) -> bool:
    """Whether one index runs along two of these dims of what a node gives."""
    sizes = sizes_of(node)
    big = [d for d in dims if sizes[d] > 1]
    if len(big) < 2:
        return False
    lies, before = _lies(seen, node), frozenset()
    for d in big:
        if lies[d] & before:
            return True
        before |= lies[d]
    return False


def _lies(seen: _Seen, node: Node) -> _Lies:
    key, known = ("lies", seen.axes, node), seen.memory.known
    if key not in known:
        known[key] = _found(seen, node)
    return known[key]


def _found(seen: _Seen, node: Node) -> _Lies:
    sizes = sizes_of(node)
    if seen.is_number(node):
        return (frozenset(),) * len(sizes)
    own: _Lies = tuple(frozenset(((node, d),)) if n > 1 else frozenset() for d, n in enumerate(sizes))
    if node.op != "call_function" or (seen.is_leaf(node) and not seen.is_made(node)):
        return own
    made = _of_op(seen, node, sizes)
    return tuple(a | b for a, b in zip(own, made, strict=True)) if seen.is_leaf(node) else made


def _of_op(seen: _Seen, node: Node, sizes: tuple[int, ...]) -> _Lies:
    name, rank = op_name(node).rstrip("_"), len(sizes)
    if not hasattr(node.target, "_schema"):  # one of several results
        several, at = node_of(node.args[0]), int_of(node.args[1])
        if kinds.collective_of(several.target) is not None:
            return _lies(seen, node_of(items_of(several.args[0])[at]))
        node, name = several, op_name(several)
    first: _Lies = _lies(seen, node_of(node.args[0])) if isinstance(node.args[0], Node) else ()
    before = len(first)
    if name in _VIEWS:
        return _viewed(sizes_of(node_of(node.args[0])), sizes, first)
    if name in ("permute", "transpose", "t"):
        order = list(range(rank))
        if name == "permute":
            order = [int_of(d) % rank for d in items_of(node.args[1])]
        elif rank > 1:
            a, b = (int_of(d) % rank for d in node.args[1:3]) if name == "transpose" else (0, 1)
            order[a], order[b] = order[b], order[a]
        return tuple(first[d] for d in order)
    if name in ("unsqueeze", "select_backward"):
        dim = int_of(node.args[1 if name == "unsqueeze" else 2]) % rank
        return (*first[:dim], frozenset(), *first[dim:])
    if name in ("select", "unbind"):
        dim = dim_at(node, 1, before)
        return (*first[:dim], *first[dim + 1 :])
    if name in ("sum", "squeeze") and rank < before:
        dims = [*node.args[1:2], None][0]
        dims = range(before) if dims is None else dims if isinstance(dims, (list, tuple)) else [dims]
        gone = {int_of(d) % before for d in dims}
        shape = sizes_of(node_of(node.args[0]))
        left = [one for d, one in enumerate(first) if d not in gone or (name == "squeeze" and shape[d] > 1)]
        return tuple(left) if len(left) == rank else _any(seen, node, rank)
    if name in ("mm", "bmm", "mv", "dot"):
        second, batch = _lies(seen, node_of(node.args[1])), int(name == "bmm")
        return (
            *[a | b for a, b in zip(first[:batch], second[:batch], strict=True)],
            *first[batch:-1],
            *second[batch + 1 :],
        )
    if name == "stack":
        dim = dim_at(node, 1, rank)
        each = [_lies(seen, node_of(n)) for n in items_of(node.args[0])]
        inside = [frozenset().union(*(one[d] for one in each)) for d in range(rank - 1)]
        return (*inside[:dim], frozenset(), *inside[dim:])
    given = [_lies(seen, n) for n in node.all_input_nodes]
    if any(len(one) > rank for one in given):
        return _any(seen, node, rank)
    each = [(frozenset(),) * (rank - len(one)) + one for one in given]  # as they are broadcast
    return tuple(frozenset().union(*(one[d] for one in each)) for d in range(rank))


def _any(seen: _Seen, node: Node, rank: int) -> _Lies:
    """Of an op of which it is not known how it moves dims: all along all."""
    all_ = frozenset().union(*(one for n in node.all_input_nodes for one in _lies(seen, n)))
    return (all_,) * rank


def _viewed(before: tuple[int, ...], after: tuple[int, ...], lies: _Lies) -> _Lies:
    out = [frozenset()] * len(after)
    for olds, news in grouped(before, after):
        olds, news = [d for d in olds if before[d] > 1], [d for d in news if after[d] > 1]
        same = [before[d] for d in olds] == [after[d] for d in news]
        for i, d in enumerate(news):
            out[d] = lies[olds[i]] if same else frozenset().union(*(lies[old] for old in olds))
    return tuple(out)

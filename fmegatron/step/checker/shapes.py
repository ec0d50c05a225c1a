"""Shapes as one rank would have them, of the nodes of a graph as a rank has them (`positions.py`).

Each op is run on tensors without data, of the shapes of one rank, with the numbers that one rank would give it. Where
one is not known, so is the shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch

from fmegatron.collectives import kinds, table
from fmegatron.step.checker.context import op_name
from fmegatron.step.checker.dims import over
from fmegatron.step.checker.values import Pending, Value
from fmegatron.step.graph.nodes import int_of, items_of, node_of

__all__ = ["GONE", "Open", "grouped", "is_by_value", "shape_on_one", "viewed_on_one"]

GONE = "one rank would not make it"  # in the place of a shape

Node = torch.fx.Node
_SHAPED = (table.PSUM, table.PMAX, table.PPERMUTE, table.DECLARE)  # whose results have the shape of what they take
_KEEP = (table.ALL_GATHER, table.REDUCE_SCATTER, table.CUT)  # on one rank
_EACH = frozenset("_to_copy clone detach alias".split())
_MADE = frozenset("zeros ones full empty arange eye new_zeros new_ones new_full new_empty".split())


class Open(Exception):
    """Nothing is known of it."""


class Numbers(Protocol):
    """What is asked for: numbers and shapes as one rank has them."""

    axes: tuple[str, ...]
    scope: Any

    def number(self, node: Node, x: int | float, lines: bool = True) -> int | float: ...
    def whole(self, node: Node) -> Any: ...
    def forward(self, node: Node, fits: Callable[[Node], bool]) -> list[Node]: ...
    def size_as_forward(self, node: Node, shape: Sequence[int], dim: int) -> int: ...


def shape_on_one(seen: Numbers, node: Node) -> Any:
    """The shape of what a node gives on one rank, where those of its operands are known; of several results a list."""
    collective = kinds.collective_of(node.target)
    if is_by_value(seen, node):
        return _by_value(seen, node)
    if collective is table.AXIS_INDEX:
        return [()] * len(items_of(node.args[0]))
    if collective is not None:
        if collective in _SHAPED:
            return [seen.whole(n) for n in items_of(node.args[0])]
        mine = [axis for axis in items_of(node.args[1]) if seen.scope.mesh[axis] > 1]
        if collective not in _KEEP or not set(mine) <= set(seen.axes):
            raise Open
        if set(mine) != set(seen.axes):
            return _by_value(seen, node)
        return [seen.whole(n) for n in items_of(node.args[0])]
    if not hasattr(node.target, "_schema"):
        return seen.whole(node_of(node.args[0]))[int_of(node.args[1])]
    shapes = [seen.whole(n) for n in node.all_input_nodes]
    if GONE in shapes:
        return _without(seen, node)
    each = op_name(node) in _EACH or torch.Tag.pointwise in getattr(node.target, "tags", ())
    if each and shapes and all(one == shapes[0] for one in shapes):  # as the op would give it, for a tenth of the calls
        return shapes[0]
    if op_name(node) in ("slice_backward", "select_backward"):
        return _put_back(seen, node)
    if op_name(node) == "select":
        of, dim = seen.whole(node_of(node.args[0])), int_of(node.args[1])
        if not -of[dim] <= seen.number(node, int_of(node.args[2])) < of[dim]:
            return GONE
    args, kwargs = _arguments(seen, node)

    def tensor(n: Node) -> torch.Tensor:
        return torch.empty(seen.whole(n), dtype=n.meta["val"].dtype, device="meta")

    args, kwargs = torch.fx.map_arg((args, kwargs), tensor)
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "layout", "pin_memory", "memory_format")}
    found = cast("Callable", node.target)(*args, **kwargs, **({"device": "meta"} if not node.all_input_nodes else {}))
    return [tuple(one.shape) for one in found] if isinstance(found, (list, tuple)) else tuple(found.shape)


def is_by_value(seen: Numbers, node: Node) -> bool:
    """Whether its shape is what the rules say of it, whatever it is made of: inputs, collectives over other axes."""
    collective = kinds.collective_of(node.target)
    other = collective is not None and not set(items_of(node.args[1])) & set(seen.axes)
    return node.op != "call_function" or other


def _without(seen: Numbers, node: Node) -> Any:
    """Of what one rank would not make in part: lists and sums leave that out, as a loop does."""
    name, left = op_name(node), [n for n in node.all_input_nodes if seen.whole(n) != GONE]
    if not left or name not in ("add", "cat", "stack"):
        return GONE
    if name == "add":
        return seen.whole(left[0])
    dim = int_of([*node.args, 0][1])
    tensors = [torch.empty(seen.whole(n), device="meta") for n in items_of(node.args[0]) if n in left]
    return tuple((torch.stack if name == "stack" else torch.cat)(tensors, dim).shape)


def _put_back(seen: Numbers, node: Node) -> tuple[int, ...]:
    """What a slice, or one index, was taken of."""
    sizes, found = [int_of(n) for n in items_of(node.args[1])], [*seen.whole(node_of(node.args[0]))]
    dim = int_of(node.args[2]) % len(sizes)
    if op_name(node) == "select_backward":
        found.insert(dim, 1)
    found[dim] = seen.size_as_forward(node, sizes, dim)
    return tuple(found)


def _by_value(seen: Numbers, node: Node) -> Any:
    """As the rules have it."""
    value = seen.scope.values.get(node)

    def shape(v: Any) -> tuple[int, ...]:
        if not isinstance(v, Value) or node in seen.scope.chunks:
            raise Open
        if any(not (m is None or isinstance(m, Pending)) for m in map(v.marks.get, seen.axes)):
            raise Open
        ways = [math.prod(int(seen.scope.mesh[a]) for a in over(dim) & set(seen.axes)) for dim in v.dims]
        return tuple(math.prod(atom.size for atom in dim) * n for dim, n in zip(v.dims, ways, strict=True))

    return [shape(v) for v in value] if isinstance(value, list) else shape(value)


def _arguments(seen: Numbers, node: Node) -> tuple[Any, Any]:
    """Those of a node, with the numbers that decide its shape as one rank has them."""
    name, args = op_name(node).rstrip("_"), list(node.args)
    meta = node.meta["val"]
    if name in ("view", "_unsafe_view", "reshape"):
        source = node_of(args[0])
        before, after = tuple(source.meta["val"].shape), tuple(meta.shape)
        return [args[0], viewed_on_one(seen, node, before, after, seen.whole(source))], node.kwargs
    if name == "expand":
        source = node_of(args[0])
        before, whole, new = source.meta["val"].shape, seen.whole(source), meta.dim() - source.meta["val"].dim()
        args[1] = [
            whole[d - new] if d >= new and (before[d - new] == n or whole[d - new] > 1)
            else seen.size_as_forward(node, tuple(meta.shape), d)
            for d, n in enumerate(meta.shape)
        ]  # fmt: skip
    elif name in _MADE:
        first = 1 if name.startswith("new") else 0
        if name in ("arange", "eye"):
            args = [seen.number(node, a) if isinstance(a, (int, float)) else a for a in args]
        else:
            args[first] = [seen.size_as_forward(node, tuple(meta.shape), d) for d in range(meta.dim())]
    elif name in ("slice", "constant_pad_nd", "repeat", "split", "split_with_sizes"):
        at = (2, 3, 4) if name == "slice" else (1,)
        for i in at:
            if i < len(args):
                args[i] = _numbers(seen, node, args[i])
    return args, node.kwargs


def _numbers(seen: Numbers, node: Node, given: Any) -> Any:
    if isinstance(given, (list, tuple)):
        return [_numbers(seen, node, one) for one in given]
    return seen.number(node, given) if isinstance(given, int) else given


def viewed_on_one(
    seen: Numbers, node: Node, before: Sequence[int], after: Sequence[int], whole: Sequence[int]
) -> list[int]:
    """The shape on one rank behind a view, of one that is `whole` before."""
    out: list[int] = []
    for olds, news in grouped(before, after):
        count = math.prod(whole[d] for d in olds)
        big = [d for d in news if after[d] > 1]
        if not big and count > 1:
            raise Open
        sizes = dict.fromkeys(news, 1)
        same = [before[d] for d in olds] == [after[d] for d in news]
        if same:
            sizes = dict(zip(news, [whole[d] for d in olds], strict=True))
        elif len(big) == 1 and not (any(before[d] == 1 < whole[d] for d in olds)):
            sizes[big[0]] = count
        elif big:
            sizes |= _split(seen, node, after, big, count)
        if math.prod(sizes.values()) != count:
            raise Open
        out += [sizes[d] for d in news]
    return out


def _split(seen: Numbers, node: Node, after: Sequence[int], big: list[int], count: int) -> dict[int, int]:
    """Sizes of the dims into which a view splits one: as its numbers say; torch itself takes those of other dims, which
    are what the rules know."""
    numbered = seen.forward(node, lambda one: "made" in one.meta) or "made" in node.meta
    try:
        sizes = {d: seen.size_as_forward(node, after, d) for d in big}
    except Open:
        if numbered:
            raise
        sizes = {}
    if (not sizes or math.prod(sizes.values()) != count) and not numbered:
        known = _by_value(seen, node)
        sizes = {d: known[d] for d in big}
    return sizes


def grouped(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Dims before and after a view that have the same elements, in their order."""
    out, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        olds, news, a, b = [], [], 1, 1
        while not (olds and news and a == b):
            if (a <= b or j >= len(after)) and i < len(before):
                olds.append(i)
                a *= before[i]
                i += 1
            elif j < len(after):
                news.append(j)
                b *= after[j]
                j += 1
            else:
                break
        if a != b:
            raise Open
        out.append((olds, news))
    return out

"""Sizes of a rank's parts as numbers: of a sharded dim it is 1/n of what one rank has (`layout.rank_counts`).

A number that is a product of such sizes, and of numbers of ranks, is known to be, and which; one that Python was told
as a plain number (`len(x)`, `float(x.shape[0])`) may be one wherever a number is as large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from fmegatron.step.checker.context import Scope
from fmegatron.step.checker.dims import UNIFORM, Dim, over, size_of
from fmegatron.step.checker.values import NOTHING, First, Pending, Value

Node = torch.fx.Node


class Known(NamedTuple):
    """{axis: power} of the numbers of ranks by which a factor is another than on one rank; sure: whether that is all of
    it, and it may not be made up for by another number in it."""

    over: Mapping[str, Fraction]
    sure: bool


def read(graph: torch.fx.Graph) -> frozenset[str]:
    """Names of the nodes whose sizes numbers of a graph are made of, or may be."""
    made = [sizes for node in graph.nodes if "parts" in node.meta for _, sizes, _ in node.meta["parts"]]
    found = {name for sizes in made for name, *_ in sizes}
    return frozenset(found.union([node.name for node in graph.nodes if "asked" in node.meta]))


def note(scope: Scope, node: Node, value: Any) -> None:
    """Keep the dims of a node whose sizes are read, as a value is dropped after its last use."""
    if not isinstance(value, Value):
        return
    for d, dim in enumerate(value.dims):
        open_ = any(not isinstance(mark, (Pending, First)) for mark in value.marks.values())
        scope.sizes[node.name, d] = None if open_ or any(atom.axes is UNIFORM for atom in dim) else dim
    for d in node.meta.get("asked", ()):
        dim = scope.sizes[node.name, d]
        scope.asked.setdefault(size_of(value.dims[d]), set()).add(None if dim is None else over(dim))


def of_factor(scope: Scope, node: Node, factor: float, divides: bool) -> Known | None:
    """What is known of a factor that is made of sizes (divides: it is 1 by a number); None: it is not, as far as is
    known."""
    number = 1 / factor if divides and factor else factor
    for whole, sizes, ranks in node.meta.get("parts", ()):
        if abs(number - whole) <= 1e-9 * abs(whole):
            return _powers(scope, whole, sizes, ranks, -1 if divides else 1)
    return None


def is_of_all(scope: Scope, node: Node, axis: str) -> bool:
    """Whether the one number that a node is given is made of sizes that the ranks of an axis do not share."""
    given = node.meta.get("parts", ())
    known = _powers(scope, *given[0], 1) if len(given) == 1 else None
    return known is not None and known.sure and axis not in known.over


def of_tensor(scope: Scope, of: Value, divides: bool) -> Known | None:
    """Of a tensor that holds a size of a rank's part, or a product of such sizes and numbers of ranks."""
    if not of.constant:
        return None
    number = 1 / of.constant if divides else of.constant
    if abs(number / _product(scope, of.ranks) - 1) < 1e-9:
        return None  # of numbers of ranks alone
    return Known({axis: -power if divides else power for axis, power in of.ranks.items()}, True)


def of_ranks(
    scope: Scope, over: Mapping[str, Fraction], factor: float, divides: bool
) -> tuple[Mapping[str, Fraction], float]:
    """{axis: power} of the numbers of ranks whose product a factor is, and what it is besides. Where it divides by some
    and by another number (that of all rows), nothing is known of it."""
    if not over or not factor:
        return NOTHING, 1
    over = {axis: -power if divides else power for axis, power in over.items() if axis in scope.mesh.names}
    rest = factor / _product(scope, over)
    if abs(rest - 1) < 1e-9:
        return over, 1
    least = min(over.values(), default=0)
    return (over, rest) if least > 0 or least < -1 else (NOTHING, 1)


def _product(scope: Scope, over: Mapping[str, Fraction]) -> float:
    return math.prod(int(scope.mesh[axis]) ** float(power) for axis, power in over.items())


def _powers(scope: Scope, whole: float, sizes: tuple, ranks: tuple, sign: int) -> Known | None:
    """The axes of the ranks are taken as they are said; a number beside them may be of anything."""
    powers = {axis: power * sign for axis, power in ranks if scope.mesh.names.count(axis) and scope.mesh[axis] > 1}
    rest = whole / _product(scope, {axis: power for axis, power in ranks if axis in scope.mesh.names})
    for name, d, power in sizes:
        dim = scope.sizes.get((name, d))
        if dim is None:
            return None
        rest /= size_of(dim) ** float(power)
        for axis in over(dim):
            powers[axis] = powers.get(axis, Fraction(0)) - sign * power
    powers = {axis: power for axis, power in powers.items() if power}
    return Known(powers, abs(rest - 1) < 1e-9)


def as_asked(scope: Scope, number: float) -> frozenset[str]:
    """The axes that shard a dim of which Python was told the size, where a number is as large and no other such dim
    is."""
    found = scope.asked.get(round(number), ()) if abs(number - round(number)) < 1e-9 else ()
    return next(iter(found)) or frozenset() if len(found) == 1 else frozenset()


def shape_of_parts(scope: Scope, node: Node, shape: tuple[int, ...]) -> tuple[Dim | None, ...]:
    """Of each dim of this size what it is, where it is the size of a dim of another value; None: not known."""
    known: dict[int, list[Dim | None]] = {}
    for whole, sizes, ranks in node.meta.get("parts", ()):
        one = not ranks and len(sizes) == 1 and sizes[0][2] == 1
        known.setdefault(round(whole), []).append(scope.sizes.get(sizes[0][:2]) if one else None)
    found = []
    for n in shape:
        dims = known.get(n, [None])
        dims = dims if len(dims) >= shape.count(n) else [None]  # of two dims of one size it may be either
        same = dims[0] is not None and size_of(dims[0]) == n and all(dim == dims[0] for dim in dims)
        found.append(dims[0] if same else None)
    return tuple(found)

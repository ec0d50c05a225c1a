"""What a value is of that of one rank: a share of what all have, a gradient of which the sum is still to be made, a sum
over the ranks of terms that a number has divided, as a mean of a rank's rows is, or of others (`Value.portion`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import torch

from fmegatron.collectives import kinds
from fmegatron.step.checker.context import Scope
from fmegatron.step.checker.values import NOTHING, OWED, SUMMED, Mark, Value
from fmegatron.step.graph.nodes import items_of

Node = torch.fx.Node
NO_MEAN = "divides a sum over the ranks by their number, of terms that are no means, as far as is known"
# What a division by a number makes of a portion, and one by the number of ranks of what a number has divided.
_AS_MEANS: Mapping[str | None, str] = MappingProxyType({"total": "mean", "owed": "owed, of a mean"})
_MEANT: Mapping[str | None, str] = MappingProxyType({"mean": "either", "owed, of a mean": "owed", "number": "number/n"})

_TO_BE_SUMMED = "it is a gradient of a loss that is a sum over the ranks, of each rank's own term"
_IS_A_SHARE = "it is what all ranks have, divided by their number, and no sum over them follows"


def is_share(value: Any, axis: str) -> bool:
    """Whether it is what all ranks have, divided by their number: so much that a sum over them makes it complete."""
    if not isinstance(value, Value) or not value.replicated(axis):
        return False
    return value.portion.get(axis) in ("exact", "either") or (axis in value.excess and value.excess[axis].power == -1)


def portion_after(
    scope: Scope, x: Value, factor: float, over: Mapping[str, Fraction], divides: bool, numbers: bool
) -> Value:
    """Divided by the number of ranks along some axes a value is a portion of what one rank has; by another number that
    is a multiple of it, it may be one. numbers: the number may count a rank's rows."""
    if over:
        return shared(x, over)
    if numbers and abs(factor) != 1:
        x = _numbered(scope, x)
    count = round(1 / abs(factor)) if factor else 0
    if count < 2 or not is_one(abs(factor) * count):
        return x
    left = (None, "maybe", "equal", "rows", *(("exact", "part") if divides else ()))
    large = {a for a, e in x.excess.items() if e.power}
    big = [a for a in scope.mesh.names if scope.mesh[a] > 1 and a not in large and x.portion.get(a) in left]
    found = {a: "maybe" for a in big if count % scope.mesh[a] == 0}
    for k in range(1, len(big) + 1) if divides else ():
        for axes in itertools.combinations(big, k):
            if math.prod(int(scope.mesh[a]) for a in axes) == count:
                found |= {a: "equal" for a in axes if x.portion.get(a) in (None, "rows")}
    return replace(x, portion={**x.portion, **found}) if found else x


def no_mean(x: Value, axis: str) -> bool:
    """Whether it is a sum over the ranks, made or to be made, of terms that no number has divided: no means."""
    portion = x.portion.get(axis)
    return portion == "total" or (x.pending(axis, "sum") and portion in (None, "owed", "rows", "mean", "number/n"))


def _numbered(scope: Scope, x: Value) -> Value:
    """Divided by a number that may count a rank's rows, which makes a mean of a sum over them."""
    portion = dict(x.portion)
    for axis in scope.mesh.names:
        before = portion.get(axis)
        if scope.mesh[axis] == 1 or (axis in x.excess and x.excess[axis].power):
            continue
        if before in _AS_MEANS:
            portion[axis] = _AS_MEANS[before]
        elif before in (None, "rows") and not x.replicated(axis):
            portion[axis] = "number"
    return replace(x, portion=portion)


def counted_rows(scope: Scope, x: Value, factor: float) -> Value:
    """Times a whole number, which may count a rank's rows, as `len(x) * log_determinant` does: a term of a sum over the
    ranks as well. A float counts nothing."""
    if type(factor) is not int or abs(factor) < 2:
        return x
    found = {a: "rows" for a in scope.mesh.names if scope.mesh[a] > 1 and a not in x.portion and x.replicated(a)}
    return replace(x, portion={**x.portion, **found}) if found else x


def shared(x: Value, over: Mapping[str, Fraction]) -> Value:
    """A value times powers of numbers of ranks: once divided by n it is 1/n of what it was, and times n that again. A
    gradient of which the sum is owed stays one: what it is a gradient of was divided."""
    portion = dict(x.portion)
    for axis, power in over.items():
        before = portion.get(axis)
        if before in _MEANT and power == -1:
            portion[axis] = _MEANT[before]
        elif before == "number/n" and power == 1:
            portion[axis] = "number"
        if before in ("mixed", "number/n", *OWED, *SUMMED):
            continue
        before = None if before == "rows" else before
        if before in ("exact", "either") and power == 1:
            del portion[axis]
        elif before not in (None, "maybe") or power < 0:
            portion[axis] = "exact" if before in (None, "maybe", "either") and power == -1 else "maybe"
    return replace(x, portion=portion or NOTHING)


def is_one(x: float) -> bool:
    return abs(x - 1) < 1e-9


def owing(scope: Scope, value: Value, axis: str, node: Node) -> Mark | None:
    """The mark of what all ranks have, at an output, where it is a portion of what one rank has; None where it is
    all of it."""
    portion = value.portion.get(axis)
    if portion in ("mixed", *OWED):
        excess = value.excess.get(axis)
        if portion in OWED and excess is not None and excess.power == 1 and not excess.loose:
            return None  # of a mean over the ranks, of which each has all
        return scope.unknown(_divided(node, axis)[0] or node, _TO_BE_SUMMED, f"psum the gradient over {axis!r}")
    if portion in ("exact", "part"):
        at, summed = _divided(node, axis)
        if at is not None:
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
        at = one if at is None and ("parts" in one.meta or axis in one.meta.get("ranks", ())) else at
        todo += one.all_input_nodes
    return at, False

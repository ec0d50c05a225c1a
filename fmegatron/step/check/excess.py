"""Scale factors: how many times too large a value is, from means of parts and sums of replicas.

A mean over a sharded dim divides by the local size: the sum of these over the ranks is n times the mean. A sum of
replicas is n times too large. Both are right once they are divided by n, as `psum(x.mean()) / n` is, so neither is a
mistake before it arrives at an output, or where only the right number will do (an addition, a function).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import torch

from fmegatron.step.check.scope import Scope
from fmegatron.step.check.values import NOTHING, Excess, Mark, Suspect, Unknown, Value

# Of a scaled argument these make something equally scaled, or not scaled at all.
_KEEPS = frozenset(("same", "beside", "abs"))
_DROPS = frozenset(("nan", "finite", "sign"))
_POWERS = MappingProxyType({"sqrt": (1, 2), "square": (2, 1), "inverse": (-1, 1)})


def raised(x: Value, axes: Iterable[str], power: int, node: torch.fx.Node, what: str, **more: Any) -> Value:
    """A value that is too large by the sizes of these axes to a power; more: as in `Excess`."""
    excess = dict(x.excess)
    for axis in axes:
        new = Excess(Fraction(power), node, what, **more)
        old = excess.pop(axis, None)
        new = new if old is None else old._replace(power=old.power + power)
        if new.power or new.doubt is not None:
            excess[axis] = new
    return replace(x, excess=excess or NOTHING)


def scaled(scope: Scope, x: Value, factor: float, divides: bool = False) -> Value:
    """A value times a number (divides: written as a division): 1/n takes an excess of n out; other numbers may have
    been meant to. A sum of replicas is divided at once, if at all: by n, or by n times another count."""
    too_large_over = [a for a, e in x.excess.items() if e.power]
    if not too_large_over:
        return _portion(scope, x, factor)
    for count in range(len(too_large_over), 0, -1):
        for axes in itertools.combinations(too_large_over, count):
            size = math.prod(scope.mesh[a] ** float(x.excess[a].power) for a in axes)
            if _is_one(abs(factor) * size):
                left = {a: e._replace(power=Fraction(0)) if a in axes else e for a, e in x.excess.items()}
                return replace(x, excess={a: e for a, e in left.items() if e.power or e.doubt is not None} or NOTHING)
    if abs(factor) == 1:
        return x
    divisor = 1 / abs(factor) if factor else 0.0
    whole = round(divisor) if divides and divisor > 1.5 and _is_one(divisor / round(divisor)) else 0
    excess = {}
    for axis, e in x.excess.items():
        holds = e.unused and whole and whole % scope.mesh[axis] == 0
        excess[axis] = e._replace(loose=True, sure=e.sure and not holds, unused=False)
    return replace(x, excess=excess)


def _portion(scope: Scope, x: Value, factor: float) -> Value:
    """Divided by the number of ranks along some axes, or by a multiple of it, a value may be a portion of what one rank
    has."""
    count = round(1 / abs(factor)) if factor else 0
    if count < 2 or not _is_one(abs(factor) * count):
        return x
    big = [a for a in scope.mesh.names if scope.mesh[a] > 1 and x.portion.get(a) != "never"]
    found = {a: "maybe" for a in big if count % scope.mesh[a] == 0}
    for k in range(1, len(big) + 1):
        for axes in itertools.combinations(big, k):
            if math.prod(scope.mesh[a] for a in axes) == count:
                found |= dict.fromkeys(axes, "exact")
    return replace(x, portion={**x.portion, **found}) if found else x


def _is_one(x: float) -> bool:
    return abs(x - 1) < 1e-9


def excess_after(
    scope: Scope, node: torch.fx.Node, kind: str, values: Sequence[Value]
) -> tuple[Mapping[str, Excess], dict[str, Mark]]:
    """Of an op on several operands: the excess of its result, and marks where it has none that makes sense."""
    axes = sorted(set().union(*(v.excess for v in values)))
    kept, marks = {}, {}
    for axis in axes:
        have = [v.excess.get(axis) for v in values]
        given = [e for e in have if e is not None]
        loose, sure = any(e.loose for e in given), all(e.sure for e in given)
        first = max(given, key=lambda e: e.power != 0)
        doubt = next((e.doubt for e in given if e.doubt is not None), None)
        first = first._replace(loose=loose, sure=sure, unused=kind in ("same", "beside") and first.unused, doubt=doubt)
        if not any(e.power for e in given):
            kept[axis] = first
            continue
        if kind in _DROPS:
            continue
        if kind in ("product", "quotient"):
            signs = [1] + [-1 if kind == "quotient" else 1] * (len(have) - 1)
            power = sum(s * e.power for s, e in zip(signs, have, strict=True) if e is not None)
            if power or doubt is not None:
                kept[axis] = first._replace(power=Fraction(power))
            continue
        if kind in _POWERS:
            kept[axis] = first._replace(power=first.power * Fraction(*_POWERS[kind]))
            continue
        terms = values[1:] if kind == "select" else values
        terms = [v for v in terms if v.constant != 0] if kind in ("sum", "select", "compare", "max", "min") else terms
        powers = {v.excess[axis].power if axis in v.excess else Fraction(0) for v in terms}
        if kind in (*_KEEPS, "sum", "select", "max", "min", "compare") and len(powers) == 1:
            if kind != "compare":
                kept[axis] = first
            continue
        if kind == "sum" and _means(terms, axis):
            kept[axis] = first
            continue
        if all(axis in v.portion for v in terms):  # whatever they were divided by, they are of different size
            first = first._replace(sure=True)
        marks[axis] = too_large(scope, node, axis, first)
    return kept or NOTHING, marks


def _means(terms: Sequence[Value], axis: str) -> bool:
    """Terms of a mean over the ranks: a complete value, added to each, is added to the mean once."""
    return all(v.pending(axis, "sum") if axis in v.excess else v.replicated(axis) for v in terms)


def too_large(scope: Scope, node: torch.fx.Node, axis: str, e: Excess) -> Mark:
    """The mark of a value with an excess that is used where only the right number will do."""
    if not e.power:
        return Unknown(frozenset((e.doubt,)), factor=True)
    if e.loose and not e.sure:
        why = f"{e.what}, and whether the numbers that it is multiplied by make up for that cannot be told"
        return scope.unknown(e.node, why, f"Divide by the size of {axis!r} alone, next to it")._replace(factor=True)
    fix = "remove it" if e.sure else "sum, psum, then divide by the global size"
    return Suspect(e.node, e.what, fix, None, frozenset())  # what mends it is a division, which would have been seen

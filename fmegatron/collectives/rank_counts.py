"""A number of ranks that knows that it is one, so that the check knows a division by it from one by another number.

`x / axes["dp"].size` is the same graph as `x / 2` on two ranks, and on one rank another: products, quotients and powers
of such numbers know the axes and their powers, all else (sums, `float(n)`, numbers of tensors) makes plain numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any

__all__ = ["RankCount", "RankShare", "of_ranks"]

_NONE: Mapping[str, Fraction] = MappingProxyType({})


def of_ranks(number: Any) -> Mapping[str, Fraction]:
    """{axis: power} of the numbers of ranks that a number is made of; empty for any other."""
    return dict(number.over) if isinstance(number, (RankCount, RankShare)) else _NONE


class _OfRanks:
    """over: ((axis, power), ...), of whose numbers of ranks it is the product, times a number of its own."""

    over: tuple[tuple[str, Fraction], ...] = ()

    def __mul__(self, other: Any) -> Any:
        return _made(_plain(self) * _plain(other), self, other, 1) if _is_number(other) else NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return _made(_plain(self) / _plain(other), self, other, -1) if _is_number(other) else NotImplemented

    def __rtruediv__(self, other: Any) -> Any:
        return _made(_plain(other) / _plain(self), other, self, -1) if _is_number(other) else NotImplemented

    def __pow__(self, power: Any, modulo: Any = None) -> Any:
        if not isinstance(power, (int, float)) or modulo is not None:
            return NotImplemented
        return _with({axis: p * Fraction(power) for axis, p in self.over}, _plain(self) ** _plain(power))


class RankCount(_OfRanks, int):
    """A whole number."""

    def __new__(cls, number: int, over: tuple[tuple[str, Fraction], ...] = ()) -> RankCount:
        made = super().__new__(cls, number)
        made.over = over
        return made


class RankShare(_OfRanks, float):
    """A number that is not whole."""

    def __new__(cls, number: float, over: tuple[tuple[str, Fraction], ...] = ()) -> RankShare:
        made = super().__new__(cls, number)
        made.over = over
        return made


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float))


def _plain(x: Any) -> Any:
    return int(x) if isinstance(x, int) else float(x)


def _made(number: Any, a: Any, b: Any, sign: int) -> Any:
    over = dict(of_ranks(a))
    for axis, power in of_ranks(b).items():
        over[axis] = over.get(axis, Fraction(0)) + sign * power
    return _with(over, number)


def _with(over: Mapping[str, Fraction], number: Any) -> Any:
    left = tuple((axis, power) for axis, power in sorted(over.items()) if power)
    if not left or not _is_number(number):
        return number
    return RankCount(number, left) if isinstance(number, int) else RankShare(number, left)

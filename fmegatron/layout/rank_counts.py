"""A number of ranks, or a size of a rank's part, that knows that it is one, so that the check knows a division by it.

`x / mesh["dp"]` (or `axes["dp"].size`) is the same graph as `x / 2` on two ranks, and on one rank another, and so is
`x / y.shape[0]` where `y` is sharded: products, quotients and powers of such numbers know of what they are made, and to
which powers; all else (sums, `float(n)`, numbers of tensors) makes plain numbers. That one was made of a size is noted
at its node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

__all__ = ["RankCount", "RankShare", "SizeOf", "of_ranks", "of_sizes", "plain", "ranks_along"]

_NONE: Mapping[str, Fraction] = MappingProxyType({})


class SizeOf(NamedTuple):
    """The size of a dim of what a node of a graph gives, on each rank."""

    node: torch.fx.Node
    dim: int

    def ask(self) -> None:
        """Note that Python was given it as a plain number."""
        self.node.meta.setdefault("asked", set()).add(self.dim)


def ranks_along(names: Sequence[str], sizes: Sequence[int]) -> int:
    """The number of ranks along these axes together, of which those of one rank leave no trace."""
    number = math.prod(sizes)
    over = tuple((name, Fraction(1)) for name, size in sorted(zip(names, sizes, strict=True)) if size > 1)
    return RankCount(number, over) if over else number


def of_ranks(number: Any) -> Mapping[str, Fraction]:
    """{axis: power} of the numbers of ranks that a number is made of; empty for any other."""
    if not isinstance(number, (RankCount, RankShare)):
        return _NONE
    return {key: power for key, power in number.over if isinstance(key, str)}


def of_sizes(number: Any) -> Mapping[SizeOf, Fraction]:
    """{size: power} of the sizes of a rank's parts that a number is made of; empty for any other."""
    if not isinstance(number, (RankCount, RankShare)):
        return MappingProxyType({})
    return {key: power for key, power in number.over if isinstance(key, SizeOf)}


def plain(x: Any) -> Any:
    """A number that knows nothing, of one that does; all else as it is."""
    return _plain(x) if isinstance(x, (RankCount, RankShare)) else x


class _OfRanks:
    """over: ((axis or SizeOf, power), ...), of whose numbers it is the product, times a number of its own."""

    over: tuple[tuple[str | SizeOf, Fraction], ...] = ()

    def __float__(self) -> float:
        for key, _ in self.over:
            if isinstance(key, SizeOf):
                key.ask()
        return float(_plain(self))

    def __reduce__(self) -> Any:
        return type(self), (_plain(self), tuple((key, power) for key, power in self.over if isinstance(key, str)))

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **how: Any) -> Any:
        """As numpy computes with a number of Python, which has no dtype: arrays of float32 stay float32."""
        return getattr(ufunc, method)(*map(plain, given), **how)

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
        if not math.isfinite(power):
            return _plain(self) ** _plain(power)
        return _with({key: p * Fraction(power) for key, p in self.over}, _plain(self) ** _plain(power))


class RankCount(_OfRanks, int):
    """A whole number."""

    def __new__(cls, number: int, over: tuple[tuple[str | SizeOf, Fraction], ...] = ()) -> RankCount:
        made = super().__new__(cls, number)
        made.over = over
        return made


class RankShare(_OfRanks, float):
    """A quotient of them, or any other float."""

    def __new__(cls, number: float, over: tuple[tuple[str | SizeOf, Fraction], ...] = ()) -> RankShare:
        made = super().__new__(cls, number)
        made.over = over
        return made


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float))


def _plain(x: Any) -> Any:
    return int.__int__(x) if isinstance(x, int) else float.__float__(x)


def _made(number: Any, a: Any, b: Any, sign: int) -> Any:
    over = _over(a)
    for key, power in _over(b).items():
        over[key] = over.get(key, Fraction(0)) + sign * power
    return _with(over, number)


def _over(x: Any) -> dict[str | SizeOf, Fraction]:
    return dict(x.over) if isinstance(x, (RankCount, RankShare)) else {}


def _with(over: Mapping[str | SizeOf, Fraction], number: Any) -> Any:
    left = tuple((key, power) for key, power in over.items() if power)
    if not left or not _is_number(number):
        return number
    return RankCount(number, left) if isinstance(number, int) else RankShare(number, left)


OF_RANKS = (RankCount, RankShare)

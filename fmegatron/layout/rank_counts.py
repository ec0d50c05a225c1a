"""A number of ranks, or a size of a rank's part, that knows that it is one, so that the check knows a division by it.

`x / mesh["dp"]` (or `axes["dp"].size`) is the same graph as `x / 2` on two ranks, and on one rank another, and so is
`x / y.shape[0]` where `y` is sharded: products, quotients and powers of such numbers know of what they are made, and to
which powers, and so do sums, differences and rests in which there is a size (`n - 1`): of which terms. All else
(`float(n)`, numbers of tensors) makes plain numbers. That one was made of a size is noted at its node, and that one was
made of a number of ranks, or compared with one, with the axes of the mesh.
"""

from __future__ import annotations

import math
import os
import sys
import types
from collections.abc import Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

__all__ = [
    *("Along", "RankCount", "RankShare", "SizeOf", "SumOf", "Told"),
    *("of_ranks", "of_sizes", "of_sums", "plain", "ranks_along"),
]

_Key = Any  # of str (an axis, in numbers of a mesh an Along), SizeOf, SumOf
_NONE: Mapping[str, Fraction] = MappingProxyType({})
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # whose own asking is not noted


class Told(NamedTuple):
    """That a line asked for a number of ranks as a plain number, or compared it (number: None).

    file, line: who asked. over: ((axis, power), ...) of the numbers of ranks that the number is made of.
    """

    file: str
    line: int
    number: float | None
    over: tuple[tuple[str, Fraction], ...]

    @property
    def at(self) -> str:
        """ "file.py:12"."""
        return f"{os.path.basename(self.file)}:{self.line}"


class Along(str):
    """The name of an axis of a mesh, which keeps the lines that asked for its number of ranks."""

    __slots__ = ("told",)

    told: set[Told]

    def __new__(cls, name: str) -> Along:
        made = super().__new__(cls, name)
        made.told = set()
        return made


class SizeOf(NamedTuple):
    """The size of a dim of what a node of a graph gives, on each rank."""

    node: torch.fx.Node
    dim: int

    def ask(self) -> None:
        """Note that Python was given it as a plain number."""
        self.node.meta.setdefault("asked", set()).add(self.dim)


class SumOf(NamedTuple):
    """A number that is a sum (or a rest, or a quotient with one) of such products. terms: ((key, power), ...) of
    each, () of a plain number. number: what it is here, by which sums of the same terms differ. parts: what each term
    is here, of which it is the sum; () of a rest or a quotient."""

    terms: tuple[tuple[tuple[Any, Fraction], ...], ...]
    number: float
    parts: tuple[float, ...] = ()

    @property
    def sized(self) -> bool:
        """Whether there is a size of a rank's part in it, and not only numbers of ranks."""
        keys = [key for one in self.terms for key, _ in one]
        return any(isinstance(key, SizeOf) or (isinstance(key, SumOf) and key.sized) for key in keys)


def ranks_along(names: Sequence[Along], sizes: Sequence[int]) -> int:
    """The number of ranks along these axes together, of which those of one rank leave no trace."""
    number = math.prod(sizes)
    over = tuple((name, Fraction(1)) for name, size in sorted(zip(names, sizes, strict=True)) if size > 1)
    return _Ranks(number, over) if over else number


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


def of_sums(number: Any) -> Mapping[SumOf, Fraction]:
    """{sum: power} of the sums with sizes of a rank's parts that a number is made of; empty for any other."""
    if not isinstance(number, (RankCount, RankShare)) or not number:
        return MappingProxyType({})
    return {key: power for key, power in number.over if isinstance(key, SumOf) and key.sized}


def plain(x: Any) -> Any:
    """A number that knows nothing, of one that does; all else as it is."""
    return _plain(x) if isinstance(x, (RankCount, RankShare)) else x


class _OfRanks:
    """over: ((axis, SizeOf or SumOf, power), ...), of whose numbers it is the product, times a number of its own."""

    over: tuple[tuple[_Key, Fraction], ...] = ()

    def __float__(self) -> float:
        return float(self._told())

    def _told(self) -> Any:
        number = _plain(self)
        _ask(self.over, number, sys._getframe(2))
        return number

    def __int__(self) -> int:
        return int(self._told())

    def __trunc__(self) -> int:
        return math.trunc(self._told())

    def __floor__(self) -> int:
        return math.floor(self._told())

    def __ceil__(self) -> int:
        return math.ceil(self._told())

    def __round__(self, digits: int | None = None) -> Any:
        return round(self._told(), digits)

    def as_integer_ratio(self) -> tuple[int, int]:
        """As a number of Python has it; one without a fraction still knows of what it is made."""
        above, below = _plain(self).as_integer_ratio()
        return (RankCount(above, self.over) if below == 1 else above), below

    def __reduce__(self) -> Any:
        kind = RankCount if isinstance(self, int) else RankShare
        return kind, (_plain(self), tuple((str(key), power) for key, power in self.over if isinstance(key, str)))

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

    def __neg__(self) -> Any:
        return _with(_over(self), -_plain(self))

    def __add__(self, other: Any) -> Any:
        return _sum(_plain(self) + _plain(other), self, other, 1) if _is_number(other) else NotImplemented

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return _sum(_plain(self) - _plain(other), self, other, -1) if _is_number(other) else NotImplemented

    def __rsub__(self, other: Any) -> Any:
        return _sum(_plain(other) - _plain(self), other, self, -1) if _is_number(other) else NotImplemented

    def __mod__(self, other: Any) -> Any:
        return _rest(self, other) if _is_number(other) else NotImplemented

    def __rmod__(self, other: Any) -> Any:
        return _rest(other, self) if _is_number(other) else NotImplemented

    def __floordiv__(self, other: Any) -> Any:
        return _floor(self, other) if _is_number(other) else NotImplemented

    def __rfloordiv__(self, other: Any) -> Any:
        return _floor(other, self) if _is_number(other) else NotImplemented

    def __divmod__(self, other: Any) -> Any:
        return (self // other, self % other) if _is_number(other) else NotImplemented

    def __rdivmod__(self, other: Any) -> Any:
        return (other // self, other % self) if _is_number(other) else NotImplemented

    def __rshift__(self, bits: Any) -> Any:
        return self // (1 << bits) if isinstance(bits, int) else NotImplemented

    def __lshift__(self, bits: Any) -> Any:
        return self * (1 << bits) if isinstance(bits, int) else NotImplemented

    def __abs__(self) -> Any:
        return -self if _plain(self) < 0 else self

    def __and__(self, other: Any) -> Any:
        return self._told() & plain(other) if isinstance(other, int) else NotImplemented

    def __or__(self, other: Any) -> Any:
        return self._told() | plain(other) if isinstance(other, int) else NotImplemented

    def __xor__(self, other: Any) -> Any:
        return self._told() ^ plain(other) if isinstance(other, int) else NotImplemented

    def __invert__(self) -> int:
        return ~self._told()

    def __pow__(self, power: Any, modulo: Any = None) -> Any:
        if not isinstance(power, (int, float)) or modulo is not None:
            return NotImplemented
        if not math.isfinite(power):
            return _plain(self) ** _plain(power)
        return _with({key: p * Fraction(power) for key, p in self.over}, _plain(self) ** _plain(power))


class RankCount(_OfRanks, int):
    """A whole number."""

    def __new__(cls, number: int, over: tuple[tuple[_Key, Fraction], ...] = ()) -> RankCount:
        made = super().__new__(cls, number)
        made.over = over
        return made


class _Ranks(RankCount):
    """A number of ranks as a mesh gives it: what comparing it gives is another on one rank."""

    def _compared(self) -> int:
        _ask(self.over, None, sys._getframe(2))
        return _plain(self)

    def __eq__(self, other: object) -> bool:
        return self._compared() == other

    def __ne__(self, other: object) -> bool:
        return self._compared() != other

    def __lt__(self, other: Any) -> Any:
        return self._compared() < other

    def __le__(self, other: Any) -> Any:
        return self._compared() <= other

    def __gt__(self, other: Any) -> Any:
        return self._compared() > other

    def __ge__(self, other: Any) -> Any:
        return self._compared() >= other

    __hash__ = int.__hash__


class RankShare(_OfRanks, float):
    """A quotient of them, or any other float."""

    def __new__(cls, number: float, over: tuple[tuple[_Key, Fraction], ...] = ()) -> RankShare:
        made = super().__new__(cls, number)
        made.over = over
        return made


def _ask(over: tuple[tuple[_Key, Fraction], ...], number: float | None, frame: types.FrameType) -> None:
    """Note of all sizes in a product, and in the sums of it, that Python was given them as a plain number, and of
    numbers of ranks, in which frame, if that is not one of the package itself."""
    for key, _ in over:
        if isinstance(key, SizeOf):
            key.ask()
        elif isinstance(key, Along):
            if frame.f_code.co_filename.startswith(_PACKAGE):
                continue
            whole = number if all([isinstance(one, str) for one, _ in over]) else None
            axes = tuple([(str(one), power) for one, power in over]) if whole is not None else ()
            key.told.add(Told(frame.f_code.co_filename, frame.f_lineno, whole, axes))
        elif isinstance(key, SumOf):
            for one in key.terms:
                _ask(one, None, frame)


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float))


def _plain(x: Any) -> Any:
    return int.__int__(x) if isinstance(x, int) else float.__float__(x)


def _made(number: Any, a: Any, b: Any, sign: int) -> Any:
    over = _over(a)
    for key, power in _over(b).items():
        over[key] = over.get(key, Fraction(0)) + sign * power
    return _with(over, number)


def _sum(number: Any, a: Any, b: Any, sign: int) -> Any:
    """A sum or rest: of equal products it is one, with a plain 0 it is the other. sign: of the second term; 0: it is a
    rest."""
    one, other = _over(a), _over(b)
    is_one = one == other or (not other and not _plain(b)) or (not one and not _plain(a))
    return _of_terms(number, one, other, is_one, (_plain(a), sign * _plain(b)) if sign else ())


def _of_terms(
    number: Any, one: Mapping[_Key, Fraction], other: Mapping[_Key, Fraction], is_one: bool, parts: tuple = ()
) -> Any:
    """is_one: it is a multiple of the first term, or of the second where that is plain."""
    if not one and not other:
        return number
    if is_one:
        return _with(one or other, number)
    return _with({SumOf((tuple(one.items()), tuple(other.items())), number, parts): Fraction(1)}, number)


def _rest(a: Any, b: Any) -> Any:
    """Of a size that a plain number divides nothing is left on any number of ranks."""
    number, over = _plain(a) % _plain(b), _over(a)
    of_size = bool(over) and all(isinstance(key, SizeOf) and power > 0 for key, power in over.items())
    return number if not number and of_size and not _over(b) else _sum(number, a, b, 0)


def _floor(a: Any, b: Any) -> Any:
    """Without a rest it is the quotient, also of a plain number by numbers of ranks, which are fewer where these are;
    of numbers of ranks by another it may have one on one rank."""
    number, over = _plain(a) // _plain(b), _over(_made(1, a, b, -1))
    is_exact = not _plain(a) % _plain(b)
    by_ranks = not _over(a) and all(isinstance(key, str) and power > 0 for key, power in _over(b).items())
    is_one = is_exact and (by_ranks or any(isinstance(key, (SizeOf, SumOf)) for key in over))
    return _of_terms(number, over, {}, is_one=is_one)


def _over(x: Any) -> dict[_Key, Fraction]:
    return dict(x.over) if isinstance(x, (RankCount, RankShare)) else {}


def _with(over: Mapping[_Key, Fraction], number: Any) -> Any:
    left = tuple((key, power) for key, power in over.items() if power)
    if not left or not _is_number(number) or not (number or [key for key, _ in left if _is_zero(key)]):
        return number
    return RankCount(number, left) if isinstance(number, int) else RankShare(number, left)


def _is_zero(key: _Key) -> bool:
    """Whether it is a sum, or a rest, that is 0 here, and on other numbers of ranks may be another."""
    return isinstance(key, SumOf) and not key.number


OF_RANKS = (RankCount, RankShare)

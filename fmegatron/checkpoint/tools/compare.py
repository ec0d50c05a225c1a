"""Two arrays of elements that come in portions: how many differ, by how much, and where first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fmegatron.checkpoint.files.format import raw

_BLOCK = 1 << 20  # elements that are compared in float64 at a time


@dataclass
class Comparison:
    """Of the elements seen so far. NaN equals NaN.

    count: elements.  bits: elements with other bits.  values: those whose values differ, too (not -0 and 0, not two
    NaNs).  beyond: those that differ by more than the tolerance.  first: row-major number of the first element that
    is `beyond` (or, without one, has other bits).  max_abs, max_rel: greatest |a - b| and |a - b| / |b|.
    """

    atol: float = 0.0
    rtol: float = 0.0
    count: int = 0
    bits: int = 0
    values: int = 0
    beyond: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    _first_beyond: int | None = None
    _first_bits: int | None = None

    @property
    def first(self) -> int | None:
        """Row-major number of the first element that differs, None when all bits are equal."""
        return self._first_bits if self._first_beyond is None else self._first_beyond

    def add(self, a: torch.Tensor, b: torch.Tensor, number: Callable[[np.ndarray], np.ndarray]) -> None:
        """Take in CPU tensors of one shape. number: from positions in them to row-major numbers in the leaf."""
        a, b, alike = a.reshape(-1), b.reshape(-1), a.dtype is b.dtype
        self.count += a.numel()
        for at in range(0, a.numel(), _BLOCK):
            x, y = raw(a[at : at + _BLOCK]), raw(b[at : at + _BLOCK])
            where = np.flatnonzero(_differ(x, y)) if alike else np.arange(len(x))
            if len(where):
                found = torch.from_numpy(number(where + at))
                x, y = torch.from_numpy(x[where]).view(a.dtype), torch.from_numpy(y[where]).view(b.dtype)
                self._add(x, y, found, alike)

    def _add(self, x: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor, same_type: bool) -> None:
        distance, size, equal = _distance(x, y)
        beyond = ~equal & ~(distance <= self.atol + self.rtol * size)
        if same_type:
            self.bits += len(x)
            self._first_bits = _least(self._first_bits, numbers)
        self.values += int((~equal).sum())
        self.beyond += int(beyond.sum())
        self._first_beyond = _least(self._first_beyond, numbers[beyond])
        relative = torch.where(equal, 0.0, distance / size)
        self.max_abs = max(self.max_abs, _most(torch.where(equal, 0.0, distance)))
        self.max_rel = max(self.max_rel, _most(relative))

    @property
    def within(self) -> bool:
        """Whether all is equal: bit for bit, or within the tolerance where there is one."""
        return not self.beyond and (not self.bits or bool(self.atol or self.rtol))


def _differ(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Which elements have other bits."""
    if x.dtype.itemsize < 16:
        return x != y
    return (x.view(np.int64) != y.view(np.int64)).reshape(-1, 2).any(1)


def _distance(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(|x - y|, |y|, whether equal), in float64; NaN where one is NaN. Exact for integers of one type."""
    if x.dtype is y.dtype and not x.is_floating_point() and not x.is_complex():
        a, b = x.numpy(), y.numpy()
        unsigned = np.dtype(f"u{a.itemsize}")
        up = a > b
        a, b = (a.view(unsigned), b.view(unsigned)) if a.dtype != bool else (a.astype(np.uint8), b.astype(np.uint8))
        distance = torch.from_numpy(np.where(up, a - b, b - a).astype(np.float64))
        return distance, y.to(torch.float64).abs(), torch.from_numpy(a == b)
    a, b = _wide(x), _wide(y)
    if not a.is_complex() and not b.is_complex():
        return (a - b).abs(), b.abs(), (a == b) | (a.isnan() & b.isnan())
    a, b = a.to(torch.complex128), b.to(torch.complex128)
    equal = (a.real == b.real) | (a.real.isnan() & b.real.isnan())
    return (a - b).abs(), b.abs(), equal & ((a.imag == b.imag) | (a.imag.isnan() & b.imag.isnan()))


def _wide(x: torch.Tensor) -> torch.Tensor:
    """float64 or complex128; over float32, the only way that exists for every float of a byte."""
    if x.is_complex():
        return x.to(torch.complex128)
    return (x.float() if x.is_floating_point() and x.element_size() < 4 else x).to(torch.float64)


def _least(old: int | None, numbers: torch.Tensor) -> int | None:
    if not len(numbers):
        return old
    new = int(numbers.min())
    return new if old is None else min(old, new)


def _most(x: torch.Tensor) -> float:
    """The greatest, where NaN (a number against a NaN) counts as infinity."""
    return float(x.nan_to_num(nan=float("inf"), posinf=float("inf")).max()) if x.numel() else 0.0

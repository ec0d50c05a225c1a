"""Statistics of elements that come in portions: any dtype, constant memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

_BLOCK = 1 << 20  # elements that are looked at in float64 at a time


@dataclass
class Statistics:
    """Of the elements seen so far. min, max, mean and std are those of the finite ones (of magnitudes, if complex).

    count: elements.  nonfinite: NaNs and infinities.  zeros: of either sign.
    """

    count: int = 0
    nonfinite: int = 0
    zeros: int = 0
    min: int | float | None = None
    max: int | float | None = None
    _mean: float = 0.0
    _squares: float = 0.0  # sum of squared distances from the mean

    @property
    def finite(self) -> int:
        """Number of finite elements."""
        return self.count - self.nonfinite

    @property
    def mean(self) -> float | None:
        """Mean of the finite elements, None without any."""
        return self._mean if self.finite else None

    @property
    def std(self) -> float | None:
        """Standard deviation (of the population) of the finite elements, None without any."""
        return math.sqrt(self._squares / self.finite) if self.finite else None

    def add(self, x: torch.Tensor) -> None:
        """Take in the elements of a CPU tensor."""
        for exact, values in _values(x):
            self.count += values.numel()
            self.zeros += values.numel() - int(values.count_nonzero())
            if not all(map(math.isfinite, torch.stack(values.aminmax()).tolist())):
                finite = values.isfinite()
                self.nonfinite += int((~finite).sum())
                exact, values = exact[finite], values[finite]
            kept, before = values.numel(), self.finite - values.numel()
            if not kept:
                continue
            low, high = exact.numpy().min().item(), exact.numpy().max().item()  # torch has no min of uint64
            self.min = low if self.min is None else min(self.min, low)
            self.max = high if self.max is None else max(self.max, high)
            # Chan, Golub and LeVeque 1979: means and squares of two sets make those of both.
            variance, mean = map(float, torch.var_mean(values, correction=0))
            away = mean - self._mean
            self._squares += variance * kept + away * away * before * kept / (before + kept)
            self._mean += away * kept / (before + kept)

    def to_json(self) -> dict[str, int | float | None]:
        """The numbers by name."""
        names = ("count", "nonfinite", "zeros", "min", "max", "mean", "std")
        return {name: getattr(self, name) for name in names}


def _values(x: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Portions of x, flat: in a type that is exact and that numpy has, and in float64."""
    flat = x.reshape(-1)
    for at in range(0, flat.numel(), _BLOCK):
        part = flat[at : at + _BLOCK]
        if part.is_complex():
            part = part.to(torch.complex128).abs()
        # Over float32, the only way that exists for every float of a byte.
        values = (part.float() if part.is_floating_point() and part.element_size() < 4 else part).to(torch.float64)
        yield values if part.is_floating_point() else part, values

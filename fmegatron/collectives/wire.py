"""In which dtypes values travel: weights when they are gathered, gradients when they are reduced."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Wire", "wide"]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an exact sum of such values is made and arrives: fp32 for what is narrower."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


@dataclass(frozen=True)
class Wire:
    """How a value travels when it is gathered, and its gradient when it is reduced.

    gather: dtype on the wire of a gather, and of what arrives; None: the value's own.
    reduce: dtype to which a gradient is cast before it is reduced; None: as it comes (the dtype that was gathered).
    exact: gradients of less than 32 bits travel as they are, and are summed in fp32 on the rank that keeps the sum (an
    all_to_all in place of a reduce-scatter: the same bytes, one rounding less for each addition).
    The reduced gradient has the dtype of the value that was gathered. ValueError for dtypes that cannot be summed.
    """

    gather: torch.dtype | None = None
    reduce: torch.dtype | None = None
    exact: bool = False

    def __post_init__(self):
        for name in ("gather", "reduce"):
            dtype = getattr(self, name)
            if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
                raise ValueError(f"Wire.{name}: got {dtype!r}, wanted a floating dtype such as torch.bfloat16, or None")
        if self.reduce is not None and self.reduce.itemsize < 2 and not self.exact:
            raise ValueError(f"Wire.reduce: got {self.reduce}, in which no sums are made; add exact=True, or use bf16")

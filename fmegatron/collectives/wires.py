"""Dtypes of communication: gathered weights (8 bits with a scale, or more), and reduced gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Wire", "largest_of", "wide"]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an exact sum of such values is made and arrives: fp32 for what is narrower."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def largest_of(dtype: torch.dtype) -> float:
    """The largest finite number of a floating dtype: 448 for float8_e4m3fn."""
    return torch.finfo(dtype).max


@dataclass(frozen=True)
class Wire:
    """How a value travels when it is gathered, and its gradient when it is reduced.

    gather: dtype on the wire of a gather; None: the value's own. With 8 bits, the value has a scale: value / scale is
    rounded to the nearest, sent, and multiplied by the scale where it arrives. arrive: dtype of what arrives; None: as
    it was sent (8 bits arrive in another).
    reduce: dtype to which a gradient is cast before it is reduced; None: as it comes (the dtype that was gathered).
    exact: gradients of less than 32 bits travel as they are, and are summed in fp32 on the rank that keeps the sum (an
    all_to_all in place of a reduce-scatter: the same bytes, one rounding less for each addition).
    The reduced gradient has the dtype of the value that was gathered. ValueError for dtypes that cannot be summed.
    """

    gather: torch.dtype | None = None
    reduce: torch.dtype | None = None
    exact: bool = False
    arrive: torch.dtype | None = None

    def __post_init__(self):
        for name in ("gather", "reduce", "arrive"):
            dtype = getattr(self, name)
            if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
                raise ValueError(f"Wire.{name}: got {dtype!r}, wanted a floating dtype such as torch.bfloat16, or None")
        if self.reduce is not None and self.reduce.itemsize < 2 and not self.exact:
            raise ValueError(
                f"Wire.reduce: got {self.reduce}, in which no sums are made, wanted 16 bits or more; add exact=True, "
                "or use bf16"
            )
        if self.scaled and (self.arrive is None or self.arrive.itemsize < 2):
            raise ValueError(f"Wire.arrive: got {self.arrive} with gather={self.gather}, wanted 16 bits or more")

    @property
    def scaled(self) -> bool:
        """Whether values travel in 8 bits, with a scale."""
        return self.gather is not None and self.gather.itemsize == 1

    def sent(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """A value as it is on the wire of a gather; one that has the dtype of the wire stays as it is."""
        if self.gather is None or x.dtype == self.gather:
            return x
        if not self.scaled:
            return x.to(self.gather)
        if scale is None:
            raise ValueError(
                f"got a {x.dtype} value that travels as {self.gather}, wanted a scale with it (nn.with_scales)"
            )
        # Of a scale that is too small for x (nn.with_scales gives none) the rest is cut off, in all formats and on all
        # devices; what a cast alone makes of it differs (the largest number, NaN, infinity).
        limit = largest_of(self.gather)
        return (x.float() / scale).clamp(-limit, limit).to(self.gather)

    def arrived(self, y: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """What a value on the wire represents, in the dtype in which it arrives."""
        if self.scaled and scale is not None:
            y = y.float() * scale
        return y if self.arrive is None else y.to(self.arrive)

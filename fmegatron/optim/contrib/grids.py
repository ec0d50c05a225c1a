"""Grids of 8 and 16 bits for numbers between -1 and 1: which values a code can stand for, and the nearest of them.

A grid encodes y, float32 in [-1, 1], or in [0, 1] when it is not signed. All of it is elementwise arithmetic without
tables, so a compiler fuses it into the update; 1.0 is a value of every grid, and comes back exactly.
"""

from dataclasses import dataclass

import torch

_DECADE = 0.9  # a decade of `Dynamic` runs from 0.1 to 1: this long


@dataclass(frozen=True)
class Floating:
    """The values of a narrow floating-point dtype, divided by its largest: relative precision, limited range.

    dtype: torch.float8_e4m3fn (4 significant bits, smallest / largest 4.4e-6), torch.float8_e5m2 (3, 2.7e-10) or
    torch.float16 (11, 9.1e-13).
    """

    dtype: torch.dtype = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16):
            raise ValueError(
                f"Floating: got {self.dtype}, wanted torch.float8_e4m3fn, torch.float8_e5m2 or torch.float16"
            )

    def code_dtype(self, signed: bool) -> torch.dtype:
        """dtype of the codes."""
        del signed
        return self.dtype

    def encode(self, y: torch.Tensor, signed: bool) -> torch.Tensor:
        """Nearest code (ties to even). Not signed: what is above 0 stays above 0. NaN stays NaN."""
        facts = torch.finfo(self.dtype)
        z = (y * facts.max).clamp(-facts.max, facts.max)
        return (z if signed else _never_vanishing(z, facts.smallest_normal * facts.eps)).to(self.dtype)

    def decode(self, codes: torch.Tensor, signed: bool) -> torch.Tensor:
        """float32 in [-1, 1]."""
        del signed
        return codes.to(torch.float32) / torch.finfo(self.dtype).max


@dataclass(frozen=True)
class Linear:
    """Equal steps: 1/127 with a sign, 1/255 without. One large value costs the small ones their precision."""

    def code_dtype(self, signed: bool) -> torch.dtype:
        """int8 with a sign, uint8 without."""
        return torch.int8 if signed else torch.uint8

    def encode(self, y: torch.Tensor, signed: bool) -> torch.Tensor:
        """Nearest code (ties to even). Not signed: what is above 0 stays above 0. NaN becomes 0."""
        y = _finite(y)
        if signed:
            return (y * 127).round().to(torch.int8)
        return _never_vanishing((y * 255).round(), 1.0, y).to(torch.uint8)

    def decode(self, codes: torch.Tensor, signed: bool) -> torch.Tensor:
        """float32 in [-1, 1]."""
        return codes.to(torch.float32) / (127 if signed else 255)


@dataclass(frozen=True)
class Dynamic:
    """Decades with ever more values: the largest has half of all codes, each one below half as many as the one above.

    Code c >= 1 is in decade i = floor(log2 c) of n (7 with a sign, 8 without) and stands for
    10^(i - n + 1)·(1 - 0.9·(2ⁱ⁺¹ - 1 - c)/2ⁱ); 0 is 0. The smallest is 1e-6, or 1e-7 without a sign. That is the
    dynamic tree of Dettmers et al. 2021 (arXiv 2110.02861, section 2), with values at the ends of its intervals, not in
    their middle, so that 1 is one.
    """

    def code_dtype(self, signed: bool) -> torch.dtype:
        """int8 with a sign, uint8 without."""
        return torch.int8 if signed else torch.uint8

    def encode(self, y: torch.Tensor, signed: bool) -> torch.Tensor:
        """Nearest code. Not signed: what is above 0 stays above 0. NaN becomes 0."""
        y = _finite(y)
        size, code = y.abs(), torch.zeros_like(y)
        decades = 7 if signed else 8
        for i in range(decades):
            top = 10.0 ** (i - decades + 1)
            from_below = size / top if i == 0 else (size / top - (1 - _DECADE)) * (2**i / _DECADE)
            step = from_below.round().clamp(min=0, max=2**i)
            code = step if i == 0 else torch.where(size >= top / 10, 2**i - 1 + step, code)
        if not signed:
            return _never_vanishing(code, 1.0, y).to(torch.uint8)
        return torch.where(y < 0, -code, code).to(torch.int8)

    def decode(self, codes: torch.Tensor, signed: bool) -> torch.Tensor:
        """float32 in [-1, 1]."""
        code = codes.to(torch.float32)
        size = code.abs() if signed else code
        decades = 7 if signed else 8
        y = torch.zeros_like(size)
        for i in range(decades):
            value = (1 - (2 ** (i + 1) - 1 - size) * (_DECADE / 2**i)) * 10.0 ** (i - decades + 1)
            y = torch.where(size >= 2**i, value, y)
        return torch.where(code < 0, -y, y) if signed else y


Grid = Floating | Linear | Dynamic


def _finite(y: torch.Tensor) -> torch.Tensor:
    """0 for NaN: a cast of NaN to an integer is not defined; the scale of its block carries it."""
    return torch.where(y.isnan(), 0.0, y)


def _never_vanishing(z: torch.Tensor, least: float, original: torch.Tensor | None = None) -> torch.Tensor:
    """At least `least` where the original (by default z itself) is above 0: an update divides by second moments."""
    return torch.where((z if original is None else original) > 0, z.clamp(min=least), z)

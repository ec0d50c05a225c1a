"""Learning-rate schedules: warm-up, plateau, decay, as one frozen value that is called with the count.

`count` is the number of updates done before this one, so the first update asks for count 0 and a run of `total` updates
ends with total - 1; the decay would reach `end` at count `total`.
"""

import math
from dataclasses import dataclass

import torch

_SHAPES = ("linear", "cosine", "sqrt")


@dataclass(frozen=True)
class Schedule:
    """A learning rate as a function of the count. Usually made by `constant`, `linear`, `cosine` or `wsd`.

    With warmup > 0 the rate rises linearly: peak/warmup, 2·peak/warmup, … and is `peak` at count warmup - 1. It stays
    there until count `decay_start`, then goes to `end`, which it reaches at count `total` and keeps. With x = the part
    of the decay that is over, 0 to 1, the rate is end + (peak - end)·f(x), where `shape` is "linear": f = 1 - x;
    "cosine": f = (1 + cos πx)/2; "sqrt": f = 1 - √x (Hägele et al. 2024, arXiv 2405.18392). decay_start = total = None:
    there is no decay.

    Calling it with a 0-d integer tensor gives a 0-d float64 tensor on its device; with an int, a float. ValueError
    names a field that makes no sense.

    >>> schedule = cosine(peak=1.0, total=100, warmup=10, end=0.1)
    >>> [round(schedule(count), 3) for count in (0, 9, 10, 55, 99, 100, 1000)]
    [0.1, 1.0, 1.0, 0.55, 0.1, 0.1, 0.1]
    """

    peak: float
    warmup: int = 0
    decay_start: int | None = None
    total: int | None = None
    end: float = 0.0
    shape: str = "linear"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.peak) and self.peak >= 0):
            raise ValueError(f"schedule: peak: got {self.peak}, wanted a finite number of 0 or more")
        if not (math.isfinite(self.end) and self.end >= 0):
            raise ValueError(f"schedule: end: got {self.end}, wanted a finite number of 0 or more")
        if self.warmup < 0:
            raise ValueError(f"schedule: warmup: got {self.warmup}, wanted a number of updates, 0 or more")
        if self.shape not in _SHAPES:
            raise ValueError(f"schedule: shape: got {self.shape!r}, wanted one of {', '.join(_SHAPES)}")
        if (self.decay_start is None) != (self.total is None):
            raise ValueError(
                f"schedule: got decay_start={self.decay_start} and total={self.total}, wanted both or none"
            )
        if self.total is not None and self.decay_start is not None and not self.warmup <= self.decay_start < self.total:
            raise ValueError(
                f"schedule: got warmup={self.warmup}, start of the decay={self.decay_start}, total={self.total},"
                " wanted them in this order, and at least one update of decay; make warmup (or the decay of wsd)"
                " shorter, or total longer"
            )

    def __call__(self, count: torch.Tensor | int) -> torch.Tensor | float:
        """The learning rate for the update after `count` updates."""
        if isinstance(count, int):
            return self._at(torch.tensor(count)).item()
        return self._at(count)

    def _at(self, count: torch.Tensor) -> torch.Tensor:
        count = count.to(torch.float64)
        rate = self.peak + 0 * count
        if self.total is not None and self.decay_start is not None:
            x = ((count - self.decay_start) / (self.total - self.decay_start)).clamp(0, 1)
            left = {"linear": 1 - x, "cosine": (1 + torch.cos(math.pi * x)) / 2, "sqrt": 1 - x.sqrt()}[self.shape]
            rate = self.end + (self.peak - self.end) * left
        return rate * ((count + 1) / self.warmup).clamp(max=1) if self.warmup else rate


def constant(peak: float, warmup: int = 0) -> Schedule:
    """`peak` for ever, after `warmup` updates of linear rise."""
    return Schedule(peak, warmup)


def linear(peak: float, total: int, warmup: int = 0, end: float = 0.0) -> Schedule:
    """Linear rise over `warmup` updates, then linear decay to `end` at update `total`."""
    return Schedule(peak, warmup, warmup, total, end, "linear")


def cosine(peak: float, total: int, warmup: int = 0, end: float = 0.0) -> Schedule:
    """Linear rise over `warmup` updates, then half a cosine to `end` at update `total` (arXiv 1608.03983, eq. 5)."""
    return Schedule(peak, warmup, warmup, total, end, "cosine")


def wsd(peak: float, total: int, decay: int, warmup: int = 0, end: float = 0.0, shape: str = "sqrt") -> Schedule:
    """Warm-up, stable, decay: `peak` until the last `decay` of `total` updates, which go to `end` (Hu et al. 2024,
    arXiv 2404.06395).

    A run can be prolonged from any checkpoint of the plateau, which a cosine cannot.

    Args:
        peak: the rate of the plateau.
        total: updates of the run.
        decay: updates of the decay, the last ones.
        warmup: updates of linear rise.
        end: the rate at update `total`.
        shape: of the decay, "linear", "cosine" or "sqrt" (`Schedule`).
    """
    return Schedule(peak, warmup, total - decay, total, end, shape)

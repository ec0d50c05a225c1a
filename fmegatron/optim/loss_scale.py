"""Loss scaling as pure state: keeps the gradients of a 16-bit backward pass above underflow (arXiv 1710.03740, 3.2)."""

from dataclasses import dataclass
from typing import Any

import torch

from fmegatron import tree
from fmegatron.layout import Layout, Mesh


@dataclass(frozen=True)
class LossScale:
    """A loss scale: constant when growth_interval is 0, else dynamic, by Megatron's and torch.amp.GradScaler's rule.

    After `growth_interval` finite steps in a row the scale is multiplied by `growth`. A step that is not finite begins
    the count anew; the `hysteresis`-th one since the last growth, and each one after it, multiplies the scale by
    `backoff`, down to `least`. Powers of two keep every bit of the gradients. (hysteresis = 1 is GradScaler.)
    ValueError names a field that makes no sense.
    """

    initial: float = 2.0**16
    growth_interval: int = 1000
    growth: float = 2.0
    backoff: float = 0.5
    hysteresis: int = 1
    least: float = 1.0

    def __post_init__(self) -> None:
        for name, fits, wanted in [
            ("initial", self.initial > 0, "a number above 0, such as 2**16"),
            ("growth_interval", self.growth_interval >= 0, "a number of steps, or 0 for a constant scale"),
            ("growth", self.growth >= 1, "a factor of 1 or more, such as 2"),
            ("backoff", 0 < self.backoff <= 1, "a factor between 0 and 1, such as 0.5"),
            ("hysteresis", self.hysteresis >= 1, "a number of steps, 1 or more"),
            ("least", self.least > 0, "a number above 0, such as 1"),
        ]:
            if not fits:
                raise ValueError(f"LossScale: {name}: got {getattr(self, name)}, wanted {wanted}")

    def init(self, like: torch.Tensor | tree.ArraySpec) -> dict[str, Any]:
        """{"factor": float32, "finite": int64 steps in a row, "left": int64 of hysteresis}, 0-d; specs for a spec."""
        return {
            "factor": scalar(like, self.initial, torch.float32),
            "finite": scalar(like, 0, torch.int64),
            "left": scalar(like, self.hysteresis, torch.int64),
        }

    def update(self, state: dict[str, torch.Tensor], finite: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state after a step whose gradients were `finite` (0-d bool) on all ranks or not; no host sync."""
        if not self.growth_interval:
            return state
        scale, left = state["factor"], state["left"]
        streak = torch.where(finite, state["finite"] + 1, 0)
        grows = streak >= self.growth_interval
        left = torch.where(grows, self.hysteresis, torch.where(finite, left, (left - 1).clamp(min=0)))
        smaller = (scale * self.backoff).clamp(min=self.least)
        scale = torch.where(grows, scale * self.growth, torch.where(finite | (left > 0), scale, smaller))
        return {"factor": scale, "finite": torch.where(grows, 0, streak), "left": left}


def scalar(like: torch.Tensor | tree.ArraySpec, value: float, dtype: torch.dtype) -> torch.Tensor | tree.ArraySpec:
    """A 0-d tensor of this value beside a tensor, or the ArraySpec of one, the same on all ranks of the spec's mesh."""
    if isinstance(like, tree.ArraySpec):
        mesh: Mesh = like.mesh
        return tree.ArraySpec(Layout((), dtype, mesh), value)
    return torch.full((), value, dtype=dtype, device=like.device)

"""Bytes and seconds of a save or a restore, as values for the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fmegatron.checkpoint.calls.arguments import flat_layouts


@dataclass(frozen=True)
class Report:
    """One save or restore of a Manager.

    what: "save" or "restore". bytes: of the state, all ranks together (replicas counted once). seconds: from the call
    until the checkpoint was durable, or everything was read. stall_seconds: the part of it that the caller was held.
    durable: whether a save has reached the disk; not yet, for one that goes on in the background.
    error: why a save in the background failed; None otherwise.
    """

    what: str
    step: int
    path: str
    bytes: int
    seconds: float
    stall_seconds: float
    durable: bool = True
    error: str | None = None

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second, all ranks together."""
        return self.bytes / max(self.seconds, 1e-9) / 1e9

    def record(self) -> dict[str, float]:
        """Numbers for a logger, named after what was done: save_seconds, save_stall_seconds, save_gb, save_gb_per_s.

        >>> Report("restore", 3, "runs/a/step_00000003", 2_000_000_000, 0.5, 0.5).record()["restore_gb_per_s"]
        4.0
        """
        values = {"seconds": self.seconds, "stall_seconds": self.stall_seconds, "gb": self.bytes / 1e9}
        if self.durable:
            values["gb_per_s"] = self.gb_per_s
        return {f"{self.what}_{name}": value for name, value in values.items()}


def state_bytes(layouts: Any) -> int:
    """Bytes of a state in global shape: a tree of Layouts or ArraySpecs.

    >>> import torch
    >>> from fmegatron.layout import Layout, Mesh
    >>> state_bytes({"w": Layout((4, 8), torch.bfloat16, Mesh(fsdp=2), ("fsdp",))})
    64
    """
    return sum(layout.nbytes for layout in flat_layouts(layouts)[1])

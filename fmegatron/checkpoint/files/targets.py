"""Targets: where a region of a stored array goes in memory, whatever the files are that it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fmegatron.checkpoint.files.format import raw
from fmegatron.layout import Box


@dataclass(frozen=True)
class Target:
    """A box of the global array and the view of the rank's tensor that it goes to; `stored` is the dtype on disk."""

    path: str
    box: Box
    view: torch.Tensor
    stored: torch.dtype

    def put(self, start: Sequence[int], data: np.ndarray) -> None:
        """Copy `data` (raw bits of the stored dtype), which begins at the global index `start`, to its place."""
        at = tuple(slice(g - a, g - a + n) for g, a, n in zip(start, self.box.start, data.shape, strict=True))
        if self.stored is self.view.dtype:
            raw(self.view)[at] = data
        else:
            self.view[at].copy_(torch.from_numpy(data).view(self.stored))

    def memory(self, start: Sequence[int], shape: Sequence[int]) -> np.ndarray | None:
        """The bytes of the tensor that [start, start + shape) goes to, if they are the stored ones, in one run."""
        if self.stored is not self.view.dtype:
            return None
        at = (slice(g - a, g - a + n) for g, a, n in zip(start, self.box.start, shape, strict=True))
        part = raw(self.view)[(..., *at)]  # of a scalar the element itself, not a copy
        return part.reshape(-1).view(np.uint8) if part.flags.c_contiguous else None

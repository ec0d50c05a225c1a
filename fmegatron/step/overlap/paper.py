"""A mesh without processes, for looking at what a step would do on it: lowered graphs, orders, planned timelines."""

from __future__ import annotations

import torch

from fmegatron.collectives import World
from fmegatron.layout import Mesh

__all__ = ["PaperWorld"]


class PaperWorld(World):
    """The ranks of a mesh on paper, seen by one of them: groups have names, but nothing can be sent.

    It stands where a graph is lowered and ordered (`timeline(..., mesh=...)`); what is compiled for it cannot run.
    """

    def __init__(self, mesh: Mesh, rank: int = 0, device: str | torch.device = "cpu"):
        super().__init__(mesh, rank, torch.device(device))

    def _make_group(self, name, axes, own=False):
        return None

    def close(self) -> None:
        """Nothing to leave."""
        self._groups.clear()

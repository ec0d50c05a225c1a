"""Overlap of communication and computation, as passes over a lowered graph."""

from fmegatron.step.overlap.gathers import units
from fmegatron.step.overlap.schedule import KEEP_WAITS, Overlap, overlapped

__all__ = ["KEEP_WAITS", "Overlap", "overlapped", "units"]

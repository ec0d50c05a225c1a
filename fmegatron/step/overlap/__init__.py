"""Overlap of communication and computation, as passes over a lowered graph."""

from fmegatron.step.overlap.schedule import Overlap, overlapped

__all__ = ["Overlap", "overlapped"]

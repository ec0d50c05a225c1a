"""Overlap of communication and computation, as passes over a lowered graph."""

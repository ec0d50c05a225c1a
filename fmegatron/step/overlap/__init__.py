"""Overlap of communication and computation, as passes over a lowered graph."""

from fmegatron.moved import no_name as _no_name

globals()["__getattr__"] = _no_name(__name__)

"""Faults of ranks: how they are noticed, reported and ended, what goes on after them, and how to bring them about."""

from fmegatron.moved import no_name as _no_name

globals()["__getattr__"] = _no_name(__name__)

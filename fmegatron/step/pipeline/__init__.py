"""Pipelines: tables of actions, their schedules and clock, and the stages that a step is cut into."""

from fmegatron.moved import no_name as _no_name

globals()["__getattr__"] = _no_name(__name__)

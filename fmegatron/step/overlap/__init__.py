"""Overlap of communication and computation, as passes over a lowered step, and pictures of what runs when."""

from fmegatron.step.overlap.events import Event, Timeline
from fmegatron.step.overlap.launches import launched, launches
from fmegatron.step.overlap.measured import measured
from fmegatron.step.overlap.paper import PaperWorld
from fmegatron.step.overlap.passes import overlapped
from fmegatron.step.overlap.planned import Rates, planned
from fmegatron.step.overlap.setting import Overlap

__all__ = [
    "Event",
    "Overlap",
    "PaperWorld",
    "Rates",
    "Timeline",
    "launched",
    "launches",
    "measured",
    "overlapped",
    "planned",
]

"""Timelines of a step: what it computes and communicates when, planned or measured."""

from fmegatron.step.timeline.events import Event, Timeline
from fmegatron.step.timeline.measured import measured, timeline
from fmegatron.step.timeline.planned import PaperWorld, Rates, launched, launches, planned

__all__ = ["Event", "PaperWorld", "Rates", "Timeline", "launched", "launches", "measured", "planned", "timeline"]

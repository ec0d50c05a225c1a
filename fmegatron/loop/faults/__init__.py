"""Faults of ranks: how they are noticed, reported and ended, what goes on after them, and how to bring them about."""

from fmegatron.loop.faults.hang import HANG, watched
from fmegatron.loop.faults.inject import Injection, Injector
from fmegatron.loop.faults.notice import Place, end, fail, lost_peer, say, watch
from fmegatron.loop.faults.pulse import Patience, Pulse

__all__ = [
    "HANG",
    "Injection",
    "Injector",
    "Patience",
    "Place",
    "Pulse",
    "end",
    "fail",
    "lost_peer",
    "say",
    "watch",
    "watched",
]

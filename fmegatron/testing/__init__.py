"""Simulated ranks, a pool of real ranks, parity, blame, purity, measurements: for our tests and for users'."""

from fmegatron.step.opaque import inline_layers
from fmegatron.testing.align import align
from fmegatron.testing.blame import Finding, Kept, blame
from fmegatron.testing.forkserver import Fork, Forkserver
from fmegatron.testing.interpret import interpret
from fmegatron.testing.measure import paired_seconds, peak_bytes, report, seconds
from fmegatron.testing.parity import Parity, assert_parity, parity, relative_error
from fmegatron.testing.purity import assert_pure
from fmegatron.testing.ranks import RankError, RankPool
from fmegatron.testing.relate import relate
from fmegatron.testing.simulate import Ranks, Simulation, join, simulate, split

__all__ = [
    "Finding",
    "Kept",
    "Fork",
    "Forkserver",
    "Parity",
    "RankError",
    "RankPool",
    "Ranks",
    "Simulation",
    "align",
    "assert_parity",
    "assert_pure",
    "blame",
    "inline_layers",
    "interpret",
    "join",
    "paired_seconds",
    "parity",
    "peak_bytes",
    "relate",
    "relative_error",
    "report",
    "seconds",
    "simulate",
    "split",
]

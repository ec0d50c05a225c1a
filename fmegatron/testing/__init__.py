"""Simulated ranks, a pool of real ranks, parity, blame, purity, measurements: for our tests and for users'."""

from fmegatron.moved import no_name as _no_name
from fmegatron.testing.compare_ranks import assert_parity, parity
from fmegatron.testing.purity import assert_pure
from fmegatron.testing.simulation import Ranks, join, simulate, split

__all__ = [
    "Ranks",
    "assert_parity",
    "assert_pure",
    "join",
    "parity",
    "simulate",
    "split",
]

globals()["__getattr__"] = _no_name(__name__)

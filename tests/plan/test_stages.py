"""The exact plan of a pipeline: what its ranks hold between F, B and W follows the table."""

import dataclasses

import pytest

from experiments.stages import Config, describe
from fmegatron import plan
from fmegatron.layout import Mesh
from fmegatron.step import Pipelining


def transient(schedule: str, microbatches: int, rank: int = 0) -> int:
    """Bytes above state and batch, of a microbatch of 4 rows."""
    config = Config(Mesh(pp=2), Pipelining(schedule), microbatches, batch_size=4 * microbatches)
    return plan.exact(*describe(config), config.mesh, rank=rank).transient


@pytest.mark.slow
def test_peaks_follow_the_table():
    all_at_once = [transient("gpipe", m) for m in (4, 6, 8)]
    assert all_at_once[2] - all_at_once[1] == all_at_once[1] - all_at_once[0] > 0  # it holds all microbatches
    in_turn = [transient("1f1b", m) for m in (4, 8)]
    assert in_turn[1] - in_turn[0] < 2**14 and in_turn[0] < all_at_once[0]  # min(p, m) of them; what is 0-d is kept
    first, last = (transient("1f1b", 4, rank) for rank in (0, 1))
    logits = 4 * 57 * 256 * 4
    assert first > last - 6 * logits  # the first holds two microbatches, the last one, and its logits


@pytest.mark.slow
def test_without_pp_it_is_as_before():
    config = dataclasses.replace(Config(), batch_size=4, layers=1, microbatches=2)
    found = plan.exact(*describe(config), Mesh())
    assert found.transient > 0 and "alive at the peak" in str(found)

"""Wrong versions of a Megatron-style step: check finds all but wrong constants, simulated ranks find those."""

import pytest

from fmegatron.layout import Mesh
from fmegatron.step import check
from fmegatron.testing import parity
from tests.testing import mutants

MESH = Mesh(dp=2, fsdp=2, tp=2)
# Which checker finds it. "check": the static check alone does; "simulate": a wrong constant, only numbers show it.
FOUND_BY = {
    "vocab_axis": "check",
    "gather_axis": "check",
    "slice_of_partial": "check",
    "no_enter": "check",
    "gather_transpose": "check",
    "psum_transpose": "check",
    "psum_axis": "check",
    "partial_in_gelu": "check",
    "sum_twice": "check",
    "mean_for_sum": "simulate",
    "local_maximum": "check",
    "mean_of_shard": "check",
    "norm_counts_replicas": "check",
    "no_dp": "check",
    "metric": "check",
}


def test_the_right_step():
    report = check(mutants.make_step(MESH), *mutants.layouts(MESH), MESH)
    assert report.ok and not report.unproven, str(report)


@pytest.mark.parametrize("bug", FOUND_BY)
def test_who_finds_it(bug):
    found = not check(mutants.make_step(MESH, bug), *mutants.layouts(MESH), MESH).ok
    assert found == (FOUND_BY[bug] == "check")
    if not found:
        result = parity(lambda m: mutants.make_step(m, bug), MESH, *mutants.values(), layouts=mutants.layouts(MESH))
        assert not result.ok

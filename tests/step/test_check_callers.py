"""Callers: steps of a fourth reviewer. No wrong one is proven, no right one refused; parity says which is which."""

import pytest

from fmegatron import step, tree
from fmegatron.layout import Mesh
from fmegatron.testing import parity
from tests.step.callers import batches, experts, frame, rows, sequences, split, states, steps

CASES = [(caller, mesh) for caller in frame.CALLERS for mesh in caller.meshes]
NAMES = [f"{caller.name}-{mesh}" for caller, mesh in CASES]
MODULES = (batches, experts, rows, sequences, split, states, steps)
DEFAULT = {"weighted_mse.declared-dp2", "weighted_mse.mean_of_means-dp2"}
MARKED = [
    pytest.param(*case, id=name, marks=() if name in DEFAULT else pytest.mark.slow)
    for case, name in zip(CASES, NAMES, strict=True)
]


@pytest.mark.long
@pytest.mark.parametrize("caller, mesh", MARKED)
def test_parity_tells_right_from_wrong(caller, mesh):
    one, here = caller.describe(Mesh(**dict.fromkeys(mesh.names, 1))), caller.describe(mesh)
    state, layouts = tree.init(one.state, key=3, rank=0), (tree.layouts(here.state), tree.layouts(here.batch))
    try:
        differences = parity(caller.describe, mesh, state, frame.batch_of(), layouts=layouts, fp64=True).differences
    except ValueError as error:  # replicas of one rank's state that are not equal
        assert "that differ by" in str(error)
        differences = (("params", float("inf")),)
    assert caller.right == (not differences)
    kept = [error for path, error in differences if "loss" in path or "params" in path or "more" in path]
    assert caller.right or max(kept) > 1e-6, differences


@pytest.mark.parametrize("caller, mesh", MARKED)
def test_the_check_proves_no_wrong_one_and_refuses_no_right_one(caller, mesh):
    report = step.check(caller.describe(mesh))
    assert not (caller.right and report.findings), report
    assert caller.right or not report.ok

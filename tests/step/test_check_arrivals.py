"""Arrivals: steps of a seventh reviewer. No wrong one is proven, no right one refused; parity says which is which."""

import pytest

from fmegatron import step, tree
from fmegatron.layout import Mesh
from fmegatron.testing import parity
from tests.step.arrivals import estimates, frame, lengths, pieces, policies, pretexts, steppers, vocabularies

CASES = [(arrival, mesh) for arrival in frame.ARRIVALS for mesh in arrival.meshes]
NAMES = [f"{arrival.name}-{mesh}" for arrival, mesh in CASES]
MODULES = (estimates, lengths, pieces, policies, pretexts, steppers, vocabularies)
DEFAULT = {"solved.normal_equations-dp2", "solved.own_solution-dp2"}
# Pairs of which the check says what is not so.
WRONG_VERDICTS = {
    f"alignment.own_gradient-cp{n}": "refused: zeros that have a gradient, among gathered values" for n in (2, 3)
}


MARKED = [
    pytest.param(*case, id=name, marks=() if name in DEFAULT else pytest.mark.slow)
    for case, name in zip(CASES, NAMES, strict=True)
]


def differences_of(arrival, mesh):
    """(path, error) of outputs that are not those of one rank."""
    one, here = arrival.describe(Mesh(**dict.fromkeys(mesh.names, 1))), arrival.describe(mesh)
    state, layouts = tree.init(one.state, key=5, rank=0), (tree.layouts(here.state), tree.layouts(here.batch))
    try:
        return parity(arrival.describe, mesh, state, frame.batch_of(), layouts=layouts, fp64=True).differences
    except ValueError as error:  # replicas of one rank's state that are not equal
        assert "that differ by" in str(error)
        return (("params", float("inf")),)


@pytest.mark.parametrize("arrival, mesh", MARKED)
def test_parity_tells_right_from_wrong(arrival, mesh):
    differences = differences_of(arrival, mesh)
    assert arrival.right == (not differences)
    assert arrival.right or max(error for _, error in differences) > 1e-6, differences


@pytest.mark.parametrize("arrival, mesh", MARKED)
def test_the_check_proves_no_wrong_one_and_refuses_no_right_one(arrival, mesh):
    report = step.check(arrival.describe(mesh))
    as_it_is = not report.findings if arrival.right else not report.ok
    assert as_it_is != (f"{arrival.name}-{mesh}" in WRONG_VERDICTS), report

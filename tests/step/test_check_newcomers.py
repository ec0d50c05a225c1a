"""Newcomers: steps of a sixth reviewer. No wrong one is proven, no right one refused; parity says which is which."""

import pytest

from fmegatron import step, tree
from fmegatron.layout import Mesh
from fmegatron.testing import parity
from tests.step.newcomers import experts, frame, generative, images, optimizers, rewards, shards, states, texts, updates

CASES = [(newcomer, mesh) for newcomer in frame.NEWCOMERS for mesh in newcomer.meshes]
NAMES = [f"{newcomer.name}-{mesh}" for newcomer, mesh in CASES]
MODULES = (experts, generative, images, optimizers, rewards, shards, states, texts, updates)
DEFAULT = {"plain.ddp-dp2", "plain.no_reduce-dp2"}
# Pairs of which the check says what is not so.
WRONG_VERDICTS = {}


MARKED = [
    pytest.param(*case, id=name, marks=() if name in DEFAULT else pytest.mark.slow)
    for case, name in zip(CASES, NAMES, strict=True)
]


def differences_of(newcomer, mesh):
    """(path, error) of outputs that are not those of one rank."""
    one, here = newcomer.describe(Mesh(**dict.fromkeys(mesh.names, 1))), newcomer.describe(mesh)
    state, layouts = tree.init(one.state, key=3, rank=0), (tree.layouts(here.state), tree.layouts(here.batch))
    try:
        return parity(newcomer.describe, mesh, state, frame.batch_of(), layouts=layouts, fp64=True).differences
    except ValueError as error:  # replicas of one rank's state that are not equal
        assert "that differ by" in str(error)
        return (("params", float("inf")),)


@pytest.mark.parametrize("newcomer, mesh", MARKED)
def test_parity_tells_right_from_wrong(newcomer, mesh):
    differences = differences_of(newcomer, mesh)
    assert newcomer.right == (not differences)
    assert newcomer.right or max(error for _, error in differences) > 1e-6, differences


@pytest.mark.parametrize("newcomer, mesh", MARKED)
def test_the_check_proves_no_wrong_one_and_refuses_no_right_one(newcomer, mesh):
    report = step.check(newcomer.describe(mesh))
    as_it_is = not report.findings if newcomer.right else not report.ok
    assert as_it_is != (f"{newcomer.name}-{mesh}" in WRONG_VERDICTS), report

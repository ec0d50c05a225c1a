"""Lodgers: steps of a fifth reviewer. No wrong one is proven, no right one refused; parity says which is which."""

import pytest

from fmegatron import step, tree
from fmegatron.layout import Mesh
from fmegatron.testing import parity
from tests.step.lodgers import frame, rows, sequences, split, steps

CASES = [(lodger, mesh) for lodger in frame.LODGERS for mesh in lodger.meshes]
NAMES = [f"{lodger.name}-{mesh}" for lodger, mesh in CASES]
MODULES = (rows, sequences, split, steps)
DEFAULT = {"regression.plain_world_size-dp2", "regression.mean_here-dp2"}
# Pairs of which the label is not so on these data.
EQUAL_BY_LUCK = {f"hard_rows.{how}_here-dp3": "the ranks have as many hard rows" for how in ("hardest", "top_half")}


MARKED = [
    pytest.param(*case, id=name, marks=() if name in DEFAULT else pytest.mark.slow)
    for case, name in zip(CASES, NAMES, strict=True)
]


def differences_of(lodger, mesh):
    """(path, error) of outputs that are not those of one rank."""
    one, here = lodger.describe(Mesh(**dict.fromkeys(mesh.names, 1))), lodger.describe(mesh)
    state, layouts = tree.init(one.state, key=3, rank=0), (tree.layouts(here.state), tree.layouts(here.batch))
    try:
        return parity(lodger.describe, mesh, state, frame.batch_of(), layouts=layouts, fp64=True).differences
    except ValueError as error:  # replicas of one rank's state that are not equal
        assert "that differ by" in str(error)
        return (("params", float("inf")),)


@pytest.mark.parametrize("lodger, mesh", MARKED)
def test_parity_tells_right_from_wrong(lodger, mesh):
    differences = differences_of(lodger, mesh)
    right = lodger.right or f"{lodger.name}-{mesh}" in EQUAL_BY_LUCK
    assert right == (not differences)
    assert right or max(error for _, error in differences) > 1e-6, differences


@pytest.mark.long
@pytest.mark.parametrize("lodger, mesh", MARKED)
def test_the_check_proves_no_wrong_one_and_refuses_no_right_one(lodger, mesh):
    report = step.check(lodger.describe(mesh))
    assert not report.findings if lodger.right else not report.ok, report

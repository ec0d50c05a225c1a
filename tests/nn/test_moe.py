"""Experts on simulated and gloo ranks equal those of one rank, in fp64: losses, metrics, every gradient."""

import functools

import pytest

from fmegatron.step import check
from fmegatron.testing import parity
from tests.nn.moe_step import SETTINGS, layouts, make_step, values

MESHES = {name: setting.mesh for name, setting in SETTINGS.items()}


@pytest.mark.parametrize("of", SETTINGS)
@pytest.mark.parametrize("skew", [0.0, 9.0], ids=["spread", "to the first experts"])
def test_equal_to_one_rank(of, skew):
    make = functools.partial(make_step, of=of)
    found = parity(make, MESHES[of], *values(of, skew), layouts=layouts(MESHES[of], of), steps=3)
    assert found.ok, str(found)
    assert found.worst[1] < 1e-10


@pytest.mark.parametrize("of", SETTINGS)
def test_check_is_clean(of):
    report = check(make_step(MESHES[of], of), *layouts(MESHES[of], of), MESHES[of])
    assert report.ok and not report.unproven, str(report)

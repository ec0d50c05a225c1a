"""Simulated ranks find every one of these faults, and blame names its line; the right step has none."""

import inspect

import pytest

from fmegatron.layout import Mesh
from fmegatron.testing import assert_parity, parity
from tests.pairs import few
from tests.testing import mutants

MESH = Mesh(dp=2, fsdp=2, tp=2)
BUGS = {
    line.split("# bug: ")[1]: i
    for i, line in enumerate(inspect.getsource(mutants).splitlines(), 1)
    if "# bug: " in line
}


@pytest.mark.medium
@pytest.mark.parametrize("mesh", few(1, [(MESH,), (Mesh(dp=1, fsdp=2, tp=2),), (Mesh(dp=2, fsdp=1, tp=4),)]))
def test_the_right_step(mesh):
    result = assert_parity(mutants.make_step, mesh, *mutants.values(), layouts=mutants.layouts(mesh), steps=2)
    assert result.worst[1] < 1e-12


@pytest.mark.medium
@pytest.mark.parametrize("bug", few(3, [(bug,) for bug in BUGS], BUGS))
def test_is_found_at_its_line(bug):
    result = parity(lambda m: mutants.make_step(m, bug), MESH, *mutants.values(), layouts=mutants.layouts(MESH))
    assert not result.ok
    first = result.findings[0]
    assert f"mutants.py:{BUGS[bug]}" in str(first), result
    assert len(result.findings) <= 6, result


@pytest.mark.long
def test_a_clip_hides_a_wrong_scale_in_the_parameters():
    """Why loss and grad_norm are compared too: the clip divides a common factor of all gradients out again."""
    step = "mean_of_shard"
    result = parity(lambda m: mutants.make_step(m, step), MESH, *mutants.values(), layouts=mutants.layouts(MESH))
    assert {path for path, _ in result.differences} == {"1/loss", "1/grad_norm"}


def test_report():
    """The message names the mesh, the first wrong output, the line, and what the values are there."""
    with pytest.raises(AssertionError) as caught:
        assert_parity(lambda m: mutants.make_step(m, "no_dp"), MESH, *mutants.values(), layouts=mutants.layouts(MESH))
    text = str(caught.value)
    assert "on dp2·fsdp2·tp2, step 0: 13 of 14 outputs differ" in text
    assert f"mutants.py:{BUGS['no_dp']}: pow" in text and "a sum over dp since mutants.py:" in text

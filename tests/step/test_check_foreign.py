"""Steps of strangers: none of the wrong ones is proven, none of the right ones is refused (`foreign_steps.py`)."""

import pytest

from fmegatron import step, testing
from tests.pairs import few
from tests.step.foreign_steps import MESHES, RIGHT, WRONG, layouts, make, values

OPEN = frozenset(
    (
        "times the mean of all",
        "padded shards written",
        "a largest of all",
    )
)  # right, and unproven


@pytest.mark.long
@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    for mesh in MESHES:
        report = step.check(make(RIGHT[name])(mesh), *layouts(mesh))
        assert "internal" not in str(report), report
        assert not report.findings, report
        assert report.ok == (name not in OPEN), report


@pytest.mark.long
@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    for mesh in MESHES:
        report = step.check(make(WRONG[name])(mesh), *layouts(mesh))
        assert "internal" not in str(report), report
        assert not report.ok, report


ALL = [(kind, name, mesh) for kind, of in (("right", RIGHT), ("wrong", WRONG)) for name in of for mesh in MESHES]


@pytest.mark.long
@pytest.mark.parametrize("kind, name, mesh", few(8, ALL))
def test_they_are_what_they_say(kind, name, mesh):
    fn = (RIGHT if kind == "right" else WRONG)[name]
    found = testing.parity(make(fn), mesh, *values(mesh), layouts=layouts(mesh))
    assert found.ok == (kind == "right"), str(found)

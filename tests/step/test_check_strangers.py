"""Steps of strangers (`tests/step/strangers`): no wrong one is proven, no right one is refused, few are open."""

from collections import Counter

import pytest

from fmegatron import step, testing
from tests.pairs import few
from tests.step.strangers import losses, models, updates
from tests.step.strangers.setting import MESHES, layouts, make, values

CASES = {**models.CASES, **losses.CASES, **updates.CASES}
# Right, and unproven: a halo that is convolved.
OPEN = frozenset(("causal convolution",))
ALL = [(name, bug) for name, (_, bugs) in CASES.items() for bug in ("", *bugs)]


def judged(name, bug, mesh):
    report = step.check(make(CASES[name][0], bug)(mesh), *layouts(mesh))
    assert "internal" not in str(report), report
    return report


@pytest.mark.long
@pytest.mark.parametrize("name, bug", few(8, ALL))
def test_none_is_mistaken(name, bug):
    report = judged(name, bug, MESHES[1])
    assert bug or not report.findings, report
    assert report.ok == (not bug and name not in OPEN), report


@pytest.mark.slow
def test_the_numbers():
    found = Counter()
    for mesh in MESHES:
        for name, bug in ALL:
            report = judged(name, bug, mesh)
            found[bool(bug), "found" if report.findings else "proven" if report.ok else "unproven"] += 1
    right, wrong = (sum(n for (is_wrong, _), n in found.items() if is_wrong == one) for one in (False, True))
    assert right >= 2 * 60 and wrong >= 2 * 60, found
    assert not found[False, "found"] and not found[True, "proven"], found
    assert found[True, "found"] >= 0.88 * wrong and found[False, "unproven"] <= 0.08 * right, found


@pytest.mark.parametrize("name, bug", few(2, ALL))
def test_they_are_what_they_say(name, bug):
    for mesh in MESHES[1:]:
        fn = CASES[name][0]
        assert testing.parity(make(fn, bug), mesh, *values(mesh), layouts=layouts(mesh)).ok == (not bug)

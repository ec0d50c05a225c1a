"""Steps of visitors (`tests/step/visitors`): no wrong one is proven, no right one is refused, few are open."""

from collections import Counter

import pytest

from fmegatron import step, testing
from tests.pairs import few
from tests.step.visitors import learning, models, optimizers
from tests.step.visitors.setting import MESHES

CASES = {**models.CASES, **learning.CASES, **optimizers.CASES}
ALL = [(name, bug) for name, case in CASES.items() for bug in ("", *case.bugs)]


def judged(name, bug, mesh):
    report = step.check(CASES[name].make(bug)(mesh), *CASES[name].layouts(mesh))
    assert "internal" not in str(report), report
    return report


@pytest.mark.long
@pytest.mark.parametrize("name, bug", few(4, ALL))
def test_none_is_mistaken(name, bug):
    report = judged(name, bug, MESHES[CASES[name].axes][0])
    assert bug or not report.findings, report
    assert not bug or not report.ok, report


@pytest.mark.slow
def test_the_numbers():
    found = Counter()
    for name, bug in ALL:
        for mesh in MESHES[CASES[name].axes]:
            report = judged(name, bug, mesh)
            found[bool(bug), "found" if report.findings else "proven" if report.ok else "unproven"] += 1
    right, wrong = (sum(n for (is_wrong, _), n in found.items() if is_wrong == one) for one in (False, True))
    assert right >= 2 * 50 and wrong >= 2 * 50, found
    assert not found[False, "found"] and not found[True, "proven"], found
    assert found[True, "found"] >= 0.88 * wrong and found[False, "unproven"] <= 0.08 * right, found


@pytest.mark.parametrize("name, bug", few(2, ALL))
def test_they_are_what_they_say(name, bug):
    case = CASES[name]
    mesh = MESHES[case.axes][0]
    assert testing.parity(case.make(bug), mesh, *case.values(mesh), layouts=case.layouts(mesh)).ok == (not bug)

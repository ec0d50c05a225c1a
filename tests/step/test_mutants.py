"""The list of mutants: check and simulated ranks together find every one, the check alone all but wrong constants."""

from collections import Counter

import pytest

from tests.pairs import few
from tests.step.mutants import (
    data_parallel,
    decoder,
    exchanges,
    of_data_parallel,
    of_decoder,
    of_exchanges,
    of_optimizers,
    optimizers,
)
from tests.step.mutants.mutate import found_by, judge, stale

LISTS = (
    (decoder, of_decoder.MUTANTS),
    (data_parallel, of_data_parallel.MUTANTS),
    (optimizers, of_optimizers.MUTANTS),
    (exchanges, of_exchanges.MUTANTS),
)
ALL = [(step, mutant) for step, mutants in LISTS for mutant in mutants]
DEFAULT = 5  # the full list with the slow tests
RIGHT = [(step, of) for step, _ in LISTS for of in getattr(step, "STEPS", ("",))]


@pytest.mark.parametrize("step, of", few(2, RIGHT, [f"{step.__name__.rpartition('.')[2]}-{of}" for step, of in RIGHT]))
def test_the_right_step(step, of):
    report, differ = judge(step, None, of)
    assert report.ok and not differ, f"{report}\n{differ}"


@pytest.mark.parametrize("step, mutant", few(DEFAULT, ALL, [mutant.name for _, mutant in ALL]))
def test_mutant(step, mutant):
    report, differ = judge(step, mutant)
    assert found_by(report, differ) == mutant.finds, f"{mutant.says}\n{report}\n{differ}"


def test_the_list():
    assert len(ALL) >= 100
    for step, mutants in LISTS:
        assert not stale(step, mutants)
        assert len({m.name for m in mutants}) == len({(m.old, m.new, m.of) for m in mutants}) == len(mutants)
    assert {m.of for m in of_data_parallel.MUTANTS} == set(data_parallel.STRATEGIES)
    assert Counter(m.finds for _, m in ALL)["check"] < 10  # faults that numbers forgive

"""The covering sets of tests/pairs.py: every pair, in few cases, and all that is left out is run by `make test-all`."""

import itertools

import pytest

from tests import pairs
from tests.pairs import covering, mixed, of_a_day, product, turns

SIZES = [(1,), (5,), (2, 3), (2, 2, 2), (4, 3, 2), (3, 3, 3, 3), (6, 6, 2, 2), (7, 2, 2, 2, 2), (2,) * 8]


def pairs_of(cases):
    """What each case has: its values, and every two of them."""
    places = range(len(cases[0]))
    singles = {(i, case[i]) for case in cases for i in places}
    return singles | {(i, j, case[i], case[j]) for case in cases for i, j in itertools.combinations(places, 2)}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_pair_of_values_is_covered(sizes):
    options = [[f"{place}{value}" for value in range(size)] for place, size in enumerate(sizes)]
    cases = covering(*options)
    full = list(itertools.product(*options))
    assert pairs_of(cases) == pairs_of(full)
    assert cases == [case for case in full if case in set(cases)]  # in their order, none twice
    fewest = sorted(sizes)[-1] * (sorted(sizes)[-2] if len(sizes) > 1 else 1)
    assert fewest <= len(cases) <= 2 * fewest + 2


def test_only_what_is_possible():
    """Of cases that exclude each other, every pair that any of them has."""
    full = [case for case in itertools.product(range(4), range(4), range(3)) if case[0] <= case[1]]
    cases = covering(of=full)
    assert pairs_of(cases) == pairs_of(full) and set(cases) < set(full)


def test_the_others_are_slow():
    found = product("ab", [1, 2, 3], [True, False], ids=[str, {1: "one", 2: "two", 3: "three"}, str])
    assert [tuple(case.values) for case in found] == list(itertools.product("ab", [1, 2, 3], [True, False]))
    kept = [tuple(case.values) for case in found if not case.marks]
    assert kept == covering("ab", [1, 2, 3], [True, False]) and len(kept) == 6
    assert {mark.name for case in found for mark in case.marks} == {"slow"}
    assert [case.id for case in found[:2]] == ["a-one-True", "a-one-False"]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_value_has_a_case_each_day_and_every_case_its_day(sizes):
    options, full = [range(size) for size in sizes], set(itertools.product(*map(range, sizes)))
    days = len(full) // max(sizes)
    for day in (0, 1, 20_779):
        cases = of_a_day(day, *options)
        assert len(cases) == len(set(cases)) == max(sizes)
        assert all({case[i] for case in cases} == set(option) for i, option in enumerate(options))
        assert {case for later in range(day, day + days) for case in of_a_day(later, *options)} == full


@pytest.mark.parametrize("count", [1, 3, 5, 9])
def test_cases_take_turns(count, monkeypatch):
    seen = set()
    for day in range(20_779, 20_779 + 5):
        monkeypatch.setattr("tests.sampling.today", lambda day=day: day)
        cases = turns(count, [(i,) for i in range(5)], ids="abcde")
        kept = {case.values for case in cases if not case.marks}
        assert [case.id for case in cases] == list("abcde") and len(kept) == min(count, 5)
        seen |= kept
    assert len(seen) == 5


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_mixed_is_the_product_in_another_order(sizes):
    cases = mixed(*map(range, sizes))
    assert sorted(cases) == sorted(itertools.product(*map(range, sizes)))
    same = [sum(x == y for x, y in zip(a, b, strict=True)) for a, b in itertools.pairwise(cases)]
    assert sum(same) <= len(sizes) * len(cases) / max(sizes)


def test_an_array_has_every_possible_pair_or_triple():
    options = {"a": (0, 1, 2), "b": (0, 1), "c": (0, 1), "d": (0, 1, 2, 3)}

    def allowed(case):
        return not (case.get("a") == 2 and case.get("b") == 1) and case.get("c", 0) + case.get("d", 0) < 4

    every = [dict(zip(options, v, strict=True)) for v in itertools.product(*options.values())]
    for strength in (1, 2, 3):
        found = pairs.array(options, allowed, strength)
        assert all(map(allowed, found)) and all(list(case) == list(options) for case in found)
        wanted, got = (
            {some for case in cases for some in itertools.combinations(case.items(), strength)}
            for cases in (filter(allowed, every), found)
        )
        assert got == wanted
        assert len(found) < len(every)

"""The covering sets of tests/pairs.py: every pair, in few cases, and all that is left out is run by `make test-all`."""

import itertools
import math

import pytest

from tests import pairs
from tests.pairs import covering, each_value, few, mixed, product, shifted

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
def test_every_value_has_a_case_and_every_case_its_shift(sizes):
    options, full = [range(size) for size in sizes], set(itertools.product(*map(range, sizes)))
    shifts = len(full) // max(sizes)
    for by in (0, 1, 20_779):
        cases = shifted(by, *options)
        assert len(cases) == len(set(cases)) == max(sizes)
        assert all({case[i] for case in cases} == set(option) for i, option in enumerate(options))
        assert {case for later in range(by, by + shifts) for case in shifted(later, *options)} == full


def kept(found):
    return [tuple(case.values) for case in found if not case.marks]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_value_has_a_default_case(sizes):
    found = each_value(*map(range, sizes))
    assert [tuple(case.values) for case in found] == list(itertools.product(*map(range, sizes)))
    assert set(kept(found)) == set(shifted(0, *map(range, sizes)))


@pytest.mark.parametrize("count", [1, 3, 5, 9])
def test_few_cases_lie_evenly(count):
    found = few(count, [(i,) for i in range(5)], ids="abcde")
    assert [case.id for case in found] == list("abcde")
    assert kept(found) == {1: [(0,)], 3: [(0,), (1,), (3,)]}.get(count, [(i,) for i in range(5)])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_few_cases_of_a_product_have_most_pairs(sizes):
    """As many as the longest option has values: nearly all of their pairs are different ones."""
    count = max(sizes) if len(sizes) > 1 else 1
    some = kept(few(count, mixed(*map(range, sizes))))
    fresh = sorted(sizes)[-2] if len(sizes) > 1 else 1  # so many have no pair in common, whatever is chosen
    assert len(some) == count and len(set(some)) == count
    width = math.comb(len(sizes), 2)
    assert len({pair for case in some for pair in itertools.combinations(enumerate(case), 2)}) >= 0.9 * fresh * width


def test_few_cases_of_values_without_a_hash():
    a, b = {"tp": 2}, {"tp": 4}
    assert kept(few(2, [(a, 1), (a, 2), (b, 1), (b, 2)])) == [(a, 1), (b, 1)]
    assert kept(few(0, [(a,), (b,)])) == []


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

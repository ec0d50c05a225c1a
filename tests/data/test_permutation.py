"""The computed shuffle is a bijection for every size and key, and it does shuffle."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmegatron.data.order import shuffled
from fmegatron.data.permutation import permuted


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 5000), key=st.integers(0, 2**64 - 1))
def test_bijection(size, key):
    assert np.array_equal(np.sort(permuted(np.arange(size), size, key)), np.arange(size))


@given(size=st.integers(1, 2**62), key=st.integers(0, 2**64 - 1), data=st.data())
def test_any_part_of_a_huge_range_is_distinct_and_inside(size, key, data):
    start = data.draw(st.integers(0, size - 1))
    positions = np.arange(start, min(start + 50, size))
    result = permuted(positions, size, key)
    assert len(np.unique(result)) == len(positions) and result.min() >= 0 and result.max() < size
    assert np.array_equal(permuted(positions[::-1], size, key)[::-1], result)


@pytest.mark.slow
def test_over_many_keys_every_position_goes_everywhere_equally_often():
    """Size 5 is where too few rounds show most."""
    size, keys = 5, 20_000
    where = np.stack([permuted(np.arange(size), size, key) for key in range(keys)])
    counts = np.stack([np.bincount(where[:, position], minlength=size) for position in range(size)])
    # Rows and columns of the counts add up to `keys`, so (size-1)/size of the sum is chi-squared, (size-1)² degrees.
    statistic = ((counts - keys / size) ** 2 / (keys / size)).sum() * (size - 1) / size
    assert statistic < 45  # 16 degrees of freedom: uniform permutations exceed it once in 7,000; six rounds gave 57


def test_neighbours_part_and_keys_disagree():
    steps = np.diff(permuted(np.arange(10_000), 10_000, key=3))
    assert (np.abs(steps) == 1).mean() < 0.002
    first, second = (permuted(np.arange(10_000), 10_000, key) for key in (1, 2))
    assert (first == second).mean() < 0.002
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05 and abs(np.corrcoef(first, np.arange(10_000))[0, 1]) < 0.05


def test_the_order_is_fixed_for_ever():
    """Resumed runs of a later version must see the same data."""
    assert permuted(np.arange(8), 1000, key=7).tolist() == [929, 515, 371, 459, 894, 183, 652, 17]


def test_positions_outside_are_refused():
    with pytest.raises(ValueError, match="0 to 9"):
        permuted(np.array([10]), 10, 0)


@pytest.mark.parametrize("size", [1, 2, 3, 10, 600])
def test_few_items_are_ordered_in_parts_of_some_epochs(size):
    """Each epoch of few items is a permutation by itself: 8,192 samples of one item would be as many."""
    samples = np.arange(5 * size, 25 * size)
    by_one = [shuffled(3, size, np.array([n]))[0] for n in samples]
    assert shuffled(3, size, samples).tolist() == by_one
    assert all(sorted(by_one[a : a + size]) == list(range(size)) for a in range(0, len(by_one), size))

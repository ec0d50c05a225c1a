"""Who keeps whose shards: a partition of the ranks, on different nodes, as large as the nodes allow."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmegatron.checkpoint.local.cliques import check_groups, cliques

NODES = st.one_of(
    st.lists(st.integers(1, 6), min_size=1, max_size=12),
    st.tuples(st.integers(1, 8), st.integers(1, 12)).map(lambda t: [t[0]] * t[1]),
)


@settings(max_examples=400, deadline=None)
@given(NODES, st.integers(1, 6))
def test_a_partition_over_different_nodes(sizes, copies):
    world = sum(sizes)
    groups = cliques(world, copies, sizes)
    assert sorted(rank for group in groups for rank in group) == list(range(world))
    assert groups == tuple(sorted(groups)) and all(list(group) == sorted(group) for group in groups)
    node = [i for i, size in enumerate(sizes) for _ in range(size)]
    for group in groups:
        assert len({node[rank] for rank in group}) == len(group), (sizes, copies, groups)
    # Groups of distinct nodes with `copies` members each exist just when the largest node's ranks find as many groups.
    possible = max(sizes) <= world // copies
    assert (min(map(len, groups)) >= copies) == possible, (sizes, copies, groups)
    assert max(map(len, groups)) < max(2 * copies, 2), (sizes, copies, groups)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 9))
def test_a_number_is_nodes_of_that_size_and_a_rest(world, copies, spacing):
    sizes = [spacing] * (world // spacing) + ([world % spacing] if world % spacing else [])
    assert cliques(world, copies, spacing) == cliques(world, copies, sizes)


def test_neighbours():
    assert cliques(8, 2, 1) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert cliques(16, 2, 4) == tuple((a + i, a + i + 4) for a in (0, 8) for i in range(4))
    assert cliques(3, 2, 1) == ((0, 1, 2),)


def test_sixteen_thousand_ranks_are_quick_to_group():
    groups = cliques(16_384, 2, 8)
    assert len(groups) == 8192 and all(b - a == 8 for a, b in groups)


@pytest.mark.parametrize(
    "args", [(0, 2, 1), (4, 0, 1), (4, 2, 0), (4, 2, (2, 1)), (4, 2, (4, 0)), (4, 2, (2, 3))], ids=str
)
def test_numbers_that_do_not_fit(args):
    with pytest.raises(ValueError, match="cliques: got"):
        cliques(*args)


def test_groups_by_hand():
    assert check_groups([[2, 6, 7], [3, 1], [5], [0, 4]], 8) == ((2, 6, 7), (3, 1), (5,), (0, 4))
    for groups in ([[0, 1]], [[0, 1], [1, 2]], [[0, 1], [2, 3]]):
        with pytest.raises(ValueError, match="exactly one group"):
            check_groups(groups, 3)

"""Numbers of ranks know that they are, through products, quotients and powers, and those of sizes through sums."""

import copy
import pickle
from fractions import Fraction

import numpy as np
import torch

from fmegatron.collectives import Axes
from fmegatron.layout import Layout, Mesh
from fmegatron.layout.rank_counts import RankCount, SizeOf, of_ranks, of_sizes, of_sums

MESH = Mesh(dp=2, fsdp=3, tp=1)
AXES = Axes(MESH)


def test_what_numbers_know():
    dp, both, one = AXES["dp"].size, AXES["dp", "fsdp"].size, AXES["tp"].size
    assert (dp, both, one) == (2, 6, 1) and of_ranks(dp) == {"dp": 1} and not of_ranks(one) and not of_ranks(2)
    assert of_ranks(both) == {"dp": 1, "fsdp": 1} == of_ranks(4 * both) and 4 * both == 24
    assert of_ranks(1 / dp) == {"dp": -1} and 1 / dp == 0.5
    assert of_ranks(both / dp) == {"fsdp": 1} and both / dp == 3.0
    assert of_ranks(dp**0.5) == {"dp": Fraction(1, 2)} and of_ranks(dp**-1) == {"dp": -1}
    assert type(dp / dp) is float and type(float(dp)) is float and type(int(dp)) is int
    for number in (dp - 1, dp // 2, dp + 1):  # which know that they are made of it, and are no multiple of it
        assert of_ranks(number) == {} == of_sizes(number) == of_sums(number) and number.over


def test_a_mesh_gives_such_numbers():
    assert (MESH["dp"], MESH["tp"], MESH["pp"], MESH.size, MESH.extent(("fsdp", "tp"))) == (2, 1, 1, 6, 3)
    assert of_ranks(MESH["dp"]) == {"dp": 1} and not of_ranks(MESH["tp"]) and not of_ranks(MESH["pp"])
    assert of_ranks(MESH.size) == {"dp": 1, "fsdp": 1} and of_ranks(MESH.extent(("fsdp", "tp"))) == {"fsdp": 1}
    again = Mesh(dp=MESH["dp"], fsdp=MESH["fsdp"], tp=1)
    assert again == MESH and {*map(type, again.sizes)} == {int}
    assert type(Layout((MESH["dp"] * 2,), torch.float32, MESH).shape[0]) is int


def test_they_are_numbers():
    dp = AXES["dp"].size
    assert torch.zeros(dp, 3).shape == (2, 3) and torch.equal(dp * torch.ones(2), torch.full((2,), 2.0))
    assert {2: "a"}[dp] == "a" and repr(dp) == "2" and list(range(dp)) == [0, 1]
    for again in (copy.deepcopy(dp), pickle.loads(pickle.dumps(dp))):
        assert again == dp and of_ranks(again) == of_ranks(dp)


def test_numpy_takes_them_for_numbers_of_python():
    """Which have no dtype: what they are multiplied by keeps its own."""
    dp, half = MESH["dp"], 1 / MESH["dp"]
    rows, bytes_ = np.ones(2, np.float32), np.ones(2, np.uint8)
    made = (rows * dp, dp * rows, rows / dp, rows * half, rows + dp, np.multiply(rows, dp), np.float32(1) * half)
    assert {x.dtype for x in made} == {rows.dtype} and {(bytes_ * dp).dtype, (dp + bytes_).dtype} == {bytes_.dtype}
    assert np.zeros(dp).shape == (2,) and np.array([dp, 3]).dtype == np.int64 and rows.reshape(dp, 1).shape == (2, 1)
    assert dp ** float("inf") == float("inf") and 2**dp == 4 and pow(dp, 3, 5) == 3


def test_sums_of_sizes_know_their_terms():
    graph = torch.fx.Graph()
    rows = SizeOf(graph.placeholder("x"), 0)
    n, dp = RankCount(6, ((rows, Fraction(1)),)), AXES["dp"].size
    assert n + 0 == 0 + n == 6 == n - 0 and {of_sizes(one)[rows] for one in (n + 0, n + n, n // 2, -n, 3 * n - n)} == {
        1
    }
    assert type(n - n) is int and type(n % 3) is int and of_ranks(dp + dp) == {"dp": 1} and type(n // n) is int
    ((less, power),) = of_sums(n - 1).items()
    assert power == 1 and less.terms == (((rows, 1),), ()) and n - 1 == 5 and not of_sizes(n - 1)
    assert of_sums(n // 4) and of_sums(n % 4) and of_sums(7 - n) and of_sums((n + 1) * dp / n) and not of_sums(n * dp)
    assert type((n - 1) / (n - 1)) is float and of_sums((n - 1) / (n - 2)) and not of_sizes(n * (n - 1) / n)
    assert (n - 1, 13 - n, n // 4, 13 // n, n % 4, 13 % n, -n) == (5, 7, 1, 2, 2, 1, -6)
    assert pickle.loads(pickle.dumps(n - 1)) == 5 == copy.deepcopy(n - 1)


def test_python_is_told_of_sizes_inside_of_sums():
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    n, dp = RankCount(6, ((SizeOf(node, 0), Fraction(1)),)), AXES["dp"].size
    assert of_sizes(n >> 1) and of_sizes(n << 1) and of_sums(n >> 2) and (n >> 2, n << 1) == (1, 12)
    assert divmod(n, 4) == (1, 2) and all(map(of_sums, divmod(n, 4))) and divmod(13, n) == (2, 1)
    assert abs(-n) == 6 and of_sizes(abs(-n)) and (dp % 2).over and "asked" not in node.meta
    assert int(n - 1) == 5 and node.meta["asked"] == {0}
    other = graph.placeholder("y")
    assert RankCount(6, ((SizeOf(other, 1), Fraction(1)),)) & 2 == 2 and other.meta["asked"] == {1}

"""What a function of data uses is stated, so that a resume with other values is refused."""

import functools

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from fmegatron import data

HEIGHT, _counted = 3, 0


def rows(count, table=None, also=None):
    def batch(position, scale=1.0, *, name="x"):
        return {name: torch.full((count, HEIGHT), scale * position)}, table, also

    return batch


def uses(function):
    return (data.source(function).describe() or {"uses": {}})["uses"]


LARGE = np.zeros(9_000_000)  # 72 MB: a part is looked at


@pytest.mark.parametrize(
    "one, other, name",
    [
        (rows(4), rows(8), "count"),
        (rows(4, np.arange(3)), rows(4, np.arange(1, 4)), "table"),
        (rows(4, torch.ones(2)), rows(4, torch.ones(2, dtype=torch.bfloat16)), "table"),
        (rows(4, torch.tensor([1 + 2j]).conj()), rows(4, torch.tensor([1 + 2j])), "table"),
        (rows(4, LARGE), rows(4, LARGE + 1), "table"),
        (rows(4, ("a", 2)), rows(4, ("a", 3)), "table"),
        (rows(4, np.float32(2)), rows(4, np.float64(2)), "table"),
        (rows(4, None, rows(5)), rows(4, None, rows(6)), "also.count"),
        (functools.partial(rows(4), scale=2.0), functools.partial(rows(4), scale=3.0), "partial.scale"),
    ],
)
def test_another_value_is_seen(one, other, name):
    first, second = uses(one), uses(other)
    assert first == uses(one) and {x for x in first if first[x] != second[x]} == {name}


def test_names_of_its_module_and_defaults():
    assert uses(rows(4)) == {
        "HEIGHT of its module": "3", "also": "None", "count": "4", "name": "'x'", "scale": "1.0", "table": "None",
    }  # fmt: skip


def test_what_a_function_writes_or_what_may_change_is_not_compared():
    seen, calls = [], 0

    def batch(position):
        nonlocal calls
        global _counted
        calls, _counted = calls + 1, _counted + 1
        seen.append(position)
        return {"x": torch.zeros(1)}

    source = data.source(batch)
    assert source.describe() is None
    source.at(0)
    assert source.describe() is None and (seen, calls, _counted) == ([0], 1, 1)
    assert data.source(lambda position: {"x": torch.zeros(1)}).describe() is None


def test_one_that_closes_over_itself():
    def batch(position):
        return batch, HEIGHT

    assert uses(batch) == {"HEIGHT of its module": "3"}


def scaled(position, by=2.0):
    return HEIGHT * by * position


def twice(position):
    return scaled(position) + scaled(position)


def counted():
    global _counted
    _counted += 1


def test_functions_of_its_module_are_looked_into():
    """Under one name each, whoever calls them; and what one of them writes is no constant of another."""
    expected = {"HEIGHT of its module": "3", "scaled.by": "2.0"}
    assert uses(lambda position: scaled(position)) == uses(twice) == uses(lambda p: twice(p) + scaled(p)) == expected
    assert uses(lambda position: (counted(), _counted)) == {}


def test_counters_that_another_function_writes():
    def made():
        calls = 0

        def count():
            nonlocal calls
            calls += 1

        def batch(position):
            count()
            return {"x": torch.full((2,), calls)}

        return batch

    assert uses(made()) == {}


@pytest.mark.parametrize("buffer", [np.zeros(4), torch.zeros(4)], ids=["numpy", "torch"])
def test_a_buffer_that_the_function_fills(buffer):
    scale = 2

    def batch(position):
        buffer[:] = scale * position
        return {"x": torch.as_tensor(buffer).clone()}

    source = data.source(batch)
    first = source.describe()
    source.at(3)
    assert source.describe() == first and source.describe()["uses"].keys() == {"buffer", "scale"}
    scale = 3
    assert source.describe()["uses"]["scale"] == "3"


@pytest.mark.parametrize(
    "table",
    [
        np.array(["2020-01-01"], "M8[D]"),
        np.zeros(3, "m8[s]"),
        np.zeros(3, [("a", "f4"), ("b", "i8")]),
        np.array(["a", "b"]),
        np.zeros((2, 0)),
        np.array(3.0),
        np.zeros(3, ">f4"),
    ],
    ids=str,
)
def test_arrays_of_any_kind(table):
    assert uses(rows(4, table)) == uses(rows(4, table.copy())) and "table" in uses(rows(4, table))
    if table.size:
        other = table.copy()
        other[...] = np.ones((), "i4").astype(table.dtype) if table.dtype.names is None else (1, 1)
        assert uses(rows(4, table)) != uses(rows(4, other))


def test_tensors_without_plain_elements_end_no_run():
    fake = FakeTensorMode().from_tensor(torch.ones(3))
    nested = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for x in (fake, nested, torch.eye(2).to_sparse(), torch.empty(3, device="meta")):
        assert "table" in uses(rows(4, x))

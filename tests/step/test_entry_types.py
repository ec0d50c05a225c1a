"""The types that an entry of a collective may state, and what the check makes of each: right uses and wrong ones."""

import pytest
import torch

from fmegatron.collectives import Axes, all_gather, axis_index, pmax, psum
from fmegatron.collectives.kinds import REPLICATED, Collective, Partial, Sharded
from fmegatron.collectives.places import Place
from fmegatron.layout import Layout, Mesh
from fmegatron.step import check

MESH = Mesh(dp=2, tp=2)
AXES = Axes(MESH)
DP, BOTH = AXES["dp"], AXES["dp", "tp"]
STATE = {"w": Layout((8, 4), torch.float64, MESH)}


def entry(name, before, after, shape=None):
    """A collective of which the check alone is asked; shape: (shape of x, n) -> that of the result."""
    make = {} if shape is None else {"result": lambda x, sizes: x.new_empty(shape(tuple(x.shape), len(sizes) * 2))}
    nothing = {"real": None, "simulated": None, "sent": lambda nbytes, n: nbytes}
    return Collective(f"typed_{name}", "", type=lambda: (before, after), **make, **nothing)


def fewer(shape, n):
    return (shape[0] // n, *shape[1:])


def more(shape, n):
    return (shape[0] * n, *shape[1:])


LARGEST = entry("largest", None, Partial("max"))
ROWS = entry("rows", None, Sharded(Place((0,))), fewer)  # one dim: of all axes, joint ones too
FIRST = entry("first", None, REPLICATED)
STACK = entry("stack", None, REPLICATED, lambda shape, n: (n, *shape))
GATHER = entry("gather", Sharded(Place((0,))), REPLICATED, more)
TERMS = entry("terms", REPLICATED, Partial("sum"))  # no rule


def own(x, axis):
    """What depends on the rank."""
    return x + axis_index(axis, like=x)


RIGHT = {
    "a maximum": lambda x: pmax(LARGEST([own(x, DP)], DP)[0], DP),
    "shards of what is replicated": lambda x: all_gather(ROWS([x], DP)[0], DP, 0),
    "shards of what differs": lambda x: all_gather(ROWS([own(x, DP)], DP)[0], DP, 0),
    "shards over joint axes": lambda x: all_gather(ROWS([own(x, BOTH)], BOTH)[0], BOTH, 0),
    "that of the first": lambda x: FIRST([own(x, DP)], DP)[0],
    "in a new dim": lambda x: STACK([own(x, DP)], DP)[0].sum(0),
    "gathered over joint axes": lambda x: GATHER([ROWS([x], BOTH)[0]], BOTH)[0],
}
WRONG = {
    "a maximum is no sum": lambda x: psum(LARGEST([own(x, DP)], DP)[0], DP),
    "shards are not gathered": lambda x: ROWS([x], DP)[0],
    "shards are gathered over one axis": lambda x: all_gather(ROWS([x], BOTH)[0], AXES["tp"], 0),
    "a sum of what is the same": lambda x: psum(STACK([x], DP)[0], DP),
}
OPEN = {
    "no rule": lambda x: psum(TERMS([x], DP)[0], DP),
    "another axis": lambda x: STACK([own(x, AXES["tp"])], DP)[0],
}


ROWS_COUNTED = {
    "ones_like": lambda x: torch.ones_like(x[:, 0]).sum(),
    "zeros_like + 1": lambda x: (torch.zeros_like(x[:, 0]) + 1).sum(),
    "new_ones": lambda x: x.new_ones(x.shape[0]).sum(),
    "a mask": lambda x: (x[:, 0] == x[:, 0]).sum(),
}


def report_of(case):
    return check(lambda state, x: (state, case(x)), STATE, Layout((8, 4), torch.float64, MESH))


@pytest.mark.parametrize("case", RIGHT.values(), ids=RIGHT)
def test_right(case):
    report = report_of(case)
    assert report.ok, report


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_wrong(case):
    assert report_of(case).findings


@pytest.mark.parametrize("case", OPEN.values(), ids=OPEN)
def test_open(case):
    report = report_of(case)
    assert not report.findings and report.unproven_outputs == ("1",), report
    assert "internal" not in str(report)


@pytest.mark.parametrize("count", ROWS_COUNTED.values(), ids=ROWS_COUNTED)
@pytest.mark.parametrize("rows", [2, 4])
def test_rows_are_counted_also_where_a_rank_has_one(count, rows):
    batch = Layout((rows, 4), torch.float64, MESH, ("dp",))
    report = check(lambda state, x: (state, psum(count(x), DP)), STATE, batch)
    assert report.ok, report

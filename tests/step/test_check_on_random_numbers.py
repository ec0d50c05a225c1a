"""What rules leave open is run on random numbers, on ranks and on one: a finding where they differ in every reading."""

from typing import NamedTuple

import pytest
import torch

from fmegatron import step, tree
from fmegatron.collectives import Axes, all_gather, axis_index, ppermute, psum
from fmegatron.layout import Layout, Mesh
from fmegatron.step.checker.context import Report, Unproven
from fmegatron.step.checker.on_random_numbers import Step, differing
from fmegatron.step.other_mesh import OneRank
from fmegatron.tree.labels import labelled
from tests.pairs import few

F64, MESH = torch.float64, Mesh(dp=2)
STATE = {"w": Layout((6, 6), F64, MESH), "t": Layout((1,), F64, MESH)}
BATCH = {"x": Layout((8, 6), F64, MESH, ("dp",)), "m": Layout((8,), F64, MESH, ("dp",))}


def descent(loss):
    """A step of descent on a loss of w, x and m, a sum over the ranks of dp."""
    axis = Axes(MESH)["dp"]

    def run(s, b):
        (_, _), grads = step.value_and_grad(lambda p: (loss(p, b, axis), {}))(s)
        return {n: s[n] - 0.1 * psum(grads[n], axis) for n in s}, {}

    return run


def checked(loss):
    return step.check(descent(loss), STATE, BATCH)


def told(loss):
    """What is found where rules say nothing of any output."""
    fn, empty = descent(loss), lambda layout: labelled(torch.empty(layout.local_shape(0), dtype=layout.dtype), layout)
    traced = step.trace(fn, tree.map(empty, (STATE, BATCH)))
    open_ = Unproven("file.py:1", "add", ("dp",), "no rule", "", tuple(traced.out_paths))
    given = Step(fn, (STATE, BATCH), traced, tree.leaves(STATE), empty)
    return differing(Report((), (open_,)), given, MESH).findings


def net(p, b):
    return torch.tanh(b["x"] @ p["w"])


def scan(seen):
    def loss(p, b, dp):
        s = net(p, b).sum(-1)
        ends, rank = all_gather(s.sum()[None], dp, 0), torch.arange(dp.size)
        total = s.cumsum(0) + (ends * seen(rank, axis_index(dp))).sum()
        return (total - b["m"]).square().sum()

    return loss


def before(p, b, dp):
    return (net(p, b) - ppermute(net(p, b), dp, 1)).square().sum()


def added(of_ranks):
    """A term that all ranks have, beside one of their rows."""
    return lambda p, b, dp: (net(p, b) * (-p["t"]).exp()).square().sum() + p["t"].sum() * of_ranks(dp)


WRONG = {
    "a carry with its own": scan(lambda rank, own: rank <= own),
    "a carry of what comes": scan(lambda rank, own: rank > own),
    "rows of the next rank": before,
    "all divided by the ranks": lambda p, b, dp: added(lambda dp: 1)(p, b, dp) / dp.size,
}


def own_end(p, b, dp):
    """What is before a rank, of the sums of all, one place on: its gradient belongs to its own entry."""
    s = net(p, b).sum(-1)
    ends = torch.nn.functional.pad(all_gather(s.sum()[None], dp, 0).cumsum(0), (1, 0))
    return (s.cumsum(0) + ends.index_select(0, axis_index(dp).view(1)) - b["m"]).square().sum()


RIGHT = {
    "a carry of what is before": scan(lambda rank, own: rank < own),
    "a share": added(lambda dp: 1 / dp.size),
    "its own entry of padded ends": own_end,
}


@pytest.mark.parametrize("name", few(2, [(name,) for name in WRONG], WRONG))
def test_what_differs_is_a_finding(name):
    report = checked(WRONG[name])
    assert any("on random numbers" in finding.what for finding in report.findings), report


@pytest.mark.parametrize("name", RIGHT)
def test_what_agrees_is_none(name):
    assert not checked(RIGHT[name]).findings


def by_rows(rows):
    return lambda p, b, dp: net(p, b).square().sum() / rows(p, b, dp) / dp.size


def test_what_rules_prove_and_is_another_on_one_rank_is_unproven():
    """A mean of means, if the number that divides is that of a rank's rows: `len` says of which."""
    assert checked(by_rows(lambda p, b, dp: len(b["x"]))).ok
    assert not checked(by_rows(lambda p, b, dp: len(all_gather(b["x"], dp, 0)))).ok
    assert not checked(by_rows(lambda p, b, dp: 3 * len(p["w"]))).ok


class Held(NamedTuple):
    loss: object
    rows: int


def test_a_plain_number_may_have_been_made_of_the_mesh():
    """Whole numbers that a function closes over, and those in its code, have another reading on one rank."""
    ranks = int(MESH["dp"])

    def of(number):
        return lambda p, b, dp: net(p, b).square().sum() / (b["x"].shape[0] * number(dp))

    assert not told(of(lambda dp: ranks)) and not told(of(lambda dp: 2)) and not told(of(lambda dp: dp.size))
    assert told(of(lambda dp: 1 + 0 * dp.size)) and told(
        lambda p, b, dp: of(lambda dp: 2)(p, b, dp) * psum(p["t"].sum(), dp)
    )
    held = Held(lambda p, b, rows: net(p, b)[:1].square().sum() / rows, 8 // ranks)
    assert not told(
        lambda p, b, dp: (held.loss(p, b, held.rows) - net(p, b)[:1].square().sum() / held.rows) + 0 * ranks
    )


AXES = Axes(MESH)


def of_globals(p, b, _):
    return net(p, b).square().sum() / (b["x"].shape[0] * AXES["dp"].size)


def test_what_a_function_reads_as_globals_is_moved():
    assert not told(of_globals)
    moved = OneRank(MESH)(of_globals)
    assert moved.__globals__["AXES"].mesh == Mesh(dp=1) and AXES.mesh == MESH and moved.__code__ is of_globals.__code__


def test_values_on_one_rank():
    layout, move = Layout((8, 6), F64, MESH, ("dp",)), OneRank(MESH)
    one = move({"at": layout, "n": (MESH["dp"], 1 / MESH["dp"], MESH["dp"] - 1), "held": Held(Axes(MESH)["dp"], 3)})
    assert one["at"].local_shape(0) == (8, 6) and one["n"] == (1, 1.0, 0) and one["held"].loss.size == 1
    assert move.plain == {3} and OneRank(MESH, {3: 6})(Held(None, 3)).rows == 6
    kept = (4, "a", [torch.float32])
    assert move(kept) is kept


def test_what_is_vouched_for_stays_so():
    loss = WRONG["rows of the next rank"]
    at = checked(loss).findings[0].at
    report = step.check(descent(loss), STATE, BATCH, allow={at: "meant so"})
    assert not report.findings and report.silenced

"""Mistakes in tables, cuts and runs of a pipeline: each is refused, or its numbers are not those of one rank."""

import dataclasses
from collections import defaultdict

import pytest
import torch

from fmegatron import step, tree
from fmegatron.layout import Layout, Mesh
from fmegatron.step import Pipeline, pipelined
from fmegatron.step.pipeline import entry, run, schedules
from fmegatron.step.pipeline.table import Table
from fmegatron.testing import simulate
from tests.step.pipeline import hand

MESH, M, TABLE = Mesh(pp=2), 4, schedules.zb_h1(2, 4)


@pytest.fixture(scope="module")
def ran():
    """(a simulated step of tied weights by stages, its arguments, what one rank computes)."""
    params, batch = hand.params_of(4, tied=True), hand.batch_of(2 * M)
    layouts = hand.state_layouts(hand.layouts_of(params, MESH))
    rows = tree.map(lambda x: Layout(tuple(x.shape), x.dtype, MESH), batch)
    fn = hand.train_step_of(pipelined(hand.loss_fn, Pipeline(TABLE, (2, 2)), dtype=hand.F64))
    state = hand.whole_state(params)
    sim = simulate(fn, MESH, state, batch, layouts=(layouts, rows))
    one = hand.layouts_of(params, Mesh(), None)
    wanted, (metrics,) = hand.steps(step.accumulate(hand.loss_fn, M, dtype=hand.F64), params, one, batch, 1)
    return sim, (state, batch), (wanted, metrics)


def wrong_microbatch(patched):
    """The last stage reads the rows of the next microbatch."""
    given = entry.RankOfPipeline.given

    def rows_of(of, name, i):
        return given(of, name, (i + 1) % M if of.rank and name[:2] == "1/" else i)

    patched.setattr(entry.RankOfPipeline, "given", rows_of)


def stale_residual(patched):
    """A backward reads what the forward of the first microbatch has kept."""
    value, first = run.Held._value, defaultdict(dict)

    def stale(held, kind, name, i, stage):
        found = value(held, kind, name, i, stage)
        return first[held.rank].setdefault(name, found) if (name, i) in held.values else found

    patched.setattr(run.Held, "_value", stale)


def swapped_parts(patched):
    """A stage runs the parts of the other one."""
    made = entry.Plan.entry
    patched.setattr(entry.Plan, "entry", lambda plan, kind, stage: made(plan, kind, 1 - stage))


def dropped_weights(patched):
    """The weight gradients of one microbatch are left out."""
    add = entry.RankOfPipeline.add
    patched.setattr(entry.RankOfPipeline, "add", lambda of, name, x, i: None if i == 2 else add(of, name, x, i))


def doubled_weights(patched):
    """Those of one microbatch are added twice."""
    add = entry.RankOfPipeline.add
    patched.setattr(
        entry.RankOfPipeline, "add", lambda of, name, x, i: [add(of, name, x, i) for _ in range(1 + (i == 1))]
    )


def crossed(kind):
    def messages(patched):
        take, before = run.Held.receive, {}

        def other(held, message, value):
            if message.kind != kind:
                return take(held, message, value)
            late = before.setdefault(held.rank, value)  # what came before, in the place of what comes now
            before[held.rank] = value
            return take(held, message, late)

        patched.setattr(run.Held, "receive", other)

    messages.__doc__ = f"A message of {kind} carries what the one before it did."
    return messages


def tied_not_summed(patched):
    """The terms of a leaf that several stages read are those of rank 0 alone."""
    shares = entry.RankOfPipeline.shares

    def own(of):
        sides, terms = shares(of)
        return sides, [of.each(torch.zeros_like, x) for x in terms] if of.rank else terms

    patched.setattr(entry.RankOfPipeline, "shares", own)


def side_of_another(patched):
    """A metric reads a value of the next microbatch."""
    shares = entry.RankOfPipeline.shares

    def turned(of):
        sides, terms = shares(of)
        return [*sides[1:], *sides[:1]], terms

    patched.setattr(entry.RankOfPipeline, "shares", turned)


RUNS = [
    *(wrong_microbatch, stale_residual, swapped_parts, dropped_weights, doubled_weights, tied_not_summed),
    *(crossed("F"), crossed("B"), side_of_another),
]


def error_of(ran):
    sim, args, (state, metrics) = ran
    found, shown = sim.again(*args).globals()
    return max(hand.worst(state, found)[0], hand.worst(metrics, shown)[0])


@pytest.mark.slow
def test_a_run_without_a_mistake(ran):
    assert error_of(ran) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("mutant", RUNS, ids=lambda of: (of.__doc__ or "").rstrip("."))
def test_mistakes_of_a_run_change_its_numbers(ran, mutant, monkeypatch):
    mutant(monkeypatch)
    try:
        error = error_of(ran)
    except (KeyError, ValueError, RuntimeError, AssertionError, StopIteration):
        return  # what it needs is not there
    assert error > 1e-6


def without(action):
    return lambda rows: tuple(tuple(a for a in row if str(a) != action) for row in rows)


def swapped(one, other):
    names = {one: other, other: one}

    def change(rows):
        by_name = {str(a): a for row in rows for a in row}
        return tuple(tuple(by_name[names.get(str(a), str(a))] for a in row) for row in rows)

    return change


@pytest.mark.parametrize(
    "change",
    [without("W0.2"), without("B1.1"), swapped("F0.0", "B0.0"), swapped("B1.0", "W1.0"), lambda rows: rows[::-1]],
    ids=["W dropped", "B dropped", "B before F", "W before B", "stages swapped"],
)
def test_mistakes_of_a_table_are_refused(change):
    with pytest.raises(ValueError, match="got .*, wanted "):
        Pipeline(Table(change(TABLE.rows), TABLE.place, M), (2, 2))


@pytest.mark.slow
def test_stages_on_other_ranks_than_their_blocks_are_refused():
    turned = dataclasses.replace(TABLE, rows=TABLE.rows[::-1], place=TABLE.place[::-1])
    params = hand.params_of(4)
    grad_fn = pipelined(hand.loss_fn, Pipeline(turned, (2, 2)), dtype=hand.F64)
    with pytest.raises(ValueError, match="rests on rank 0 of pp, wanted it on rank 1"):
        hand.steps(grad_fn, params, hand.layouts_of(params, MESH), hand.batch_of(8), 1)

"""Timelines of a step by stages: a lane for each rank of pp, one for messages, planned by the clock and measured."""

import pytest
import torch

from fmegatron import step, tree
from fmegatron.collectives import connect
from fmegatron.layout import Layout, Mesh
from fmegatron.step.pipeline import schedules
from fmegatron.step.pipeline.clock import Costs, clock
from fmegatron.step.pipeline.table import messages
from fmegatron.testing import split
from tests.step.pipeline import hand

UNIT = Costs(send=0.0)


def described(pipeline: step.Pipeline, layers: int = 4) -> step.Description:
    mesh = Mesh(pp=pipeline.table.ranks)
    layouts = hand.layouts_of(hand.params_of(layers), mesh, pipeline.split(mesh, layers))
    rows = tree.map(lambda x: Layout(tuple(x.shape), x.dtype, mesh), hand.batch_of(8))
    fn = hand.train_step_of(step.pipelined(hand.loss_fn, pipeline, dtype=hand.F64))
    return step.Description(fn, hand.state_layouts(layouts), rows, pipeline.microbatches, pipeline=pipeline)


CASES = [
    (schedules.one_f_one_b, 2, (1, 1)),
    pytest.param(schedules.zb_h1, 4, (3, 1), marks=pytest.mark.slow),
    pytest.param(schedules.zb_v, 8, (1, 1, 1, 1), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("of, m, stages", CASES)
def test_the_plan_is_the_clock_of_the_table(of, m, stages):
    """With a unit for each action; the bar is 1.01 of the clock with the same costs."""
    table = of(2, m)
    found = step.timeline(described(step.Pipeline(table, stages), sum(stages)))
    on_the_clock = clock(table, UNIT)
    (whole,) = [e for e in found.events if e.name == "table"]
    assert whole.duration == on_the_clock.duration
    assert found.lanes[:3] == ["compute", "pp 0", "pp 1"] and "messages" in found.lanes
    for rank, spans in enumerate(on_the_clock.spans):
        ran = [e for e in found.events if e.lane == f"pp {rank}" and not e.waits]
        assert [(e.start - whole.start, e.end - whole.start) for e in ran] == [*spans]
        assert [e.detail for e in ran] == [str(action) for action in table.rows[rank]]
    assert [e.detail for e in found.events if e.lane == "messages"] == [*map(str, messages(table))]
    waits = sum(e.duration for e in found.events if e.waits and e.lane == "pp 0")
    assert waits == on_the_clock.idle[0]  # of the rank that is looked at
    assert "W of the weights" in str(found)


@pytest.mark.slow
def test_an_evaluation_has_forwards_alone():
    pipeline = step.Pipeline(schedules.one_f_one_b(2, 4), (2, 2))
    of = described(pipeline)
    specs = tree.map(lambda x: tree.ArraySpec(x), of.state.params)
    built = step.build(hand.loss_fn, hand.OPTIMIZER, specs, of.batch, microbatches=pipeline, shards=True)
    found = step.timeline(step.Description(built.evaluate, built.state, built.batch))
    assert {e.detail[0] for e in found.events if e.lane.startswith("pp ") and not e.waits} == {"F"}


def measured(rank: int) -> tuple:
    pipeline = step.Pipeline(schedules.zb_v(2, 4), (1, 1, 1, 1))
    of = described(pipeline)
    world = connect(of.mesh)
    own = split(hand.whole_state(hand.params_of(4)), of.state, of.mesh)[rank]
    state, batch = tree.place(tree.map(torch.clone, own), of.state), tree.place(hand.batch_of(8), of.batch)
    jitted = step.jit(of.function, donate=0, world=world, backend="eager")
    found = step.timeline(jitted, state, batch)
    return found.lanes, [e.name for e in found.events if e.lane == f"pp {rank}"], str(step.timeline(jitted))


@pytest.mark.slow
def test_measured_on_two_ranks(ranks):
    table = schedules.zb_v(2, 4)
    for rank, (lanes, names, planned) in enumerate(ranks.run(measured, ranks=2)):
        assert "messages" in lanes
        assert names == [f"{kind}{a.stage}.{a.microbatch}" for a in table.rows[rank] for kind in a.kind]
        assert f"pp {1 - rank}" in planned

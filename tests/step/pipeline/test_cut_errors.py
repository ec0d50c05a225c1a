"""What cannot be a pipeline is refused by name: of lines, blocks, stages and leaves."""

import re

import pytest
import torch
import torch.nn.functional as F

from fmegatron import step, tree
from fmegatron.layout import Layout, Mesh
from fmegatron.step import Pipeline, pipelined, stage
from fmegatron.step.layer import unstack
from fmegatron.step.pipeline import schedules
from fmegatron.step.pipeline.table import Action, Table
from fmegatron.step.tracing import trace
from tests.step.pipeline import hand

MESH, F64 = Mesh(pp=2), torch.float64


def traced(loss_fn, stages=(1, 1), layers=2, split="pp", mesh=MESH, table=None):
    """The trace of a step with this loss."""
    params, batch = hand.params_of(layers), hand.batch_of(4)
    layouts = hand.layouts_of(params, mesh, split)
    local = tree.map(lambda x, layout: x.new_zeros(layout.local_shape(0)), params, layouts)
    placed = (
        tree.place(local, layouts),
        tree.place(batch, tree.map(lambda x: Layout(tuple(x.shape), x.dtype, mesh), batch)),
    )
    table = table or schedules.one_f_one_b(mesh["pp"], 2)
    return trace(pipelined(loss_fn, Pipeline(table, stages), dtype=F64), placed, mesh=mesh)


def trunk(params, batch, before):
    """A loss whose blocks begin as `before(x, n)` says."""
    x = first = F.embedding(batch["tokens"], params["embed"])
    for n, w in enumerate(unstack(params["blocks"])):
        x = hand.block(before(x, n), w)
    return x, first


def without_marks(params, batch):
    return trunk(params, batch, lambda x, n: x)[0].square().mean()


def numbered_from_one(params, batch):
    return trunk(params, batch, lambda x, n: stage(x, n + 1))[0].square().mean()


def the_same_twice(params, batch):
    return trunk(params, batch, lambda x, n: stage(x, 0))[0].square().mean()


def marked(params, batch):
    return trunk(params, batch, stage)[0].square().mean()


def skips(params, batch):
    x, first = trunk(params, batch, stage)
    return (x * first).mean()


def mixes(params, batch):
    x, first = trunk(params, batch, stage)
    return x.square().mean() * first.square().mean()


def detached(params, batch):
    return trunk(params, batch, lambda x, n: stage(x.detach() if n else x, n))[0].square().mean()


@pytest.mark.long
@pytest.mark.parametrize(
    ("loss_fn", "how", "wanted"),
    [
        (without_marks, {}, r"got a loss without marks of stages, wanted .* its stack is taken apart at .*\.py:\d+"),
        (numbered_from_one, {}, r"got no step.stage\(x, 0\).*number the blocks"),
        (the_same_twice, {}, r"got step.stage\(x, 0\) 2 times .*number the blocks"),
        (marked, {"stages": (1, 2)}, r"got 2 stages of 3 blocks and 2 marks of blocks \(.*\.py:\d+\)"),
        (marked, {"stages": (1, 1, 1), "mesh": Mesh(pp=3), "split": None}, r"got 3 stages of 3 blocks and 2 marks"),
        (skips, {}, r"blocks/down.*got a gradient of stages 0, 1 together \(.*, as nothing skips a stage.*torch.cat"),
        (mixes, {}, r"embed.*got a gradient of stages 0, 1 together"),
        (detached, {}, r"got a value without a gradient, wanted one that the loss depends on"),
        (marked, {"layers": 4, "stages": (3, 1)}, r"blocks/b'.*layer 2 rests on rank 1 of pp, wanted it on rank 0"),
        (marked, {"mesh": Mesh(pp=3), "split": None, "table": schedules.gpipe(2, 2)}, r"a table of 2 ranks, on pp3"),
    ],
)
def test_a_loss_that_cannot_be_cut(loss_fn, how, wanted):
    with pytest.raises(ValueError, match=re.compile(wanted, re.DOTALL)):
        traced(loss_fn, **how)


def test_outside_of_a_jit():
    params = tree.place(hand.params_of(2), hand.layouts_of(hand.params_of(2), MESH, None))
    with pytest.raises(ValueError, match=r"got a call outside of a jit, wanted a jitted step of placed ones"):
        pipelined(marked, Pipeline(schedules.gpipe(2, 2), (1, 1)))(params, hand.batch_of(4))


def test_a_weight_that_is_not_known_before():
    def loss_fn(params, batch):
        return marked(params, batch), {"tokens": batch["mask"].sum()}

    with pytest.raises(ValueError, match=r"got a scalar loss with 'tokens' beside it.*step.mean\(total, count\)"):
        traced(loss_fn)


def test_pipelines_that_are_none():
    table = schedules.gpipe(2, 2)
    for stages in ((1,), (1, 1, 1), (2, 0)):
        with pytest.raises(ValueError, match=r"wanted 2 stages, one block or more in each"):
            Pipeline(table, stages)
    with pytest.raises(ValueError, match=r"got G0.0 and G0.0 with no use between, wanted one; drop one"):
        Pipeline(Table((2 * (Action("G", 0, 0),) + table.rows[0], table.rows[1]), table.place, 2), (1, 1))


def test_where_there_is_no_pp_it_is_accumulate():
    """No node is left of the marks."""
    one = traced(marked, mesh=Mesh(dp=1), table=schedules.gpipe(2, 2))
    params, batch = hand.params_of(2), hand.batch_of(4)
    other = trace(step.accumulate(without_marks, 2, dtype=F64), (params, batch))
    assert len(one.graph_module.graph.nodes) == len(other.graph_module.graph.nodes)


@pytest.mark.parametrize(
    ("x", "n"), [(1.0, 0), (torch.zeros(2, dtype=torch.int64), 0), (torch.zeros(2), -1), (torch.zeros(2), True)]
)
def test_wrong_marks(x, n):
    with pytest.raises(ValueError, match=r"stage: (x|n): got .*, wanted "):
        stage(x, n)

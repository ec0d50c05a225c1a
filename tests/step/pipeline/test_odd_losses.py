"""Losses and trees of unusual forms by stages: against microbatches on one rank."""

import pytest
import torch

from fmegatron import step, tree
from fmegatron.layout import Layout, Mesh
from fmegatron.step import Pipeline, pipelined, stage
from fmegatron.step.layer import unstack
from fmegatron.step.pipeline import schedules
from fmegatron.step.pipeline.pipeline import evaluated
from fmegatron.testing import simulate


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def assert_same(loss_fn, params, batch, split=True):
    """Two stages of two blocks each, of stacks that pp splits, give what microbatches on one rank do."""
    table, found = schedules.zb_h1(2, 3), []
    for mesh, grad_fn in (
        (Mesh(pp=2), pipelined(loss_fn, Pipeline(table, (2, 2)))),
        (Mesh(), step.accumulate(loss_fn, 3)),
    ):
        axes = ("pp",) if split and mesh["pp"] > 1 else ()
        layouts = tree.map(lambda x, mesh=mesh, axes=axes: Layout(tuple(x.shape), x.dtype, mesh, axes), params)
        sim = simulate(grad_fn, mesh, params, batch, layouts=(layouts, None), out_layouts=(None, layouts))
        found.append(tree.leaves(sim.globals()))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def trunk(x, *stacks):
    for n, ws in enumerate(zip(*map(unstack, stacks), strict=True)):
        x = stage(x, n)
        x = x + torch.tanh(x @ ws[0]) + sum(ws[1:])
    return x


def test_a_gradient_that_reads_no_value_of_a_stage_is_of_the_rank_that_holds_the_layer():
    """Of a loss that is linear in what the last block makes: nothing of any stage is in the gradient of its bias."""

    def loss_fn(params, batch):
        return step.mean((trunk(batch["x"], params["w"], params["b"]) * batch["y"]).sum(), float(batch["x"].numel()))

    batch = {"x": random(6, 4), "y": random(6, 4)}
    assert_same(loss_fn, {"w": random(4, 4, 4), "b": random(4, 4)}, batch)


@pytest.mark.long
@pytest.mark.parametrize("form", ["batch", "params"])
def test_a_batch_and_parameters_of_one_tensor(form):
    def loss_fn(params, batch):
        x = trunk(batch if form == "batch" else batch["x"], params if form == "params" else params["w"])
        return step.mean(x.square().sum(), float(x.numel()))

    w, x = random(4, 4, 4), random(6, 4)
    assert_same(loss_fn, w if form == "params" else {"w": w}, x if form == "batch" else {"x": x})


@pytest.mark.medium
def test_parameters_that_several_stages_read_through_functions_and_a_stack_that_is_read_whole_too():
    def loss_fn(params, batch):
        shared = torch.tanh(params["s"]) * torch.cos(params["s"] @ params["m"])
        x = batch["x"]
        for n, w in enumerate(unstack(params["w"])):
            x = stage(x, n)
            x = x + torch.tanh(x @ w) * shared + torch.nn.functional.silu(params["m"]).sum(0)
        return step.mean(x.square().sum() + 0.1 * params["w"].square().sum(), float(x.numel()))

    params = {"w": random(4, 4, 4), "s": random(4), "m": random(4, 4)}
    assert_same(loss_fn, params, {"x": random(6, 4)})
    assert_same(loss_fn, params, {"x": random(6, 4)}, split=False)


def test_the_loss_alone_by_forwards():
    """A part whose rows count differently, a metric made of values of a stage, and no gradient anywhere."""

    def loss_fn(params, batch):
        x = trunk(batch["x"], params["w"], params["b"])
        counted = (batch["x"] > 0).double()
        return {"own": step.mean((x.square() * counted).sum(), counted.sum())}, {"largest": x.detach().max()}

    params, batch = {"w": random(4, 4, 4), "b": random(4, 4)}, {"x": random(6, 4)}
    mesh, table = Mesh(pp=2), schedules.zb_h1(2, 3)
    layouts = tree.map(lambda x: Layout(tuple(x.shape), x.dtype, mesh, ("pp",)), params)
    sim = simulate(evaluated(loss_fn, Pipeline(table, (2, 2))), mesh, params, batch, layouts=(layouts, None))
    loss, metrics, whole = sim.globals()
    part, others = loss_fn(params, batch)[0]["own"], [loss_fn(params, {"x": x})[1] for x in batch["x"].chunk(3)]
    assert whole
    torch.testing.assert_close(loss, part.total / part.count, rtol=1e-13, atol=0)
    torch.testing.assert_close(metrics["own/count"], part.count.double(), rtol=0, atol=0)
    largest = torch.stack([one["largest"] for one in others]).mean()
    torch.testing.assert_close(metrics["largest"], largest, rtol=1e-13, atol=0)


def test_a_list_of_stacks():
    def loss_fn(params, batch):
        x = trunk(batch["x"], params[0]["w"], params[1]["w"])
        return step.mean(x.square().sum(), float(x.numel()))

    assert_same(loss_fn, [{"w": random(4, 4, 4)}, {"w": random(4, 4)}], {"x": random(6, 4)})


def test_leaves_named_as_layers_and_as_roots_of_others():
    def loss_fn(params, batch):
        x = trunk(batch["x"], params["w"], params["0"]["w"]) + sum(params[f"w[{i}]"] for i in range(4))
        return step.mean(x.square().sum(), float(x.numel()))

    params = {"w": random(4, 4, 4), "0": {"w": random(4, 4)}} | {f"w[{i}]": random(4) * (i + 1) for i in range(4)}
    assert_same(loss_fn, params, {"x": random(6, 4)}, split=False)


@pytest.mark.parametrize(("numbers", "where"), [([[0, 0], [1], [2], [3]], 1), ([[0], [2], [1], [3]], 1)])
def test_marks_twice_or_in_another_order_are_refused(numbers, where):
    """Also where the first one has no gradient, and where the blocks are of one stage."""

    def loss_fn(params, batch):
        x = batch["x"]
        for w, marks in zip(unstack(params["w"]), numbers, strict=True):
            for n in marks:
                x = stage(x, n)
            x = torch.tanh(x @ w)
        return step.mean(x.square().sum(), float(x.numel()))

    with pytest.raises(ValueError, match=f"where block {where} begins, wanted each once, in the order of the blocks"):
        assert_same(loss_fn, {"w": random(4, 4, 4)}, {"x": random(6, 4)}, split=False)

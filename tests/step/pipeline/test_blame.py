"""A wrong step with a pipeline: parity names the leaf that differs and the line where meaning is lost."""

import pytest
import torch

from fmegatron import optim, step, testing, tree
from fmegatron.collectives import Axes
from fmegatron.layout import DataParallel, Mesh

OPTIMIZER = optim.sgd(1e-1)


def describe(wrong: str, layers: int, mesh: Mesh) -> step.Description:
    init, parts = tree.Normal(0.5), step.Pipelining("zb_h1").of(2)
    specs = tree.specs(
        {"first": (3, 4), "blocks": {"up": (layers, 4, 4)}}, mesh, init=init, dtype=torch.float64, stacked="blocks"
    )

    def loss_fn(params, batch):
        x = batch["x"] @ params["first"]
        for n, w in enumerate(params["blocks"]["up"].unbind()):
            x = step.stage(x, n)
            if wrong == "block" and n == layers - 1:
                x = x - x.mean(0)  # block
            x = x + torch.tanh(x @ w)
        errors = (x - batch["y"]).square()
        if wrong == "loss":
            errors = errors / errors.max()  # loss
        return step.mean(errors.sum(), float(x.numel()))

    def train_step(state, batch):
        (loss, _), grads = step.pipelined(loss_fn, parts, dtype=torch.float64)(state.params, batch)
        if wrong != "grads":
            grads = step.reduce_gradients(grads)
        if wrong == "update":
            grads = tree.map(lambda g: g / g.abs().max(), grads)  # update
        params, opt = OPTIMIZER.update(grads, state.opt, state.params)  # grads
        return step.State(state.step + 1, params, opt), {"loss": loss}

    by = DataParallel(Axes(mesh).data)
    rows = {name: by.batch_layout((8, n), torch.float64, mesh, 2) for name, n in (("x", 3), ("y", 4))}
    return step.Description(train_step, step.state_specs(specs, OPTIMIZER), rows, 2, pipeline=parts)


def line_of(word: str) -> str:
    with open(__file__) as file:
        return next(f"test_blame.py:{n}" for n, line in enumerate(file, 1) if line.endswith(f"  # {word}\n"))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "wrong, mesh, leaf",
    [
        ("update", Mesh(pp=2), "0/params/blocks/up"),
        pytest.param("block", Mesh(pp=2, dp=2), "0/params/blocks/up", marks=SLOW),
        pytest.param("loss", Mesh(pp=2, dp=2), "0/params/blocks/up", marks=SLOW),
        pytest.param("grads", Mesh(pp=2, dp=2), "0/params/blocks/up", marks=SLOW),
        pytest.param("update", Mesh(pp=2, dp=2), "0/params/blocks/up", marks=SLOW),
    ],
)
def test_the_leaf_and_the_line(wrong, mesh, leaf):
    layers = mesh.size
    found = testing.parity(lambda m: describe(wrong, layers, m), mesh)
    assert found.differences[0][0] == leaf
    assert line_of(wrong) in str(found.findings[0]), str(found)


@pytest.mark.slow
def test_a_right_one():
    testing.assert_parity(lambda m: describe("", 4, m), Mesh(pp=2, dp=2), steps=2)

"""A loss that is not finite makes the gradient norm NaN, however finite its gradients are, so nothing is updated."""

import math

import pytest
import torch

from fmegatron import optim, step, tree
from fmegatron.collectives import Axes, psum
from fmegatron.layout import DataParallel, Mesh
from fmegatron.testing import simulate

F64 = torch.float64


def constant_of_the_data(params, batch):
    """log of what has become negative: it depends on no parameter."""
    return (batch["x"] @ params["w"]).mean() + torch.log(batch["bad"].sum() * 0 - batch["bad"].amax())


def cancelled(params, batch):
    """inf - inf beside the loss."""
    big = torch.where(batch["bad"].amax() > 0, torch.inf, 0.0)
    return (batch["x"] @ params["w"]).mean() + (big - big.clone())


def infinite(params, batch):
    return (batch["x"] @ params["w"]).mean() + torch.where(batch["bad"].amax() > 0, torch.inf, 0.0)


def of_parts(f):
    return lambda params, batch: step.mean(f(params, batch) * len(batch["x"]), len(batch["x"]))


def of_scalar(f, dp):
    return lambda params, batch: (f(params, batch) / dp.size, {"own": psum(batch["x"].sum(), dp)})


@pytest.mark.long
@pytest.mark.parametrize("bad", [0, 3, 7], ids=lambda bad: f"row {bad}" if bad else "none")
@pytest.mark.parametrize(
    "kind, mesh, n", [("scalar", Mesh(), 1), ("scalar", Mesh(dp=2), 2), ("parts", Mesh(dp=2), 2), ("parts", Mesh(), 1)]
)
@pytest.mark.parametrize("loss", [constant_of_the_data, cancelled, infinite])
def test_nothing_is_updated(loss, kind, mesh, n, bad):
    """On one rank or two, where one microbatch of one rank has it; an AdamW that skips such updates stays as it is."""
    axes, strategy = Axes(mesh), DataParallel("dp")
    specs = tree.specs({"w": (5, 3)}, mesh, init=tree.Normal(0.3), dtype=F64, strategy=strategy)
    fn = of_parts(loss) if kind == "parts" else of_scalar(loss, axes[axes.data])
    optimizer = optim.skip_nonfinite(optim.adamw(0.1))
    train = step.build_train_step(fn, optimizer, specs, axes, microbatches=n)
    g = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(8, 5, generator=g, dtype=F64), "bad": torch.zeros(8, dtype=F64)}
    batch["bad"][bad] = float(bad > 0)
    if loss is constant_of_the_data:  # log(0 - 0) is -inf, of a row that is bad log(-1); of none log(1)
        batch["bad"] = torch.where(batch["bad"] > 0, 1.0, -1.0)
    rows = {k: strategy.batch_layout(tuple(x.shape), x.dtype, mesh, n) for k, x in batch.items()}
    full = step.state_specs(specs, optimizer)
    before = tree.init(
        step.state_specs(tree.specs({"w": (5, 3)}, Mesh(), init=tree.Normal(0.3), dtype=F64), optimizer), 0, 0
    )
    after, metrics = simulate(train, mesh, before, batch, layouts=(tree.layouts(full), rows)).globals()
    assert math.isnan(metrics["grad_norm"]) == (bad > 0)
    assert torch.equal(after.params["w"], before.params["w"]) == (bad > 0) == bool(after.opt["skipped"])

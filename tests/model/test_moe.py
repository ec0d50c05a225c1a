"""Experts in a decoder, over an axis of their own and folded over fsdp: loss and each gradient of one rank, proven."""

import pytest
import torch

from fmegatron import model, nn, optim, step, tree
from fmegatron.collectives import Axes
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.model.array_specs import init
from fmegatron.model.counts import flops_per_token, parameters
from fmegatron.step import value_and_grad
from fmegatron.step.reduce import raw_gradient_layout
from fmegatron.testing import assert_parity, simulate
from tests.model.test_reference import leaves_that_differ, make_batch, tiny
from tests.pairs import few

DATA = ("dp", "fsdp", "ep")
SIGMOID = nn.Router(4, 2, "sigmoid", normalised=True, scale=2.5, groups=2, top_groups=1, group_best=2)
SETTINGS = {
    "ep": (Mesh(ep=2), {}),
    "fsdp, ep": (Mesh(fsdp=2, ep=2), {"router": SIGMOID, "choice_bias": True}),
    "ep, tp": (Mesh(ep=2, tp=2), {"shared": model.MLP(16)}),
    "ep, tp, sequence parallel": (Mesh(ep=2, tp=2), {"biases": True, "limit": 1.0}),
    "over fsdp": (Mesh(dp=2, fsdp=2), {"ep": ("fsdp",)}),
    "tp, sequence parallel": (Mesh(fsdp=2, tp=2), {"choice_bias": True}),
}


def experts(name):
    """A Llama of one layer whose MLP are experts with losses of their router."""
    fields = {"router": nn.Router(4, 2, normalised=True), "balance": 0.1, "z_loss": 0.01, **SETTINGS[name][1]}
    return tiny(layers=1, mlp=model.MoE(ffn_dim=24, **fields), sequence_parallel="sequence" in name)


@pytest.mark.slow
@pytest.mark.parametrize("name", few(1, [(name,) for name in SETTINGS], SETTINGS))
def test_loss_and_each_gradient(name):
    of, mesh = experts(name), SETTINGS[name][0]

    def make_step(mesh):
        axes = Axes(mesh, data=DATA)
        f = value_and_grad(lambda params, batch: model.loss(params, batch, of, axes, "inputs"), axes=axes)

        def gradients(params, batch):
            (loss, metrics), grads = f(params, batch)
            return grads, loss, metrics

        return gradients

    params, batch = leaves_that_differ(init(of, Mesh(), key=3)), make_batch(of, batch_size=4)
    data, layouts = Axes(mesh, data=DATA).data, model.layouts(of, mesh)
    raw = tree.map(lambda layout: raw_gradient_layout(layout, data), layouts)
    result = assert_parity(
        make_step, mesh, params, batch,
        layouts=(layouts, {k: Layout(x.shape, x.dtype, mesh, (data,)) for k, x in batch.items()}),
        out_layouts=(raw, None, None),
    )  # fmt: skip
    assert {"loss", "balance", "router_z", "imbalance"} <= set(result.sharded.metrics)


@pytest.mark.medium
@pytest.mark.parametrize("name", few(1, [(name,) for name in SETTINGS], SETTINGS))
def test_every_output_is_proven(name):
    of, mesh = experts(name), SETTINGS[name][0]
    axes, layouts, optimizer = Axes(mesh, data=DATA), model.layouts(of, mesh), optim.adamw(1e-3)
    train = step.build_train_step(lambda p, b: model.loss(p, b, of, axes, "inputs"), optimizer, layouts, axes)
    rows = DataParallel(axes.data).batch_layout((8, 12), torch.int64, mesh)
    report = step.check(train, step.state_specs(model.specs(of, mesh), optimizer), {"tokens": rows, "labels": rows})
    assert report.ok, str(report)


def whole(found, axes):
    """The means of a loss's parts, and its metrics that are none."""
    parts, metrics = found
    rest = {name: x for name, x in metrics.items() if not isinstance(x, step.Part)}
    return {**step.means(parts, axes), **rest}


def test_too_few_rows_are_counted_and_no_loss_is_reported():
    mesh = Mesh(ep=2)
    of = tiny(layers=1, mlp=model.MoE(nn.Router(4, 2), 24, rows=13))
    layouts, axes = model.layouts(of, mesh), Axes(mesh, data=DATA)
    batch = make_batch(of, batch_size=2)
    sim = simulate(
        lambda p, b: (p, whole(model.loss(p, b, of, axes), axes)), mesh, init(of, Mesh(), 0), batch,
        layouts=(layouts, {k: Layout(x.shape, x.dtype, mesh, ("ep",)) for k, x in batch.items()}),
        out_layouts=(layouts, None),
    )  # fmt: skip
    assert int(sim.metrics["overflow"]) > 0 and torch.isnan(torch.as_tensor(sim.metrics["lm"]))


def test_counts():
    of = tiny(mlp=model.MoE(nn.Router(8, 2), 24, model.MLP(16)))
    counts = parameters(of)
    assert counts["total"] == sum(x.numel() for x in tree.leaves(init(of, Mesh(), 0)))
    assert counts["mlp"] == 2 * (32 * 8 + 8 * 3 * 32 * 24 + 3 * 32 * 16)
    used = 2 * (32 * 8 + 2 * 3 * 32 * 24 + 3 * 32 * 16 + 32 * 32 * 3)
    assert flops_per_token(of, training=False)["matmul"] == 2 * used


@pytest.mark.parametrize(
    ("fields", "mesh", "message"),
    [
        ({}, Mesh(ep=3), r"MoE.router.experts: got 4, wanted a multiple of 3 on the mesh ep3"),
        ({"ffn_dim": 25}, Mesh(tp=2), r"MoE.ffn_dim: got 25, wanted a multiple of 2"),
    ],
)
def test_experts_that_do_not_fit_their_mesh(fields, mesh, message):
    moe = model.MoE(**{"router": nn.Router(4, 2), "ffn_dim": 24, **fields})
    with pytest.raises(ValueError, match=message):
        model.specs(tiny(mlp=moe), mesh)

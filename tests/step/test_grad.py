"""Gradients as values: value_and_grad, microbatches that equal the whole batch, and the reduction a layout asks for."""

import dataclasses

import pytest
import torch

from fmegatron import model, optim, tree
from fmegatron.collectives import Axes, Precision
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.model.array_specs import init
from fmegatron.step import (
    State,
    accumulate,
    build_train_step,
    collectives_of,
    jit,
    reduce_gradients,
    state_specs,
    trace,
    value_and_grad,
)
from fmegatron.step.reduce import raw_gradient_layout
from fmegatron.testing import Ranks, assert_pure, simulate, split
from fmegatron.testing.compare_ranks import relative_error
from tests.fresh_state import fresh_state
from tests.pairs import few, mixed
from tests.step import tiny


# ---- value_and_grad --------------------------------------------------------------------------------------------------
def loss_of(p, x):
    loss = (p["w"] * x).sin().sum() + (p["layers"][0] ** 2).sum()
    return loss, {"count": torch.tensor(3), "mean": p["w"].mean(), "name": "aux"}


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_value_and_grad(backend):
    p = {"w": torch.randn(3, dtype=torch.float64), "layers": [torch.randn(2), torch.randn(())], "unused": torch.ones(4)}
    x = torch.randn(3, dtype=torch.float64)
    f = value_and_grad(loss_of)
    (loss, aux), grads = assert_pure(jit(f, backend=backend) if backend else f, p, x)
    torch.testing.assert_close(loss, loss_of(p, x)[0])
    assert tree.paths(grads) == tree.paths(p)
    torch.testing.assert_close(grads["w"], x * (p["w"] * x).cos())
    torch.testing.assert_close(grads["layers"][0], 2 * p["layers"][0])
    for path, g, w in zip(tree.paths(p), tree.leaves(grads), tree.leaves(p), strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype and not g.requires_grad, path
    assert not grads["unused"].any() and not grads["layers"][1].any()
    assert aux["name"] == "aux" and aux["count"] == 3 and not aux["mean"].requires_grad and not loss.requires_grad


def test_a_loss_without_aux():
    (loss, aux), grads = value_and_grad(lambda p: p.square().sum())(torch.ones(3))
    assert loss == 3 and aux == {} and grads.tolist() == [2, 2, 2]


def test_a_gradient_of_a_gradient():
    """The gradient is part of a pure function, so it can be taken inside of a loss that penalises something."""

    def step(p):
        (_, _), inner = value_and_grad(lambda p: (p**3).sum())(p)
        (loss, _), grads = value_and_grad(lambda p: (p * inner).sum())(p)
        return loss, grads

    loss, grads = jit(step, backend="aot_eager")(torch.full((2,), 2.0))
    assert loss == 2 * 2 * 12 and grads.tolist() == [12, 12]


# ---- microbatches ----------------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize(
    ("n", "backend"),
    [(1, None), (2, None), (4, None), *few(1, [(2, "aot_eager"), (4, "aot_eager"), (1, "aot_eager")])],
)
def test_accumulate_equals_the_whole_batch(n, backend):
    axes = Axes(tiny.ONE)

    def loss(params, batch):
        return model.loss(params, batch, tiny.CONFIG, axes)

    args = tiny.decoder_state().params, tiny.decoder_batch(rows=4)
    (wanted_loss, wanted_aux), wanted = value_and_grad(loss)(*args)
    f = accumulate(loss, n)
    (got_loss, aux), grads = assert_pure(jit(f, backend=backend) if backend else f, *args)
    assert relative_error(got_loss, wanted_loss) <= 1e-12 and relative_error(aux["loss"], wanted_aux["loss"]) <= 1e-12
    assert aux["lm/count"] == wanted_aux["lm/count"] == args[1]["tokens"].numel()
    for path, a, b in zip(tree.paths(grads), tree.leaves(grads), tree.leaves(wanted), strict=True):
        assert relative_error(a, b) <= 1e-12, path


SHARDED = mixed([Mesh(fsdp=2), Mesh(dp=2, fsdp=2)], [None, "inputs"])


@pytest.mark.medium
@pytest.mark.parametrize(("mesh", "save"), few(1, SHARDED, map(str, SHARDED)))
def test_accumulate_under_fsdp(mesh, save):
    """Four microbatches of each rank's rows, three steps: the state of one rank with the whole batch."""
    config = dataclasses.replace(tiny.CONFIG, z_loss=1e-3)
    layouts = tiny.decoder_layouts(config, mesh), None
    step = tiny.decoder_step(config, save, mesh, microbatches=4)
    batches = [tiny.decoder_batch(rows=16, seed=i) for i in range(3)]

    def parts(batch):
        return split(batch, tree.map(lambda x: DataParallel().batch_layout(x.shape, x.dtype, mesh, 4), batch))

    args = tiny.decoder_state(config), parts(batches[0])
    sim = simulate(step, mesh, *args, layouts=layouts, out_layouts=layouts)
    for batch in batches[1:]:
        sim = sim.again(Ranks(out[0] for out in sim.outputs), parts(batch))
    losses, wanted = tiny.run_steps(tiny.decoder_step(config), tiny.decoder_state(config), batches)
    assert (
        sim.metrics["loss"] == pytest.approx(losses[-1], rel=1e-10) and sim.metrics["lm/count"] == 16 * config.max_seq
    )
    got = sim.globals()[0]
    for path, a, b in zip(tree.paths(got), tree.leaves(got), tree.leaves(wanted), strict=True):
        assert relative_error(a, b) <= 1e-10, path


def test_one_microbatch_is_one_node():
    """The graph of the step hardly grows with the number of microbatches."""
    sizes = {}
    for n in (2, 4, 8):
        step = accumulate(tiny.mlp_loss(), n)
        sizes[n] = len(trace(step, (tiny.mlp_params(), tiny.mlp_batch(rows=8))).graph_module.graph.nodes)
    assert (sizes[8] - sizes[4]) == 2 * (sizes[4] - sizes[2]) <= 2 * 2 * 15


def test_low_precision_gradients_are_summed_in_fp32():
    f = accumulate(lambda p, b: (p * b["x"]).sum(), 256)
    x = torch.full((256, 1), 1 / 256).bfloat16()
    x[0] = 1.0
    (_, _), grads = f(torch.ones(1, dtype=torch.bfloat16), {"x": x})
    assert grads.dtype == torch.float32 and float(grads * 256) == pytest.approx(1 + 255 / 256, rel=1e-6)


B16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("param", "precision", "sent", "summed"),
    [
        (B16, None, B16, F32),  # as the backward makes them
        (F32, Precision(reduce=B16), B16, F32),
        (F32, Precision(reduce=F32, accumulate=F64), F32, F64),
        (F32, Precision(reduce=B16, accumulate=F64), B16, F64),
    ],
)
def test_microbatches_are_reduced_narrow_and_added_up_wide(param, precision, sent, summed):
    """ZeRO-2: what each reduce-scatter sends has the dtype of the wire, and its result is then widened and added."""
    mesh, strategy, optimizer = Mesh(dp=2), DataParallel.zero2("dp"), optim.sgd(0.1)
    layouts = {"w": Layout((8, 4), param, mesh)}
    specs, axes = tree.map(lambda layout: tree.ArraySpec(layout, tree.Normal(1.0)), layouts), Axes(mesh)

    def loss(params, batch):
        return (batch["x"] @ params["w"]).square().sum()

    step = build_train_step(loss, optimizer, layouts, axes, strategy=strategy, precision=precision, microbatches=2)
    batch = {"x": torch.ones(2, 8, dtype=summed if precision else param)}
    graph = trace(step, (tree.init(state_specs(specs, optimizer, strategy), 0, 0), batch)).graph_module.graph
    scatters = [c for c in collectives_of(graph, mesh) if c.op.startswith("reduce_scatter")]
    assert [c.dtype for c in scatters] == [sent, sent]
    sums = [n.meta["val"] for n in graph.nodes if n.target is torch.ops.aten.add.Tensor]
    assert [x.dtype for x in sums if x.shape == (4, 4)][:1] == [summed]


def test_fp64_sums_of_microbatches_lose_nothing_of_fp32_gradients():
    """1 + 2^-30 is 1 in fp32: in the sum itself, and in the norm that a policy's step reports."""
    x = torch.tensor([[1.0], [2.0**-30]])
    (_, _), grads = accumulate(lambda p, b: (p * b["x"]).sum(), 2, dtype=F64)(torch.ones(1), {"x": x})
    assert grads.dtype == F64 and grads.item() == x.double().mean().item()

    layouts, optimizer = {"w": Layout((1,), F32, tiny.ONE)}, optim.sgd(0.1)
    step = build_train_step(
        lambda p, b: (p["w"] * b["x"]).sum(), optimizer, layouts, Axes(tiny.ONE), microbatches=2, clip_norm=None,
        precision=Precision(accumulate=F64),
    )  # fmt: skip
    state, metrics = step(fresh_state({"w": torch.ones(1)}, optimizer), {"x": x})
    assert metrics["grad_norm"].item() == pytest.approx(x.double().mean().item(), rel=1e-12)
    assert state.params["w"].dtype == F32


@pytest.mark.parametrize(
    ("batch", "n", "message"),
    [
        ({"x": torch.ones(6, 2)}, 4, r"leaf 'x': got local shape \(6, 2\), wanted a dim 0 that 4 microbatches divide"),
        ({"x": torch.ones(4), "y": torch.ones(())}, 2, r"leaf 'y': got local shape \(\), wanted a dim 0"),
        ({"x": torch.ones(4)}, 0, "n: got 0, wanted a whole number of microbatches"),
    ],
)
def test_accumulate_errors(batch, n, message):
    with pytest.raises(ValueError, match=message):
        accumulate(lambda p, b: (p * b["x"]).sum(), n)(torch.ones(()), batch)


# ---- reduction -------------------------------------------------------------------------------------------------------
def test_reduce_gradients():
    """Each leaf is summed over the data axes that do not shard it, and over no other."""
    mesh = Mesh(dp=2, fsdp=2, tp=2)
    specs = {"both": (("dp", "fsdp"), "tp"), "fsdp": ("fsdp", None), "tp": (None, "tp"), "none": ()}
    layouts = {name: Layout((4, 4), torch.float64, mesh, spec) for name, spec in specs.items()}
    pending = {name: raw_gradient_layout(layout, ("dp", "fsdp")).unreduced for name, layout in layouts.items()}
    assert pending == {"both": (), "fsdp": ("dp",), "tp": ("dp", "fsdp"), "none": ("dp", "fsdp")}
    grads = {name: torch.randn(4, 4, dtype=torch.float64) for name in specs}
    raw = tree.map(lambda layout: raw_gradient_layout(layout, ("dp", "fsdp")), layouts)
    sim = simulate(reduce_gradients, mesh, grads, layouts=(raw,), out_layouts=layouts)
    for name, got in sim.globals().items():
        torch.testing.assert_close(got, grads[name], rtol=1e-14, atol=1e-15, msg=name)


# ---- the state -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("optimizer", [optim.adamw(1e-3), optim.sgd(0.1), optim.sgd(0.1, momentum=0.9)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_specs_of_the_state_are_its_twin(optimizer, dtype):
    """Same structure, dtypes and local shapes as the state itself, on every rank."""
    config, mesh = tiny.config_with(dtype), Mesh(fsdp=2, tp=2)
    specs = state_specs(model.specs(config, mesh), optimizer)
    assert isinstance(specs, State) and specs.step.shape == () and specs.step.dtype == torch.int64
    for rank in range(mesh.size):
        state = fresh_state(init(config, mesh, key=0, rank=rank), optimizer)
        assert tree.paths(state) == tree.paths(specs) and state.step == 0
        tree.check(state, tree.layouts(specs), rank)


def test_train_step_counts_and_reports():
    """The step number goes up by one; metrics are the loss's own and the gradient's norm before it was clipped."""
    state, batch = tiny.decoder_state(), tiny.decoder_batch()
    free, free_metrics = tiny.decoder_step(clip_norm=None)(state, batch)
    clipped, metrics = assert_pure(tiny.decoder_step(clip_norm=1e-3), state, batch)
    assert state.step == 0 and free.step == clipped.step == 1
    assert metrics["grad_norm"] == free_metrics["grad_norm"] > 1e-3
    assert set(metrics) == {"loss", "lm", "lm/count", "grad_norm"} and all(m.dim() == 0 for m in metrics.values())
    scale = 1e-3 / (metrics["grad_norm"] + 1e-6)  # the first moment is linear in the gradient
    for a, b in zip(tree.leaves(clipped.opt["adam"]["m"]), tree.leaves(free.opt["adam"]["m"]), strict=True):
        torch.testing.assert_close(a, b * scale, rtol=1e-10, atol=0)

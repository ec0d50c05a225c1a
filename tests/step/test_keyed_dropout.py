"""Dropout in train steps: the same masks on every mesh, in microbatches, in recomputation and when resumed."""

import pytest
import torch

from fmegatron import nn, optim, tree
from fmegatron.collectives import Axes, enter, psum
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.step import build_train_step, check, jit, state_specs
from fmegatron.step.layer import compiled_layer
from fmegatron.testing import assert_parity, simulate
from fmegatron.testing.compare_ranks import relative_error
from tests.pairs import each_value, few

F64, ROWS, WIDE, HIDDEN, DEPTH = torch.float64, 24, 6, 8, 2
OPTIMIZER = optim.sgd(0.1, momentum=0.9)
DATA = ("dp", "fsdp")
MESHES = (Mesh(dp=2), Mesh(tp=2), Mesh(fsdp=2, tp=2), Mesh(dp=3, tp=4))


def plain(fn):
    return fn


def make_step(mesh, n=1, layer=plain, rate=0.3):
    """Layers of column- and row-parallel products, with dropout of what is split over tp and of what is not."""
    axes = Axes(mesh)
    data, tp = (tuple(name for name in names if name in mesh) for names in (DATA, ("tp",)))

    def mlp(x_BD, w, count):
        rows = len(x_BD) * axes[data].size
        hidden, out = Layout((rows, HIDDEN), F64, mesh, (data, tp)), Layout((rows, WIDE), F64, mesh, (data,))
        h = torch.tanh(enter(x_BD, axes[tp]) @ w["a"])
        h = nn.dropout(h, rate, key=tree.fold_in(5, "hidden"), count=count, layout=hidden)
        y = psum(h @ w["b"], axes[tp])
        y = nn.dropout(y, rate / 2, key=tree.fold_in(5, "out"), count=count, layout=out)
        return x_BD + y

    one_layer = layer(mlp)

    def loss_fn(params, batch, samples):
        x = batch["x"]
        for depth in range(DEPTH):
            x = one_layer(x, {name: w[depth] for name, w in params.items()}, samples * DEPTH + depth)
        loss = (x - batch["y"]).square().sum() / (len(x) * axes[data].size)
        return loss, {"loss": psum(loss.detach(), axes[data])}

    layouts = tree.layouts(specs_of(mesh).params)
    return build_train_step(loss_fn, OPTIMIZER, layouts, axes, microbatches=n, with_sample_ids=True)


def specs_of(mesh):
    tp = "tp" if "tp" in mesh else None
    a, b = ((DEPTH, WIDE, HIDDEN), (None, None, tp)), ((DEPTH, HIDDEN, WIDE), (None, tp))
    specs = {
        name: tree.ArraySpec(Layout(shape, F64, mesh, spec), tree.Normal(0.5))
        for name, (shape, spec) in {"a": a, "b": b}.items()
    }
    return state_specs(specs, OPTIMIZER)


def layouts_of(mesh, n):
    rows = DataParallel().batch_layout((ROWS, WIDE), F64, mesh, n)
    return tree.layouts(specs_of(mesh)), {"x": rows, "y": rows}


def batch_at(step=0):
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(ROWS, WIDE, generator=generator, dtype=F64) for name in ("x", "y")}


def first_state():
    return tree.init(specs_of(Mesh()), 0, 0)


def after(step, steps=2):
    """(parameters, losses) after some steps on one device; gradients show in the momentum-driven parameters."""
    state, losses = first_state(), []
    for i in range(steps):
        state, metrics = step(state, batch_at(i))
        losses.append(metrics["loss"].item())
    return state, losses


@pytest.mark.medium
@pytest.mark.parametrize(("mesh", "n"), few(1, zip(MESHES, (2, 1, 3, 2), strict=True), map(str, MESHES)))
def test_the_same_numbers_on_every_mesh(mesh, n):
    """Forward, gradients and update."""
    assert_parity(
        lambda m: make_step(m, n), mesh, first_state(), batch_at, layouts=layouts_of(mesh, n), steps=2, tolerance=1e-12
    )


@pytest.mark.long
@pytest.mark.parametrize(("save", "n"), few(2, [("all", 1), ("mincut", 2), ("inputs", 1), ("inputs", 3)]))
def test_microbatches_and_recomputation_draw_the_same(save, n):
    """Of a mask that were drawn anew in the backward, the gradients would differ in the first digits."""
    wanted, losses = after(make_step(Mesh()))
    got, found = after(jit(make_step(Mesh(), n, compiled_layer(save)), backend="eager"))
    assert max(abs(a - b) for a, b in zip(losses, found, strict=True)) < 1e-12
    for path, a, b in zip(tree.paths(wanted), tree.leaves(got), tree.leaves(wanted), strict=True):
        assert relative_error(a, b) < 1e-12, path


def test_the_gradient_is_that_of_the_masked_function():
    """Against differences of the loss, whose masks are those of the same step and samples."""
    step, state, batch = make_step(Mesh()), first_state(), batch_at()

    def loss(params):
        return step(state._replace(params=params), batch)[1]["loss"]

    generator = torch.Generator().manual_seed(1)
    direction = tree.map(lambda x: torch.randn(x.shape, generator=generator, dtype=F64), state.params)
    there, back = (loss(tree.map(lambda p, d, s=s: p + s * 1e-6 * d, state.params, direction)) for s in (1, -1))
    moved, metrics = step(state, batch)  # the first update is 0.1 times the clipped gradient
    grads = tree.map(lambda p, q: (p - q) / 0.1 * metrics["grad_norm"].clamp(min=1), state.params, moved.params)
    along = sum((g * d).sum() for g, d in zip(tree.leaves(grads), tree.leaves(direction), strict=True))
    assert relative_error((there - back) / 2e-6, along) < 1e-7


def test_steps_differ_and_a_resumed_run_repeats():
    step, state, batch = jit(make_step(Mesh()), backend="eager"), first_state(), batch_at()
    later = state._replace(step=state.step + 1)
    losses = [step(s, batch)[1]["loss"].item() for s in (state, later, state, later)]
    assert losses[0] != losses[1] and losses[:2] == losses[2:]
    plain_loss = make_step(Mesh(), rate=0.0)(state, batch)[1]["loss"].item()
    assert len({plain_loss, *losses}) == 3


@pytest.mark.parametrize(("mesh", "n"), each_value([Mesh(), Mesh(dp=2, tp=2), Mesh(dp=2, fsdp=2)], [1, 2, 3]))
def test_samples_are_numbered_through_the_run(mesh, n):
    axes, layouts = Axes(mesh), layouts_of(mesh, n)
    numbers = DataParallel().batch_layout((ROWS,), torch.int64, mesh, n)

    def loss_fn(params, batch, samples):
        assert samples.shape == batch["x"].shape[:1] and samples.dtype == torch.int64
        return (params["a"].sum() + params["b"].sum()) * batch["x"].sum(), {"samples": samples}

    step = build_train_step(
        loss_fn, OPTIMIZER, tree.layouts(specs_of(mesh).params), axes, microbatches=n, with_sample_ids=True
    )
    state = first_state()._replace(step=torch.tensor(7))
    out = layouts[0], {"samples": numbers, "grad_norm": Layout((), F64, mesh)}
    sim = simulate(step, mesh, state, batch_at(), layouts=layouts, out_layouts=out)
    assert sim.globals()[1]["samples"].tolist() == list(range(7 * ROWS, 8 * ROWS))


@pytest.mark.medium
@pytest.mark.parametrize(("mesh", "n"), [(Mesh(dp=2), 2), (Mesh(fsdp=2, tp=2), 1)], ids=str)
def test_the_check_has_nothing_to_say(mesh, n):
    report = check(make_step(mesh, n), specs_of(mesh), layouts_of(mesh, n)[1])
    assert report.ok and not report.unproven, str(report)


BAD = {
    "rows": ({"x": torch.zeros(4, WIDE), "y": torch.zeros(3, WIDE)}, r"got rows \(dim 0\) \{'x': 4, 'y': 3\}"),
    "no rows": ({"x": torch.zeros(())}, "of no leaf"),
}


@pytest.mark.parametrize("name", BAD)
def test_batches_that_cannot_be_numbered(name):
    batch, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make_step(Mesh())(first_state(), batch)

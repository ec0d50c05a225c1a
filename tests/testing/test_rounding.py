"""What rounding can do is no difference, at the magnitudes of the step; what is more is one, however small."""

from typing import Any

import pytest
import torch

from fmegatron import optim, step, testing, tree
from fmegatron.layout import DataParallel, Mesh
from fmegatron.testing.rounding import movements

F64 = torch.float64
WIDTH = 16


def attention(p, x):
    """Softmax over keys does not change with a bias of the keys: its gradient is what rounding leaves."""
    scores = (x @ p["q"]) @ (x @ p["k"] + p["bias"]).transpose(1, 2)
    return scores.softmax(-1) @ x


def centred(p, x):
    """And so of a bias whose mean is taken away again, by a mean over it."""
    y = x @ p["q"] + p["k"].sum() + p["bias"].sum()
    return y - y.mean((1, 2), keepdim=True)


def run(model, off=0.0, steps=6):
    """Parity of AdamW on dp 2. off: by what the loss of a mesh of two is wrong."""
    strategy, opt = DataParallel(), optim.adamw(1e-2)
    shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "bias": (WIDTH,)}

    def build(mesh):
        specs = tree.specs(shapes, mesh, init=[(r"bias", 0.0), (r".*", tree.Normal(0.3))], strategy=strategy)
        factor = 1.0 + off * (mesh.size > 1)

        def loss(params, batch):
            y = model(params, batch["x"])
            error = (y - batch["y"]).square().sum()
            return step.mean(error * factor, torch.ones_like(y[..., 0]).sum()), {}

        train = step.build_train_step(loss, opt, specs, strategy=strategy)
        return train, step.state_specs(specs, opt, strategy), strategy

    def rows(mesh):
        return {k: strategy.batch_layout((8, 8, WIDTH), torch.float32, mesh) for k in "xy"}

    def draw(i):
        g = torch.Generator().manual_seed(i)
        return {k: torch.randn(8, 8, WIDTH, generator=g) for k in "xy"}

    mesh = Mesh(dp=2)
    state = tree.init(build(Mesh())[1], 0, 0)
    how = {"layouts": (build(mesh)[1], rows(mesh)), "steps": steps, "fp64": True}
    return testing.parity(lambda m: build(m)[0], mesh, state, draw, **how)


@pytest.mark.parametrize("model", [attention, centred])
def test_a_gradient_that_is_zero_but_for_rounding(model):
    """Adam makes steps of it that are 1e8 times as large: other ones on each mesh."""
    found = run(model)
    assert found.ok and found.worst[1] > 1e-10, found


@pytest.mark.parametrize("off", [1e-8, 1e-3])
def test_a_small_mistake_beside_it_is_found(off):
    found = run(attention, off, 1)
    assert not found.ok and not any("bias" in path for path, error in found.differences if error < off / 10), found


def test_by_how_much_rounding_can_move():
    """A sum of what cancels moves by the magnitude of its terms, one of whole numbers by nothing."""

    def f(x, n):
        return (x - x.flip(0)).sum(0), x.sum(0), n.sum(), x[:2] * 3, n.sum().to(torch.float32)

    x, n = torch.randn(100, 3, dtype=F64) * 1e3, torch.arange(100, dtype=F64)
    simulated = testing.simulate(f, Mesh(dp=1), x, n)
    found: Any = movements(simulated.flat, simulated.mesh, simulated.inputs)
    (cancelled, plain, whole, product, other), eps = found, torch.finfo(F64).eps
    assert other is None and not whole.any() and not product.any()
    for moved in (cancelled, plain):
        assert (moved > 1e4 * eps).all() and (moved < 64 * 1.1 * 2e5 * 2 * eps).all()

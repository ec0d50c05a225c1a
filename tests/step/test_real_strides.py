"""Ops whose recorded strides are not those of their kernels, met by views: as plain torch has them."""

import pytest
import torch
import torch.nn.functional as F

from fmegatron.layout import Mesh
from fmegatron.step import jit, trace, value_and_grad
from fmegatron.step.opaque import Entry
from fmegatron.step.passes import Target
from fmegatron.testing import simulate

ACTS = "elu celu selu softplus hardtanh relu6 hardswish hardsigmoid leaky_relu hardshrink softshrink silu mish".split()


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, PARAMS = randn(4, 6, 5), {"k": randn(5, 3, seed=1), "q": randn(5, 3, seed=2)}


def step_of(name):
    act = getattr(F, name)

    def loss(p, x):
        return torch.einsum("bsk,btk,btd->bsd", act(x @ p["q"]), act(x @ p["k"]), x).square().sum(), {}

    return value_and_grad(loss)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ACTS)
def test_activations(name, backend):
    step = step_of(name)
    want, got = step(PARAMS, X)[1], jit(step, backend=backend)(PARAMS, X)[1]
    assert all(torch.allclose(got[k], want[k], rtol=1e-12) for k in want)


@pytest.mark.parametrize("name", ["elu", "softplus"])
def test_on_simulated_ranks(name):
    step = step_of(name)
    got = simulate(step, Mesh(dp=2), PARAMS, X).outputs[0][1]
    assert all(torch.allclose(got[k], want, rtol=1e-12) for k, want in step(PARAMS, X)[1].items())


def test_strides_that_are_taken_as_they_were_recorded():
    """What reads memory by strides has the elements that were meant."""

    def f(x, g):
        (slope,) = torch.autograd.grad(F.elu(x.requires_grad_()), x, g.transpose(1, 2))
        return torch.as_strided(slope, (4, 18), (18, 1)), slope

    def plain(x, g):
        slope = f(x.clone(), g)[1]
        return slope.reshape(4, 18)

    x, g = randn(4, 6, 3), randn(4, 3, 6, seed=1)
    for backend in ("eager", "aot_eager"):
        got = jit(lambda x, g: f(x.clone(), g), backend=backend)(x, g)[0]
        assert torch.allclose(got, plain(x, g), rtol=1e-12)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_view_that_is_written_is_a_view(backend):
    def f(x):
        y = x * 2
        y.view(-1)[:3] = 0.0
        return y

    x = randn(4, 3)
    assert torch.equal(jit(f, backend=backend)(x), f(x))


def test_results_that_a_compiler_lays_out_in_another_way_are_those_that_were_recorded():
    """What reads them was compiled for these: another part of a pipeline refuses other strides."""
    traced = trace(lambda x: [x * 2, x[:1] + 1], (X[0],))
    entry = Entry.make("twice", traced.graph_module, traced.fakes, traced.fake_mode)
    bound = entry.bind(Target(backend="eager"))
    bound.code = lambda x: [(x * 2).t().contiguous().t(), torch.empty_strided((1, 5), (7, 1)).copy_(x[:1] + 1)]
    assert bound.code(X[0])[0].stride() == (1, 6)
    twice, row = bound.run(X[0])
    assert twice.stride() == (5, 1) and torch.equal(twice, X[0] * 2)
    assert row.stride() == (7, 1)  # of a dim of size 1 any will do

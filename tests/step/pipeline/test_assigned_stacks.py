"""Stacks whose layers are assigned to ranks in pieces (uneven stages, a V), in one graph: check and simulated ranks."""

import pytest
import torch

from fmegatron import optim, step, tree
from fmegatron.collectives import Axes, reshard
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.testing import simulate

F64, MESH = torch.float64, Mesh(pp=2, dp=2)
AXES = Axes(MESH)
UNEVEN = Layout((5, 3, 2), F64, MESH, (Split("pp", sizes=(1, 2, 1, 1), order=(0, 1, 1, 0)),), padded=True)
OTHER = UNEVEN.replace(spec=(Split("pp", sizes=(1, 1, 1, 2), order=(0, 1, 1, 0)),))
V = Layout((4, 3, 2), F64, MESH, (Split("pp", order=(0, 1, 1, 0)),))
LOOP, PLAIN = V.replace(spec=(Split("pp", 2),)), V.replace(spec=("pp",))
NONE = Layout((1, 3, 2), F64, MESH, (Split("pp", sizes=(0, 1)),), padded=True)


def step_of(w: Layout, m: Layout):
    """A step whose gradient is made of the whole stack, with a momentum laid out as m."""

    def train_step(state, scales):
        params, momentum = state
        full = reshard(params, w, w.without("pp"), AXES).detach().requires_grad_()
        (g,) = torch.autograd.grad((full * scales.view(-1, 1, 1)).square().sum(), full)
        g = reshard(reshard(g, w.without("pp"), w, AXES), w, m, AXES)
        norm = optim.global_norm({"g": tree.place(g, m)})
        momentum = 0.9 * momentum + g / norm
        return (params - reshard(0.1 * momentum / (momentum.abs() + 1e-3), m, w, AXES), momentum), {"norm": norm}

    return train_step


@pytest.mark.parametrize(
    ("w", "m"),
    [(UNEVEN, UNEVEN), (V, V), (NONE, NONE), (UNEVEN, UNEVEN.replace(flat=("dp",), flat_from=1)),
     (UNEVEN, UNEVEN.replace(flat=("dp",))), (V, V.replace(spec=(V.spec[0], "dp"), padded=True))],
)  # fmt: skip
def test_a_step_is_proven_and_that_of_one_rank(w, m):
    generator = torch.Generator().manual_seed(0)
    x, scales = torch.randn(w.shape, dtype=F64, generator=generator), torch.arange(1.0, w.shape[0] + 1, dtype=F64)
    layouts = ((w, m), Layout(tuple(scales.shape), F64, MESH))
    assert step.check(step_of(w, m), *layouts).ok
    state, metrics = simulate(step_of(w, m), MESH, (x, x), scales, layouts=layouts).globals()
    g = 2 * x * scales.square().view(-1, 1, 1)
    momentum = 0.9 * x + g / g.norm()
    assert torch.equal(metrics["norm"], g.norm()) or (metrics["norm"] / g.norm() - 1).abs() < 1e-14
    assert torch.allclose(state[1], momentum, rtol=1e-13, atol=0)
    assert torch.allclose(state[0], x - 0.1 * momentum / (momentum.abs() + 1e-3), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "layout",
    [
        UNEVEN.replace(shape=(5, 4, 6), spec=(UNEVEN.spec[0], "dp")),
        UNEVEN.replace(shape=(5, 3, 6), spec=(UNEVEN.spec[0], "dp")),
        UNEVEN.replace(shape=(5, 4, 6), spec=(UNEVEN.spec[0], None, Split("dp", parts=(4, 2)))),
    ],
)
def test_muon_of_uneven_stacks_is_that_of_one_rank(layout):
    optimizer = optim.muon(1e-2, matrices=[".*"], parts=(), dtype=F64)
    w, g = (torch.randn(layout.shape, dtype=F64, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    state, layouts = optimizer.init({"w": w}), tree.layouts(optimizer.init({"w": tree.ArraySpec(layout, 0)}))
    given = ({"w": layout}, layouts, {"w": layout})
    sim = simulate(optimizer.update, MESH, {"w": g}, state, {"w": w}, layouts=(given[2], layouts, given[0]))
    found, wanted = sim.globals()[0]["w"], optimizer.update({"w": g}, state, {"w": w})[0]["w"]
    assert (found - wanted).abs().max() < 1e-14


def through(gathered: Layout, cut: Layout):
    """A function that gathers as one layout says and cuts as another."""
    return lambda x, _: (reshard(reshard(x, gathered, gathered.without("pp"), AXES), cut.without("pp"), cut, AXES), {})


@pytest.mark.parametrize(
    ("fn", "given"),
    [
        (through(UNEVEN, OTHER), UNEVEN),
        (through(OTHER, UNEVEN), UNEVEN),
        (through(LOOP, V), V),
        (through(PLAIN, V), V),
        (through(V, PLAIN), V),
        (lambda x, _: (x + 1, {}), UNEVEN),
        (lambda state, _: ((state[0] + state[1], state[1]), {}), (UNEVEN, OTHER)),
        (lambda state, _: ((state[0], state[0] + state[1]), {}), (UNEVEN, OTHER)),
        (lambda state, _: ((state[0] * state[1], state[1]), {}), (V, LOOP)),
        (lambda state, _: ((state[0], state[0] * state[1]), {}), (V, PLAIN)),
    ],
)
def test_layers_of_other_ranks_are_never_taken_for_proven(fn, given):
    assert not step.check(fn, given, Layout((2,), F64, MESH)).ok

"""Gradients of gradients, and torch.func, through every collective: against definitions; real ranks as simulated."""

import pytest
import torch

from fmegatron.collectives import Axes, connect
from fmegatron.collectives.ops import all_gather_many, all_to_all_rows, as_terms, lend, psum_many, reduce_scatter_many
from fmegatron.collectives.places import Place
from fmegatron.collectives.wires import Wire
from fmegatron.layout import Mesh
from fmegatron.testing import Ranks, simulate
from tests.collectives.definitions import AXES, CASES, by_definition, inputs, make_second, make_transformed

ALL = [(Mesh(a=2), "a"), (Mesh(a=2, b=2), ("b", "a")), (Mesh(a=2, b=2).view(order=("b", "a"), c=4), "c")]
MOVED = [name for name in CASES if CASES[name][2] is not None]  # all but pmax, which is not linear


def values(mesh, name, axis):
    xs, gs = inputs(mesh, name, axis)
    return xs, gs, [x.flip(1) + 1 for x in xs]


@pytest.mark.long
@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("mesh, axis", ALL, ids=str)
def test_second_and_third_gradient(name, mesh, axis):
    """The gradient of a transpose is the collective again, and the gradient of that the transpose."""
    xs, gs, hs = values(mesh, name, axis)
    sim = simulate(make_second(name, Axes(mesh)[axis]), mesh, Ranks(xs), Ranks(gs), Ranks(hs))
    second, third = (by_definition(mesh, axis, f, of) for f, of in zip(CASES[name][1:], (hs, gs), strict=True))
    for rank, (dg, dh) in enumerate(sim.outputs):
        assert torch.equal(dg, second[rank]), f"second gradient on rank {rank}"
        assert torch.equal(dh, third[rank]), f"third gradient on rank {rank}"


@pytest.mark.long
@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("mesh, axis", ALL, ids=str)
def test_transforms_of_torch_func(name, mesh, axis):
    xs, gs, hs = values(mesh, name, axis)
    sim = simulate(make_transformed(name, Axes(mesh)[axis]), mesh, Ranks(xs), Ranks(gs), Ranks(hs))
    value, pulled = (by_definition(mesh, axis, f, of) for f, of in zip(CASES[name][1:], (hs, gs), strict=True))
    for rank, (vjp, jvp, vmap) in enumerate(sim.outputs):
        assert torch.equal(vjp, pulled[rank]), f"vjp on rank {rank}"
        assert torch.equal(jvp, 3 * value[rank]), f"jvp on rank {rank}"
        assert torch.equal(vmap, value[rank]), f"vmap on rank {rank}"


def run_all(rank, mesh):
    axes, found = Axes(mesh, connect(mesh)), {}
    for axis in AXES[mesh]:
        for name in MOVED:
            given = [of[rank] for of in values(mesh, name, axis)]
            found[name, axis] = [make(name, axes[axis])(*given) for make in (make_second, make_transformed)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(a=2), pytest.param(Mesh(a=2, b=2), marks=pytest.mark.long)], ids=str)
def test_real_ranks_as_simulated_ones(ranks, mesh):
    real = ranks.run(run_all, mesh, ranks=mesh.size)
    for name, axis in real[0]:
        for i, make in enumerate((make_second, make_transformed)):
            sim = simulate(make(name, Axes(mesh)[axis]), mesh, *map(Ranks, values(mesh, name, axis)))
            for rank in range(mesh.size):
                for got, wanted in zip(real[rank][name, axis][i], sim.outputs[rank], strict=True):
                    assert torch.equal(got, wanted), f"{name} over {axis} on rank {rank}"


def second_of(call):
    """`step(x, h)`: dx of call(x) . g by g, along h; g is made of x's value."""

    def step(x, h):
        leaf = x.detach().requires_grad_()
        y = call(leaf)
        g = torch.ones_like(y).requires_grad_()
        (dx,) = torch.autograd.grad(y, leaf, g, create_graph=True)
        return call(h.detach()), torch.autograd.grad(dx, g, h)[0]

    return step


LISTS = {
    "lend": lambda a: lambda x: lend(x, a, 1),
    "some of a list": lambda a: lambda x: all_gather_many([x.detach() * 2, x, x.detach()], a, [0, 1, 2])[1],
    "joint reduction": lambda a: lambda x: reduce_scatter_many([x.detach(), x], a, [0, 1])[1],
    "flat": lambda a: lambda x: all_gather_many([x.flatten()], a, [Place((-1,), block=(8, 12))])[0],
    "as_terms": lambda a: lambda x: as_terms(x, a, 3.0),
    "counts": lambda a: lambda x: as_terms(x, a, torch.tensor(3.0)),
}


@pytest.mark.parametrize("name", LISTS)
def test_other_forms(name):
    """Those behind which no name of its own stands: the second gradient along h is the collective of h."""
    mesh = Mesh(a=2)
    xs, _, hs = values(mesh, "psum", "a")
    xs, hs = ([x[:, :6, :] for x in of] for of in (xs, hs))
    for value, second in simulate(second_of(LISTS[name](Axes(mesh)["a"])), mesh, Ranks(xs), Ranks(hs)).outputs:
        assert torch.equal(value, second)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "wire", [Wire(gather=torch.bfloat16, reduce=torch.float32), Wire(torch.float8_e4m3fn, arrive=torch.bfloat16)]
)
def test_wires(wire, size):
    """What travels narrow is not differentiated (straight through): the second gradient is gathered in full."""
    mesh = Mesh(a=size)
    axis = Axes(mesh)["a"]

    def step(x, h):
        leaf, scale = x.detach().requires_grad_(), torch.tensor(1e-3)
        y = all_gather_many([leaf], axis, [0], wire, [scale if wire.scaled else None])[0]
        g = torch.ones_like(y).requires_grad_()
        (dx,) = torch.autograd.grad(y, leaf, g, create_graph=True)
        return torch.autograd.grad(dx, g, h)[0]

    xs, hs = [torch.ones(2, 2)] * size, [torch.full((2, 2), 3.0 + i) for i in range(size)]
    for got in simulate(step, mesh, Ranks(xs), Ranks(hs)).outputs:
        assert got.dtype == torch.bfloat16 and torch.equal(got.float(), torch.cat(hs))


def test_frozen_ones_of_a_list_have_no_second_gradient():
    mesh = Mesh(a=2)
    axis = Axes(mesh)["a"]

    def step(x):
        frozen, own = x.detach(), x.detach().requires_grad_()
        y, z = psum_many([frozen, own], axis)
        assert not y.requires_grad and z.requires_grad
        (g,) = torch.autograd.grad((z.square() * y).sum(), own, create_graph=True)
        return torch.autograd.grad(g.sum(), own)[0]

    x = torch.tensor([3.0])
    # z = 2x, y = 2x frozen; on each rank 2 z y, then by own: 2 y of each of two ranks
    assert [float(out) for out in simulate(step, mesh, Ranks([x, x])).outputs] == [24.0, 24.0]


@pytest.mark.parametrize(
    "call, words",
    [
        (
            lambda x, a: all_gather_many([x], a, [Place((-1,), block=(4, 2))])[0],
            r"all_gather over a: got torch\.func\.vmap over a flattened",
        ),
        (
            lambda x, a: all_to_all_rows(x, x.long(), x.long(), a, 2),
            r"all_to_all_rows over a: got torch\.func\.vmap over counts",
        ),
    ],
)
def test_what_vmap_cannot_follow_is_refused_with_the_line(call, words):
    mesh = Mesh(a=2)

    def step(x):
        return torch.func.vmap(lambda row: call(row, Axes(mesh)["a"]))(x)

    size = 2 if "rows" in words else 4
    with pytest.raises(ValueError, match=rf"test_second\.py:\d+.*{words}"):
        simulate(step, mesh, Ranks([torch.ones(3, size)] * 2))

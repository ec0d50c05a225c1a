"""all_to_all_many is the single op for each tensor, forward and gradient, in one collective; also on real ranks."""

import pytest
import torch

from fmegatron.collectives import Axes, all_to_all, connect
from fmegatron.collectives.ops import all_to_all_many
from fmegatron.layout import Mesh
from fmegatron.step import collectives_of, trace
from fmegatron.testing import Ranks, simulate

# shape on a rank, split dim, concat dim, dtype
SHAPES = [
    ((4, 3, 6), 0, 2, torch.float64),
    ((8, 2), 0, 1, torch.float64),
    ((2, 4, 3), 1, 0, torch.float32),
    ((4, 5), 0, 0, torch.float64),
    ((4, 1, 3), 0, 1, torch.bfloat16),
]
MESHES = [Mesh(a=2, b=2), Mesh(a=4, b=1), Mesh(b=2, a=2)]


def values(mesh, dtype=None):
    """A tuple of tensors for each rank."""
    generator = torch.Generator().manual_seed(0)
    return Ranks(
        tuple(
            torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype or own) for shape, *_, own in SHAPES
        )
        for _ in range(mesh.size)
    )


def many(xs, axis):
    return all_to_all_many(xs, axis, [split for _, split, *_ in SHAPES], [concat for _, _, concat, _ in SHAPES])


def singles(xs, axis):
    return [all_to_all(x, axis, split, concat) for x, (_, split, concat, _) in zip(xs, SHAPES, strict=True)]


def stepped(exchange, axes, names):
    """xs -> ({}, outputs and gradients of a weighted sum of squares)."""

    def step(xs):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in xs]
            out = exchange(leaves, axes[names])
            loss = sum(((i + 1) * y.double().square()).sum() for i, y in enumerate(out))
            grads = torch.autograd.grad(loss, leaves)
        return {"out": [y.detach() for y in out], "grads": list(grads)}

    return step


@pytest.mark.long
@pytest.mark.parametrize("names", ["a", ("a", "b"), ("b", "a")], ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_tensor_by_tensor_it_is_the_single_op(mesh, names):
    xs = values(mesh)
    got = simulate(stepped(many, Axes(mesh), names), mesh, xs).outputs
    wanted = simulate(stepped(singles, Axes(mesh), names), mesh, xs).outputs
    for mine, theirs in zip(got, wanted, strict=True):
        for kind in ("out", "grads"):
            assert all(torch.equal(x, y) for x, y in zip(mine[kind], theirs[kind], strict=True))


def test_one_collective_of_the_bytes_of_all():
    mesh = Mesh(a=4)
    xs = values(mesh)[0]
    traced = trace(lambda *xs: many(xs, Axes(mesh)["a"]), xs)
    (one,) = collectives_of(traced.graph_module.graph, mesh)
    assert one.op == "all_to_all" and one.sent == sum(x.numel() * x.dtype.itemsize for x in xs) * 3 // 4
    assert not collectives_of(trace(lambda *xs: many(xs, Axes(Mesh(a=1))["a"]), xs).graph_module.graph, Mesh(a=1))


def on_a_rank(rank, mesh, names, dtype):
    with connect(mesh) as world:
        return stepped(many, Axes(mesh, world), names)(values(mesh, dtype)[rank])


@pytest.mark.parametrize("dtype", [None, torch.float64], ids=["several dtypes", "one dtype"])
def test_real_ranks_have_the_bits_of_simulated_ones(ranks, dtype):
    mesh, names = Mesh(b=2, a=2), ("a", "b")  # an order that is not that of the group
    simulated = simulate(stepped(many, Axes(mesh), names), mesh, values(mesh, dtype)).outputs
    for mine, theirs in zip(ranks.run(on_a_rank, mesh, names, dtype, ranks=4), simulated, strict=True):
        for kind in ("out", "grads"):
            assert all(torch.equal(x, y) for x, y in zip(mine[kind], theirs[kind], strict=True))


def test_errors_for_people():
    axis, xs = Axes(Mesh(a=2))["a"], [torch.ones(4, 3), torch.ones(2, 2)]
    for call, message in [
        (lambda: all_to_all_many(xs, axis, [0], [1]), "got 2 tensors, 1 split dims and 1 concat dims"),
        (
            lambda: all_to_all_many(xs, axis, [1, 0], [0, 1]),
            r"dim 1 of a tensor with shape \(4, 3\), which is not div",
        ),
        (lambda: all_to_all_many(xs, axis, [0, 0], [1, 2]), r"concat dim: got dim 2 of a tensor with shape \(2, 2\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()

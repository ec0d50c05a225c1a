"""Coalesced collectives: each tensor gets what its layout says, value and transpose, in one collective for the list.

The reference are the boxes of the layouts (`testing.split`), on simulated and on real ranks.
"""

import math

import pytest
import torch

from fmegatron import collectives as c
from fmegatron.collectives import FLAT, Axes, Place, Wire, connect
from fmegatron.layout import Layout, Mesh
from fmegatron.step import collectives_of, symbolic_nodes, trace
from fmegatron.testing import Ranks, simulate
from tests.collectives.coalesced_cases import GROUPS, MESHES, Problem, gather_step

ALL = [
    (mesh, group)
    for mesh in MESHES
    for group, (_, names, _) in GROUPS.items()
    if group != "two axes" or mesh["b"] > 1 or mesh["a"] == 4
]


def all_of(problem, axis):
    """A step that calls each of the ops, with its transpose: one dict of lists."""
    gather = gather_step(problem, axis)

    def transposed(call, xs, gs):
        leaves = [x.detach().requires_grad_() for x in xs]
        with torch.enable_grad():
            out = call(leaves)
        gs = [g.to(y.dtype) for g, y in zip(gs, out, strict=True)]
        return [y.detach() for y in out], list(torch.autograd.grad(out, leaves, gs))

    def step(shards, terms):
        wholes, grads = gather(shards, terms)
        summed = [i for i, x in enumerate(terms) if x.dtype.itemsize > 1]  # fp8 has no sums
        places, some = [problem.places[i] for i in summed], [terms[i] for i in summed]
        scattered = transposed(lambda xs: c.reduce_scatter_many(xs, axis, places), some, [shards[i] for i in summed])
        exact = transposed(lambda xs: c.reduce_scatter_many(xs, axis, problem.places, exact=True), terms, shards)
        sums, same = transposed(lambda xs: c.psum_many(xs, axis), some, some)
        return {
            "gathered": wholes, "reduced gradients": grads, "scattered": scattered[0], "gathered again": scattered[1],
            "exact": exact[0], "gathered after exact": exact[1], "sums": sums, "same": same,
            "exact sums": c.psum_many(terms, axis, exact=True),
        }  # fmt: skip

    return step


def wanted(problem, rank):
    """What `all_of` gives on a rank."""
    own = [layout.dtype for layout in problem.layouts]
    wide = [torch.float32 if dtype.itemsize < 4 else dtype for dtype in own]
    cast = lambda xs, dtypes: [x.to(dtype) for x, dtype in zip(xs, dtypes, strict=True)]  # noqa: E731
    scattered, sums = problem.scattered(rank), problem.sums(rank)
    summed = lambda xs: [x for x, dtype in zip(xs, own, strict=True) if dtype.itemsize > 1]  # noqa: E731
    return {
        "gathered": problem.wholes[rank], "reduced gradients": cast(scattered, own),
        "scattered": summed(cast(scattered, own)), "gathered again": summed(problem.wholes[rank]),
        "exact": cast(scattered, wide), "gathered after exact": problem.wholes[rank],
        "sums": summed(cast(sums, own)), "same": summed(problem.terms[rank]), "exact sums": cast(sums, wide),
    }  # fmt: skip


def assert_same(found, expected, rank):
    for name, values in expected.items():
        assert len(found[name]) == len(values)
        for i, (x, y) in enumerate(zip(found[name], values, strict=True)):
            assert x.dtype == y.dtype and torch.equal(x.double(), y.double()), f"{name}[{i}] on rank {rank}"


@pytest.mark.parametrize(("mesh", "group"), ALL, ids=str)
def test_values_and_transposes(mesh, group):
    problem = Problem(mesh, group)
    sim = simulate(all_of(problem, problem.axis()), mesh, problem.shards, Ranks(problem.terms))
    for rank in range(mesh.size):
        assert_same(sim.outputs[rank], wanted(problem, rank), rank)


@pytest.mark.parametrize(("mesh", "group"), [(MESHES[0], "one axis"), (MESHES[0], "two axes")], ids=str)
def test_one_node_each(mesh, group):
    problem = Problem(mesh, group)
    axis = problem.axis()
    graph = trace(gather_step(problem, axis), (problem.shards[0], problem.terms[0])).graph_module.graph
    assert [one.op for one in collectives_of(graph, mesh)] == ["all_gather_many", "reduce_scatter_many"]
    gathered, reduced = collectives_of(graph, mesh)
    elements = [math.prod(layout.local_shape(0)) for layout in problem.layouts]
    own = [layout.dtype.itemsize for layout in problem.layouts]
    back = [size if size > 1 else 4 for size in own]  # fp8 gradients travel in fp32
    assert gathered.sent == (axis.size - 1) * sum(n * size for n, size in zip(elements, own, strict=True))
    assert reduced.sent == (axis.size - 1) * sum(n * size for n, size in zip(elements, back, strict=True))


def on_rank(rank, mesh, group):
    with connect(mesh) as world:
        problem = Problem(mesh, group)
        found = all_of(problem, problem.axis(world))(problem.shards[rank], problem.terms[rank])
        return {name: [(x.double(), x.dtype) for x in xs] for name, xs in found.items()}  # fp8 cannot be pickled


@pytest.mark.parametrize("mesh", [Mesh(a=2, b=1), Mesh(a=2, b=2), Mesh(b=2, a=2)], ids=str)
def test_real_ranks(ranks, mesh):
    for group in GROUPS:
        problem = Problem(mesh, group)
        for rank, found in enumerate(ranks.run(on_rank, mesh, group, ranks=mesh.size)):
            own = {name: [x.to(dtype) for x, dtype in xs] for name, xs in found.items()}
            assert_same(own, wanted(problem, rank), rank)

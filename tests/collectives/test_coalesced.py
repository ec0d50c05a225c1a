"""Coalesced collectives: each tensor gets what its layout says, value and transpose, in one collective for the list.

The reference are the boxes of the layouts (`testing.split`), on simulated and on real ranks.
"""

import itertools
import math

import pytest
import torch

from fmegatron.collectives import Axes, connect, real
from fmegatron.collectives.ops import all_gather_many, psum_many, reduce_scatter_many
from fmegatron.collectives.places import FLAT, Place
from fmegatron.collectives.wires import Wire
from fmegatron.layout import Layout, Mesh
from fmegatron.layout.dtypes import dtype_name
from fmegatron.step import collectives_of, jit, symbolic_nodes, trace
from fmegatron.testing import Ranks, simulate
from tests.collectives.coalesced_cases import GROUPS, LITTLE_GROUPS, MESHES, Problem, draw, gather_step
from tests.pairs import few

ALL = [  # every group, each on another mesh, then each on the next
    (mesh, group)
    for shift in range(len(MESHES))
    for i, group in enumerate(GROUPS)
    if (mesh := MESHES[(i + shift) % len(MESHES)]) and (group != "two axes" or mesh["b"] > 1 or mesh["a"] == 4)
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
        scattered = transposed(lambda xs: reduce_scatter_many(xs, axis, places), some, [shards[i] for i in summed])
        exact = transposed(lambda xs: reduce_scatter_many(xs, axis, problem.places, exact=True), terms, shards)
        sums, same = transposed(lambda xs: psum_many(xs, axis), some, some)
        return {
            "gathered": wholes, "reduced gradients": grads, "scattered": scattered[0], "gathered again": scattered[1],
            "exact": exact[0], "gathered after exact": exact[1], "sums": sums, "same": same,
            "exact sums": psum_many(terms, axis, exact=True),
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


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "group"), few(8, ALL, [f"{mesh}-{group}" for mesh, group in ALL]))
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
    assert [one.op for one in collectives_of(graph, mesh)] == ["all_gather", "reduce_scatter"]
    gathered, reduced = collectives_of(graph, mesh)
    elements = [math.prod(layout.local_shape(0)) for layout in problem.layouts]
    own = [layout.dtype.itemsize for layout in problem.layouts]
    back = [size if size > 1 else 4 for size in own]  # fp8 gradients travel in fp32
    assert gathered.sent == (axis.size - 1) * sum(n * size for n, size in zip(elements, own, strict=True))
    assert reduced.sent == (axis.size - 1) * sum(n * size for n, size in zip(elements, back, strict=True))


def on_rank(rank, mesh, group, little=None):
    """little: bytes from which a tensor has a buffer of its own; None: as it is, far above these tensors."""
    with connect(mesh) as world, pytest.MonkeyPatch.context() as patched:
        if little is not None:
            patched.setattr(real, "_LITTLE", little)
        problem = Problem(mesh, group)
        found = all_of(problem, problem.axis(world))(problem.shards[rank], problem.terms[rank])
        return {name: [(x.double(), x.dtype) for x in xs] for name, xs in found.items()}  # fp8 cannot be pickled


@pytest.mark.long
@pytest.mark.parametrize("mesh", [Mesh(a=2, b=1), Mesh(a=2, b=2), Mesh(b=2, a=2)], ids=str)
def test_real_ranks(ranks, mesh):
    for group in GROUPS:
        problem = Problem(mesh, group)
        for rank, found in enumerate(ranks.run(on_rank, mesh, group, ranks=mesh.size)):
            own = {name: [x.to(dtype) for x, dtype in xs] for name, xs in found.items()}
            assert_same(own, wanted(problem, rank), rank)


@pytest.mark.long
@pytest.mark.parametrize("little", [0, 100])
def test_large_tensors_travel_as_they_are(ranks, little):
    """All of them, or those of 100 bytes and more, beside one buffer of the others: values and transposes stay."""
    mesh = Mesh(a=2, b=1)
    for group in GROUPS:
        problem = Problem(mesh, group)
        for rank, found in enumerate(ranks.run(on_rank, mesh, group, little, ranks=mesh.size)):
            own = {name: [x.to(dtype) for x, dtype in xs] for name, xs in found.items()}
            assert_same(own, wanted(problem, rank), rank)


def jitted_on_rank(rank, mesh, group, little=None, backend="eager"):
    """(results, collectives of the lowered graph, calls that copy) of a jitted gather with its transpose."""
    with connect(mesh) as world, pytest.MonkeyPatch.context() as patched:
        if little is not None:
            patched.setattr(real, "_LITTLE", little)
        problem = Problem(mesh, group)
        step = jit(gather_step(problem, problem.axis()), world=world, backend=backend, check=False)
        wholes, grads = step(problem.shards[rank], problem.terms[rank])
        graph = step.graph("lower")
        found = {"gathered": wholes, "reduced gradients": grads}
        names = [n.target._opname for n in graph.nodes if hasattr(n.target, "_opname")]
        found = {name: [(x.double(), x.dtype) for x in xs] for name, xs in found.items()}
        return found, [one.op for one in collectives_of(graph, mesh)], names


@pytest.mark.medium
@pytest.mark.parametrize(
    ("group", "little", "ops", "copies"),
    [
        ("one axis", None, ["all_gather", "all_to_all"], {"pack": 2, "unpack": 2, "cat": 4}),
        ("one axis, one dtype", None, ["all_gather", "reduce_scatter"], {"cat": 6}),
        ("one tensor", None, ["all_gather", "reduce_scatter"], {}),
        ("one axis", 0, ["all_gather", "all_to_all"], {"pack": 1, "unpack": 1, "cat": 4}),
        ("one axis, one dtype", 0, ["all_gather", "reduce_scatter"], {"cat": 4}),
        ("one tensor by rows", None, ["all_gather", "reduce_scatter"], {}),
    ],
)
def test_one_real_collective(ranks, group, little, ops, copies):
    """One all-gather forward and one exchange backward in the graph; no cat for a list of one or of large tensors, and
    else one for each buffer (and one for each interleaved dim)."""
    mesh = Mesh(a=2, b=1)
    problem = Problem(mesh, group)
    for rank, (found, collectives, names) in enumerate(ranks.run(jitted_on_rank, mesh, group, little, ranks=2)):
        own = {name: [x.to(dtype) for x, dtype in xs] for name, xs in found.items()}
        assert_same(own, {name: xs for name, xs in wanted(problem, rank).items() if name in own}, rank)
        assert collectives == ops
        assert {name: names.count(name) for name in ("pack", "unpack", "cat") if name in names} == copies


OF_ONE_AXIS = [group for group, (_, names, _) in GROUPS.items() if names == ("a",)]
LONG = [pytest.param(group, little, marks=pytest.mark.slow) for group in OF_ONE_AXIS for little in (None, 0)]


@pytest.mark.slow
@pytest.mark.parametrize(("group", "little"), [*few(1, itertools.product(LITTLE_GROUPS, (None, 0))), *LONG])
def test_compiled(ranks, group, little):
    """The compiled graph computes the same."""
    problem = Problem(Mesh(a=2, b=1), group)
    for rank, (found, _, _) in enumerate(ranks.run(jitted_on_rank, problem.mesh, group, little, "inductor", ranks=2)):
        own = {name: [x.to(dtype) for x, dtype in xs] for name, xs in found.items()}
        assert_same(own, {name: xs for name, xs in wanted(problem, rank).items() if name in own}, rank)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x, a: all_gather_many([x, x], a, [0]), "2 tensors and 1 dims"),
        (lambda x, a: all_gather_many([x], a, [2]), "dim 2 of a tensor with shape"),
        (lambda x, a: all_gather_many([x], a, [Place((0, 1))]), "the place 0,1 for 2 axes"),
        (lambda x, a: all_gather_many([x], a, [Place((1,), 1, (1, 1))]), r"parts \(1, 1\) of dim 1, which is 3 long"),
        (lambda x, a: all_gather_many([x], a, [Place((FLAT,))]), "give that with FLAT axes"),
        (
            lambda x, a: reduce_scatter_many([x], a, [1]),
            "dim 1 of a tensor with shape .2, 3., which is not divisible by 2",
        ),
        (lambda x, a: reduce_scatter_many([x[:, 0].to(torch.float8_e5m2)], a, [0]), "float8_e5m2, which has no sums"),
        (lambda x, a: psum_many([x.to(torch.float8_e5m2)], a), "has no sums"),
        (lambda x, a: Wire(reduce=torch.float8_e4m3fn), "add exact=True"),
        (lambda x, a: Wire(gather=torch.int8), "wanted a floating dtype"),
        (lambda x, a: Place.of(Layout((5,), x.dtype, Mesh(a=2), ("a",)), ("a",)), "make the dim a multiple of 2"),
    ],
)
def test_bad_calls(call, says):
    with pytest.raises(ValueError, match=says):
        call(torch.zeros(2, 3), Axes(Mesh(a=2))["a"])


def test_size_one_leaves_no_node_but_the_casts():
    axis, x = Axes(Mesh(a=1, b=2))["a"], torch.ones(2, requires_grad=True)
    wire = Wire(torch.bfloat16, torch.bfloat16)

    def step(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (y,) = all_gather_many([x], axis, [0], wire)
            (z,) = reduce_scatter_many(psum_many([y], axis), axis, [0], exact=True)
        (g,) = torch.autograd.grad(z, x, torch.full((2,), 1 + 2**-10))
        return z.detach(), g

    graph = trace(step, (x,)).graph_module.graph
    assert not symbolic_nodes(graph)
    z, g = step(x)
    assert z.dtype == g.dtype == torch.float32 and g.tolist() == [1, 1]  # rounded to bf16 on its way


def test_one_rank_rounds_gradients_as_several_do():
    """A wire that names nothing but the dtype of reductions is no idle one."""
    x = torch.ones(2, requires_grad=True)
    (y,) = all_gather_many([x], Axes(Mesh(a=1))["a"], [0], Wire(reduce=torch.bfloat16))
    (g,) = torch.autograd.grad(y, x, torch.full((2,), 1 + 2**-10))
    assert g.dtype == torch.float32 and g.tolist() == [1, 1]


def test_dtypes_that_do_not_divide_each_other_share_a_buffer():
    """A row has 6 bytes of bf16 beside 8 of fp32, which begin where fp32 can be viewed."""
    xs = [draw(0, (2, 3), torch.bfloat16), draw(1, (2, 2), torch.float32), draw(2, (2, 1), torch.float64)]
    rows = torch.ops.fmegatron_real.pack(xs)
    assert rows.shape == (2, 24)  # of 22 bytes, up to a multiple of the widest
    names = [dtype_name(x.dtype) for x in xs]
    for x, y in zip(xs, torch.ops.fmegatron_real.unpack(rows, names, [3, 2, 1]), strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.int32), (torch.float64, torch.float64), (torch.int32,)])
def test_scalars_of_all_ranks_share_a_buffer(dtypes):
    rows = [torch.arange(2).to(dtype) for dtype in dtypes]
    shapes, mixed = [torch.Size(())] * len(rows), len(set(dtypes)) > 1
    buffer = real._packed(rows).view(2, -1)
    found = real._unpacked(buffer, rows, shapes) if mixed else real._parted(buffer, shapes)
    assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(rows, found, strict=True))


def test_tensors_that_need_no_gradient_are_not_reduced():
    problem = Problem(Mesh(a=2, b=1), "one axis, one dtype")
    axis = problem.axis()

    def step(shards, terms):
        leaves = [x.detach().requires_grad_(i == 2) for i, x in enumerate(shards)]
        with torch.enable_grad():
            wholes = all_gather_many(leaves, axis, problem.places)
        return torch.autograd.grad(wholes[2], leaves[2], terms[2])

    traced = trace(step, (problem.shards[0], problem.terms[0]))
    gathered, reduced = collectives_of(traced.graph_module.graph, problem.mesh)
    assert reduced.elements == problem.wholes[0][2].numel() < gathered.elements * 2

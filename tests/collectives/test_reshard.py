"""reshard between even layouts chosen by hypothesis: the same global value, and the transpose of each move."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmegatron.collectives import Axes, connect, reshard
from fmegatron.collectives.reshard_plan import reshard_moves
from fmegatron.collectives.resharding import reshard_many
from fmegatron.collectives.wires import Wire
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.step import collectives_of
from fmegatron.testing import Ranks, join, simulate, split

MESHES = [Mesh(a=2, b=2), Mesh(a=2, b=1, c=3), Mesh(a=2, b=2, c=2)]
SHAPE = (96, 48)


@st.composite
def pairs(draw, meshes=tuple(MESHES)):
    """(source, target) over one mesh; the target's pending sums are among the source's."""
    mesh = draw(st.sampled_from(meshes))
    source = draw(layouts(mesh, mesh.names))
    return source, draw(layouts(mesh, source.unreduced))


@st.composite
def layouts(draw, mesh, may_pend):
    """An even layout; an axis splits a dim (alone, jointly, interleaved) or the flat block, is pending, or unused."""
    order = draw(st.permutations(mesh.names))
    uses = [draw(st.sampled_from((0, 0, 1, 1, "flat", "pending", None))) for _ in order]
    spec = []
    for dim in range(2):
        axes = tuple(a for a, use in zip(order, uses, strict=True) if use == dim)
        parts = draw(st.sampled_from((1, 2, 2, "uneven"))) if axes else 1
        sizes = (SHAPE[dim] // 2, SHAPE[dim] // 2) if parts == "uneven" and dim else (24, 48, 24)
        spec.append((axes or None) if parts == 1 else Split(axes, sizes if parts == "uneven" else parts))
    flat = tuple(a for a, use in zip(order, uses, strict=True) if use == "flat")
    pending = tuple(a for a, use in zip(order, uses, strict=True) if use == "pending" and a in may_pend)
    return Layout(SHAPE, torch.float64, mesh, tuple(spec), unreduced=pending, flat=flat)


def make_step(source, target, axes):
    """`step(x, g) -> (resharded, gradient)`."""

    def step(x, g):
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            y = reshard(leaf, source, target, axes)
        return y.detach().clone(), torch.autograd.grad(y, leaf, g)[0]

    return step


def problem(source, target):
    """Per rank: the value under the source layout, and a cotangent of the result.

    What is replicated only in the target was gathered: each rank uses it for its own purpose, so its cotangents are
    terms of a sum. All other cotangents are whole. The gradient then is whole, laid out as the source.
    """
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randint(-512, 512, SHAPE, generator=generator).double() for _ in range(2))
    gathered = tuple(a for a in source.sharded if a not in target.sharded)
    local_x = split(x, source)
    local_g = split(g, target.replace(unreduced=gathered))
    return x, g, local_x, local_g


@pytest.mark.medium
@settings(max_examples=20, deadline=None)
@given(pairs())
def test_reshard(pair):
    source, target = pair
    x, g, local_x, local_g = problem(source, target)
    sim = simulate(make_step(source, target, Axes(source.mesh)), source.mesh, local_x, local_g)
    said = f"{source} -> {target} by {[str(m) for m in reshard_moves(source, target)]}"
    assert torch.equal(join([y for y, _ in sim.outputs], target), x), f"value of {said}"
    assert torch.equal(join([dx for _, dx in sim.outputs], source.replace(unreduced=())), g), f"gradient of {said}"


@st.composite
def several(draw):
    """Three pairs over one mesh."""
    mesh = draw(st.sampled_from(MESHES))
    return [draw(pairs((mesh,))) for _ in range(3)]


@pytest.mark.medium
@settings(max_examples=8, deadline=None)
@given(several(), st.sampled_from((0, 1 << 20)))
def test_reshard_many(chosen, together):
    """Each value as `reshard` moves it, and its gradient; whole numbers, so that the order of sums does not matter."""
    sources, targets = map(list, zip(*chosen, strict=True))
    axes = Axes(sources[0].mesh)
    problems = [problem(*pair) for pair in chosen]

    def step(xs, gs):
        leaves = [x.detach().requires_grad_() for x in xs]
        with torch.enable_grad():
            ys = reshard_many(leaves, sources, targets, axes, bucket_bytes=together)
        return [y.detach().clone() for y in ys], list(torch.autograd.grad(ys, leaves, gs))

    xs, gs = (Ranks(list(local) for local in zip(*(p[i] for p in problems), strict=True)) for i in (2, 3))
    sim = simulate(step, axes.mesh, xs, gs)
    for i, (x, g, _, _) in enumerate(problems):
        said = f"{i} of {[f'{source} -> {target}' for source, target in chosen]}"
        assert torch.equal(join([out[0][i] for out in sim.outputs], targets[i]), x), f"value {said}"
        whole = sources[i].replace(unreduced=())
        assert torch.equal(join([out[1][i] for out in sim.outputs], whole), g), f"gradient {said}"


def test_small_values_share_a_collective():
    """Four gradients of ZeRO-1: the large one travels alone, the small ones together; sums exact in 16 bits."""
    mesh = Mesh(dp=4, tp=2)
    pending = [Layout((n, 8), torch.bfloat16, mesh, (), unreduced=("dp",)) for n in (1024, 8, 16, 8)]
    target = [layout.replace(spec=("dp",), unreduced=()) for layout in pending[:3]] + [pending[3].replace(unreduced=())]

    def step(xs, wire):
        return reshard_many(xs, pending, target, Axes(mesh), wire, bucket_bytes=1024)

    # 256 + 1 + 1 + 1 is 256 when it is added up in bf16; ranks 0 and 1 are the first along dp
    terms = [[torch.full(x.shape, 256.0 if r < 2 else 1.0).bfloat16() for x in pending] for r in range(8)]
    sim = simulate(lambda xs: step(xs, Wire(exact=True)), mesh, Ranks(terms))
    found = collectives_of(sim.traced.graph_module.graph, mesh)
    assert [(one.op, one.elements) for one in found] == [
        ("reduce_scatter", 8192), ("reduce_scatter", 192), ("psum", 64),
    ]  # fmt: skip
    assert all(x.dtype == torch.float32 and bool((x == 259).all()) for local in sim.outputs for x in local)
    sim = simulate(lambda xs: step(xs, Wire(reduce=torch.float32)), mesh, Ranks(terms))
    assert all(bool((x == 259).all()) for local in sim.outputs for x in local)
    assert sum(one.sent for one in collectives_of(sim.traced.graph_module.graph, mesh)) == 2 * sum(
        one.sent for one in found
    )
    sim = simulate(lambda xs: step(xs, Wire()), mesh, Ranks(terms))
    assert all(x.dtype == torch.bfloat16 and bool((x == 256).all()) for local in sim.outputs for x in local)


def on_a_rank(rank, pairs):
    """All pairs on real ranks: (resharded, gradient) of each."""
    axes = Axes(pairs[0][0].mesh, connect(pairs[0][0].mesh))
    found = []
    for source, target in pairs:
        _, _, local_x, local_g = problem(source, target)
        found.append(make_step(source, target, axes)(local_x[rank], local_g[rank]))
    return found


def test_real_ranks(ranks):
    """A dozen layouts of 4 ranks into each other: gloo has the bits of the simulation."""
    mesh = Mesh(a=2, b=2)

    def lay(*spec, **other):
        return Layout(SHAPE, torch.float64, mesh, spec, **other)

    chosen = [
        (lay("a", "b"), lay("b", "a")),
        (lay(("a", "b")), lay(("b", "a"))),
        (lay(("a", "b")), lay(None, ("b", "a"))),
        (lay(unreduced=("a", "b")), lay("a", "b")),
        (lay("b", unreduced=("a",)), lay(flat=("a", "b"))),
        (lay(Split("a", 2), Split("b", (24, 24))), lay("a", "b")),
        (lay(flat=("b", "a")), lay("b")),
        (lay("a"), lay(Split(("a", "b"), (24, 48, 24)))),
    ]
    real = ranks.run(on_a_rank, chosen)
    for i, (source, target) in enumerate(chosen):
        _, _, local_x, local_g = problem(source, target)
        sim = simulate(make_step(source, target, Axes(mesh)), mesh, local_x, local_g)
        for rank, wanted in enumerate(sim.outputs):
            for got, want in zip(real[rank][i], wanted, strict=True):
                assert torch.equal(got, want), f"{source} -> {target} on rank {rank}"


def test_is_short():
    """Nothing is exchanged that need not be."""
    mesh = Mesh(a=2, b=2)

    def moves(source, target):
        lay = [Layout(SHAPE, torch.float64, mesh, spec, unreduced=pending) for spec, pending in (source, target)]
        return [str(move) for move in reshard_moves(*lay)]

    assert moves((("a", "b"), ()), (("a", "b"), ())) == []
    assert moves(((), ("a",)), (("a",), ())) == ["reduce_scatter(a dim 0)"]
    assert moves(((), ("a", "b")), ((), ())) == ["psum(a+b)"]
    assert moves((("a",), ()), ((None, "a"), ())) == ["all_to_all(a dim 0 -> dim 1)"]
    assert moves(((), ()), ((("a", "b"),), ())) == ["shard(a+b dim 0)"]


def test_refuses():
    mesh = Mesh(a=2)
    whole, uneven = Layout((3,), torch.float32, mesh), Layout((3,), torch.float32, mesh, ("a",))
    with pytest.raises(ValueError, match="uneven"):
        reshard_moves(whole, uneven)
    with pytest.raises(ValueError, match="cannot become partial"):
        reshard_moves(whole, whole.replace(unreduced=("a",)))
    with pytest.raises(ValueError, match="shape and mesh"):
        reshard_moves(whole, Layout((4,), torch.float32, mesh))


def test_split_ranks_type():
    assert isinstance(split(torch.zeros(2), None, Mesh(a=2)), Ranks)

"""Simulated ranks: what goes in and out, in-place nodes, compiled layers, and errors that say what to do."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmegatron import optim, step, tree
from fmegatron.collectives import Axes, enter, psum
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.step import value_and_grad
from fmegatron.step.layer import compiled_layer
from fmegatron.testing import Ranks, join, parity, simulate, split
from tests.pairs import few

MESH = Mesh(dp=2, tp=2)


def lay(shape, *spec, mesh=MESH, **other):
    return Layout(shape, torch.float64, mesh, spec, **other)


# ---- split and join --------------------------------------------------------------------------------------------------
@st.composite
def layouts(draw):
    """Any layout of a small array on 6 ranks: uneven, interleaved, flattened, pending, empty, 0-d."""
    mesh = Mesh(a=2, b=3)
    shape = draw(st.lists(st.integers(0, 7), max_size=2).map(tuple))
    uses = [draw(st.sampled_from([*range(len(shape)), "flat", "pending", None])) for _ in mesh.names]
    spec = []
    for dim, size in enumerate(shape):
        axes = tuple(a for a, use in zip(mesh.names, uses, strict=True) if use == dim)
        at = draw(st.integers(0, size))
        spec.append(Split(axes, (at, size - at)) if axes and draw(st.booleans()) else axes or None)
    named = {u: tuple(a for a, use in zip(mesh.names, uses, strict=True) if use == u) for u in ("flat", "pending")}
    return Layout(shape, torch.float64, mesh, tuple(spec), flat=named["flat"], unreduced=named["pending"])


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_join_is_the_inverse_of_split(layout):
    x = torch.arange(1.0, 1.0 + torch.Size(layout.shape).numel(), dtype=torch.float64).view(layout.shape)
    ranks = split({"x": x}, {"x": layout})
    assert [tuple(r["x"].shape) for r in ranks] == [layout.local_shape(r) for r in range(6)]
    assert torch.equal(join(ranks, {"x": layout})["x"], x)


def test_replicas_are_one_tensor_and_terms_are_unequal():
    x = torch.arange(8.0).double()
    same = split(x, lay((8,), "tp"))
    assert same[0] is same[2] and same[0] is not same[1]
    terms = split(x, lay((8,), unreduced=("dp",)))
    assert not torch.equal(terms[0], terms[2]) and torch.equal(terms[0] + terms[2], x)


def test_join_finds_replicas_that_differ():
    ranks = split({"w": torch.ones(4).double()}, {"w": lay((4,), "tp")})
    ranks[3] = {"w": torch.ones(2).double() * 1.5}
    with pytest.raises(ValueError, match=r"w: got values .* on ranks 1 and 3 .* sum over dp is missing"):
        join(ranks, {"w": lay((4,), "tp")})


# ---- simulate --------------------------------------------------------------------------------------------------------
def make_step(mesh, layer=None):
    """Two tensor-parallel layers, SGD; `layer`: how a layer is compiled."""
    axes = Axes(mesh)

    def mlp(x_BD, w):
        h_BF = torch.tanh(enter(x_BD, axes["tp"]) @ w["in"])
        return x_BD + psum(h_BF @ w["out"], axes["tp"])

    block = mlp if layer is None else layer(mlp)

    def loss_fn(params, batch):
        x_BD = batch
        for w_in, w_out in zip(params["in"].unbind(0), params["out"].unbind(0), strict=True):
            x_BD = block(x_BD, {"in": w_in, "out": w_out})
        return x_BD.square().sum() / 8, {}

    def step(params, batch):
        (loss, _), grads = value_and_grad(loss_fn)(params, batch)
        grads = {k: psum(g, axes["dp"]) for k, g in grads.items()}
        return {k: p - 0.1 * grads[k] for k, p in params.items()}, {"loss": psum(loss, axes["dp"])}

    return step


def problem(mesh=MESH):
    generator = torch.Generator().manual_seed(0)
    params = {"in": torch.randn(2, 6, 8, generator=generator), "out": torch.randn(2, 8, 6, generator=generator)}
    params = {k: v.double() for k, v in params.items()}
    specs = {"in": lay((2, 6, 8), None, None, "tp", mesh=mesh), "out": lay((2, 8, 6), None, "tp", mesh=mesh)}
    return params, torch.randn(8, 6, generator=generator).double(), (specs, lay((8, 6), "dp", mesh=mesh))


def test_metrics_gather_and_again():
    params, batch, specs = problem()
    sim = simulate(make_step(MESH), MESH, params, batch, layouts=specs)
    assert sim.paths == ["0/in", "0/out", "1/loss"]
    new, metrics = sim.globals()
    assert new["in"].shape == (2, 6, 8) and metrics["loss"].item() == sim.metrics["loss"]
    assert torch.equal(sim.gather("0/in"), new["in"])
    second = sim.again(Ranks(out[0] for out in sim.outputs), batch)
    from_globals = simulate(make_step(MESH), MESH, new, batch, layouts=specs)
    assert second.metrics == from_globals.metrics
    assert second.metrics["loss"] < sim.metrics["loss"]


@pytest.mark.parametrize("save", few(2, [("mincut",), ("inputs",), ("all",), (0.5,)]))
def test_compiled_layers_are_run_inside(save):
    """Opaque nodes: their collectives work, whatever they save, and blame looks into them."""
    params, batch, specs = problem()
    plain = simulate(make_step(MESH), MESH, params, batch, layouts=specs)
    opaque = simulate(make_step(MESH, compiled_layer(save)), MESH, params, batch, layouts=specs)
    calls = [n for n in opaque.traced.graph_module.graph.nodes if hasattr(n.target, "entry")]
    assert len(calls) == 4
    assert opaque.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=1e-14)
    for path in plain.paths:
        assert torch.allclose(plain.gather(path), opaque.gather(path), rtol=1e-12, atol=1e-14)
    result = parity(lambda m: make_step(m, compiled_layer(save)), MESH, params, batch, layouts=specs, steps=3)
    assert result.ok, str(result)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp64_goes_on_from_its_own_result(dtype):
    """What a simulation in fp64 gives is in fp64: the step that takes it next is that of the layouts' dtypes. Ranks
    know their layouts too, where these are given."""
    mesh = Mesh(fsdp=2)
    specs = tree.specs({"w": (8, 4)}, mesh, [("w", ("fsdp",))], tree.Normal(0.1), dtype)

    def loss_fn(params, batch):
        return step.mean((batch["x"] @ params["w"]).float().square().sum(), batch["x"].shape[0])

    made = step.build(loss_fn, optim.adamw(1e-2), specs, {"x": ((4, 8), dtype)})
    layouts, batch = (tree.layouts(made.state), made.batch), {"x": torch.linspace(-1, 1, 32).view(4, 8).to(dtype)}
    first = simulate(made.function, mesh, Ranks(tree.init(made.state, 0, r) for r in range(2)), batch,
                     layouts=layouts, fp64=True)  # fmt: skip
    carried = first.again(Ranks(out[0] for out in first.outputs), batch).metrics
    for state in (Ranks(out[0] for out in first.outputs), first.globals()[0]):
        assert simulate(made.function, mesh, state, batch, layouts=layouts, fp64=True).metrics == carried

    def norm(grads):
        return optim.global_norm(grads)

    bare = Ranks(tree.map(lambda x: x.detach().clone(), tree.init(specs, 0, r)) for r in range(2))
    whole = tree.init(tree.specs({"w": (8, 4)}, Mesh(), [], tree.Normal(0.1), dtype), 0, 0)
    found = simulate(norm, mesh, bare, layouts=(tree.layouts(specs),)).globals()
    torch.testing.assert_close(found, optim.global_norm(whole))


def test_32_ranks():
    mesh = Mesh(dp=8, tp=4)
    params, batch, specs = problem(mesh)
    one = simulate(make_step(Mesh(dp=1, tp=1)), Mesh(dp=1, tp=1), params, batch)
    many = simulate(make_step(mesh), mesh, params, batch, layouts=specs)
    assert many.metrics["loss"] == pytest.approx(one.metrics["loss"], rel=1e-13)


def test_writes_in_place_touch_no_argument_and_no_other_rank():
    axes = Axes(MESH)

    def step(x, y):
        total = psum(x, axes["dp"])  # one tensor, held by both ranks of the group
        rows = total.view(-1)
        rows.add_(y)  # y differs on each rank
        copy = x.clone()
        copy[0] = 7
        return total, copy

    x = split(torch.arange(4.0).double(), lay((4,), "tp"))
    y = Ranks(torch.tensor(float(r)).double() for r in range(4))
    before = [t.clone() for t in x]
    sim = simulate(step, MESH, x, y)
    for r in range(4):
        assert torch.equal(x[r], before[r])
        assert torch.equal(sim.outputs[r][0], before[r] * 2 + r)
        assert sim.outputs[r][1][0] == 7


@pytest.mark.parametrize(
    "split", [lambda x: torch.unsafe_split(x, 2), lambda x: torch.unsafe_split_with_sizes(x, [2, 1])]
)
def test_writes_into_a_part_of_which_torch_says_nothing(split):
    """The schema of an unsafe_split does not say that its results are in its argument's memory."""

    def step(x):
        first, second = split(torch.ones(3))  # one tensor, held by all ranks
        first.add_(x[:2])
        return first * second

    sim = simulate(step, Mesh(dp=2), Ranks([torch.zeros(3), torch.ones(3)]))
    assert [y.unique().item() for y in sim.outputs] == [1, 2]


def test_a_module_with_a_recurrence():
    """`nn.GRU` adds what differs on each rank in place to what is equal on all of them."""
    torch.manual_seed(0)
    gru = torch.nn.GRU(4, 4, batch_first=True).double()
    params = {name: p.detach() for name, p in gru.named_parameters()}
    x = torch.randn(4, 3, 4).double()
    sim = simulate(
        lambda p, x: torch.func.functional_call(gru, p, (x,))[0],
        Mesh(dp=2),
        params,
        x,
        layouts=(None, Layout((4, 3, 4), x.dtype, Mesh(dp=2), ("dp",))),
    )
    torch.testing.assert_close(sim.globals(), gru(x)[0].detach(), rtol=1e-12, atol=1e-12)


# ---- errors ----------------------------------------------------------------------------------------------------------
def test_bad_arguments():
    x = torch.zeros(4).double()
    with pytest.raises(ValueError, match="one per argument"):
        simulate(lambda x: x, MESH, x, layouts=(None, None))
    with pytest.raises(ValueError, match="got global shape"):
        split({"w": x}, {"w": lay((8,), "tp")})
    with pytest.raises(
        ValueError,
        match=r"(?s)split: the value: got another structure than that of its layouts.*w: got a leaf, wanted nothing",
    ):
        split({"w": x}, {"v": lay((4,), "tp")})
    with pytest.raises(ValueError, match="trees for 3 ranks"):
        simulate(lambda x: x, MESH, Ranks([x] * 3))
    with pytest.raises(ValueError, match="wanted one shape on all ranks"):
        simulate(lambda x: x * 1, MESH, torch.zeros(3).double(), layouts=(lay((3,), "tp"),))
    sim = simulate(lambda x: {"y": x * 1}, MESH, x)
    with pytest.raises(ValueError, match="gather: got path 'z', wanted one that the step returned: 'y'"):
        sim.gather("z")


def test_a_metric_that_was_not_summed():
    sim = simulate(lambda x: (x * 1, {"sum": x.sum()}), MESH, torch.arange(4.0).double(), layouts=(lay((4,), "dp"),))
    with pytest.raises(ValueError, match=r"1/sum: got .* on ranks 0 and 2 .* a sum over dp is missing"):
        sim.metrics  # noqa: B018

"""Layers: compiled once however many there are, saving what their policy says, with the plain function's gradients."""

import functools
import gc
import itertools
import operator
import weakref
from unittest import mock

import pytest
import torch

from fmegatron import model, nn, tree
from fmegatron.collectives import World
from fmegatron.step import accumulate, jit, remat, trace, value_and_grad
from fmegatron.step.graph.nodes import entry_of, opaque_entries
from fmegatron.step.layer import CompiledLayer, compiled_layer
from fmegatron.step.opaque import inline_layers
from tests.pairs import few
from tests.step import tiny

CALLABLE = lambda node: node.target is torch.ops.aten.mm.default  # noqa: E731


# ---- once ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def graphs():
    """layers -> traced gradients of the decoder (its optimizer sees stacked layers)."""
    found = {}
    for layers in (1, 2, 3):
        config = tiny.config_with(layers=layers)
        f = value_and_grad(loss_of(config, "mincut"))
        found[layers] = trace(f, (tiny.decoder_state(config).params, tiny.decoder_batch(config))).graph_module.graph
    return found


def loss_of(config, save):
    axes = tiny.Axes(tiny.ONE)
    return lambda params, batch: model.loss(params, batch, config, axes, save)


def test_equal_layers_of_two_programs_have_each_its_own_line():
    """The entry that they share has the lines of the first; blame pairs nodes by them."""

    def one(x, w):
        return compiled_layer("all")(nn.rms_norm)(x, w).sum()

    def other(x, w):
        return compiled_layer("all")(nn.rms_norm)(x, w).sum()

    for step in (one, other):
        graph = trace(value_and_grad(step), (torch.ones(4, 3), torch.ones(3))).graph_module.graph
        at = [n.meta["at"] for n in inline_layers(graph).nodes if "norm.py" in n.meta.get("at", "")]
        line = f"test_layer.py:{step.__code__.co_firstlineno + 1}"
        assert len(at) > 8 and {place.partition(" ")[0] for place in at} == {line}, at


@pytest.mark.medium
def test_two_entries_whatever_the_depth(graphs):
    """A forward and a backward; equal layers of several traces share them."""
    entries = opaque_entries(graphs[1])
    assert [e.name.split("_")[-2] for e in entries] == ["fwd", "bwd"]
    assert entries == opaque_entries(graphs[2]) == opaque_entries(graphs[3])
    for layers, graph in graphs.items():
        assert len([n for n in graph.nodes if entry_of(n)]) == 2 * layers


def test_the_outer_graph_grows_by_a_few_nodes_per_layer(graphs):
    sizes = {layers: len(graph.nodes) for layers, graph in graphs.items()}
    assert sizes[3] - sizes[2] == sizes[2] - sizes[1]
    inside = sum(len(e.graph_module.graph.nodes) for e in opaque_entries(graphs[1]))
    assert sizes[2] - sizes[1] < 0.25 * inside


def test_layers_that_differ_in_a_constant_are_two():
    """Their code is the same text: it only names the constant."""

    def of(c):
        return compiled_layer("mincut")(lambda x, w: x * w * torch.tensor([c, 2 * c]))

    first, second = of(1.0), of(5.0)
    got = jit(lambda x, w: second(first(x, w), w), backend="eager")(torch.ones(2), torch.ones(2))
    assert got.tolist() == [5.0, 20.0]


# ---- what is saved ---------------------------------------------------------------------------------------------------
@functools.cache
def block():
    """The function that the decoder makes its layers of, and the arguments of the first one."""
    calls, config = [], tiny.config_with(layers=1)

    def noted(layer, x, shards, *rest):
        calls.append(((layer.fn, layer.prepare), (x, shards, *rest)))
        return layer.fn(x, layer.prepare(shards), *rest)

    with mock.patch.object(CompiledLayer, "__call__", noted):
        loss_of(config, "mincut")(tiny.decoder_state(config).params, tiny.decoder_batch(config))
    return calls[0]


@functools.cache
def saved(save):
    """The partition of the decoder's block: what one call saves besides its inputs, and the halves."""
    functions, arguments = block()
    layer = compiled_layer(save)(*functions)
    layer(*arguments)
    (pair,) = layer.halves.values()
    return pair.parts


@pytest.mark.medium
def test_policies_are_ordered():
    cuts = {save: saved(save) for save in ("inputs", 0.0, 0.5, "mincut", 1.0, "all")}
    sizes = {save: cut.residual_bytes for save, cut in cuts.items()}
    assert sizes["inputs"] == sizes[0.0] == 0 < sizes[0.5] <= sizes["mincut"] == sizes[1.0] <= sizes["all"]
    assert sizes["mincut"] < sizes["all"]
    for cut in cuts.values():  # what the forward returns is what the backward takes
        _, *residuals = cut.forward.graph.output_node().args[0]
        names = [n.name for n in cut.backward.graph.find_nodes(op="placeholder")]
        assert [n.name for n in residuals] == names[: len(residuals)]


def test_a_callable_policy_saves_what_it_picks():
    _, *residuals = saved(CALLABLE).forward.graph.output_node().args[0]
    assert residuals and all(CALLABLE(n) for n in residuals)


def test_attention_that_is_saved_is_not_computed_again(graphs):
    """Nor left in the backward for nobody: torch does not drop operators that may draw random numbers."""
    forward, backward = opaque_entries(graphs[1])
    name = "_scaled_dot_product_flash_attention_for_cpu"
    targets = [[getattr(n.target, "_opname", "") for n in e.graph_module.graph.nodes] for e in (forward, backward)]
    assert targets[0].count(name) == 1 and targets[1].count(name) == 0
    assert targets[1].count(f"{name}_backward") == 1


def test_recomputation_is_in_the_backward():
    def products(save):
        return [len(g.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default))
                for g in (saved(save).forward, saved(save).backward)]  # fmt: skip

    assert products("all") == [4, 8]  # qkv, o, gate and up, down; two products in the backward of each
    assert products("inputs") == [4, 8 + 3]  # the last one is not needed again


@pytest.mark.parametrize("save", ["some", 1.5, -0.1, True, ("inputs",)])
def test_unknown_policy(save):
    with pytest.raises(ValueError, match="save="):
        trace(value_and_grad(tiny.mlp_loss(save)), (tiny.mlp_params(), tiny.mlp_batch()))


# ---- gradients -------------------------------------------------------------------------------------------------------
LAYERS = {
    "mlp": lambda x, w: x + torch.tanh(x * w["a"]) * w["b"],
    "residual only": lambda x, w: x + w["a"],  # the backward returns its own input, twice
    "two residuals": lambda x, w: x + w["a"] + w["b"],
    "times ones": lambda x, w: x * torch.ones(4),
    "one weight": lambda x, w: x.relu() * w["b"],
    "view of a product": lambda x, w: (x[:, None] * w["a"]).sum(0).t().sum(0) + w["b"],
    "in place on a temporary": lambda x, w: (x * w["a"]).add_(w["b"]).mul_(x),
    "weight of another dtype": lambda x, w: (x.float() * w["a"].float()).double(),
    "several outputs of one op": lambda x, w: x.split(2)[0].repeat(2) * w["a"].split(2)[1].repeat(2),
}  # fmt: skip


def loss_over(layer):
    def loss(p, x):
        y = layer(x * p["s"], {"a": p["a"], "b": p["b"]})
        y = layer(y, {"a": p["b"], "b": p["a"]})
        return (y * y).sum() + y.sum()

    return loss


# For Inductor those whose halves return their inputs: one by default.
RETURNED = [("inductor", [name]) for name in ("residual only", "two residuals", "times ones")]


@pytest.mark.long
@pytest.mark.parametrize("backend, names", [(None, LAYERS), ("aot_eager", LAYERS), *few(1, RETURNED)])
def test_gradients(backend, names):
    """The layers in one step, each used twice; also eagerly."""
    layers = {name: LAYERS[name] for name in names}
    p = {n: torch.randn(4, dtype=torch.float64) for n in ("s", "a", "b")}
    x = torch.randn(4, dtype=torch.float64)

    def f(layers):
        fs = {name: value_and_grad(loss_over(layer)) for name, layer in layers.items()}
        return lambda p, x: {name: f(p, x) for name, f in fs.items()}

    step = f({name: compiled_layer("mincut")(fn) for name, fn in layers.items()})
    got, wanted = (jit(step, backend=backend) if backend else step)(p, x), f(layers)(p, x)
    for path, a, b in zip(tree.paths(got), tree.leaves(got), tree.leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6 if "dtype" in path else 1e-12, atol=1e-12, msg=path)


def test_prepare():
    """Runs before the forward and again before the backward; constants and integers among the weights are welcome."""
    calls = []

    def prepare(shards):
        calls.append(0)
        return {"w": shards["w"] * 2, "same": shards["same"], "constant": torch.ones(3), "index": shards["index"]}

    def fn(x, w):
        return (x * w["w"] * w["constant"] + w["same"])[w["index"]]

    def step(layer):
        def loss(p, x, index):
            return layer(layer(x, {**p, "index": index}), {**p, "index": index}).square().sum()

        return value_and_grad(loss)

    args = {"w": torch.randn(3), "same": torch.randn(3)}, torch.randn(3), torch.tensor([2, 0, 1])
    got = jit(step(remat(fn, prepare)), backend="aot_eager")(*args)
    assert len(calls) == 2 * 2
    wanted = step(lambda x, shards: fn(x, prepare(shards)))(*args)
    for a, b in zip(tree.leaves(got), tree.leaves(wanted), strict=True):
        torch.testing.assert_close(a, b)


# ---- errors ----------------------------------------------------------------------------------------------------------
def changes_rest(x, w, r):
    r.add_(1)  # HERE rest
    return x * w + r


def changes_x(x, w, r):
    x.add_(1)  # HERE x
    return x * w


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (changes_rest, f"argument '2': got aten.add_.* in place at {tiny.line_of(__file__, 'rest')}"),
        (changes_x, rf"changes_x \(.*\): at {tiny.line_of(__file__, 'x')}: got an argument that is changed in place"),
        (
            lambda x, w, r: (x, {"norm": 3}),
            r"layer <lambda> \(test_layer.py:\d+\): its result '1/norm': got 3, wanted a tensor; return tensors",
        ),
        (lambda x, w, r: None, r"layer <lambda> \(test_layer.py:\d+\): its result: got None, wanted a tensor"),
        (lambda x, w, r: x * w if x.sum() > 0 else x, r"at test_layer.py:\d+: got a read of the value of a tensor"),
    ],
    ids=["rest in place", "x in place", "a number", "nothing", "if"],
)
def test_errors_of_the_function(fn, message):
    with pytest.raises(ValueError, match=message):
        trace(compiled_layer("mincut")(fn), (torch.ones(3), torch.ones(3), torch.ones(3)))


def test_a_layer_may_not_close_over_tensors():
    constant = torch.ones(3)

    def step(x, w):
        angle = x * 2
        return compiled_layer("mincut")(lambda x, w: x * w * angle)(x, w)

    for f in (step, compiled_layer("mincut")(lambda x, w: x * w * constant)):
        with pytest.raises(ValueError, match=r"at test_layer.py:\d+: got a tensor from a closure or a global"):
            trace(f, (torch.ones(3), torch.ones(3)))


def test_gradients_stop_at_nothing_silently():
    layer = compiled_layer("mincut")(lambda x, w, r: x * w + r)
    with pytest.raises(ValueError, match="argument '0' after the shards: got a tensor that needs a gradient"):
        trace(
            value_and_grad(lambda p: layer(p["w"] * 2, p["w"], p["r"]).sum()),
            ({"w": torch.ones(3), "r": torch.ones(3)},),
        )
    with pytest.raises(ValueError, match="argument '0' after the shards: got 3, wanted a tensor"):
        trace(lambda x, w: layer(x, w, 3), (torch.ones(3), torch.ones(3)))


# ---- a jit inside a jit ----------------------------------------------------------------------------------------------
def test_a_jit_inside_a_jit_is_one_node():
    @functools.partial(jit, backend="eager")
    def inner(x, scale):
        y = (x * scale).sin()
        return {"y": y, "same": y, "part": y[:1], "name": "inner"}

    def outer(x):
        return [inner(x, 2.0), inner(x + 1, 2.0), inner(x, 3.0)]

    step = jit(outer, backend="aot_eager")
    x = torch.randn(3)
    alone = inner(x, 2.0)  # the same jit on its own is another kind of entry
    for got, scale, shift in zip(step(x), (2.0, 2.0, 3.0), (0, 1, 0), strict=True):
        torch.testing.assert_close(got["y"], ((x + shift) * scale).sin())
        torch.testing.assert_close(got["part"], got["same"][:1])
        assert got["name"] == "inner"
    torch.testing.assert_close(alone["y"], (x * 2).sin())
    nodes = [n for n in step.graph().nodes if n.op == "call_function" and n.target is not operator.getitem]
    assert len([n for n in nodes if entry_of(n)]) == 3 and len(opaque_entries(step.graph())) == 2
    assert not [n for n in nodes if "sin" in n.name]


def test_errors_of_a_jit_inside_a_jit():
    with pytest.raises(ValueError, match="output 'a': got one of its inputs or a view of one, wanted a new tensor"):
        inner = jit(lambda x: {"a": x[1:]})
        jit(lambda x: inner(x), backend="eager")(torch.ones(3))
    with pytest.raises(ValueError, match="got a tensor that needs a gradient, wanted none, as a jit is one node"):
        cut = jit(lambda p: (p * 3).sum())
        jit(value_and_grad(lambda p: cut(p) + p.square().sum()), backend="eager")(torch.ones(3))


def held(graph) -> list:
    """What the opaque nodes of a graph run, and those inside of it."""
    found = opaque_entries(graph)
    return found + [inner for one in found for inner in held(one.graph_module.graph)]


@pytest.mark.long
@pytest.mark.parametrize("ranks", ["no world", "a world"])
@pytest.mark.parametrize(
    ("backend", "n"),
    [
        *itertools.product(["eager", "aot_eager"], [1, 2]),
        ("inductor", 1),
        pytest.param("inductor", 2, marks=pytest.mark.slow),
    ],
)
def test_what_layers_run_is_gone_with_the_program(backend, ranks, n):
    """torch knows their operators by name in the whole process; none outlives what it runs, and none keeps it."""

    def run() -> tuple[list[weakref.ref], list[str]]:
        inner = compiled_layer("inputs")(lambda x, w: torch.tanh(x @ w) + 0.125)
        layer = compiled_layer("mincut")(lambda x, w: inner(x * 0.375, w) - x)
        world = World.alone("cpu") if ranks == "a world" else None
        gradients = accumulate(lambda w, x: layer(layer(x, w), w).square().sum(), n)
        f = jit(gradients, world=world, backend=backend)
        f(torch.ones(2, 2), torch.ones(2, 2))
        found = held(f.graph()) + held(f.graph("exchange"))
        assert len({one.op.name() for one in found}) == len(set(found)) >= 8
        return [weakref.ref(x) for one in found for x in (one, one.graph_module)], [one.op.name() for one in found]

    references, names = run()
    gc.collect()
    assert not [reference() for reference in references if reference() is not None]
    assert not set(names) & set(torch._C._dispatch_get_all_op_names())


def test_a_graph_keeps_what_its_layers_run():
    """Nothing else does: the layer, and the trace around the graph, are gone."""
    f = lambda x, w: compiled_layer("inputs")(lambda x, w: torch.tanh(x @ w) - 0.625)(x, w)  # noqa: E731
    graph = trace(f, (torch.ones(2, 2), torch.ones(2, 2))).graph_module.graph
    gc.collect()
    (entry,) = opaque_entries(graph)
    x = torch.randn(2, 2, dtype=torch.float32)
    assert torch.equal(entry.op([x, x])[0], torch.tanh(x @ x) - 0.625)
    copies = [torch.fx.Graph() for _ in range(2)]
    copies[0].graph_copy(graph, {})
    name, graph, entry = entry.op.name(), None, None
    gc.collect()
    copies[1].graph_copy(copies[0], {})
    assert [entry.op.name() for entry in opaque_entries(copies[1])] == [name]


def test_equal_layers_of_programs_that_live_share_one_operator():
    def of(c):
        f = lambda x, w: compiled_layer("inputs")(lambda x, w: torch.tanh(x @ w) - c)(x, w)  # noqa: E731
        return trace(f, (torch.ones(2, 2), torch.ones(2, 2))).graph_module.graph

    first, second, other = map(of, (0.75, 0.75, 0.875))
    assert opaque_entries(first) == opaque_entries(second) != opaque_entries(other)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_no_world_is_kept_alive_by_what_was_compiled_for_it(backend):
    """A notebook connects again and again; the operators of its layers are known to the whole process."""
    layer = compiled_layer("inputs")(lambda x, w: torch.tanh(x @ w))

    def run() -> tuple:
        world = World.alone("cpu")
        f = jit(lambda x, w: layer(layer(x, w), w).sum(), world=world, backend=backend)
        return weakref.ref(world), f(torch.ones(2, 2), torch.ones(2, 2))

    (first, a), (second, b) = run(), run()
    gc.collect()
    assert first() is None and second() is None and torch.equal(a, b)


def test_names_of_a_world_that_is_gone_are_free():
    """Ranks collect garbage at different times, and their graphs have to have equal names."""

    def names() -> list[str]:
        layer = compiled_layer("inputs")(lambda x, w: torch.tanh(x @ w) * 0.625)
        f = jit(lambda x, w: layer(x, w).sum(), world=World.alone("cpu"), backend="eager")
        f(torch.ones(2, 2), torch.ones(2, 2))
        return [one.op.name() for one in opaque_entries(f.graph("exchange"))]

    gc.collect()
    gc.disable()
    try:
        assert names() == names()
    finally:
        gc.enable()

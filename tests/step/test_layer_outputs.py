"""Layers with several outputs: gradients of all that have one, nothing of counts, under every policy and on meshes.

Letters: B rows, D features, F hidden.
"""

import functools

import pytest
import torch

from fmegatron import tree
from fmegatron.collectives import Axes, psum
from fmegatron.collectives.ops import declare
from fmegatron.layout import Layout, Mesh
from fmegatron.step import build_train_step, jit, layers, state_specs, trace, value_and_grad
from fmegatron.step.graph.nodes import entry_of
from fmegatron.step.layer import compiled_layer, unstack
from tests.fresh_state import fresh_state
from tests.step import tiny
from tests.step.proven import proven_and_equal
from tests.step.test_layers import layouts_on


def block(x_BD, w, data=None):
    """(x, what a layer of experts gives besides: a loss, counts, values for metrics)."""
    h_BF = torch.tanh(x_BD @ w["a"])
    y_BD = x_BD + h_BF @ w["b"]
    counts_F = (h_BF.detach() > 0).sum(0)
    counts_F = counts_F if data is None else declare(counts_F, data, "partial")
    aux = (h_BF.square() * w["b"].sum(1)).sum()
    return y_BD, {"aux": aux, "counts": counts_F, "seen": h_BF.detach().sum(0)}


def others(x_BD, w):
    """Outputs that are an input, one another, a view of one another, and constant."""
    y_BD = x_BD * w["a"]
    return {"in": x_BD, "y": y_BD, "again": y_BD, "view": y_BD.t(), "half": y_BD[:2], "one": torch.ones(3), "w": w["a"]}


def unused(x_BD, w):
    """Of two outputs the loss uses one, and one weight only the other."""
    return x_BD * w["a"], (w["b"] * 2).exp()


def by_blocks(layer, p, x_BD):
    total = 0.0
    for i in range(2):
        x_BD, more = layer(x_BD, {"a": p["a"][i], "b": p["b"][i]})
        total = total + more["aux"] * 0.1 + more["counts"].sum() * 0.0
    return x_BD.square().sum() + total


def by_others(layer, p, x_BD):
    found = layer(x_BD * p["a"][0, :, 0], {"a": p["a"][1, :, 0], "b": p["b"]})
    return sum((leaf * (i + 1.5)).square().sum() for i, leaf in enumerate(tree.leaves(found)))


def by_unused(layer, p, x_BD):
    y_BD, _ = layer(x_BD, {"a": p["a"][0, :, 0], "b": p["b"]})
    return y_BD.square().sum()


CASES = {"block": (block, by_blocks), "others": (others, by_others), "unused": (unused, by_unused)}
POLICIES = ["all", "inputs", "mincut", 0.5, lambda node: node.target is torch.ops.aten.mm.default]


@pytest.mark.medium
@pytest.mark.parametrize("offload", [None, 0])
@pytest.mark.parametrize("save", POLICIES, ids=[*map(str, POLICIES[:4]), "own"])
def test_gradients_are_those_of_the_function(save, offload):
    p, x_BD = tiny.mlp_params(), tiny.mlp_batch()["x"]
    for name, (fn, loss) in CASES.items():
        layer = compiled_layer(save, offload=offload)(fn)
        wanted = value_and_grad(functools.partial(loss, fn))(p, x_BD)
        step = value_and_grad(functools.partial(loss, layer))
        for how in (step, jit(step, backend="aot_eager")):
            torch.testing.assert_close(how(p, x_BD), wanted, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.slow
@pytest.mark.long
def test_inductor():
    p, x_BD = tiny.mlp_params(), tiny.mlp_batch()["x"]
    step = value_and_grad(functools.partial(by_blocks, compiled_layer("mincut")(block)))
    wanted = value_and_grad(functools.partial(by_blocks, block))(p, x_BD)
    torch.testing.assert_close(jit(step, patches=tiny.SCALAR)(p, x_BD), wanted, rtol=1e-12, atol=1e-12)


def test_which_outputs_have_a_gradient():
    p, x_BD = tiny.mlp_params(), tiny.mlp_batch()["x"].requires_grad_()
    y_BD, more = compiled_layer("mincut")(block)(x_BD, {"a": p["a"][0], "b": p["b"][0]})
    found = {"y": y_BD.requires_grad} | {name: leaf.requires_grad for name, leaf in more.items()}
    assert found == {"y": True, "aux": True, "counts": False, "seen": False}
    assert more["counts"].dtype == torch.int64


def test_nesting_and_one_pair_of_entries():
    """What is nested in another way is the same computation."""
    p, x_BD = tiny.mlp_params(), tiny.mlp_batch()["x"]

    def run(p, x_BD):
        one = compiled_layer("mincut")(lambda x, w: (x * w, [x + w]))(x_BD, p)  # SAME
        return one

    graph = trace(run, (p["a"][0, :, 0], x_BD)).graph_module.graph
    assert len({n.target for n in graph.nodes if entry_of(n)}) == 1
    found = run(p["a"][0, :, 0], x_BD)
    assert isinstance(found, tuple) and isinstance(found[1], list) and torch.equal(found[1][0], x_BD + p["a"][0, :, 0])


# ---- in a stack, on a mesh -------------------------------------------------------------------------------------------
HOW = {
    "min-cut": {},
    "remat": {"save": "inputs"},
    "plain": {"save": None},
    "on the host": {"save": "all", "offload": 0},
}


def loss_of(mesh, **how):
    layouts, axes = layouts_on(mesh), Axes(mesh)
    data = axes[axes.data]

    def loss_fn(params, batch):
        x_BD, more = layers(functools.partial(block, data=data), params, layouts, axes, **how)(batch["x"])
        loss = ((x_BD - batch["y"]).square().sum() + sum(one["aux"] for one in more)) / 32
        counts = torch.stack([one["counts"] for one in more])
        return loss, {"loss": psum(loss.detach(), data), "counts": psum(counts, data)}

    return loss_fn


def train_step(mesh, **how):
    return build_train_step(loss_of(mesh, **how), tiny.OPTIMIZER, layouts_on(mesh), Axes(mesh))


@pytest.mark.long
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_a_stack_is_the_loop(how):
    def loop(params, batch):
        x_BD, aux, counts = batch["x"], 0.0, []
        for w in unstack(params):
            x_BD, more = block(x_BD, w)
            aux, counts = aux + more["aux"], [*counts, more["counts"]]
        loss = ((x_BD - batch["y"]).square().sum() + aux) / 32
        return loss, {"loss": loss.detach(), "counts": torch.stack(counts)}

    params, batch = tiny.mlp_params(), tiny.mlp_batch()
    wanted, got = (value_and_grad(fn)(params, batch) for fn in (loop, loss_of(Mesh(), **how)))
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.medium
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_on_a_mesh(how):
    mesh = Mesh(dp=2, fsdp=2)
    layouts = layouts_on(mesh)
    state = fresh_state(tiny.mlp_params(), tiny.OPTIMIZER)
    at = tree.layouts(state_specs(tree.map(lambda x: tree.ArraySpec(x), layouts), tiny.OPTIMIZER))
    rows = tree.map(lambda x: Layout(tuple(x.shape), x.dtype, mesh, (Axes(mesh).data,)), tiny.mlp_batch(rows=16))
    given = state, tiny.mlp_batch(rows=16)
    proven_and_equal(lambda m: train_step(m, **how), mesh, *given, layouts=(at, rows), steps=2)


@pytest.mark.slow
def test_steps_that_donate_have_the_same_losses():
    step = train_step(Mesh())
    state = fresh_state(tiny.mlp_params(), tiny.OPTIMIZER)
    batches = [tiny.mlp_batch(seed=i) for i in range(3)]
    wanted = tiny.run_steps(step, tiny.copied(state), batches)
    got = tiny.run_steps(jit(step, donate=0, backend="aot_eager"), tiny.copied(state), batches)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_a_block_that_returns_neither():
    with pytest.raises(ValueError, match=r"block <lambda> \(test_layer_outputs.py:\d+\) returned a list of 1: got no"):
        layers(lambda x, w: [x], tiny.mlp_params(), layouts_on(Mesh()), Axes(Mesh()))(tiny.mlp_batch()["x"])


def cut_and_declared(x_BD, w, axis):
    """A part of a product, with gaps between its rows, about which something is stated; its square needs it again."""
    part_BF = declare((x_BD @ w["a"])[:, :2], axis, backward="partial")
    return (part_BF * torch.tanh(part_BF)) @ w["b"][:2]


@pytest.mark.medium
def test_a_declared_part_is_saved_as_what_it_is_a_part_of():
    axis, seen = Axes(Mesh(tp=2))["tp"], []
    layer = compiled_layer("mincut")(functools.partial(cut_and_declared, axis=axis))
    w = {"a": torch.ones(4, 6), "b": torch.ones(6, 4)}
    graph = trace(value_and_grad(lambda w: layer(torch.ones(3, 4), w).sum()), (w,)).graph_module.graph
    for entry in filter(None, map(entry_of, graph.nodes)):
        given = [n.meta["val"] for n in entry.graph_module.graph.find_nodes(op="placeholder")]
        seen += [x for x in given if tuple(x.shape) == (3, 2)]
        assert all(x.stride() == torch.empty_like(x).stride() for x in given)
    assert not seen

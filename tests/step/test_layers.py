"""A stack of layers in one word: what the loop that it stands for computes, and as many collectives."""

import collections

import pytest
import torch

from fmegatron import nn, tree
from fmegatron.collectives import Axes, Precision, psum
from fmegatron.collectives.kinds import collective_of
from fmegatron.layout import Layout, Mesh
from fmegatron.step import layers, trace, value_and_grad
from fmegatron.step.layer import layer_layout, unstack
from fmegatron.step.opaque import inline_layers
from fmegatron.step.reduce import raw_gradient_layout
from fmegatron.testing import assert_parity
from tests.pairs import each_value
from tests.step import tiny

MESHES = [Mesh(), Mesh(fsdp=2), Mesh(dp=2, fsdp=2)]
HOW = {
    "min-cut": {},
    "remat": {"save": "inputs"},
    "plain": {"save": None},
    "kept": {"reshard_after_forward": False},
    "on the host": {"save": "all", "offload": 0},
}


def layouts_on(mesh, count=2):
    """Of the stacked weights: columns over fsdp."""
    return tree.map(lambda x: Layout(tuple(x.shape), x.dtype, mesh, (None, None, "fsdp")), tiny.mlp_params(count))


def gradient(mesh, count=2, **how):
    layouts, axes = layouts_on(mesh, count), Axes(mesh)

    def loss_fn(params, batch):
        x_BD = layers(tiny.mlp, params, layouts, axes, **how)(batch["x"])
        return (x_BD - batch["y"]).square().sum() / 32, {}

    def step(params, batch):
        (loss, _), grads = value_and_grad(loss_fn)(params, batch)
        return grads, psum(loss, axes[axes.data])

    return step


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_it_is_the_loop(how):
    def loop(params, batch):
        x_BD = batch["x"]
        for w in unstack(params):
            x_BD = tiny.mlp(x_BD, w)
        return (x_BD - batch["y"]).square().sum() / 32

    params, batch = tiny.mlp_params(3), tiny.mlp_batch()
    (loss, _), wanted = value_and_grad(loop)(params, batch)
    grads, got = gradient(Mesh(), 3, **how)(params, batch)
    torch.testing.assert_close((grads, got), (wanted, loss), rtol=1e-12, atol=1e-14)


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "name"), each_value(MESHES[1:], HOW))
def test_on_a_mesh(mesh, name):
    how = HOW[name]
    layouts = layouts_on(mesh)
    rows = tree.map(lambda x: Layout(tuple(x.shape), x.dtype, mesh, (Axes(mesh).data,)), tiny.mlp_batch())
    raw = tree.map(lambda layout: raw_gradient_layout(layout, Axes(mesh).data), layouts)
    assert_parity(
        lambda m: gradient(m, **how), mesh, tiny.mlp_params(), tiny.mlp_batch(),
        layouts=(layouts, rows), out_layouts=(raw, None),
    )  # fmt: skip


def collectives(**how):
    mesh = Mesh(fsdp=2)
    params = tree.local(tiny.mlp_params(3), layouts_on(mesh, 3), rank=0)
    graph = trace(gradient(mesh, 3, **how), (params, tiny.mlp_batch(rows=2))).graph_module.graph
    found = [one.name for n in inline_layers(graph).nodes if (one := collective_of(n.target)) and one.sent]
    return collections.Counter(found)


def test_number_of_collectives():
    """A layer's weights are one gather, again for its backward, and one reduce-scatter."""
    assert collectives() == {"all_gather": 6, "reduce_scatter": 3, "psum": 1}
    assert collectives(reshard_after_forward=False) == {"all_gather": 3, "reduce_scatter": 3, "psum": 1}
    assert collectives(save=None) == {"all_gather": 3, "reduce_scatter": 3, "psum": 1}


def test_one_compiled_pair_however_many_layers():
    alive = []  # a pair that nothing uses any more is made anew

    def entries(count):
        layouts = layouts_on(Mesh(), count)

        def run(params, x):
            return layers(tiny.mlp, params, layouts, Axes(Mesh()))(x)

        alive.append(trace(run, (tiny.mlp_params(count), tiny.mlp_batch()["x"])))
        return [n.target for n in alive[-1].graph_module.graph.nodes if hasattr(n.target, "entry")]

    assert len(entries(3)) == 3 and len(set(entries(3))) == 1 and set(entries(2)) == set(entries(3))


def test_precision_decides_the_dtype_of_matrices():
    seen = {}

    def block(x, w):
        seen.update({name: leaf.dtype for name, leaf in w.items()})
        return x * w["norm"] + x @ w["a"].to(x.dtype)

    params = {"a": torch.ones(2, 4, 4), "norm": torch.ones(2, 4)}
    layouts = tree.map(lambda x: Layout(tuple(x.shape), x.dtype, Mesh()), params)
    for save in (None, "mincut"):
        layers(block, params, layouts, Axes(Mesh()), save, precision=Precision.bf16())(torch.ones(3, 4))
        assert seen == {"a": torch.bfloat16, "norm": torch.float32}


def test_errors():
    mesh, params = Mesh(fsdp=2), tiny.mlp_params()
    split = tree.map(lambda x: Layout(tuple(x.shape), x.dtype, mesh, ("fsdp",)), params)
    with pytest.raises(ValueError, match=r"^a: got f64\[2@fsdp.*, wanted a stack \[L, ...\] whose dim 0 is not split"):
        layers(tiny.mlp, params, split, Axes(mesh))
    with pytest.raises(ValueError, match="layers: .*got .*fsdp2.*wanted"):
        layers(tiny.mlp, params, layouts_on(mesh), Axes(Mesh(fsdp=4)))
    with pytest.raises(ValueError, match=r"unstack: got layers \(dim 0\) \{'a': 2, 'b': 3\}, wanted the same number"):
        unstack({"a": torch.ones(2, 4), "b": torch.ones(3, 4)})
    with pytest.raises(ValueError, match=r"unstack: 'b': got a tensor of shape \(\), wanted a stack of layers"):
        unstack({"a": torch.ones(2, 4), "b": torch.ones(())})
    with pytest.raises(ValueError, match=r"unstack: 'a/b': got 2, wanted a stack of layers"):
        unstack({"a": {"b": 2}})
    with pytest.raises(ValueError, match="layer_layout: got .*, wanted a stack"):
        layer_layout(split["a"])
    assert nn.gather_tree(unstack(params)[0], tree.map(layer_layout, layouts_on(Mesh())), Axes(Mesh())[()]) is not None

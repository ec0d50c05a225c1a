"""A layer makes and reduces gradients of what is trained alone: a frozen base costs no product and no byte of it."""

import pytest
import torch

from fmegatron import tree
from fmegatron.collectives import Axes
from fmegatron.collectives.kinds import collective_of
from fmegatron.layout import Layout, Mesh
from fmegatron.step import layers, trace, value_and_grad
from fmegatron.step.layer import compiled_layer
from fmegatron.step.opaque import inline_layers
from fmegatron.testing import simulate
from fmegatron.tree.structure import map_with_path
from tests.step.test_layers import HOW

FSDP2, L, D, R, B = Mesh(fsdp=2), 3, 16, 2, 8
ROWS = Layout((B, D), torch.float64, FSDP2, ("fsdp",))
SHAPES = {"base": {"w": (L, D, D)}, "pair": {"a": (L, D, R), "b": (L, R, D)}}


def block(x, w):
    """A matrix, and beside it two narrow ones."""
    return x + torch.tanh(x @ w["base"]["w"] + (x @ w["pair"]["a"]) @ w["pair"]["b"])


def layouts():
    return tree.map(lambda shape: Layout(shape, torch.float64, FSDP2, (None, "fsdp", None)), SHAPES, is_leaf=_is_shape)


def _is_shape(x):
    return isinstance(x, tuple)


def params():
    generator = torch.Generator().manual_seed(0)
    return tree.map(lambda s: 0.3 * torch.randn(s, generator=generator, dtype=torch.float64), SHAPES, is_leaf=_is_shape)


def gradients(names, **how):
    """step(params, x) -> gradients of the subtrees of these names."""
    axes = Axes(FSDP2)

    def loss_fn(trained, frozen, x):
        return layers(block, {**trained, **frozen}, layouts(), axes, **how)(x).square().sum(), {}

    def step(params, x):
        trained, frozen = ({k: v for k, v in params.items() if (k in names) == own} for own in (True, False))
        return value_and_grad(loss_fn)(trained, frozen, x)[1]

    return step


def cost(names, **how):
    """(multiply-adds of products with matrices, numbers that are reduced and scattered) of a rank."""
    local = tree.map(lambda layout: torch.empty(layout.local_shape(0), dtype=torch.float64), layouts())
    graph = trace(gradients(names, **how), (local, torch.empty(B // 2, D, dtype=torch.float64))).graph_module.graph
    products = reduced = 0
    for node in inline_layers(graph).nodes:
        if node.target is torch.ops.aten.mm.default:
            products += node.args[0].meta["val"].numel() * node.args[1].meta["val"].shape[1]
        found = collective_of(node.target)
        if found is not None and found.name == "reduce_scatter":
            reduced += sum(x.meta["val"].numel() for x in node.args[0])
    return products, reduced


@pytest.mark.long
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_a_frozen_base_costs_nothing_in_the_backward(how):
    (all_products, all_reduced), (products, reduced) = cost(("base", "pair"), **how), cost(("pair",), **how)
    assert all_reduced == L * (D * D + 2 * D * R) and reduced == L * 2 * D * R
    assert all_products - products == L * (B // 2) * D * D  # x^T g of each matrix


@pytest.mark.long
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_gradients_are_bitwise_those_of_a_step_that_trains_all(how):
    given = (params(), torch.randn(B, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    of_all, of_pairs = (
        simulate(
            gradients(n, **how), FSDP2, *given, layouts=(layouts(), ROWS), out_layouts={k: layouts()[k] for k in n}
        )
        for n in (("base", "pair"), ("pair",))
    )
    for path in ("pair/a", "pair/b"):
        assert torch.equal(of_all.gather(path), of_pairs.gather(path))


def test_each_set_of_trained_leaves_has_a_pair_of_its_own():
    """And a call without a gradient, as an evaluation has it, that of the training of all."""
    layer = compiled_layer("mincut")(block)
    w = tree.map(lambda t: t[0], params())
    x = torch.ones(2, D, dtype=torch.float64)
    layer(x, w)
    with torch.no_grad():
        layer(x, tree.map(lambda t: t.clone().requires_grad_(), w))
    assert len(layer.halves) == 1
    for path in ("base/w", "pair/a", "pair/b"):
        some = map_with_path(lambda p, t, path=path: t.clone().requires_grad_(p == path), w)
        (got,) = torch.autograd.grad(layer(x, some).sum(), [t for t in tree.leaves(some) if t.requires_grad])
        (wanted,) = torch.autograd.grad(block(x, some).sum(), [t for t in tree.leaves(some) if t.requires_grad])
        torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-14)
    assert len(layer.halves) == 4
    y = layer(x.clone().requires_grad_(), w)  # what lies before the layer is trained, nothing in it
    assert y.requires_grad and len(layer.halves) == 5

"""The loss without the logits of all tokens: it is the plain one on every mesh, and no buffer is as large as they."""

import pytest
import torch

from fmegatron import model, tree
from fmegatron.collectives import Axes
from fmegatron.layout import Mesh
from fmegatron.model.array_specs import init
from fmegatron.step import trace, value_and_grad
from fmegatron.step.opaque import inline_layers
from tests.model.families.test_families_sharded import assert_proven
from tests.model.test_reference import leaves_that_differ, make_batch, tiny
from tests.model.test_sharded import check, collectives
from tests.pairs import few

VARIANTS = {
    "plain": {},
    "z-loss, tied": {"z_loss": 1e-2, "tied": True},
    "soft cap": {"logit_softcap": 1.5, "z_loss": 1e-2},
    "sequence parallel": {"sequence_parallel": True},
}


def loss_and_gradients(of, batch):
    params = leaves_that_differ(init(of, Mesh(), key=3))
    f = value_and_grad(lambda p, b: model.loss(p, b, of, Axes(Mesh())), axes=Axes(Mesh()))
    (loss, metrics), grads = f(params, batch)
    return [loss, *metrics.values(), *tree.leaves(grads)]


@pytest.mark.parametrize("mask", [False, True], ids=["", "mask"])
@pytest.mark.parametrize("name", VARIANTS)
def test_it_is_the_plain_loss(name, mask):
    batch = make_batch(tiny(), mask=mask)
    plain, chunked = (loss_and_gradients(tiny(loss_chunks=n, **VARIANTS[name]), batch) for n in (1, 4))
    for a, b in zip(plain, chunked, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-11, atol=1e-13)


MESHES = [(name, mesh) for name in VARIANTS for mesh in (Mesh(tp=2), Mesh(fsdp=2, tp=2), Mesh(fsdp=2, cp=2))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), few(1, MESHES, [f"{name}-{mesh}" for name, mesh in MESHES]))
def test_on_a_mesh(name, mesh):
    of = tiny(loss_chunks=3, kv_heads=4, **VARIANTS[name])
    check(of, mesh, mask=True)
    assert_proven(of, mesh)


@pytest.mark.medium
def test_no_buffer_has_the_size_of_the_logits_and_no_collective_is_added():
    of, plain = (tiny(vocab_size=4096, loss_chunks=n, layers=1) for n in (8, 1))
    largest = []
    for one in (of, plain):
        layouts, axes = model.layouts(one, Mesh()), Axes(Mesh())
        f = value_and_grad(lambda p, b, one=one, of=layouts, axes=axes: model.loss(p, b, one, axes)[0])
        graph = inline_layers(trace(f, (init(one, Mesh(), 0), make_batch(one, 4))).graph_module.graph)
        shapes = [n.meta["val"].shape for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        largest.append(max(shape.numel() for shape in shapes if shape[-1:] == (4096,) and shape[:-1] != (32,)))
    assert largest == [4 * 12 * 4096 // 8, 4 * 12 * 4096]
    mesh = Mesh(tp=2)
    assert collectives(of, mesh) == collectives(plain, mesh)


def test_chunks_that_do_not_divide():
    of = tiny(loss_chunks=5)
    with pytest.raises(ValueError, match="chunks: got 5, wanted a divisor of the 36 tokens"):
        model.loss(init(of, Mesh(), 0), make_batch(of), of, Axes(Mesh()))

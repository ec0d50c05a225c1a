"""Muon in the decoder's own train step: fused QKV by parts, on any mesh proved and equal to one rank."""

import pytest

from fmegatron import model, optim, tree
from fmegatron.collectives import Axes, connect
from fmegatron.layout import Layout, Mesh
from fmegatron.model.array_specs import init
from fmegatron.optim.guard import Spike
from fmegatron.step import build_train_step, check, jit, state_specs
from fmegatron.testing import assert_parity
from tests.fresh_state import fresh_state
from tests.pairs import few
from tests.step import tiny

ONE = Mesh(dp=1, fsdp=1, tp=1)


def make_optimizer(share=()):
    """Muon that skips bad steps, with an embedding that learns slower and a frozen norm."""
    rules = [("embed", optim.Group(lr=0.3)), ("final_norm", optim.Group(frozen=True))]
    opt = optim.muon(optim.cosine(1e-2, 20), share=share, rules=rules)
    return optim.skip_nonfinite(opt, clip_norm=1.0, spike=Spike(), loss_scale=optim.LossScale())


def make_step(mesh, save=None, share=()):
    layouts, axes = model.layouts(tiny.CONFIG, mesh), Axes(mesh)

    def loss_fn(params, batch):
        return model.loss(params, batch, tiny.CONFIG, axes, save)

    return build_train_step(loss_fn, make_optimizer(share), layouts, axes, clip_norm=None)


def layouts_on(mesh):
    batch = tree.map(lambda x: Layout(x.shape, x.dtype, mesh, (("dp", "fsdp"),)), tiny.decoder_batch(rows=8))
    return tree.layouts(state_specs(model.specs(tiny.CONFIG, mesh), make_optimizer())), batch


CASES = [
    (Mesh(dp=2, fsdp=2, tp=2), ("dp",)),
    (Mesh(dp=2, fsdp=2, tp=2), ()),
    (Mesh(dp=1, fsdp=4, tp=2), ()),
    (Mesh(dp=4, fsdp=1, tp=2), ("dp",)),
]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("mesh, share", few(1, CASES, map(str, CASES)))
def test_a_mesh_trains_as_one_rank(mesh, share):
    state = fresh_state(init(tiny.CONFIG, ONE, key=0), make_optimizer())
    assert_parity(
        lambda m: make_step(m, share=share), mesh, state, lambda i: tiny.decoder_batch(rows=8, seed=i),
        layouts=layouts_on(mesh), steps=3,
    )  # fmt: skip


LAYERS = {"plain": None, "compiled-layer": "inputs"}


@pytest.mark.medium
@pytest.mark.parametrize("layer", few(1, [(layer,) for layer in LAYERS.values()], LAYERS))
def test_check_proves_it(layer):
    mesh = Mesh(dp=2, fsdp=2, tp=2)
    report = check(make_step(mesh, layer, share=("dp",)), *layouts_on(mesh))
    assert not report.findings and not report.unproven, str(report)


def trained(rank, mesh, backend):
    """Losses of three donated steps, and what is in the state for metrics, on a real rank."""
    with connect(mesh) as world:
        step = jit(make_step(mesh, share=("dp",)), donate=0, world=world, backend=backend)
        state = fresh_state(init(tiny.CONFIG, mesh, key=0, rank=rank), make_optimizer())
        losses = []
        for i in range(3):
            state, metrics = step(state, tiny.decoder_batch(rows=8, seed=i, mesh=mesh, rank=rank))
            losses += [metrics["loss"].item(), metrics["grad_norm"].item(), state.opt["norm"].item()]
        return losses


@pytest.mark.slow  # starting the pool of ranks alone takes 10 s and more
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_real_ranks_train_as_one_rank(ranks, backend):
    """Four gloo ranks, the collectives of the dealt matrices included; a frozen leaf in a donated state."""
    found = ranks.run(trained, Mesh(dp=1, fsdp=2, tp=2), backend, ranks=4)
    assert all(other == found[0] for other in found)
    assert found[0] == pytest.approx(trained(0, ONE, "eager"), rel=1e-10)

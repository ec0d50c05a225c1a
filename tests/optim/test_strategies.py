"""Optimizers that look at matrices, in the decoder's train step under every strategy: proved, and equal to one rank."""

import functools

import pytest

from fmegatron import model, optim, tree
from fmegatron.collectives import Axes
from fmegatron.layout import Layout, Mesh
from fmegatron.model.array_specs import init
from fmegatron.optim import contrib
from fmegatron.step import build_train_step, check, state_specs
from fmegatron.testing import assert_parity
from tests.fresh_state import fresh_state
from tests.pairs import few, mixed
from tests.step import tiny
from tests.step.strategies import STRATEGIES

ONE, MESH = Mesh(dp=1, fsdp=1, tp=1), Mesh(dp=2, fsdp=2, tp=2)
MAKE = {
    "muon": functools.partial(optim.muon, 1e-2),
    "muon-heads-shared": functools.partial(optim.muon, 1e-2, parts=[("wqkv", 8)], share=("dp", "fsdp")),
    "soap": functools.partial(
        contrib.soap, 1e-2, eps=1e-3
    ),  # what hardly has a gradient is rounding, which is not scaled
    "adafactor": functools.partial(contrib.adafactor, 1e-2),
}
# SOAP's bases of what no gradient has reached stand on a ridge of a millionth: other roundings count that much more.
TOLERANCE = {MAKE["soap"]: 1e-6}


def make_step(make, strategy, mesh):
    """(train step, layouts of the state)."""
    specs, axes = model.specs(tiny.CONFIG, mesh, strategy=strategy), Axes(mesh)
    layouts = tree.layouts(specs)
    opt = make()

    def loss_fn(params, batch):
        return model.loss(params, batch, tiny.CONFIG, axes)

    step = build_train_step(loss_fn, opt, layouts, axes, strategy=strategy)
    return step, tree.layouts(state_specs(specs, opt, strategy)), opt


def batch_on(mesh):
    return tree.map(lambda x: Layout(x.shape, x.dtype, mesh, (("dp", "fsdp"),)), tiny.decoder_batch(rows=8))


CASES = mixed(MAKE, STRATEGIES)


@pytest.mark.medium
@pytest.mark.parametrize(("name", "strategy"), few(2, CASES, map("-".join, CASES)))
def test_check_proves_it(name, strategy):
    make, strategy = MAKE[name], STRATEGIES[strategy]
    step, state_layouts, _ = make_step(make, strategy, MESH)
    report = check(step, state_layouts, batch_on(MESH))
    assert not report.findings and not report.unproven, str(report)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("name", "strategy"), few(1, CASES, map("-".join, CASES)))
def test_ranks_train_as_one(name, strategy):
    make, strategy = MAKE[name], STRATEGIES[strategy]
    state = fresh_state(init(tiny.CONFIG, ONE, key=0), make_step(make, strategy, ONE)[2])
    assert_parity(
        lambda mesh: make_step(make, strategy, mesh)[0], MESH, state, lambda i: tiny.decoder_batch(rows=8, seed=i),
        layouts=(make_step(make, strategy, MESH)[1], batch_on(MESH)), steps=3, tolerance=TOLERANCE.get(make, 1e-10),
    )  # fmt: skip

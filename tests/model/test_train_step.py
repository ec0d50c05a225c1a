"""Three AdamW steps of the whole model on simulated ranks equal one rank: state, loss, grad_norm; fp64, 1e-10.

Without an active clip too, and with grad_norm compared: a clip and Adam both hide a wrong scale of the gradients.
"""

import dataclasses

import pytest

from fmegatron import model, optim, tree
from fmegatron.collectives import Axes
from fmegatron.layout import DataParallel, Mesh
from fmegatron.model.array_specs import init
from fmegatron.step import build_train_step, state_specs
from fmegatron.testing import assert_parity
from tests.fresh_state import fresh_state
from tests.model.test_reference import leaves_that_differ, make_batch
from tests.model.test_sharded import CONFIG, MESHES
from tests.pairs import few, mixed


def check(config, mesh, clip_norm, save=None, microbatches=1):
    optimizer = optim.adamw(learning_rate=1e-2)

    def make_step(mesh):
        layouts, axes = model.layouts(config, mesh), Axes(mesh)

        def loss_fn(params, batch):
            return model.loss(params, batch, config, axes, save)

        return build_train_step(loss_fn, optimizer, layouts, axes, clip_norm=clip_norm, microbatches=microbatches)

    state = fresh_state(leaves_that_differ(init(config, Mesh(), key=3)), optimizer)
    specs = state_specs(model.specs(config, mesh), optimizer)
    batch = make_batch(config, batch_size=8)
    rows = tree.map(lambda x: DataParallel().batch_layout(x.shape, x.dtype, mesh, microbatches), batch)
    layouts = (tree.layouts(specs), rows)
    result = assert_parity(
        make_step, mesh, state, lambda i: make_batch(config, batch_size=8, seed=i),
        layouts=layouts, out_layouts=(layouts[0], None), steps=3,
    )  # fmt: skip
    assert {"loss", "grad_norm"} <= set(result.sharded.metrics)


CASES = mixed(MESHES, [0.01, None])
EVERYTHING = [Mesh(fsdp=2, tp=2), Mesh(dp=2, fsdp=2, tp=2)]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "clip_norm"), few(2, CASES, map(str, CASES)))
def test_steps(mesh, clip_norm):
    check(dataclasses.replace(CONFIG, tied=mesh.size == 8, z_loss=1e-3), mesh, clip_norm)


@pytest.mark.medium
@pytest.mark.parametrize("mesh", few(1, [(mesh,) for mesh in EVERYTHING], map(str, EVERYTHING)))
def test_steps_with_everything(mesh):
    """Sequence parallelism, layers compiled once that recompute, and microbatches, together."""
    config = dataclasses.replace(CONFIG, sequence_parallel=True, z_loss=1e-3)
    check(config, mesh, 0.01, "inputs", microbatches=2)

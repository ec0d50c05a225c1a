"""A pipeline on real ranks, compiled: a step of stages, whose checkpoint is restored without pp."""

import pytest
import torch

from fmegatron import checkpoint, step, tree
from fmegatron.collectives import connect
from fmegatron.layout import Layout, Mesh
from fmegatron.step import Pipeline, pipelined
from fmegatron.step.pipeline import schedules
from fmegatron.testing import split
from tests.step.pipeline import hand

F64 = torch.float64
PIPELINES = {
    "1f1b": Pipeline(schedules.one_f_one_b(2, 4), (2, 2)),
    "zero bubble": Pipeline(schedules.zb_h1(2, 4), (2, 2)),
    "pairs": Pipeline(schedules.dualpipe_v(2, 4), (1, 1, 1, 1)),
}


def on_ranks(rank: int, schedule: str, backend: str, folder: str):
    """Two steps and a checkpoint: (metrics of each, whether the check found nothing)."""
    mesh = Mesh(pp=2)
    world, params, batch = connect(mesh), hand.params_of(4), hand.batch_of(8)
    pipeline = PIPELINES[schedule]
    layouts = hand.state_layouts(hand.layouts_of(params, mesh, pipeline.split(mesh, 4)))
    own = split(hand.whole_state(params), layouts, mesh)[rank]
    state = tree.place(tree.map(torch.clone, own), layouts)
    given = tree.place(batch, tree.map(lambda x: Layout(tuple(x.shape), x.dtype, mesh), batch))
    grad_fn = pipelined(hand.loss_fn, pipeline, dtype=F64)
    jitted = step.jit(hand.train_step_of(grad_fn), donate=0, world=world, backend=backend)
    found = []
    for _ in range(2):
        state, metrics = jitted(state, given)
        found.append({name: x.item() for name, x in metrics.items()})
    with checkpoint.Manager(folder, world=world) as manager:
        manager.save(2, state)
    (compiled,) = jitted.cache.values()
    return found, compiled.report.ok


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "backend"), [("1f1b", "eager"), ("zero bubble", "inductor"), ("pairs", "inductor")]
)
def test_two_ranks_are_one(ranks, tmp_path, schedule, backend):
    found = ranks.run(on_ranks, schedule, backend, str(tmp_path), ranks=2)
    params = hand.params_of(4)
    one = hand.layouts_of(params, Mesh(), None)
    state, metrics = hand.steps(step.accumulate(hand.loss_fn, 4, dtype=F64), params, one, hand.batch_of(8))
    for of_rank, ok in found:
        assert ok and hand.worst(metrics, tree.map(lambda x: torch.tensor(x, dtype=F64), of_rank))[0] <= 1e-12
    with checkpoint.Manager(str(tmp_path)) as manager:
        restored = manager.restore_latest(hand.state_layouts(one))
    restored = restored[1] if isinstance(restored, tuple) else restored
    error, path = hand.worst(state, restored)
    assert error <= 1e-12, path

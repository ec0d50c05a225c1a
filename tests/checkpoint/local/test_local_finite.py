"""Local replicas of steps that were not finite are not made, and such global checkpoints are the last resort."""

import os
import shutil

import pytest
import torch

from fmegatron.checkpoint import LocalReplicas, Manager
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import run
from tests.checkpoint.tokens import files_of

LAYOUTS = {"w": Layout((4,), torch.float32, Mesh())}
TWO = {"w": Layout((4,), torch.float32, Mesh(fsdp=2), ("fsdp",))}


def state(value):
    return {"w": torch.full((4,), float(value))}


@pytest.mark.parametrize("way", ["save", "save_async"])
def test_nothing_is_given_up_for_a_step_that_is_not_finite(tmp_path, way):
    local = LocalReplicas(tmp_path, "run", copies=1, keep=1)
    local.save(1, state(1), LAYOUTS, finite=True)
    with pytest.warns(
        RuntimeWarning, match="replicas of step 2 were not stored: its loss or gradient norm is not finite"
    ):
        handle = getattr(local, way)(2, state(2), LAYOUTS, finite=False)
    if way == "save_async":
        assert handle.poll()
        handle.result()
    assert local.steps() == [1] and len(os.listdir(tmp_path / "run")) == 1
    local.save(3, state(3), LAYOUTS)
    assert local.steps() == [3] and local.restore_latest(LAYOUTS)[0] == 3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_one_rank_speaks_for_all(tmp_path):
    def of(rank, world=None):
        return LocalReplicas(tmp_path / str(rank), "run", world, copies=2, spacing=1)

    def save(world, step, said):
        of(world.rank, world).save(step, {"w": torch.full((2,), float(step))}, TWO, finite=said[world.rank])

    assert run(2, lambda world: save(world, 1, (True, True))) == [None, None]
    assert run(2, lambda world: save(world, 2, (None, False))) == [None, None]
    assert [of(rank).steps() for rank in range(2)] == [[1], [1]]


def test_global_ones_that_are_not_finite_come_last(tmp_path):
    local, manager = LocalReplicas(tmp_path / "ram", "run", copies=1), Manager(tmp_path / "global")
    for step, finite in ((1, True), (2, None), (5, False)):
        manager.save(step, state(step), LAYOUTS, finite=finite)
    local.save(4, state(4), LAYOUTS)
    told = "loss or gradient norm was not finite are tried last: steps 5"
    with pytest.warns(RuntimeWarning, match=told):
        assert local.restore_latest(LAYOUTS, fallback=manager)[0] == 4
    with pytest.warns(RuntimeWarning, match="steps 5 were set aside"):
        manager.save(5, state(9), LAYOUTS)  # the run went on from 4: what is newer is left behind
    assert manager.restore(5, LAYOUTS)[0]["w"][0] == 9
    manager.save(6, state(6), LAYOUTS, finite=False)
    for name in os.listdir(tmp_path / "ram/run"):
        shutil.rmtree(tmp_path / "ram/run" / name)
    with pytest.warns(RuntimeWarning, match="tried last: steps 6"):
        assert local.restore_latest(LAYOUTS, fallback=manager)[0] == 5
    for step in (1, 2, 5):
        manager.delete(step)
    with pytest.warns(RuntimeWarning, match="tried last: steps 6"):
        assert local.restore_latest(LAYOUTS, fallback=manager)[0] == 6


def test_a_local_step_that_is_older_than_a_damaged_global_one(tmp_path):
    """The run goes on from 3 and saves 4; nobody has to say that the damaged 5 is left behind."""
    local, manager = LocalReplicas(tmp_path / "ram", "run", copies=1), Manager(tmp_path / "global")
    manager.save(5, state(5), LAYOUTS)
    (files_of(tmp_path / "global/step_00000005") / "manifest.json").write_text("{}")
    local.save(3, state(3), LAYOUTS)
    with pytest.warns(RuntimeWarning, match="skipped the global checkpoint of step 5"):
        assert local.restore_latest(LAYOUTS, fallback=manager)[0] == 3
    with pytest.warns(RuntimeWarning, match="steps 5 were set aside"):
        manager.save(4, state(4), LAYOUTS)
    assert manager.steps() == [4]

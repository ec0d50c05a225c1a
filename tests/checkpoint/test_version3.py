"""Checkpoints that the commit before shards wrote (version3.zip): read, verified, saved again, deleted, in place."""

import json
import os

import pytest

from fmegatron import checkpoint
from fmegatron.checkpoint import Manager
from fmegatron.checkpoint.tools.verification import verify
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, save_all
from tests.checkpoint.tokens import files_of
from tests.checkpoint.version1 import MESHES, layouts_on, state
from tests.checkpoint.version3 import of_step, unpacked

pytestmark = pytest.mark.slow


@pytest.fixture
def old(tmp_path):
    return unpacked(tmp_path)


@pytest.mark.parametrize("name", [*MESHES, "tiny"])
def test_restores_on_every_mesh(old, name):
    assert json.loads((old[name] / "COMPLETE").read_text())["version"] == 3
    assert checkpoint.describe(old[name]).version == 3 and verify(old[name]).damages == ()
    for mesh in MESHES.values():
        layouts = layouts_on(mesh)
        for rank, wanted in enumerate(cut_tree(state(), layouts)):
            for verified in (True, False):
                got = checkpoint.restore(old[name], layouts, rank=rank, verify=verified)
                assert_same_bits(got, wanted, name)
    assert checkpoint.metadata(old[name]) == {"v": 3}


@pytest.mark.parametrize("name", [*MESHES, "tiny"])
def test_is_saved_again_in_place(old, name):
    """Now of version 4, below a token; of the files of version 3 nothing is left."""
    mesh = MESHES["uneven"]
    assert save_all(old[name], state(), layouts_on(mesh), metadata={"v": 4}) == [None] * mesh.size
    assert checkpoint.describe(old[name]).version == 4 and verify(old[name]).damages == ()
    assert_same_bits(checkpoint.restore(old[name], layouts_on(MESHES["one"])), state())
    assert sorted(os.listdir(old[name])) == sorted(["COMPLETE", "arrays", files_of(old[name]).name])


def test_a_run_goes_on(old):
    """Its steps are listed and restored, older ones go, the one that was set aside stays."""
    run, aside = old["run"], next(old["run"].glob(".step_*.aside-*"))
    manager = Manager(run, keep=2)
    assert manager.steps() == [1, 2, 3] and verify(run / "step_00000003").damages == ()
    for step in (1, 2, 3):
        assert_same_bits(checkpoint.restore(run / f"step_{step:08d}"), of_step(step))
    step, got, *_ = manager.restore_latest()
    assert step == 3
    assert_same_bits(got, of_step(3))
    manager.save(4, of_step(4))
    assert manager.steps() == [3, 4]
    manager.save(5, of_step(5))
    assert manager.steps() == [4, 5]
    manager.close()  # what goes is gone
    assert sorted(os.listdir(run)) == [aside.name, "latest", "step_00000004", "step_00000005"]
    assert_same_bits(manager.restore_latest()[1], of_step(5))


def test_a_step_is_set_aside_in_place(old):
    """A run that goes on from step 2 saves its own step 3."""
    manager = Manager(old["run"], keep=9)
    manager.restore(2)
    with pytest.warns(RuntimeWarning, match="steps 3 were set aside"):
        manager.save(3, of_step(7))
    assert manager.steps() == [1, 2, 3]
    assert_same_bits(checkpoint.restore(old["run"] / "step_00000003"), of_step(7))

"""A folder whose name says another step than it holds (cp, mv) is no step: not resumed, not deleted, in no way."""

import json
import re
import shutil
import warnings

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.tools.ls import listing
from fmegatron.checkpoint.tools.verification import verify
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import run
from tests.checkpoint.tokens import files_of


def state(step):
    return {"w": torch.full((8, 8), float(step))}


def unsaid(path):
    """As a checkpoint from before 2026-11-27: neither pointer nor marker repeats the step."""
    for at in (files_of(path) / "COMPLETE", path / "COMPLETE"):
        marker = json.loads(at.read_text())
        del marker["step"]
        at.write_text(json.dumps(marker))


@pytest.fixture(params=["copied", "moved"])
def run_of_two(tmp_path, request):
    with checkpoint.Manager(tmp_path, keep=None) as manager:
        manager.save(5, state(5))
        manager.save(6, state(6))
    if request.param == "copied":
        shutil.copytree(tmp_path / "step_00000005", tmp_path / "step_00000020")
    else:
        (tmp_path / "step_00000005").rename(tmp_path / "step_00000020")
    return tmp_path


def test_it_is_no_step(run_of_two):
    at = run_of_two
    moved = not (at / "step_00000005").exists()
    fix = rf"mv {at}/step_00000020 {at}/step_00000005$" if moved else rf"mv {at}/step_00000020 {at}/step_00000020.copy"
    manager = checkpoint.Manager(at)
    assert manager.steps() == ([6] if moved else [5, 6])
    with pytest.warns(RuntimeWarning, match=f"skipped {at}/step_00000020: it holds step 5, and not 20; {fix}"):
        step, got, _ = manager.restore_latest()
    assert step == 6 and got["w"][0, 0] == 6
    with pytest.raises(checkpoint.CheckpointError, match="got a checkpoint of step 5.*wanted one of step 20; mv"):
        manager.restore(20)
    assert checkpoint.restore(at / "step_00000020")["w"][0, 0] == 5
    (problem,) = [c.problem for c in listing(at).checkpoints if c.name == "step_00000020"]
    assert re.match(f"holds step 5, and not 20; {fix}", problem)
    with pytest.raises(ValueError, match=r"Manager\.delete: got step 20, whose folder holds step 5"):
        manager.delete(20)


def test_it_is_in_no_saves_way_and_stays(run_of_two):
    with checkpoint.Manager(run_of_two, keep=checkpoint.Keep(last=1)) as manager:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            manager.save(7, state(7))
            manager.save(8, state(8))
        assert manager.steps() == [8] and checkpoint.restore(run_of_two / "step_00000020")["w"][0, 0] == 5
        with pytest.warns(RuntimeWarning, match=r"step_00000020: held step 5, and not 20, so it was set aside: "):
            manager.save(20, state(20))
        assert manager.restore(20)[0]["w"][0, 0] == 20
    (aside,) = [left for left in listing(run_of_two).leftovers if left.kind == "aside"]
    assert checkpoint.restore(aside.path)["w"][0, 0] == 5


def test_moved_as_the_message_says(run_of_two):
    (run_of_two / "step_00000020").rename(run_of_two / "step_00000005.copy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.Manager(run_of_two).restore_latest()[0] == 6


def test_one_whose_marker_does_not_say_it(run_of_two):
    """Then the first bytes of its manifest do: it is no step either, and no save deletes it."""
    unsaid(run_of_two / "step_00000020")
    assert not verify(run_of_two / "step_00000020").damages
    manager = checkpoint.Manager(run_of_two, keep=1)
    assert manager.steps()[-1] == 6
    with pytest.warns(RuntimeWarning, match="it holds step 5, and not 20"):
        assert manager.restore_latest()[0] == 6
    with pytest.raises(checkpoint.CheckpointError, match="got a checkpoint of step 5"):
        manager.restore(20)
    with pytest.warns(RuntimeWarning, match=r"step_00000020: held step 5, and not 20, so it was set aside: "):
        manager.save(20, state(20))
    manager.save(21, state(21))
    manager.close()
    (aside,) = [left for left in listing(run_of_two).leftovers if left.kind == "aside"]
    assert manager.steps() == [21] and checkpoint.restore(aside.path)["w"][0, 0] == 5


def test_all_ranks_hear_of_it(run_of_two):
    layouts = {"w": Layout((8, 8), torch.float32, Mesh(dp=2), ("dp",))}

    def work(world):
        step = checkpoint.Manager(run_of_two, world=world).restore_latest(layouts)[0]
        try:
            checkpoint.Manager(run_of_two, world=world).restore(20, layouts)
        except (checkpoint.CheckpointError, RuntimeError) as error:
            return step, str(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(2, work)
    assert all(isinstance(one, tuple) and one[0] == 6 and "got a checkpoint of step 5" in one[1] for one in found), (
        found
    )


def test_steps_of_a_save_without_a_step_are_their_names(tmp_path):
    """`checkpoint.save` to such a path, without step=: nothing says another."""
    checkpoint.save(tmp_path / "step_00000003", state(3))
    manager = checkpoint.Manager(tmp_path)
    assert manager.steps() == [3] and manager.restore_latest()[0] == 3 and manager.restore(3)[0]["w"][0, 0] == 3
    assert [c.problem for c in listing(tmp_path).checkpoints] == [None]


def test_a_folder_of_misnamed_ones_is_no_new_start_in_silence(tmp_path):
    checkpoint.save(tmp_path / "step_00000020", state(5), step=5)
    with pytest.warns(RuntimeWarning, match="begins anew; but there is: .*step_00000020: it holds step 5.*; mv "):
        assert checkpoint.Manager(tmp_path).latest() is None


def test_a_store_of_objects():
    store = open_store("memory://run", {})
    checkpoint.save(store.child("step_00000009"), state(4), step=4)
    with checkpoint.Manager(store) as manager:
        manager.save(5, state(5))
        assert manager.steps() == [5]
        with pytest.warns(RuntimeWarning, match="it holds step 4, and not 9; move its objects to"):
            assert manager.restore_latest()[0] == 5
        wrong, right = [c.problem for c in listing(store).checkpoints]
        assert wrong.startswith("holds step 4, and not 9; move its objects to ") and right is None


def test_a_place_in_a_store_of_objects_is_looked_at_again():
    """What is saved where a misnamed one was is a step at once; and the other way round."""
    store = open_store("memory://run", {})
    checkpoint.save(store.child("step_00000009"), state(4), step=4)
    with checkpoint.Manager(store) as manager:
        manager.save(5, state(5))
        assert manager.steps() == [5]
        with pytest.warns(RuntimeWarning, match="step_00000009: held step 4, and not 9, so it was set aside"):
            manager.save(9, state(9))
        assert manager.steps() == [5, 9] and manager.restore_latest()[0] == 9
        checkpoint.save(store.child("step_00000009"), state(4), step=4)
        assert manager.steps() == [5]

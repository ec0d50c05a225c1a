"""Steps only go up: a save below the newest is refused, and a run that goes back sets aside what it leaves behind."""

import os
import re
import threading
import time
import warnings

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint import Keep, Manager
from fmegatron.checkpoint.files import leases
from fmegatron.checkpoint.files.notes import Notes
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.manage import line
from fmegatron.checkpoint.manage.tracker import read_latest
from fmegatron.checkpoint.tools.gc import collect
from fmegatron.checkpoint.tools.ls import listing
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run
from tests.checkpoint.test_manager import ONE, TWO, spoil, state
from tests.checkpoint.tokens import files_of, plain


def filled(directory, *steps, **options):
    with Manager(directory) as manager:
        for step in steps:
            manager.save(step, state(step), ONE, metadata={"line": 1}, **options)
    return manager


@pytest.fixture(params=["folder", "memory"])
def place(request, tmp_path):
    return tmp_path / "run" if request.param == "folder" else open_store("memory://runs/line", {})


def asides(place):
    return sorted(left.of for left in listing(place).leftovers if left.kind == "aside")


def test_the_abandoned_step_is_not_resumed(place):
    """The issue's case: restore(200), saves 250 and 260 with keep=2; 260 is resumed, not the 300 that was given up."""
    filled(place, 100, 200, 300)
    with Manager(place, keep=2) as manager:
        got, _ = manager.restore(200, ONE)
        assert_same_bits(got, state(200))
        assert manager.steps() == [100, 200, 300]  # who only reads changes nothing
        with pytest.warns(RuntimeWarning, match="training went on from an older step, so steps 300 were set aside: "):
            manager.save(250, state(250), ONE)
        assert manager.steps() == [200, 250] and manager.latest() == 250
        manager.save(260, state(260), ONE)
        assert manager.steps() == [250, 260]
        step, got, _ = Manager(place).restore_latest(ONE)
        assert step == 260
        assert_same_bits(got, state(260))
        assert read_latest(place).step == 260
    assert asides(place) == ["step_00000300"]
    # Later runs, and their clean-up, leave it alone too, until gc.
    with Manager(place, keep=2) as manager:
        assert manager.restore_latest(ONE)[0] == 260
        manager.save(300, state(7), ONE)  # the new line gets there, and may be saved again
        manager.save(300, state(8), ONE)
    assert asides(place) == ["step_00000300"] and Manager(place).steps() == [260, 300]
    (left,) = listing(place).leftovers
    if isinstance(place, os.PathLike):
        assert_same_bits(checkpoint.restore(left.path, ONE), state(300))  # nothing is lost
        assert {a.kind for a in collect(place).actions} == {"keep"}  # it is young
    removed = collect(place, age=0.0)
    assert [(a.kind, a.path) for a in removed.actions] == [("remove", left.path)]
    assert listing(place).leftovers == () and Manager(place).steps() == [260, 300]
    assert_same_bits(Manager(place).restore(300, ONE)[0], state(8))


@pytest.fixture(scope="module")
def saver():
    with checkpoint.AsyncSaver() as saver:
        yield saver


@pytest.mark.long
@pytest.mark.parametrize("wait", [True, False])
def test_a_step_below_the_newest_is_refused(tmp_path, saver, wait):
    filled(tmp_path, 100, 300)
    before = sorted(os.listdir(tmp_path))
    with Manager(tmp_path, keep=1, saver=saver) as manager:
        for step in (299, 100, 1):
            with pytest.raises(
                ValueError, match=r"wanted one above the newest: it holds newer ones \((100, )?300|rewind"
            ):
                manager.save(step, state(step), ONE, wait=wait)
        assert sorted(os.listdir(tmp_path)) == before
        manager.save(300, state(1), ONE, wait=wait)  # the newest may be saved again
        manager.save(301, state(2), ONE, wait=wait)
    assert manager.steps() == [301]


def test_all_ranks_hear_of_it(tmp_path):
    filled(tmp_path, 100)
    parts = cut_tree(state(50), TWO)
    got = run(2, lambda world: Manager(tmp_path, world=world).save(50, parts[world.rank], TWO))
    assert isinstance(got[0], ValueError) and isinstance(got[1], RuntimeError)
    assert all("holds newer ones (100)" in str(error) for error in got)

    def back(world):
        mine = Manager(tmp_path, world=world)
        mine.rewind(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return mine.save(50, parts[world.rank], TWO).step

    assert run(2, back) == [50, 50] and Manager(tmp_path).steps() == [50]


def test_a_fresh_run_says_so(tmp_path):
    """Nothing was restored: a second training in an old folder is refused at its first save, or starts a new line."""
    filled(tmp_path, 10, 20)
    with Manager(tmp_path) as manager:
        with pytest.raises(ValueError, match="Or save into another directory"):
            manager.save(5, state(5), ONE)
        manager.rewind(0)
        with pytest.warns(RuntimeWarning, match="steps 10, 20 were set aside"):
            manager.save(5, state(5), ONE)
        assert manager.steps() == [5]


def test_past_a_damaged_step(tmp_path):
    """Nobody has to say anything: what restore_latest has skipped does not stop the run hours later."""
    manager = filled(tmp_path, 10, 20, 30)
    spoil(manager, 30)
    spoil(manager, 20)
    with Manager(tmp_path) as manager:
        with pytest.warns(RuntimeWarning, match="skipped"):
            assert manager.restore_latest(ONE)[0] == 10
        with pytest.warns(RuntimeWarning, match="steps 20, 30 were set aside"):
            manager.save(15, state(15), ONE)
        assert manager.steps() == [10, 15]


@pytest.mark.parametrize("first", [250, 300, 350])
def test_the_whole_old_line_goes(tmp_path, first):
    """Also what is below the first save of the new line, or has its number: else damage to it would bring back 250."""
    filled(tmp_path, 200, 250, 300)
    with Manager(tmp_path) as manager:
        manager.restore(200, ONE)
        with pytest.warns(RuntimeWarning, match="steps 250, 300 were set aside"):
            manager.save(first, state(first), ONE)
        assert manager.steps() == [200, first]


def test_to_look_at_an_old_step_is_not_to_go_back(tmp_path):
    """An evaluation in a running job, by the run's own Manager; and by the function that is for it."""
    with Manager(tmp_path) as manager:
        for step in (100, 200, 300):
            manager.save(step, state(step), ONE)
        manager.restore(100, ONE)
        manager.save(400, state(400), ONE)
        assert manager.steps() == [100, 200, 300, 400]
        checkpoint.restore(manager.path(100), ONE)
        with pytest.raises(ValueError, match="newer ones"):
            manager.save(350, state(350), ONE)


def test_back_in_a_running_job(tmp_path):
    """A spike: the job restores an older step of its own and goes on."""
    with Manager(tmp_path) as manager:
        for step in (100, 200, 300):
            manager.save(step, state(step), ONE)
        manager.restore(200, ONE)
        with pytest.warns(RuntimeWarning, match="steps 300 were set aside"):
            manager.save(300, state(9), ONE)
        assert manager.steps() == [100, 200, 300]
        assert_same_bits(manager.restore(300, ONE)[0], state(9))


def test_another_run_saves_here(tmp_path):
    """What came after we restored is not ours to set aside."""
    filled(tmp_path, 100, 200)
    with Manager(tmp_path) as manager:
        manager.restore_latest(ONE)
        filled(tmp_path, 290)
        with pytest.raises(ValueError, match=r"newer ones \(290, saved after step 200 was restored: does another run"):
            manager.save(250, state(250), ONE)


# ---- saves in the background


@pytest.mark.long
def test_back_while_a_save_is_pending(tmp_path, saver):
    """The abandoned 300 is not on the disk yet when the run goes back: it is not allowed to come later."""
    with Manager(tmp_path, saver=saver) as manager:
        manager.save(100, state(100), ONE)
        manager.save(200, state(200), ONE)
        manager.save(300, state(300), ONE, wait=False)
        manager.restore(200, ONE)
        with pytest.warns(RuntimeWarning, match="steps 300 were set aside"):
            manager.save(250, state(250), ONE, wait=False)
    assert manager.steps() == [100, 200, 250] and asides(tmp_path) == ["step_00000300"]


def test_a_pending_save_is_the_newest(tmp_path, saver):
    with Manager(tmp_path, saver=saver) as manager:
        manager.save(300, state(300), ONE, wait=False)
        with pytest.raises(
            ValueError, match=r"got step 250 to save, wanted one above the newest: it holds newer ones \(300\)"
        ):
            manager.save(250, state(250), ONE, wait=False)
        manager.save(310, state(310), ONE, wait=False)
    assert manager.steps() == [300, 310]


def test_retention_on_two_lines(tmp_path):
    filled(tmp_path, *range(10, 60, 10))
    with Manager(tmp_path, keep=Keep(last=1, every=20)) as manager:
        manager.restore(20, ONE)
        with pytest.warns(RuntimeWarning, match="steps 30, 40, 50 were set aside"):
            manager.save(25, state(25), ONE)
        manager.save(40, state(41), ONE)
        manager.save(45, state(45), ONE)
    assert manager.steps() == [20, 40, 45]
    assert_same_bits(manager.restore(40, ONE)[0], state(41))


# ---- readers, pins, deletion


def test_a_step_that_is_read_is_waited_for(tmp_path, monkeypatch):
    filled(tmp_path, 100, 200)
    monkeypatch.setattr(line, "_READERS_S", 0.2)
    with Manager(tmp_path) as manager:
        manager.rewind(100)
        with leases.reading(Notes(tmp_path), "step_00000200"):
            with pytest.raises(
                ValueError, match=rf"in use \(process {os.getpid()} on .* reads it\), wanted one to set aside"
            ):
                manager.save(150, state(150), ONE)
            assert manager.steps() == [100, 200]
            monkeypatch.setattr(line, "_READERS_S", 60.0)
            done = []

            def save():
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    done.append(manager.save(150, state(150), ONE))

            thread = threading.Thread(target=save)
            thread.start()
            time.sleep(0.3)
            assert not done
        thread.join()
        assert done and manager.steps() == [100, 150]


def test_a_pin_holds_back_gc(tmp_path):
    manager = filled(tmp_path, 100, 200)
    manager.pin(200)
    manager.rewind(100)
    with pytest.warns(RuntimeWarning, match="steps 200 were set aside"):
        manager.save(150, state(150), ONE)
    assert [a.kind for a in collect(tmp_path, age=0.0).actions] == ["keep"]
    manager.unpin(200)
    assert [a.kind for a in collect(tmp_path, age=0.0).actions] == ["remove"]


def test_a_pin_is_of_the_save_and_not_of_its_number(place):
    """After a rewind the new step 2 has none, and the old one keeps its own."""
    filled(place, 1, 2)
    with Manager(place, keep=1) as manager:
        manager.pin(2)
        manager.rewind(1)
        with pytest.warns(RuntimeWarning, match="steps 2 were set aside"):
            manager.save(2, state(22), ONE)
        manager.save(3, state(3), ONE)
        assert manager.steps() == [3]
    # Closed: what retention has deleted is gone.
    assert [a.kind for a in collect(place, age=0.0).actions] == ["keep"]
    with Manager(place, keep=1) as manager:
        manager.unpin(2)
    assert [a.kind for a in collect(place, age=0.0).actions] == ["remove"]
    assert not [name for name in manager._steps.notes.names() if "pinned" in name]


def test_delete(place):
    manager = filled(place, 100, 200, 300)
    manager.pin(100)
    for step, words in (
        (100, "it is pinned.*wait, or unpin it"),
        (150, r"wanted one of \[100, 200, 300\]"),
        (-1, "step: got -1"),
    ):
        with pytest.raises(ValueError, match=words):
            manager.delete(step)
    notes = manager._steps.notes
    with leases.reading(notes, "step_00000200"):
        with pytest.raises(ValueError, match=f"process {os.getpid()} on .* reads it"):
            manager.delete(200)
    manager.delete(300)
    assert manager.steps() == [100, 200] and read_latest(place).step == 200
    manager.save(250, state(250), ONE)
    manager.unpin(100)
    for step in (100, 200, 250):
        manager.delete(step)
    manager.close()
    assert manager.steps() == [] and read_latest(place) is None
    if isinstance(place, os.PathLike):
        assert os.listdir(place) == []
    else:
        assert place.values.names() == []


def test_delete_what_is_not_complete_or_damaged(tmp_path):
    manager = filled(tmp_path, 100, 200, 300)
    spoil(manager, 300)
    (tmp_path / "step_00000200" / "COMPLETE").unlink()
    for step in (200, 300):
        manager.delete(step)
    manager.close()
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000100"]


def test_a_step_that_is_being_saved_is_not_deleted(tmp_path, saver):
    with Manager(tmp_path, saver=saver) as manager:
        manager.save(100, state(100), ONE)
        manager.save(100, state(101), ONE, wait=False)
        with pytest.raises(ValueError, match="it is being saved"):
            manager.delete(100)


def test_two_asides_of_one_step(tmp_path):
    """Back twice past the same number: both are kept, under names of their own."""
    filled(tmp_path, 100, 200)
    for value in (7, 8):
        with Manager(tmp_path) as manager:
            manager.rewind(100)
            with pytest.warns(RuntimeWarning, match="steps 200 were set aside"):
                manager.save(200, state(value), ONE)
    left = [x for x in listing(tmp_path).leftovers if x.kind == "aside"]
    values = sorted(float(checkpoint.restore(x.path, ONE)["w"][0, 0]) for x in left)
    assert values == [7.0, 200.0] and all(re.fullmatch(r"step_00000200/[0-9a-f]{12}", x.name) for x in left)
    assert_same_bits(Manager(tmp_path).restore_latest(ONE)[1], state(8))


def test_a_copied_checkpoint_in_a_bucket_is_set_aside(tmp_path):
    """It has no token of its own, and takes none: what says that it is aside does, and its objects stay."""
    store = open_store("memory://runs/copied", {})
    checkpoint.save(tmp_path / "a", {"x": torch.ones(3)}, {"x": Layout((3,), torch.float32, Mesh())}, step=5)
    place, files = store.child("step_00000005"), plain(tmp_path / "a")
    for path in (p for p in files.rglob("*") if p.is_file()):
        place.values.write(str(path.relative_to(files)), [path.read_bytes()])
    store.values.write(".checkpoints/step_00000005", [b""])
    names = place.values.names()
    manager = Manager(store)
    manager.rewind(1)
    with pytest.warns(RuntimeWarning, match="steps 5 were set aside: memory://runs/copied/step_00000005"):
        manager.save(3, state(3), ONE)
    assert manager.steps() == [3]
    assert place.values.names() == sorted([*(n for n in names if n != "COMPLETE"), "ASIDE-plain"])
    (left,) = place.leftovers()
    assert (left.kind, left.token) == ("aside", "plain")
    place.move("ASIDE-plain", "COMPLETE")
    assert manager.steps() == [3, 5] and torch.equal(manager.restore(5)[0]["x"], torch.ones(3))


def test_a_step_by_its_number_goes_past_what_cannot_be_seen(tmp_path, monkeypatch):
    """And a save after that, when all can be seen again, asks what is to be done with what is newer."""
    manager = filled(tmp_path, 1, 2)
    newest = tmp_path / "step_00000002"
    hide = ((os.listdir, tmp_path), (os.open, newest / "COMPLETE"), (os.stat, files_of(newest) / "COMPLETE"))
    for real, hidden in hide:

        def refuse(path, *args, real=real, hidden=hidden, **kwargs):
            if path == str(hidden):
                raise PermissionError(13, "Permission denied", path)
            return real(path, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, real.__name__, refuse)
            assert_same_bits(manager.restore(1, ONE)[0], state(1))
        unseen = rf"\(2; when step 1 was restored they could not be seen: .*Permission denied: '{hidden}'\); to go on"
        with pytest.raises(ValueError, match=unseen):
            manager.save(1, state(7), ONE)
    manager.rewind(1)
    with pytest.warns(RuntimeWarning, match="steps 2 were set aside"):
        manager.save(1, state(7), ONE)
    assert manager.steps() == [1]

"""What is newer than the step that a run goes on from, and cannot be seen, or is no complete step: said, never lost."""

import os
import shutil

import pytest

from fmegatron.checkpoint import Manager
from fmegatron.checkpoint.files.folder import FolderStore
from tests.checkpoint.fake_world import assert_same_bits
from tests.checkpoint.test_line import filled
from tests.checkpoint.test_manager import ONE, state


def test_a_save_past_a_step_that_cannot_be_seen_says_how_to_give_it_up(tmp_path, monkeypatch):
    manager = filled(tmp_path, 1, 2, 3)
    hidden, real = manager.path(3), os.open
    this = os.stat(f"{hidden}/COMPLETE").st_ino

    def refuse(path, *args, **kwargs):
        if path == f"{hidden}/COMPLETE" and os.path.lexists(path) and os.lstat(path).st_ino == this:
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with Manager(tmp_path, keep=1) as manager:
        assert_same_bits(manager.restore(2, ONE)[0], state(2))
        with pytest.raises(RuntimeError) as got:
            manager.save(3, state(33), ONE)
        assert f"or give it up: Manager.delete(3): '{hidden}" in str(got.value)
        manager.delete(3)
        manager.save(3, state(33), ONE)
        assert manager.steps() == [3]
    assert_same_bits(manager.restore(3, ONE)[0], state(33))


@pytest.mark.parametrize("left", ["no COMPLETE", "chunks only", "half a copy"])
def test_a_newest_step_without_its_marker_is_said_and_kept(tmp_path, left):
    """Not complete, under a name that only complete ones take; the run goes on past its number, and nothing is lost."""
    newest = filled(tmp_path, 1, 2, 3).path(3)
    os.remove(f"{newest}/COMPLETE")
    (token,) = FolderStore(newest).inside()
    if left == "chunks only":
        os.remove(f"{newest}/{token}/manifest.json")
    elif left == "half a copy":  # of version 3
        os.rename(f"{newest}/{token}/arrays", f"{newest}/new")
        (
            os.remove(f"{newest}/arrays"),
            os.rename(f"{newest}/new", f"{newest}/arrays"),
            shutil.rmtree(f"{newest}/{token}"),
        )
    with Manager(tmp_path) as manager:
        with pytest.warns(RuntimeWarning) as caught:
            assert manager.restore_latest(ONE)[0] == 2
        (warned,) = caught
        assert str(warned.message).startswith(f"skipped the checkpoint of step 3: {newest} has no COMPLETE")
        with pytest.warns(RuntimeWarning, match="steps 3 were set aside"):
            manager.save(3, state(33), ONE)
        assert manager.steps() == [1, 2, 3] and manager.restore_latest(ONE)[0] == 3
    (aside,) = FolderStore(newest).inside("ASIDE-")
    assert aside == ("ASIDE-plain" if left == "half a copy" else f"ASIDE-{token}")
    at = tmp_path / "step_00000003" if left == "half a copy" else tmp_path / "step_00000003" / token
    assert os.path.isfile(at / "arrays/w/c.0.0")


def test_a_step_that_is_a_broken_link_is_said_and_kept(tmp_path):
    """No save goes into what a link leads to, and it has no files of ours: a person removes it."""
    newest = filled(tmp_path, 1, 2, 3).path(3)
    shutil.rmtree(newest)
    os.symlink("/no/such/place", newest)
    with Manager(tmp_path) as manager:
        with pytest.warns(RuntimeWarning) as caught:
            assert manager.restore_latest(ONE)[0] == 2
        (warned,) = caught
        assert str(warned.message).startswith(f"skipped the checkpoint of step 3: {newest} has no COMPLETE")
        with pytest.raises((ValueError, RuntimeError), match="got a link to another place.*remove the link"):
            manager.save(3, state(33), ONE)
        assert os.readlink(newest) == "/no/such/place"
        os.remove(newest)
        manager.save(3, state(33), ONE)
        assert manager.steps() == [1, 2, 3]


def test_an_empty_step_is_a_save_that_has_just_begun(tmp_path, recwarn):
    """There is nothing in it to keep, and nothing to say: every save makes its directory first."""
    newest = filled(tmp_path, 1, 2, 3).path(3)
    shutil.rmtree(newest)
    os.mkdir(newest)
    with Manager(tmp_path) as manager:
        assert manager.restore_latest(ONE)[0] == 2
        manager.save(3, state(33), ONE)
        assert manager.steps() == [1, 2, 3]
        assert_same_bits(manager.restore(3, ONE)[0], state(33))
    assert not recwarn.list


def test_an_older_one_without_its_marker_is_not_in_the_way(tmp_path):
    os.remove(f"{filled(tmp_path, 1, 2, 3).path(2)}/COMPLETE")
    with Manager(tmp_path) as manager:
        assert manager.restore_latest(ONE)[0] == 3
        manager.save(4, state(4), ONE)

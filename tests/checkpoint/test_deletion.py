"""Old steps go in the background: what is slow, refused or linked, and names that are used again."""

import os
import threading
import time

import pytest

from fmegatron.checkpoint import Manager
from fmegatron.checkpoint.files import trees
from fmegatron.checkpoint.files.folder import FolderStore
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.manage.deletion import Deleter
from fmegatron.checkpoint.manage.steps import Steps
from fmegatron.checkpoint.tools.gc import collect
from tests.checkpoint.fake_world import assert_same_bits
from tests.checkpoint.test_manager import ONE, filled, state


def test_deletion_is_in_the_background(tmp_path, monkeypatch):
    """The name is gone when `save` returns; the files go meanwhile; `close` waits for them."""
    go, real = threading.Event(), trees.remove

    def slow(path, stop=None):
        assert stop is None or go.wait(30)  # only what is deleted in the background
        real(path, stop)

    monkeypatch.setattr(trees, "remove", slow)
    manager = Manager(tmp_path, keep=1)
    for step in (1, 2, 3):
        manager.save(step, state(step), ONE)
        assert manager.steps() == [step]
    # Nobody has waited for the disk: not the saves that came after, either.
    assert sum(len(FolderStore(str(at)).inside(".GONE-")) for at in tmp_path.glob("step_*")) == 2
    with pytest.warns(RuntimeWarning, match="steps 3 were set aside"):
        manager.rewind(1)
        manager.save(2, state(2), ONE)  # a name that is being deleted can be used again
    assert manager.steps() == [2]
    go.set()
    manager.close()
    names = sorted(os.listdir(tmp_path))
    assert names == ["latest", "step_00000002", "step_00000003"]
    assert len(FolderStore(manager.path(3)).inside("ASIDE-")) == 1 and manager.steps() == [2]


def test_a_name_that_an_object_store_is_still_deleting(monkeypatch):
    """The new checkpoint of that name does not wait, and is not deleted with the old one."""
    store, go = open_store("memory://runs/names", {}), threading.Event()
    manager, real = Manager(store, keep=1), Steps.withdraw

    def slow(self, step):
        remove = real(self, step)
        return lambda stop: (go.wait(30), remove(stop))

    monkeypatch.setattr(Steps, "withdraw", slow)
    for step in (1, 2):
        manager.save(step, state(step), ONE)
    threading.Timer(0.3, go.set).start()
    manager.rewind(0)
    with pytest.warns(RuntimeWarning, match="steps 2 were set aside"):
        manager.save(1, state(9), ONE)
    assert manager.steps() == [1]
    manager.close()
    assert_same_bits(manager.restore(1, ONE)[0], state(9))


def test_deletion_that_fails_is_a_warning(tmp_path, monkeypatch):
    """Training goes on; the next save, or the next run, tries again."""

    def refuse(path, stop=None):
        raise PermissionError(13, "Permission denied")

    manager = Manager(tmp_path, keep=1)
    manager.save(1, state(1), ONE)
    with monkeypatch.context() as patch:
        patch.setattr(trees, "remove", refuse)
        with pytest.warns(RuntimeWarning, match="step_00000001: could not be deleted .*Permission denied"):
            manager.save(2, state(2), ONE)
            manager.close()
    assert manager.steps() == [2] and len(os.listdir(tmp_path)) == 3
    manager = Manager(tmp_path, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(FolderStore, "withdraw", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.warns(RuntimeWarning, match="old checkpoints could not be deleted: .*Input/output"):
            assert manager.save(3, state(3), ONE).durable
    assert manager.steps() == [2, 3]
    manager.save(4, state(4), ONE)
    manager.close()
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000004"]


def test_a_slow_disk_is_given_little_at_a_time(tmp_path):
    """What does not fit the queue keeps its name, and is deleted after a later save."""
    go = threading.Event()
    manager = Manager(tmp_path, keep=1)
    manager._deleter = Deleter(most=2)
    for _ in range(3):  # one is being removed, two wait
        manager._deleter.add("x", lambda stop: go.wait(30))
        time.sleep(0.05)
    for step in (1, 2, 3):
        manager.save(step, state(step), ONE)
    assert manager.steps() == [1, 2, 3]
    go.set()
    manager.close()
    with Manager(tmp_path, keep=1) as manager:
        manager.save(4, state(4), ONE)
    assert manager.steps() == [4]


def test_close_does_not_hang(tmp_path):
    manager = Manager(tmp_path)
    go = threading.Event()
    manager._deleter.add("stuck", lambda stop: go.wait(600))
    began = time.monotonic()
    manager.close(wait_s=0.1)
    assert time.monotonic() - began < 300  # not until the stuck deletion ends
    go.set()


@pytest.mark.parametrize("how", ["retention", "clean", "again"])
def test_of_a_linked_step_only_the_link_goes(tmp_path, how):
    with Manager(tmp_path / "elsewhere") as other:
        other.save(1, state(1), ONE)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step_00000001").symlink_to(other.path(1))
    manager = Manager(tmp_path / "run", keep=1)
    assert manager.restore_latest(ONE)[0] == 1
    if how == "clean":  # as version 3 did before it deleted
        os.rename(tmp_path / "run" / "step_00000001", tmp_path / "run" / ".step_00000001.gone-0123456789ab")
    if how == "again":  # it would be put into what the link leads to
        with pytest.raises(ValueError, match="got a link to another place, wanted a name of its own"):
            manager.save(1, state(7), ONE)
    manager.save(2, state(7), ONE)
    manager.close()
    assert len(os.listdir(tmp_path / "run")) == 2 and not any(p.is_symlink() for p in (tmp_path / "run").iterdir())
    assert_same_bits(manager.restore_latest(ONE)[1], state(7))
    assert_same_bits(other.restore_latest(ONE)[1], state(1))


def test_removal_stops_when_told(tmp_path):
    for folder_ in ("a/b", "a/c"):
        (tmp_path / folder_).mkdir(parents=True)
        for name in range(5):
            (tmp_path / folder_ / str(name)).write_text("x")
    (tmp_path / "a" / "COMPLETE").write_text("x")
    (tmp_path / "outside").write_text("stays")
    (tmp_path / "a" / "link").symlink_to(tmp_path)
    stop = threading.Event()
    stop.set()
    trees.remove(str(tmp_path / "a"), stop)
    assert (tmp_path / "a" / "b" / "0").exists() and not (tmp_path / "a" / "COMPLETE").exists()
    trees.remove(str(tmp_path / "a"), threading.Event())
    assert os.listdir(tmp_path) == ["outside"]
    trees.remove(str(tmp_path / "a"), threading.Event())  # nothing to do


@pytest.mark.parametrize("by", ["manager", "gc"])
def test_what_stays_is_durable_before_others_go(tmp_path, monkeypatch, by):
    """Who saved it may have died before its last fsync: a power cut then takes both, what went and what stayed."""
    filled(tmp_path, 1, 2, 3)
    done = []
    for name in ("durable", "withdraw"):
        real = getattr(FolderStore, name)

        def call(self, *args, name=name, real=real):
            done.append((name, os.path.basename(self.path)))
            return real(self, *args)

        monkeypatch.setattr(FolderStore, name, call)
    if by == "gc":
        collect(tmp_path, keep_last=2)
        went, stay = ["step_00000001"], ["step_00000002", "step_00000003"]
    else:
        filled(tmp_path, 4, keep=2)
        went, stay = ["step_00000001", "step_00000002"], ["step_00000003", "step_00000004"]
    first = done.index(("withdraw", went[0]))
    assert [name for act, name in done if act == "withdraw"] == went
    assert all(("durable", name) in done[:first] for name in stay)

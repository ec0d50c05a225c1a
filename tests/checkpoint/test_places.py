"""Where a checkpoint cannot lie is found before anything is written, and the last step of a save has one outcome."""

import contextlib
import errno
import os
import subprocess

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint import LocalReplicas, Manager
from fmegatron.checkpoint.files.folder import Folder, FolderStore
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.files import whole
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import assert_same_bits, small_sizes

LAYOUTS = {"w": Layout((8, 16), torch.float32, Mesh()), "n": Layout((), torch.int64, Mesh())}


def state(value):
    return {"w": torch.full((8, 16), float(value)), "n": torch.tensor(value)}


def nothing_written(monkeypatch):
    """Every chunk that is written from here on is an error."""

    def write(self, name, blocks, durable=True):
        raise AssertionError(f"{name} was written")

    monkeypatch.setattr(Folder, "write", write)


@pytest.fixture(scope="module")
def saver():
    with checkpoint.AsyncSaver() as saver:
        yield saver


# ---- mount points


@contextlib.contextmanager
def mounted(at, kind):
    """A file system at `at`; where this user may mount none, the system is asked in vain whether there is one."""
    at.mkdir()
    if kind == "bind":
        (at.parent / "origin").mkdir()
    how = ["--bind", at.parent / "origin", at] if kind == "bind" else ["-t", "tmpfs", "-o", "size=1m", "tmpfs", at]
    if subprocess.run(["mount", *how], capture_output=True).returncode == 0:
        try:
            yield
        finally:
            subprocess.run(["umount", at], check=True)
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os.path, "ismount", lambda path: path == str(at))
            yield


@pytest.mark.parametrize("kind", ["tmpfs", "bind"])
@pytest.mark.parametrize("name", ["a", "with a space"])
def test_a_mount_point(tmp_path, kind, name):
    """A container's volume, say: nothing is renamed over it, so it is a place as any other."""
    with mounted(tmp_path / name, kind):
        for version in (1, 2):
            checkpoint.save(tmp_path / name, state(version), LAYOUTS)
            assert_same_bits(checkpoint.restore(tmp_path / name, LAYOUTS), state(version))


# ---- names


@pytest.mark.parametrize("path", ["~/runs/a", "~", "~root/a"])
def test_a_tilde(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: checkpoint.save(path, state(1), LAYOUTS),
        lambda: checkpoint.restore(path, LAYOUTS),
        lambda: Manager(path),
        lambda: open_store(path),
        lambda: LocalReplicas(path, "run"),
    ):
        with pytest.raises(
            ValueError, match=r"path: got '~.*wanted no '~', which only a shell replaces; pass os.path.expanduser"
        ):
            call()
    assert os.listdir(tmp_path) == []
    for good in ("./~", "a~", "~no-such-user-here"):
        checkpoint.save(good, state(1), LAYOUTS)
        assert_same_bits(checkpoint.restore(good, LAYOUTS), state(1))


@pytest.mark.medium
@pytest.mark.parametrize("name", ["a.__lock/b", "a\\b", "a\nb", os.fsdecode(b"\xff")])
def test_directories_of_any_name(tmp_path, saver, name):
    """Files are written by their names as they are (tensorstore, which wrote them once, does not take these)."""
    at = os.path.join(tmp_path, name)
    checkpoint.save(at, state(1), LAYOUTS)
    assert_same_bits(checkpoint.restore(at, LAYOUTS), state(1))
    saver.save(at, state(2), LAYOUTS).result()
    assert_same_bits(checkpoint.restore(at, LAYOUTS), state(2))


@pytest.mark.parametrize("key", ["k" * 256, "é" * 64, "a b" * 60, "x" * 300], ids=["256", "quoted", "spaces", "300"])
def test_a_key_that_is_longer_than_a_file_name(tmp_path, monkeypatch, saver, key):
    nothing_written(monkeypatch)
    big, layouts = {"big": {key: torch.ones(200, 200)}}, {"big": {key: Layout((200, 200), torch.float32, Mesh())}}
    for call in (checkpoint.save, saver.save):
        with pytest.raises(
            ValueError, match=r"^big/.*got a key of \d+ bytes as the name of its files .*at most 255; use"
        ):
            call(tmp_path / "a", big, layouts)
    assert os.listdir(tmp_path) == [] and saver.pending == ()


def test_long_keys_that_are_right(tmp_path):
    """Of exactly the length of a file name; and of any length where the leaf is small or empty: then it has no file."""
    keys = ["k" * 255, "é" * 42]
    small = {"p" * 3000: LAYOUTS["n"], "e" * 3000: Layout((0,), torch.float32, Mesh())}
    layouts = {key: Layout((200, 200), torch.float32, Mesh()) for key in keys} | small
    values = {key: torch.ones(200, 200) for key in keys} | {"p" * 3000: torch.tensor(3), "e" * 3000: torch.empty(0)}
    checkpoint.save(tmp_path / "a", values, layouts)
    assert_same_bits(checkpoint.restore(tmp_path / "a", layouts), values)


def test_paths_that_are_too_long_in_all(tmp_path, monkeypatch):
    deep = {"w": torch.ones(200, 200)}
    layouts = {"w": Layout((200, 200), torch.float32, Mesh())}
    for _ in range(19):
        deep, layouts = {"d" * 200: deep}, {"d" * 200: layouts}
    checkpoint.save(tmp_path / "a", deep, layouts)
    deep, layouts = {"d" * 240: deep}, {"d" * 240: layouts}
    nothing_written(monkeypatch)
    with pytest.raises(ValueError, match=r"got a path of 4\d+ bytes as the name of its files .* use shorter keys"):
        checkpoint.save(tmp_path / "b", deep, layouts)
    with pytest.raises(ValueError, match=r"wanted at most 100\d; use shorter keys"):
        checkpoint.save(open_store("memory://runs/a", {}), deep, layouts)


def test_a_checkpoint_with_a_long_name(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / ("n" * 233), state(1), LAYOUTS)
    nothing_written(monkeypatch)
    with pytest.raises(ValueError, match="got a name of 234 bytes, wanted at most 233"):
        checkpoint.save(tmp_path / ("n" * 234), state(1), LAYOUTS)


# ---- what a power cut leaves


def test_new_directories_above_are_durable(tmp_path, monkeypatch):
    """Else a power cut takes a checkpoint that was reported durable, with all that is above it."""
    synced, fsync = set(), os.fsync

    def seen(fd):
        synced.add(os.fstat(fd).st_ino)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", seen)
    with Manager(tmp_path / "x/y/z") as manager:
        manager.save(1, state(1), LAYOUTS)
        manager.save(2, state(2), LAYOUTS)
    above = [tmp_path, *(tmp_path / part for part in ("x", "x/y", "x/y/z"))]
    assert {path.stat().st_ino for path in above} <= synced
    synced.clear()
    local = LocalReplicas(tmp_path / "l/m", "run", copies=1)
    local.save(1, state(1), LAYOUTS)
    assert {path.stat().st_ino for path in (tmp_path, tmp_path / "l", tmp_path / "l/m")} <= synced
    synced.clear()
    with checkpoint.claim(tmp_path / "q/r"):
        assert {path.stat().st_ino for path in (tmp_path, tmp_path / "q")} <= synced


@pytest.mark.parametrize("existing", [True, False], ids=["again", "first"])
@pytest.mark.parametrize("moved", [False, True], ids=["before the pointer", "behind it"])
def test_an_fsync_of_the_names_fails(tmp_path, monkeypatch, existing, moved):
    """The save has failed. Before the pointer is moved there is what was there; behind it the new one, with the old
    one's files beside, as after a power cut either may be the checkpoint. The next save leaves itself alone."""
    at, place = str(tmp_path / "a"), FolderStore(str(tmp_path / "a"))
    if existing:
        checkpoint.save(at, state(1), LAYOUTS)
    real, failed, old = whole.sync_directory, [], place.inside()

    def sync(path):
        named = place._root() if path == at else None
        if path == at and not failed and (named is not None and named not in old) == moved:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        real(path)

    with small_sizes(), monkeypatch.context() as patch:
        patch.setattr(whole, "sync_directory", sync)
        with pytest.raises(RuntimeError, match=rf"Input/output error: '{at}'"):
            checkpoint.save(at, state(2), LAYOUTS)
    assert failed and os.listdir(tmp_path) == (["a"] if existing or moved else [])
    if existing or moved:
        assert_same_bits(checkpoint.restore(at, LAYOUTS), state(2 if moved else 1))
        assert len([name for name in place.inside() if name != "COMPLETE"]) == 1 + (existing and moved)
    checkpoint.save(at, state(3), LAYOUTS)
    assert_same_bits(checkpoint.restore(at, LAYOUTS), state(3))
    assert os.listdir(tmp_path) == ["a"] and len(place.inside()) == 2


@pytest.mark.parametrize("existing", [True, False], ids=["again", "first"])
def test_the_last_fsync_fails_when_another_job_has_saved_there_since(tmp_path, monkeypatch, existing):
    """That save was acknowledged: the one that fails does not take it along."""
    at, place = str(tmp_path / "a"), FolderStore(str(tmp_path / "a"))
    if existing:
        checkpoint.save(at, state(1), LAYOUTS)
    real, done, old = whole.sync_directory, [], place.inside()

    def sync(path):
        if path == at and not done and place._root() not in (None, *old):
            done.append(path)
            checkpoint.save(at, state(5), LAYOUTS)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        real(path)

    with small_sizes(), monkeypatch.context() as patch:
        patch.setattr(whole, "sync_directory", sync)
        with pytest.raises(RuntimeError, match=rf"Input/output error: '{at}'"):
            checkpoint.save(at, state(2), LAYOUTS)
    assert done and os.listdir(tmp_path) == ["a"] and len(place.inside()) == 2
    assert_same_bits(checkpoint.restore(at, LAYOUTS), state(5))


@pytest.mark.long
def test_an_object_store_whose_answer_is_lost(monkeypatch):
    """The pointer was put, and the answer did not come: it is looked at, and the save has not failed."""
    store = open_store("memory://runs/a", {})
    real = type(store.values).write

    def write(self, name, blocks):
        real(self, name, blocks)
        if name == "COMPLETE" and self.spec["path"] == "runs/a/":
            raise OSError(errno.EIO, "UNAVAILABLE: connection reset")

    monkeypatch.setattr(type(store.values), "write", write)
    checkpoint.save(store, state(1), LAYOUTS)
    checkpoint.save(store, state(2), LAYOUTS)
    assert_same_bits(checkpoint.restore(store, LAYOUTS), state(2))

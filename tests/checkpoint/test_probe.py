"""What a file system must be able to do is looked at when a save begins: refused in words, or done without."""

import errno
import os
import stat
import warnings

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint.files.folder import Folder, FolderStore
from fmegatron.checkpoint.writing.plan import plan
from fmegatron.checkpoint.writing.write import write_part
from fmegatron.files import whole
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import assert_same_bits, small_sizes
from tests.checkpoint.test_manager import ONE, state
from tests.checkpoint.tokens import files_of


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM, errno.ENOTSUP], ids=errno.errorcode.get)
def test_files_that_cannot_be_renamed(tmp_path, monkeypatch, error):
    """As below mountpoint-s3: nothing is written there."""

    def rename(source, to):
        raise OSError(error, os.strerror(error), source)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        patch.setattr(os, "replace", rename)
        with pytest.raises((ValueError, RuntimeError), match="does not rename files .*wanted one that does; .*s3://"):
            checkpoint.save(tmp_path / "a", state(1), ONE)
    assert os.listdir(tmp_path) == []
    checkpoint.save(tmp_path / "a", state(1), ONE)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
def test_an_fsync_of_a_directory_that_fails_is_no_file_system_without_one(tmp_path, monkeypatch, error):
    def fsync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(RuntimeError, match=os.strerror(error)):
        checkpoint.save(tmp_path / "a", state(1), ONE)


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP], ids=errno.errorcode.get)
def test_directories_that_cannot_be_synced(tmp_path, monkeypatch, error):
    """As on FUSE without fsyncdir: a warning; every file is synced."""
    synced, real = set(), os.fsync

    def fsync(fd):
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            raise OSError(error, os.strerror(error))
        synced.add(found.st_ino)
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.warns(RuntimeWarning, match="a: got a file system that cannot sync directories"):
            checkpoint.save(tmp_path / "a", state(1), ONE)
    assert {p.stat().st_ino for p in files_of(tmp_path / "a").rglob("*") if p.is_file()} <= synced
    assert_same_bits(checkpoint.restore(tmp_path / "a", ONE), state(1))


def test_every_writer_syncs_its_own_files_where_directories_cannot_be(tmp_path, monkeypatch):
    """rank 0 is on another machine, whose fsync does not send what is in this one's memory."""
    synced, real = set(), os.fsync

    def fsync(fd):
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        synced.add(found.st_ino)
        real(fd)

    layouts = {f"w{i}": Layout((64, 2), torch.float32, Mesh(fsdp=2), ("fsdp",)) for i in range(3)}
    tensors = [torch.ones(32, 2) for _ in layouts]
    for rank in (0, 1):
        storage = Folder(str(tmp_path / f"{rank}"))
        os.mkdir(storage.root)
        with monkeypatch.context() as patch, small_sizes(chunk=128, band=64):
            patch.setattr(os, "fsync", fsync)
            write_part(storage, plan(list(layouts), list(layouts.values())), tensors, rank)
        written = {os.stat(storage.at(name)).st_ino for name in storage.names()}
        assert written and written <= synced, rank


@pytest.mark.parametrize("where", ["in it", "in a checkpoint", "beside it"])
def test_what_a_killed_probe_leaves_is_in_nobodys_way(tmp_path, where):
    """In a directory that was there and empty, as a mount point is; or that held a checkpoint; or that is not there."""
    if where == "in a checkpoint":
        checkpoint.save(tmp_path / "a", state(2), ONE)
    elif where == "in it":
        (tmp_path / "a").mkdir()
    left = (tmp_path if where == "beside it" else tmp_path / "a") / f"{whole.BESIDE}{'x' * 8}-1-1-00000000"
    left.write_bytes(b"fmeg")
    os.utime(left, (1, 1))
    place = FolderStore(str(tmp_path / "a"))
    assert where == "in a checkpoint" or (place.inside() == [] and place.is_begun())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.save(place, state(1), ONE)
    assert_same_bits(checkpoint.restore(place, ONE), state(1))
    assert not left.exists()

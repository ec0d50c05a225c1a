"""Full and broken disks, at every write of a save and on any rank: all ranks are told what, and nothing is lost."""

import collections
import contextlib
import errno
import itertools
import os
import re
import shutil
import subprocess
import threading

import pytest
import torch

from fmegatron import checkpoint, tree
from fmegatron.checkpoint.files import folder
from fmegatron.checkpoint.files.folder import FolderStore
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.manage.report import Report
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run, save_all, small_sizes
from tests.checkpoint.faulty import FaultyStorage, FaultyStore
from tests.pairs import each_value

MESH = Mesh(fsdp=4)


def layouts_on(mesh=MESH):
    f32 = torch.float32
    return {
        "w": Layout((8, 16), f32, mesh, ("fsdp",)),
        "flat": Layout((5, 7), f32, mesh, flat=("fsdp",) if mesh.size > 1 else ()),
        "step": Layout((), torch.int64, mesh),
    }


def state(seed):
    torch.manual_seed(seed)
    return tree.map(lambda x: torch.randint(1, 1000, x.shape).to(x.dtype), layouts_on())


def assert_holds(path, seed):
    assert_same_bits(checkpoint.restore(path, layouts_on(Mesh(fsdp=1))), state(seed), path)


@pytest.fixture(autouse=True)
def _tiny():
    with small_sizes():
        yield


@pytest.fixture
def saved(tmp_path):
    """Two good checkpoints: another step, and the one that is saved again."""
    assert save_all(tmp_path / "other", state(0), layouts_on()) == [None] * 4
    assert save_all(tmp_path / "a", state(1), layouts_on()) == [None] * 4
    return tmp_path / "a"


class Faults:
    """Raises `error` at the n-th operation of a kind on a rank; counts the operations of each rank."""

    def __init__(self, operation, rank=None, moment=None, error=None, act=None):
        self.operation, self.rank, self.moment, self.error, self.act = operation, rank, moment, error, act
        self.seen, self.names, self.lock = collections.Counter(), [], threading.Lock()

    def before(self, rank):
        def look(operation, name):
            if operation != self.operation:
                return
            with self.lock:
                self.seen[rank] += 1
                due = rank == self.rank and self.seen[rank] >= self.moment
                self.names += [name] * due
            if due:
                if self.act is not None:
                    self.act()
                if self.error is not None:
                    raise OSError(self.error, os.strerror(self.error), name)

        return look

    def save(self, path, seed):
        """What each rank got."""
        local = cut_tree(state(seed), layouts_on())

        def rank_main(world):
            store = FaultyStore(open_store(path), lambda real: FaultyStorage(real, self.before(world.rank)))
            return checkpoint.save(store, local[world.rank], layouts_on(), world)

        return run(4, rank_main)


def assert_told(got, faults, error):
    """All ranks have the same RuntimeError, which names what failed and the leaf or the file."""
    assert all(isinstance(e, RuntimeError) for e in got) and len({str(e) for e in got}) == 1, got
    text = str(got[0])
    assert os.strerror(error) in text and f"on rank {faults.rank} of 4" in text, text
    leaves = [name for name in layouts_on() if f"{name}: a chunk could not be written" in text]
    assert leaves or any(name in text for name in faults.names), text


def assert_intact(path, seed, others=("other",)):
    """The checkpoint is as it was, so are the others, and nothing half-made lies about."""
    assert sorted(os.listdir(path.parent)) == sorted(["a", *others])
    for name in ("a", *others):
        place = FolderStore(str(path.parent / name))
        assert place.inside() == sorted(["COMPLETE", place.pointer()["root"]])
    assert_holds(path, seed)
    assert_holds(path.parent / "other", 0)


def drafts(path):
    """The directories of the saves that are under way there."""
    return [path / draft.name.removeprefix(".COMPLETE-") for draft in path.glob(".COMPLETE-*")]


def moments(operation, path):
    """How often each rank does it in a save that goes well."""
    faults = Faults(operation)
    assert faults.save(path, 1) == [None] * 4
    return faults.seen


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank", "error"), each_value(range(4), (errno.ENOSPC, errno.EIO, errno.EROFS), ids=(str, errno.errorcode))
)
def test_every_write_of_every_rank(saved, rank, error):
    count = moments("write", saved)[rank]
    assert count >= 4  # chunks, a flat piece, the part or the manifest
    for moment in range(1, count + 1):
        faults = Faults("write", rank, moment, error)
        assert_told(faults.save(saved, 2), faults, error)
        assert_intact(saved, 1)
    assert Faults("write").save(saved, 3) == [None] * 4
    assert_intact(saved, 3)


@pytest.mark.parametrize("operation", ["sync", "read"])
def test_rank_0_cannot_sync_or_read_the_parts(saved, operation):
    for moment in range(1, moments(operation, saved)[0] + 1):
        faults = Faults(operation, 0, moment, errno.EIO)
        got = faults.save(saved, 2)
        assert all(isinstance(e, RuntimeError) and "Input/output error" in str(e) for e in got), got
        assert_intact(saved, 1)
    assert moment >= (1 if operation == "sync" else 3)  # a part of each of the other ranks


@pytest.mark.long
@pytest.mark.parametrize("call, error", [("rename", errno.EIO), ("mkdir", errno.EIO), ("listdir", errno.EACCES)])
def test_a_directory_that_cannot_be_changed(saved, monkeypatch, call, error):
    """An error at every call of this kind, in the first save to a new place; some of them do not matter."""
    real, new, done = getattr(os, call), saved.parent / "new", [itertools.count(1)]

    def save(moment):
        done[0] = itertools.count(1)  # files are written by several threads

        def failing(*args, **kwargs):
            if next(done[0]) == moment:
                raise OSError(error, os.strerror(error), args[0])
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            return save_all(new, state(2), layouts_on())

    assert save(0) == [None] * 4
    calls, failed = next(done[0]) - 1, 0
    for moment in range(1, calls + 1):
        shutil.rmtree(new)
        got = save(moment)
        if got == [None] * 4:
            assert_intact(saved, 1, ("other", "new"))
        else:
            assert all(isinstance(e, Exception) for e in got), got
            assert any(os.strerror(error) in str(e) for e in got), got
            failed += 1
            if new.exists():  # only something after the commit failed
                assert_holds(new, 2)
            else:
                assert_intact(saved, 1)
                assert save(0) == [None] * 4
    assert failed >= 1


@pytest.mark.medium
def test_the_directory_vanishes(saved):
    """Somebody removes what is being written, at every write: never a checkpoint with holes that counts as saved."""

    def remove_drafts():
        for draft in drafts(saved):
            shutil.rmtree(draft, ignore_errors=True)

    for rank in (0, 2):
        count = moments("write", saved)[rank]
        for moment in range(1, count + 1):
            faults = Faults("write", rank, moment, act=remove_drafts)
            got = faults.save(saved, 2)
            assert all(isinstance(e, RuntimeError) for e in got) and len({str(e) for e in got}) == 1, (moment, got)
            assert_intact(saved, 1)
    assert Faults("write").save(saved, 3) == [None] * 4
    assert_intact(saved, 3)


def test_one_file_vanishes(saved):
    """A chunk that was written is not there when the save is completed: that is no success."""

    def remove_chunk():
        for draft in drafts(saved):
            (draft / "arrays/w/c.1.0").unlink()

    faults = Faults("sync", 0, 1, act=remove_chunk)
    got = faults.save(saved, 2)
    assert all("arrays/w/c.1.0: was written and has vanished" in str(e) for e in got), got
    assert_intact(saved, 1)


def test_short_writes_are_finished(saved, monkeypatch):
    """A system that takes a few bytes at a time gets all of them."""
    real, sizes = os.write, []
    monkeypatch.setattr(folder.os, "write", lambda fd, view: sizes.append(1) or real(fd, view[:5]))
    assert save_all(saved, state(2), layouts_on()) == [None] * 4
    assert len(sizes) > 300
    assert_intact(saved, 2)


def test_reads_that_fail(saved):
    """EIO at every read of a restore: the file is named, and nobody takes it for damage."""
    seen, target = collections.Counter(), layouts_on(Mesh(fsdp=1))

    def restore(moment):
        def look(operation, name):
            seen[moment] += 1
            if seen[moment] == moment:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        return checkpoint.restore(FaultyStore(open_store(saved), lambda real: FaultyStorage(real, look)), target)

    assert_same_bits(restore(0), state(1))
    assert seen[0] > 10
    for moment in range(1, seen[0] + 1):
        with pytest.raises(RuntimeError, match=f"Input/output error; whether it is good cannot be told.*{saved}"):
            restore(moment)


# ---- real file systems that are full or read-only


@contextlib.contextmanager
def small_disk(at):
    """A file system of 1 MiB at `at`; where this user may not mount one, a directory whose writes fail as its would.

    Yields a function that makes it read-only, or writable again.
    """
    at.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", at], capture_output=True)
    if mounted.returncode == 0:
        try:
            yield lambda on: subprocess.run(["mount", "-o", f"remount,{'ro' if on else 'rw'}", at], check=True)
        finally:
            subprocess.run(["umount", at], check=True)
        return
    with pytest.MonkeyPatch.context() as patch:
        real_write, real_open, real_mkdir, frozen = os.write, os.open, os.mkdir, [False]

        def used():
            return sum(os.path.getsize(os.path.join(d, f)) for d, _, files in os.walk(at) for f in files)

        def write(fd, view):
            if used() + len(view) > 1 << 20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real_write(fd, view)

        def refuse(path, flags):
            if frozen[0] and os.fspath(path).startswith(str(at)) and flags & (os.O_WRONLY | os.O_CREAT):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

        patch.setattr(os, "write", write)
        patch.setattr(os, "open", lambda p, f, *a, **k: (refuse(p, f), real_open(p, f, *a, **k))[1])
        patch.setattr(os, "mkdir", lambda p, *a, **k: (refuse(p, os.O_CREAT), real_mkdir(p, *a, **k))[1])
        yield lambda on: frozen.__setitem__(0, on)


def test_a_full_and_a_read_only_disk(tmp_path):
    layout = {"w": Layout((4, 20_000), torch.float32, MESH, ("fsdp",))}  # 320 kB: two fit, three do not

    def w(seed):
        return {"w": torch.full((4, 20_000), float(seed))}

    def assert_there(path, seed):
        assert_same_bits(checkpoint.restore(path, {"w": layout["w"].replace(mesh=Mesh(), spec=())}), w(seed))

    with small_disk(tmp_path / "disk") as read_only, small_sizes(chunk=1 << 15, band=1 << 12):
        run_dir = tmp_path / "disk" / "run"
        manager = checkpoint.Manager(run_dir)

        def save(step):
            local = cut_tree(w(step), layout)
            return run(4, lambda world: checkpoint.Manager(run_dir, world=world).save(step, local[world.rank], layout))

        for step in (1, 2):
            assert all(isinstance(got, Report) for got in save(step))
        got = save(3)
        assert all(isinstance(e, RuntimeError) and "No space left on device" in str(e) for e in got), got
        assert "w: a chunk could not be written" in str(got[0]) or re.search(
            "/step_00000003/[0-9a-f]{12}/", str(got[0])
        )
        assert sorted(os.listdir(run_dir)) == ["latest", "step_00000001", "step_00000002"]
        read_only(True)
        got = save(3)
        assert all(isinstance(e, RuntimeError) and "Read-only file system" in str(e) for e in got), got
        assert "step_00000003" in str(got[0])
        assert manager.latest() == 2
        assert_there(run_dir / "step_00000002", 2)  # a read-only disk is good enough for a restore
        read_only(False)
        shutil.rmtree(run_dir / "step_00000001")  # somebody makes room
        assert all(isinstance(got, Report) for got in save(3))
        assert manager.latest() == 3
        assert_there(run_dir / "step_00000003", 3)


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_a_pointer_that_cannot_be_moved_leaves_what_was_there(tmp_path, monkeypatch, kind):
    layouts, move = {"w": Layout((3,), torch.float32, Mesh())}, FolderStore.move
    checkpoint.save(tmp_path / "a", {"w": torch.zeros(3)}, layouts)
    place = FolderStore(str(tmp_path / "a"))

    def fails(self, name, to):
        if to == "COMPLETE":
            raise kind("not this one")
        move(self, name, to)

    monkeypatch.setattr(FolderStore, "move", fails)
    with pytest.raises((RuntimeError, kind), match="not this one"):
        checkpoint.save(tmp_path / "a", {"w": torch.ones(3)}, layouts)
    assert os.listdir(tmp_path) == ["a"] and place.inside() == sorted(["COMPLETE", place.pointer()["root"]])
    assert torch.equal(checkpoint.restore(tmp_path / "a", layouts)["w"], torch.zeros(3))

"""The traps of the commit protocol (files/commit.py), one test each; what power cuts and savers that slept leave."""

import itertools
import os
import shutil
from pathlib import Path

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint import Manager
from fmegatron.checkpoint.files import folder, leases
from fmegatron.checkpoint.files.folder import FolderStore
from fmegatron.checkpoint.files.keyvalue import KeyValues
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.tools.gc import collect
from fmegatron.files import whole
from tests.checkpoint.faulty import Killed, lives
from tests.checkpoint.test_manager import ONE, state
from tests.checkpoint.tokens import plain

GONE = "was deleted by another process, which took this save for dead"


def version_of(place):
    """Which of the states 1 to 9 a place holds, whole; None: it has no checkpoint. What is listed restores."""
    if not place.is_complete():
        return None
    got = checkpoint.restore(place, ONE)
    return next(v for v in range(1, 10) if all(torch.equal(got[k], state(v)[k]) for k in ONE))


@pytest.fixture(params=["folder", "memory"])
def place(request, tmp_path):
    at = FolderStore(str(tmp_path)) if request.param == "folder" else open_store("memory://runs/one", {})
    return at.child("a")


@pytest.fixture
def folder_place(tmp_path):
    return FolderStore(str(tmp_path / "step_00000007"))


def test_a_token_that_is_a_link_is_refused_as_one(folder_place, tmp_path):
    """A save whose files somebody moved to a larger disk."""
    checkpoint.save(folder_place, state(3), ONE, step=7)
    token, big = folder_place.pointer()["root"], tmp_path / "big"
    shutil.move(folder_place.at(token), big)
    os.symlink(big, folder_place.at(token))
    with pytest.raises(
        checkpoint.CheckpointError, match=f"is a link to {big}, and links .* not followed.*restore that"
    ):
        checkpoint.restore(folder_place, ONE)
    assert torch.equal(checkpoint.restore(big, ONE)["w"], state(3)["w"])


# ---- the ten traps


@pytest.mark.long
@pytest.mark.parametrize("copied", ["token", "half a token", "marker last"])
def test_a_copy_that_is_under_way_is_left_alone(folder_place, tmp_path, copied):
    """A token without a file and no COMPLETE: `cp -r` has not come so far. Nothing waits it out."""
    checkpoint.save(tmp_path / "elsewhere", state(3), ONE, step=7)
    source = FolderStore(str(tmp_path / "elsewhere"))
    token = source.pointer()["root"]
    shutil.copytree(source.at(token), folder_place.at(token))
    for name in ("COMPLETE", "manifest.json") if copied == "half a token" else ():
        os.remove(folder_place.at(f"{token}/{name}"))
    before, now = sorted(p for p in Path(folder_place.path).rglob("*")), [0.0]
    with Manager(tmp_path, keep=1) as manager:
        manager._steps.watch = leases.Watch(lambda: now[0])
        for step in range(8, 20):
            manager.save(step, state(1), ONE)
            now[0] += 3600.0
    collect(tmp_path, age=0.0)
    assert sorted(p for p in Path(folder_place.path).rglob("*")) == before
    if copied != "half a token":
        shutil.copy(source.at("COMPLETE"), folder_place.path)
        assert version_of(folder_place) == 3


def test_of_a_link_nothing_is_swept_and_nothing_is_put_there(folder_place, tmp_path):
    """What it leads to is another's: dead drafts there, too. Deletion takes the link."""
    other = FolderStore(str(tmp_path / "elsewhere"))
    checkpoint.save(other, state(3), ONE)
    other.make("0123456789ab")
    os.symlink(other.path, folder_place.path)
    before = sorted(os.listdir(other.path))
    folder_place.sweep(leases.Watch())
    with pytest.raises(ValueError, match="got a link to another place"):
        checkpoint.save(folder_place, state(4), ONE)
    with pytest.raises(ValueError, match="got a link to another place"):
        folder_place.set_aside()
    assert sorted(os.listdir(other.path)) == before and version_of(folder_place) == 3
    folder_place.withdraw().delete()
    assert not os.path.lexists(folder_place.path) and sorted(os.listdir(other.path)) == before


def killed_before(patch, place, call):
    """A save of state 2 that dies before the move of its draft, or just behind it."""
    real = type(place).move

    def move(self, name, to):
        if to == "COMPLETE" and call == "before":
            raise Killed
        real(self, name, to)
        if to == "COMPLETE" and call == "behind":
            raise Killed

    with patch.context() as inner:
        inner.setattr(type(place), "move", move)
        inner.setattr(type(place), "end", lambda self, storage: None)
        with pytest.raises(Killed):
            checkpoint.save(place, state(2), ONE)


def test_nobody_finishes_the_move_of_a_dead_saver(place, monkeypatch):
    """It would go over a pointer that another has just put. Its draft counts as it is, until the next save."""
    with lives() as end:
        killed_before(monkeypatch, place, "before")
        end()
        (draft,) = place.inside(".COMPLETE-")
        place.sweep(leases.Watch())
        assert place.inside(".COMPLETE-") == [draft] and place.content("COMPLETE") is None
        assert version_of(place) == 2
        checkpoint.save(place, state(3), ONE)
        assert version_of(place) == 3 and place.inside(".COMPLETE-") == []


@pytest.mark.parametrize("act", ["withdraw", "set_aside"])
def test_another_save_comes_between_the_look_and_the_move(place, monkeypatch, act):
    """What was taken is read, and that is what goes, whole."""
    checkpoint.save(place, state(1), ONE)
    real, done = type(place).move, []

    def move(self, name, to):
        if not done:
            done.append(1)
            checkpoint.save(place, state(5), ONE)
        real(self, name, to)

    with monkeypatch.context() as patch:
        patch.setattr(type(place), "move", move)
        taken = getattr(place, act)()
    assert done and version_of(place) is None
    if act == "withdraw":
        taken.delete()
        assert place.inside() == []
    else:
        (left,) = place.leftovers()
        assert left.kind == "aside" and left.files.text == taken
        place.move(f"ASIDE-{left.token}", "COMPLETE")
        assert version_of(place) == 5


@pytest.mark.long
def test_a_save_that_was_only_replaced_is_not_refused(place, monkeypatch):
    """Between any two of the last looks of publish: token first, pointer second."""
    real_look = type(place)._was_taken
    for at in itertools.count():
        looks, busy = itertools.count(), []

        def hooked(real, at=at, looks=looks, busy=busy):
            def call(self, *args):
                if busy == ["looking"] and next(looks) == at:
                    busy.append("done")
                    checkpoint.save(place, state(5), ONE)
                return real(self, *args)

            return call

        def look(self, token, busy=busy):
            busy.append("looking") if not busy else None
            return real_look(self, token)

        with monkeypatch.context() as patch:
            patch.setattr(type(place), "_was_taken", look)
            for name in ("is_there", "content"):
                patch.setattr(type(place), name, hooked(getattr(type(place), name)))
            checkpoint.save(place, state(2), ONE)
        assert version_of(place) == (5 if "done" in busy else 2), at
        if "done" not in busy:
            break
    assert at >= 2


def test_a_disk_that_takes_half_of_the_pointer(folder_place, monkeypatch):
    """Then it is full: the draft is no pointer, and the save before stays."""
    checkpoint.save(folder_place, state(1), ONE)
    real, half = os.write, []

    def write(fd, data):
        if half and bytes(data[:1]) != b"{":
            raise OSError(28, "No space left on device")
        if b'"root"' in bytes(data):
            half.append(1)
            return real(fd, data[: len(data) // 2])
        return real(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(folder.os, "write", write)
        with pytest.raises(RuntimeError, match="No space left"):
            checkpoint.save(folder_place, state(2), ONE)
    assert half and version_of(folder_place) == 1 and len(folder_place.inside()) == 2


def test_a_move_that_was_done_answers_that_nothing_is_there(place, monkeypatch):
    """A server that was asked twice: the pointer names the save, so it is the checkpoint."""
    real = type(place).move

    def move(self, name, to):
        real(self, name, to)
        if to == "COMPLETE":
            raise FileNotFoundError(2, "No such file or directory", name)

    for version in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(type(place), "move", move)
            checkpoint.save(place, state(version), ONE)
        assert version_of(place) == version and len(place.inside()) == 2


def test_a_note_that_is_half_copied_keeps_its_save(folder_place):
    """It is watched as long as that of a saver on another machine."""
    storage = folder_place.begin()
    storage.lease.release()
    token, now = os.path.basename(storage.root), [0.0]
    watch = leases.Watch(lambda: now[0])
    note = Path(folder_place.path).parent / leases.saving_note("step_00000007", token)
    note.write_text('{"time": 17')
    for _ in range(5):
        folder_place.sweep(watch)
        assert folder_place.inside() == [f".COMPLETE-{token}", token]
        now[0] += 60.0
    folder_place.sweep(watch)
    assert not os.path.exists(folder_place.path) and not note.exists()


@pytest.mark.parametrize("kind", ["saving", "reading", "leaving"])
def test_a_note_that_is_half_copied_goes_when_it_was_watched(folder_place, kind):
    """Its own draft, or step, is not there any more; what holds the directory, or a save, cleans it up."""
    directory, now = folder_place.above(), [0.0]
    watch = leases.Watch(lambda: now[0])
    note = f".step_00000007.{kind}-{leases.new_token()}"
    (Path(directory.path) / note).write_text('{"time": 17')

    def clean():
        directory.clean(r"step_\d+", (), watch)
        leases.clean(directory.notes(), watch)
        return note in directory.notes().names()

    for _ in range(5):
        assert clean()
        now[0] += 60.0
    assert not clean()


def test_a_listing_that_is_older_than_a_draft(folder_place, monkeypatch):
    """A network file system shows a directory and not the draft that was made before it: it is looked for by name."""
    checkpoint.save(folder_place, state(1), ONE)
    storage, real = folder_place.begin(), FolderStore.inside
    token = os.path.basename(storage.root)
    with monkeypatch.context() as patch:
        patch.setattr(FolderStore, "inside", lambda self, start="": [n for n in real(self, start) if n[0] != "."])
        folder_place.sweep(leases.Watch())
    assert token in folder_place.inside() and f".COMPLETE-{token}" in folder_place.inside()
    storage.lease.release()


class Disk:
    """Which names of small files in a directory are on the disk: as they were at the last fsync of it."""

    def __init__(self, patch, place):
        self.place, real = place, whole.sync_directory
        self.names = self.now()

        def sync(path):
            real(path)
            if path == place.path:
                self.names = self.now()

        patch.setattr(whole, "sync_directory", sync)

    def now(self):
        there = os.listdir(self.place.path) if os.path.isdir(self.place.path) else []
        files = {n: Path(self.place.at(n)) for n in there}
        return {n: p.read_bytes() for n, p in files.items() if p.is_file() and not p.is_symlink()}

    def cut(self, to):
        """What is there after a power cut: names in the directory as of the last fsync; of those below, as they are."""
        shutil.copytree(self.place.path, to, symlinks=True) if os.path.isdir(self.place.path) else os.mkdir(to)
        after = FolderStore(str(to))
        for name in self.now():
            os.remove(after.at(name))
        for name, data in self.names.items():
            Path(after.at(name)).write_bytes(data)
        return after


def aimed_cuts(tmp_path, patch, act, mutant=False):
    """Power cuts before each change of who comes after a saver that died behind its move: which versions are left."""
    place, found = FolderStore(str(tmp_path / "runs/step_00000007")), []
    with lives() as end, patch.context() as inner:
        checkpoint.save(place, state(1), ONE, step=7)
        disk = Disk(inner, place)
        killed_before(patch, place, "behind")
        end()
        acknowledged, busy = [1, 2], []

        def hooked(real):
            def call(*args, **kwargs):
                if not busy:
                    busy.append(1)  # what is done to look at it is none of the changes
                    after = disk.cut(tmp_path / f"cut-{len(found)}")
                    try:
                        found.append((version_of(after), list(acknowledged)))
                    except checkpoint.CheckpointError as error:
                        found.append((f"listed and broken: {error}", list(acknowledged)))
                    shutil.rmtree(after.path)
                    busy.clear()
                return real(*args, **kwargs)

            return call

        if mutant:
            sweep = FolderStore.sweep
            inner.setattr(
                FolderStore, "sweep", lambda self, watch, synced=False, stop=None: sweep(self, watch, True, stop)
            )
        for name in ("remove", "rename", "rmdir", "mkdir"):
            inner.setattr(os, name, hooked(getattr(os, name)))
        if act == "save":
            acknowledged.append(3)
            checkpoint.save(place, state(3), ONE, step=7)
            acknowledged[:] = [3]
        elif act == "manager":
            with Manager(tmp_path / "runs") as manager:
                manager.save(8, state(8), ONE)
        else:
            collect(tmp_path / "runs", age=0.0)
        os.mkdir(tmp_path / "end")
    assert len(found) > 5
    return [one for one, allowed in found if one not in allowed]


@pytest.mark.parametrize("act", ["save", "manager", "gc"])
def test_a_power_cut_behind_a_save_that_died_before_its_last_fsync(tmp_path, monkeypatch, act):
    """Somebody deletes what it replaced: the names are durable first, or the old pointer comes back without files."""
    assert aimed_cuts(tmp_path, monkeypatch, act) == []


def test_without_the_fsync_before_deletion_such_a_cut_loses_a_checkpoint(tmp_path, monkeypatch):
    """The check above sees it."""
    assert aimed_cuts(tmp_path, monkeypatch, "save", mutant=True) != []


# ---- savers that slept


@pytest.mark.long
@pytest.mark.parametrize("existing", [True, False], ids=["again", "first"])
@pytest.mark.parametrize("act", ["nothing", "save", "delete"])
def test_a_saver_that_was_taken_for_dead_wakes_up(place, monkeypatch, act, existing):
    """At every change it stops, another cleans up, saves or deletes, and it goes on: what is acknowledged is there,
    what is listed is whole, and the next save leaves nothing else."""
    changes = [(type(place), name) for name in ("make", "fill", "durable", "move", "drop", "delete")]
    changes += [(folder.Folder, "write")] if isinstance(place, FolderStore) else [(KeyValues, "write")]
    outcomes = set()
    for at in range(200):
        if existing:
            checkpoint.save(place, state(1), ONE)
        steps, slept = itertools.count(), []

        def hooked(real, at=at, steps=steps, slept=slept):
            def call(*args, **kwargs):
                if not slept and next(steps) == at:
                    slept.append(1)
                    with monkeypatch.context() as patch:
                        patch.setattr("fmegatron.files.owners.fate", lambda whose: "gone")
                        place.sweep(leases.Watch())
                        place.above().clean("a", (), leases.Watch())
                    if act == "save":
                        checkpoint.save(place, state(5), ONE)
                    elif act == "delete":
                        place.withdraw().delete()
                return real(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(folder.Folder, "writers", 1)
            for of, name in changes:
                patch.setattr(of, name, hooked(getattr(of, name)))
            try:
                checkpoint.save(place, state(2), ONE)
                acknowledged = True
            except (RuntimeError, OSError) as error:
                acknowledged = False
                assert GONE in str(error) or "No such file" in str(error) or "vanished" in str(error), (at, error)
        found = version_of(place)
        if act == "nothing":
            wanted = {2} if acknowledged else {1} if existing else {None}
        elif act == "save":
            wanted = {2, 5} if acknowledged else {5}
        else:
            wanted = {2, None} if acknowledged or not existing else {None}
        assert found in wanted, (at, acknowledged, found)
        outcomes.add((acknowledged, found))
        checkpoint.save(place, state(3), ONE)
        assert version_of(place) == 3 and place.inside() == sorted(["COMPLETE", place.pointer()["root"]]), at
        place.withdraw().delete()
        if not slept:
            break
    assert at > 10 and len(outcomes) >= 2


# ---- what is gone


def begun(place):
    storage = place.begin()
    storage.write("manifest.json", [b"{}"])
    return storage


WITH_WORDS = {  # what is done with a place: (what was there before, the act, what an error says)
    "withdraw": (lambda place: None, lambda place, was: place.withdraw().delete(), None),
    "set aside": (lambda place: None, lambda place, was: place.set_aside(), "got nothing, wanted a save to set aside"),
    "sweep": (lambda place: begun(place).lease.release(), lambda place, was: place.sweep(leases.Watch()), None),
    "remove": (
        lambda place: (begun(place).lease.release(), place.leftovers())[1],
        lambda place, was: [place.remove(left) for left in was],
        None,
    ),
    "begin": (lambda place: None, lambda place, was: place.end(begun(place)), None),
    "publish": (begun, lambda place, was: place.publish(was, b"{}"), GONE),
    "end": (begun, lambda place, was: place.end(was), None),
}


@pytest.mark.parametrize("act", WITH_WORDS)
def test_a_place_that_goes_before_a_change(place, monkeypatch, act):
    """Somebody removes all of it before the first, or any later, change: it is done, or the error has words."""
    before, do, words = WITH_WORDS[act]
    changes, outcomes = ("make", "fill", "put", "durable", "move", "drop", "delete"), set()
    for at in range(-1, 100):
        checkpoint.save(place, state(1), ONE)
        was, steps, gone = before(place), itertools.count(), []

        def goes(gone=gone):
            gone.append(1)
            shutil.rmtree(place.path) if isinstance(place, FolderStore) else place.values.delete()

        def hooked(real, at=at, steps=steps, gone=gone, goes=goes):
            def call(*args, **kwargs):
                if not gone and next(steps) == at:
                    goes()
                return real(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in changes:
                patch.setattr(type(place), name, hooked(getattr(type(place), name)))
            goes() if at < 0 else None
            try:
                do(place, was)
            except OSError as error:
                assert words and words in str(error) and place.text in str(error), (at, error)
                outcomes.add("said")
        if was is not None and hasattr(was, "lease"):
            place.end(was)
        if not gone:
            break
        outcomes.add("gone")
    assert outcomes == {"gone", *(["said"] if words else [])}, (at, outcomes)


@pytest.mark.parametrize("act", ["withdraw", "set_aside"])
def test_a_name_that_version_3_had_taken(folder_place, act):
    """A re-save of version 3 was killed between two renames: the step is there under a hidden name, and goes, too."""
    checkpoint.save(folder_place, state(3), ONE, step=7)
    os.rename(plain(folder_place.path), f"{folder_place.above().path}/.step_00000007.old-aaaaaaaaaaaa")
    assert version_of(folder_place) == 3
    if act == "withdraw":
        folder_place.withdraw().delete()
        assert os.listdir(folder_place.above().path) == []
    else:
        assert folder_place.set_aside() == folder_place.path and version_of(folder_place) is None
        assert [left.kind for left in folder_place.leftovers()] == ["aside"]

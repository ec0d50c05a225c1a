"""Two jobs in one folder: what one of them is told is saved is saved, whatever the other cleans or replaces."""

import itertools
import json
import os
import sys
import threading
import time
import warnings

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint import Manager
from fmegatron.checkpoint.files import leases, objects, siblings
from fmegatron.checkpoint.files.folder import Folder, FolderStore
from fmegatron.checkpoint.files.keyvalue import KeyValues
from fmegatron.checkpoint.files.notes import Notes
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.tools.gc import collect
from tests.checkpoint.fake_world import assert_same_bits
from tests.checkpoint.faulty import FaultyStorage, FaultyStore
from tests.checkpoint.test_manager import ONE, state
from tests.house import ROOT
from tests.pairs import few
from tests.sampling import seeds


def campaign(python, directory, seconds, seed, keep, machines=1, background=0):
    command = [sys.executable, "-m", "tests.checkpoint.two_jobs_campaign", str(directory)]
    arguments = map(str, (seconds, seed, keep, machines, background))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = python.run([*command, *arguments], cwd=ROOT, env=environment, timeout=1000)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["acknowledged"] > 4 and found["reader"]["restored"] > 4, found
    assert found["broken"] == found["lost"] == found["reader"]["wrong"] == [], f"seed {seed}, keep {keep}: {found}"
    return found


@pytest.mark.parametrize("keep, machines", few(1, [(0, 1), (1, 2)], ["all", "one"]))
def test_every_acknowledged_save_restores(tmp_path, python, keep, machines):
    campaign(python, tmp_path / "run", 3, seeds("two jobs", 0, 1)[0], keep, machines)


@pytest.mark.slow
@pytest.mark.parametrize("keep, machines, background, seed", [(0, 1, 0, 1), (1, 1, 0, 2), (2, 1, 1, 3), (1, 2, 1, 4)])
def test_every_acknowledged_save_restores_for_a_minute(tmp_path, python, keep, machines, background, seed):
    found = campaign(python, tmp_path / "run", 60, seed, keep, machines, background)
    assert found["twice"] > 0 and min(found["by job"]) > 0, found


# ---- the same at chosen moments


class Meanwhile:
    """A save that stops before one of its operations, until `go`; other saves happen there."""

    def __init__(self, store, operation, number=1):
        self.reached, self.go, self.number = threading.Event(), threading.Event(), number
        self.operation, self.count, self.error = operation, itertools.count(1), []  # next: of several threads, too
        self.thread = threading.Thread(target=self.save, args=(FaultyStore(store, self.wrap),))
        self.thread.start()
        assert self.reached.wait(60)

    def wrap(self, real):
        return FaultyStorage(real, self.before)

    def before(self, operation, name):
        if operation == self.operation and next(self.count) == self.number:
            self.reached.set()
            assert self.go.wait(60)

    def save(self, store):
        try:
            checkpoint.save(store, state(7), ONE, step=7)
        except Exception as error:
            self.error.append(error)

    def end(self):
        self.go.set()
        self.thread.join()
        assert self.error == []


@pytest.fixture(params=["folder", "memory"])
def place(request, tmp_path):
    return tmp_path / "run" if request.param == "folder" else open_store("memory://runs/two", {})


@pytest.mark.long
@pytest.mark.parametrize("operation, number", [("write", 1), ("write", 4), ("sync", 1), ("write", 7)])
@pytest.mark.parametrize("other", ["machine", "here"])
def test_a_save_that_is_under_way(place, monkeypatch, operation, number, other):
    """The other job saves, keeps one, cleans and collects; on this machine or on another."""
    store = open_store(place)
    saving = Meanwhile(store.child("step_00000007"), operation, number)
    with monkeypatch.context() as patch:
        if other == "machine":
            patch.setattr("fmegatron.files.owners._where", lambda: "elsewhere")
        with Manager(place, keep=1) as manager:
            for step in (1, 2, 3):
                manager.save(step, state(step), ONE)
            collect(place, age=0.0)
    saving.end()
    assert Manager(place).steps() == [3, 7]
    assert_same_bits(Manager(place).restore(7, ONE)[0], state(7))
    with Manager(place, keep=1) as manager:
        manager.save(8, state(8), ONE)
    assert Manager(place).steps() == [8]
    if isinstance(place, os.PathLike):
        assert sorted(os.listdir(place)) == ["latest", "step_00000008"]


def test_both_save_the_same_step(place):
    """The last one stays; both are whole, and nothing is left over."""
    store = open_store(place)
    saving = Meanwhile(store.child("step_00000007"), "write", 7)
    Manager(place).save(7, state(1), ONE)
    assert_same_bits(Manager(place).restore(7, ONE)[0], state(1))
    saving.end()
    assert_same_bits(Manager(place).restore(7, ONE)[0], state(7))
    if isinstance(place, os.PathLike):
        assert sorted(os.listdir(place)) == ["latest", "step_00000007"]
    else:
        keys = {key.partition("/")[0] for key in store.child("step_00000007").values.names()}
        assert len(keys) == 2 and store.notes().names() == [".step_00000007.saved", "latest"]


@pytest.mark.long
@pytest.mark.parametrize("existing", [True, False], ids=["again", "first"])
@pytest.mark.parametrize("act", ["save", "delete"])
def test_another_saves_or_deletes_between_any_two_steps(tmp_path, monkeypatch, act, existing):
    """Of giving a checkpoint its name: `fill`, each `durable`, `move`, `sweep`. What was acknowledged is there."""
    place = FolderStore(str(tmp_path / "a"))

    def delete():
        if os.path.lexists(place.path):
            place.withdraw().delete()

    for at in range(100):
        if existing:
            checkpoint.save(place, state(1), ONE)
        steps, done = itertools.count(), []

        def hooked(real, at=at, steps=steps, done=done):
            def call(self, *args, **options):
                if self == place and not done and next(steps) == at:
                    done.append(1)
                    checkpoint.save(place, state(5), ONE) if act == "save" else delete()
                return real(self, *args, **options)

            return call

        saved = None
        with monkeypatch.context() as patch:
            for name in ("make", "fill", "durable", "move", "sweep"):
                patch.setattr(FolderStore, name, hooked(getattr(FolderStore, name)))
            try:
                checkpoint.save(place, state(2), ONE)
                saved = 2
            except (OSError, RuntimeError) as error:
                assert "was deleted by another process" in str(error) or "No such file" in str(error), error
        if place.is_complete():
            got = checkpoint.restore(place, ONE)
            assert any(all(torch.equal(got[k], state(v)[k]) for k in ONE) for v in (1, 2, 5)), at
        else:
            assert act == "delete", at
        assert saved or act == "delete", at
        assert set(place.inside()) - {"COMPLETE"} == ({place._root()} if place.is_complete() else set()), at
        delete()
        assert os.listdir(tmp_path) == [], at
        if not done:
            break
    assert at > 6


def test_an_owner_that_was_stopped_for_long_fails_cleanly(tmp_path, monkeypatch):
    """It was taken for dead on another machine, and its files went: it is told so, and what is there stays as it is."""
    checkpoint.save(tmp_path / "step_00000007", state(1), ONE, step=7)
    before = len([at for at in (tmp_path / "step_00000007").glob("*/**/*") if at.is_file()])
    saving = Meanwhile(FolderStore(str(tmp_path / "step_00000007")), "write", 4)
    watch, now = leases.Watch(lambda: now[0]), [0.0]
    while len([at for at in (tmp_path / "step_00000007").glob("*/**/*") if at.is_file()]) < before + 3:
        time.sleep(0.01)  # what it has given to tensorstore is written: that would make the directory again
    with monkeypatch.context() as patch:
        patch.setattr("fmegatron.files.owners._where", lambda: "elsewhere")
        store = FolderStore(str(tmp_path))
        for _ in range(10):
            store.clean(leases.STEP.pattern, (), watch)
            assert len(os.listdir(tmp_path)) == (2 if now[0] < leases.LEASE_S else 1)
            assert len(store.child("step_00000007").inside()) == (4 if now[0] < leases.LEASE_S else 2)
            now[0] += 60.0
    saving.go.set()
    saving.thread.join()
    assert len(saving.error) == 1
    assert any(text in str(saving.error[0]) for text in ("No such file", "was written and has vanished"))
    assert os.listdir(tmp_path) == ["step_00000007"]
    assert_same_bits(checkpoint.restore(tmp_path / "step_00000007", ONE), state(1))


def test_what_an_older_version_has_left_is_watched(tmp_path):
    """It has no owner: as long as something changes in it, somebody may write there."""
    (tmp_path / ".step_00000007.tmp-0123456789ab/arrays").mkdir(parents=True)
    at, now = tmp_path / ".step_00000007.tmp-0123456789ab/arrays/x", [0.0]
    with Manager(tmp_path) as manager:
        manager._steps.watch = leases.Watch(lambda: now[0])
        for step in range(1, 12):
            at.write_text("x" * step)
            manager.save(step, state(step), ONE)
            now[0] += 3600.0
        assert at.exists()
        for step in range(12, 18):
            manager.save(step, state(step), ONE)
            now[0] += 3600.0
    assert not at.parent.parent.exists()


def test_the_only_step_goes_between_two_looks(place, monkeypatch):
    """Another job saves a newer one and deletes it, after the directory was listed: there always is one."""
    store, jobs = open_store(place), []
    real = type(store).children

    def children(self):
        found = real(self)
        if self.text == store.text and jobs:
            with Manager(store, keep=1) as manager:
                step = jobs.pop()
                manager.save(step, state(step), ONE)
        return found

    with Manager(store, keep=1) as manager:
        manager.save(1, state(1), ONE)
    monkeypatch.setattr(type(store), "children", children)
    for last, look in (
        (4, lambda: Manager(store).latest()),
        (7, lambda: Manager(store).steps()[-1]),
        (10, lambda: Manager(store).restore_latest(ONE)[0]),
    ):
        jobs += [last, last - 1, last - 2]
        assert look() == last and jobs == []


def test_what_savers_of_other_machines_have_there_is_said(place, monkeypatch):
    """Without a Manager nobody watches whether they live, so it would fill the disk in silence."""
    store = open_store(place).child("last")
    checkpoint.save(store, state(1), ONE)
    with monkeypatch.context() as patch:
        patch.setattr("fmegatron.files.owners._where", lambda: "elsewhere")
        other = store.begin()
    other.write("arrays/w/c.0.0", [b"half of it"])
    with pytest.warns(RuntimeWarning, match=f"last: others save here, too, or have died: .*{other.root} is of process"):
        checkpoint.save(store, state(2), ONE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.save(store.above().child("else"), state(3), ONE)  # nothing to say of another one
        other.lease.release()
        if isinstance(place, os.PathLike):
            assert any(a.kind == "remove" for a in collect(place, age=0.0).actions)
            checkpoint.save(store, state(4), ONE)
    assert_same_bits(checkpoint.restore(store, ONE), state(4 if isinstance(place, os.PathLike) else 2))


def test_a_leftover_that_cannot_be_removed_is_said_and_in_nobodys_way(tmp_path, monkeypatch):
    lease = leases.Lease(Notes(tmp_path), ".step_00000007.saving-0123456789ab")
    (tmp_path / ".step_00000007.tmp-0123456789ab").mkdir()
    lease.drop()

    def refuse(path, stop=None):
        raise PermissionError(13, "Permission denied", path)

    with monkeypatch.context() as patch:
        patch.setattr(siblings, "remove", refuse)
        with pytest.warns(RuntimeWarning, match="what killed saves left could not be removed: .*Permission denied"):
            Manager(tmp_path).save(1, state(1), ONE)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpoint.save(tmp_path / "step_00000007", state(7), ONE)
        assert any("what killed saves have left there could not be removed" in str(w.message) for w in caught)
    Manager(tmp_path).save(8, state(8), ONE)
    assert sorted(os.listdir(tmp_path)) == ["latest", *(f"step_0000000{n}" for n in (1, 7, 8))]


def test_an_object_store_with_a_live_saver_of_another_step(monkeypatch):
    """The prefix of a step that retention deletes while it is saved again: only the old objects go."""
    store = open_store("memory://runs/x", {})
    with Manager(store) as manager:
        manager.save(7, state(1), ONE)
    saving = Meanwhile(store.child("step_00000007"), "write", 4)
    store.child("step_00000007").withdraw().delete()
    assert isinstance(store, objects.ObjectStore) and Manager(store).steps() == []
    saving.end()
    assert Manager(store).steps() == [7]
    assert_same_bits(Manager(store).restore(7, ONE)[0], state(7))


@pytest.mark.parametrize(
    "moment, existing",
    [
        *itertools.product(["before its draft is filled", "before it", "after it"], [False, True]),
        *itertools.product(["when marked", "when seen"], [True]),
    ],
)
def test_an_object_store_and_an_owner_that_was_stopped_for_long(monkeypatch, existing, moment):
    """It goes on at this moment of another machine's clean-up: it is told that its files went, or they are there.

    With nothing saved before, a draft that is filled is the checkpoint: it is not cleaned up."""
    store, now = open_store("memory://runs/x", {}), [0.0]
    place, watch = store.child("step_00000007"), leases.Watch(lambda: now[0])
    if existing:
        checkpoint.save(place, state(1), ONE, step=7)
    seen, published, cleaned = threading.Event(), threading.Event(), threading.Event()
    real = {name: getattr(type(place), name) for name in ("_condemn", "delete")}

    def clean():
        for _ in range(10):
            store.clean(leases.STEP.pattern, (), watch)
            now[0] += 60.0
        cleaned.set()

    cleaner = threading.Thread(target=clean)

    def stop(name):
        def call(self, *args):
            if name == "_condemn":
                real[name](self, *args)
            if threading.current_thread() is cleaner:
                if moment == {"_condemn": "when marked", "delete": "when seen"}[name]:
                    seen.set()
                    assert published.wait(60)
            if name == "delete":
                real[name](self, *args)

        return call

    put = KeyValues.write

    def write(self, name, blocks):
        first = name.startswith(".COMPLETE-") and blocks != [b""] if "filled" in moment else name == "COMPLETE"
        if first and self.spec["path"].endswith("step_00000007/") and cleaner.ident is None:
            if moment != "after it":
                cleaner.start()
                assert (cleaned if moment.startswith("before") else seen).wait(60)
            put(self, name, blocks)
            published.set()
            if moment == "after it":
                cleaner.start()
            cleaner.join()
        else:
            put(self, name, blocks)

    with monkeypatch.context() as patch:
        # The saver asks nobody's fate, and all are unknown to the cleaner.
        patch.setattr("fmegatron.files.owners.fate", lambda whose: "unknown")
        for name in real:
            patch.setattr(type(place), name, stop(name))
        patch.setattr(KeyValues, "write", write)
        if "filled" in moment or (existing and moment in ("before it", "when seen")):
            with pytest.raises(RuntimeError, match="was deleted by another process, which took this save for dead"):
                checkpoint.save(place, state(2), ONE, step=7)
            there = 1 if existing else None
        else:
            checkpoint.save(place, state(2), ONE, step=7)
            there = 2
    assert Manager(store).steps() == ([] if there is None else [7])
    if there is not None:
        assert_same_bits(checkpoint.restore(place, ONE), state(there))
    checkpoint.save(place, state(3), ONE, step=7)
    assert_same_bits(checkpoint.restore(place, ONE), state(3))
    assert len({key.partition("/")[0] for key in place.values.names()}) == 2
    assert [note for note in store.notes().names() if ".saving-" in note] == []


def test_chunks_that_vanish_before_the_marker(tmp_path, monkeypatch):
    """Whoever removed them, without a note: that save has failed, and the old one is there."""
    checkpoint.save(tmp_path / "a", state(1), ONE)

    def sync(self):
        os.remove(self.at("arrays/w/c.0.0"))

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "sync", sync)
        with pytest.raises(RuntimeError, match="was written and has vanished"):
            checkpoint.save(tmp_path / "a", state(2), ONE)
    assert_same_bits(checkpoint.restore(tmp_path / "a", ONE), state(1))
    assert torch.equal(state(1)["w"], checkpoint.restore(tmp_path / "a", ONE)["w"])

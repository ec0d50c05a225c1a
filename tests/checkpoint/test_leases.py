"""A step that somebody reads is not deleted: in this process, in another one, and under a stress of both."""

import io
import json
import os
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint import CheckpointError, Manager
from fmegatron.checkpoint import __main__ as command_line
from fmegatron.checkpoint.__main__ import main as tool
from fmegatron.checkpoint.files import leases
from fmegatron.checkpoint.files.notes import Notes
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.manage import walk
from fmegatron.checkpoint.manage.steps import Steps
from fmegatron.checkpoint.reading import read
from fmegatron.files.owners import fate, owner
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import assert_same_bits
from tests.house import ROOT

LAYOUTS = {"w": Layout((64, 1024), torch.float32, Mesh()), "step": Layout((), torch.int64, Mesh())}


def state(step):
    return {"w": torch.full((64, 1024), float(step)), "step": torch.tensor(step)}


def save(directory, *steps, keep=1):
    with Manager(directory, keep=keep) as manager:
        for step in steps:
            manager.save(step, state(step), LAYOUTS)
        return manager


@pytest.fixture
def held(monkeypatch):
    """Restores wait, with everything chosen and nothing read, until `go` is set."""
    started, go, restore = threading.Event(), threading.Event(), walk.restore_save

    def slow(*args, **kwargs):
        started.set()
        assert go.wait(30)
        return restore(*args, **kwargs)

    monkeypatch.setattr(walk, "restore_save", slow)
    return started, go


def in_a_thread(work):
    result = []

    def main():
        try:
            result.append(work())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=main)
    thread.start()
    return thread, result


@pytest.mark.parametrize("read", ["restore", "restore_latest"])
def test_a_slow_reader_of_the_oldest_step(tmp_path, held, read):
    """Retention passes it by, several times; it reads every bit; then the step goes."""
    started, go = held
    save(tmp_path, 1)
    reader = Manager(tmp_path)
    work = {"restore": lambda: reader.restore(1, LAYOUTS), "restore_latest": lambda: reader.restore_latest(LAYOUTS)}
    thread, result = in_a_thread(work[read])
    assert started.wait(30)
    writer = save(tmp_path, 2, 3, 4)
    assert writer.steps() == [1, 4]
    go.set()
    thread.join()
    assert_same_bits(result[0][-2], state(1))
    save(tmp_path, 5)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000005"]


@pytest.mark.parametrize("url", [None, "memory://runs/held"])
def test_a_plain_restore_of_a_step_holds_it(tmp_path, monkeypatch, url):
    """`checkpoint.restore` of a path or Store, which knows of no Manager; not only of the Manager's own."""
    store = open_store(tmp_path) if url is None else open_store(url, {})
    save(store, 1)
    started, go, start = threading.Event(), threading.Event(), read.start_reading

    def slow(*args, **kwargs):
        started.set()
        assert go.wait(30)
        return start(*args, **kwargs)

    monkeypatch.setattr(read, "start_reading", slow)
    thread, result = in_a_thread(lambda: checkpoint.restore(store.child("step_00000001"), LAYOUTS))
    assert started.wait(30)
    assert save(store, 2).steps() == [1, 2]
    go.set()
    thread.join()
    assert_same_bits(result[0], state(1))
    assert save(store, 3).steps() == [3]


def test_tools_hold_what_they_read(tmp_path, monkeypatch):
    save(tmp_path, 1, 2, keep=None)
    seen = []
    for name in ("verify", "show", "diff", "export_safetensors"):
        real = getattr(command_line, name)

        def spy(*args, real=real, name=name, **kwargs):
            seen.append((name, [Steps(tmp_path).why_held(step) is not None for step in (1, 2)]))
            return real(*args, **kwargs)

        monkeypatch.setattr(command_line, name, spy)
    one, two = (str(tmp_path / f"step_0000000{step}") for step in (1, 2))
    for argv in (["verify", one], ["show", two], ["diff", one, two], ["export", one, str(tmp_path / "out")]):
        assert tool(argv, io.StringIO(), io.StringIO()) in (0, 1)
    held = {"verify": [True, False], "show": [False, True], "diff": [True, True]}
    held["export_safetensors"] = [True, False]
    assert dict(seen) == held
    assert [Steps(tmp_path).why_held(step) for step in (1, 2)] == [None, None]


def test_without_the_lease_it_would_be_lost(tmp_path, held, monkeypatch):
    """The test above can fail: the same reader whose note cannot be seen."""
    started, go = held
    save(tmp_path, 1)
    monkeypatch.setattr(leases, "why_held", lambda *args: None)
    thread, result = in_a_thread(lambda: Manager(tmp_path).restore(1, LAYOUTS))
    assert started.wait(30)
    assert save(tmp_path, 2).steps() == [2]
    go.set()
    thread.join()
    assert isinstance(result[0], CheckpointError)


def test_a_reader_in_another_process(tmp_path, python):
    save(tmp_path, 1)
    code = (
        "import sys, torch\n"
        "from fmegatron.checkpoint import Manager\n"
        "from fmegatron.checkpoint.manage import walk\n"
        "from tests.checkpoint.test_leases import LAYOUTS\n"
        "restore = walk.restore_save\n"
        "def slow(*args, **kwargs):\n"
        "    print('reading', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    return restore(*args, **kwargs)\n"
        "walk.restore_save = slow\n"
        "got, _ = Manager(sys.argv[1]).restore(1, LAYOUTS)\n"
        "print(torch.equal(got['w'], torch.full((64, 1024), 1.0)), flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    reader = python.popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=pipe, stdout=pipe, text=True, env=environment, cwd=ROOT
    )
    try:
        assert reader.stdout.readline() == "reading\n"
        assert save(tmp_path, 2, 3).steps() == [1, 3]
        out, _ = reader.communicate("go\n", timeout=600)
        assert out == "True\n"
        assert save(tmp_path, 4).steps() == [4]
    finally:
        reader.kill()
        reader.wait()


@pytest.mark.slow
@pytest.mark.long
def test_readers_and_retention_at_once(tmp_path):
    """Readers restore the newest step over and over while a writer keeps one: none ever fails, or reads mixed bits."""
    save(tmp_path, 0)
    done, failures, seen = threading.Event(), [], set()

    def read():
        while not done.is_set():
            try:
                step, got, _ = Manager(tmp_path).restore_latest(LAYOUTS)
                assert_same_bits(got, state(step))
                seen.add(step)
            except Exception as error:
                failures.append(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a step that went between the look and the note is named, and left out
        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        save(tmp_path, *range(1, 60))
        done.set()
        for thread in threads:
            thread.join()
    assert not failures and len(seen) > 3
    assert save(tmp_path, 60).steps() == [60]


def test_a_reader_that_was_killed_here(tmp_path):
    """Its note is void at once, on this node; that of a reader on another node only with time."""
    save(tmp_path, 1)
    dead = subprocess.Popen(["true"])
    dead.wait()
    note = tmp_path / ".step_00000001.reading-0123456789ab"
    where, _, _ = owner().partition("-")
    note.write_text(json.dumps({"time": time.time(), "owner": f"{where}-{dead.pid}"}))
    assert fate(owner()) == fate(f"{where}-1") == "lives"
    for whose in (f"elsewhere-{dead.pid}", f"-{dead.pid}", where, f"{where}-{10**30}"):
        assert fate(whose) == "unknown"
    assert fate(f"{where}-{dead.pid}") == "gone"
    (tmp_path / f".new-{where}-{dead.pid}-01234567").write_text("torn")
    assert save(tmp_path, 2).steps() == [2] and sorted(os.listdir(tmp_path)) == ["latest", "step_00000002"]


@pytest.mark.medium
@pytest.mark.parametrize("clock", [-1e6, 0.0, 1e6])
def test_a_reader_of_another_node_protects_while_it_renews_its_note(tmp_path, clock):
    """Whatever its clock says, or ours: what counts is that we have seen its note change."""
    now, note = [0.0], tmp_path / ".step_00000001.reading-0123456789ab"
    wall = time.time() + clock

    def renew(beat):
        note.write_text(json.dumps({"time": wall + 30 * beat, "owner": "elsewhere-1-1", "host": "n7", "beat": beat}))

    save(tmp_path, 1)
    with Manager(tmp_path, keep=1) as manager:
        manager._steps.watch = leases.Watch(lambda: now[0])
        for step in range(2, 30):  # a long run; each save looks once, an hour after the last
            renew(step)
            manager.save(step, state(step), LAYOUTS)
            now[0] += 3600.0
        assert manager.steps() == [1, 29]
        for step in range(30, 40):  # the node died: the note stays as it is
            manager.save(step, state(step), LAYOUTS)
            now[0] += 60.0
            assert manager.steps() == ([1, step] if step < 34 else [step])
        assert not note.exists()  # and its note goes, too
    note.write_text(json.dumps({"time": wall, "owner": "elsewhere-1-1", "host": "n7", "beat": 0}))
    with Manager(tmp_path, keep=1) as manager:
        manager._steps.watch = leases.Watch(lambda: now[0])
        manager.save(40, state(40), LAYOUTS)
        now[0] += 10 * leases.LEASE_S  # the file system was away, for the other node, too: one look proves nothing
        manager.save(41, state(41), LAYOUTS)
        assert note.exists()


def test_a_note_without_a_holder_protects_nothing(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".step_00000001.reading-0123456789ab").write_text("{}")
    assert save(tmp_path, 2).steps() == [2]


@pytest.mark.long
@pytest.mark.parametrize("text", ["", "[]", '{"time": "now"}', "[" * 100_000, "\0\xff"])
def test_a_note_that_cannot_be_parsed_is_watched(tmp_path, text):
    """Where a rename is a copy it was read in the middle of one: it counts until it was not renewed for as long as any
    other of another node, and then it protects nothing, and goes."""
    note, now = tmp_path / ".step_00000001.reading-0123456789ab", [0.0]
    save(tmp_path, 1)
    note.write_text(text)
    with Manager(tmp_path, keep=1) as manager:
        manager._steps.watch = leases.Watch(lambda: now[0])
        for step in range(2, 12):
            if step == 5:  # somebody renews it
                note.write_text(text + " ")
            manager.save(step, state(step), LAYOUTS)
            now[0] += 60.0
            assert manager.steps() == ([1, step] if step < 10 else [step])
    assert not note.exists()


def test_a_reader_renews_its_note(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "BEAT_S", 0.01)
    notes = Notes(tmp_path)
    with leases.reading(notes, "a"):
        (note,) = tmp_path.iterdir()
        first = json.loads(note.read_text())["beat"]
        until = time.monotonic() + 600
        while json.loads(note.read_text())["beat"] == first:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert not list(tmp_path.iterdir())


def test_one_of_the_two_always_sees_the_other(tmp_path):
    """The deleter left its note first: the reader waits until it is through, and then finds the step or not."""
    notes, order, watch = Notes(tmp_path), [], leases.Watch()
    with leases.leaving(notes, "a", watch) as held:
        assert held is None

        def read():
            with leases.reading(notes, "a"):
                order.append("reads")

        thread, _ = in_a_thread(read)
        while len(list(tmp_path.iterdir())) < 2:  # the reader's note is there
            time.sleep(0.001)
        time.sleep(0.05)
        order.append("renamed")
    thread.join()
    assert order == ["renamed", "reads"]
    with leases.reading(notes, "a"), leases.leaving(notes, "a", watch) as a, leases.leaving(notes, "b", watch) as b:
        assert a.startswith(f"process {os.getpid()} on ") and a.endswith(" reads it") and b is None


def test_where_no_note_can_be_left(tmp_path, monkeypatch):
    """A read-only directory can be restored from, and a full disk does not keep old steps from being deleted."""
    save(tmp_path, 1, 2, keep=None)

    real = Notes.write

    def full(self, name, data, durable=False):
        if "saving" not in name:
            raise OSError(28, "No space left on device")
        real(self, name, data, durable)

    monkeypatch.setattr(Notes, "write", full)
    got, _ = Manager(tmp_path).restore(1, LAYOUTS)
    assert_same_bits(got, state(1))
    with pytest.warns(RuntimeWarning, match="the tracker could not be written.*No space left"):
        assert save(tmp_path, 3).steps() == [3]


def test_pins(tmp_path):
    manager = save(tmp_path, 1, 2, keep=None)
    manager.pin(1)
    assert save(tmp_path, 3).steps() == [1, 3]
    assert save(tmp_path, 4).steps() == [1, 4]  # for other Managers and later runs, too
    Manager(tmp_path).unpin(1)
    assert save(tmp_path, 5).steps() == [5]
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000005"]
    with pytest.raises(ValueError, match=r"Manager.pin: got step 1, wanted one of \[5\]"):
        manager.pin(1)

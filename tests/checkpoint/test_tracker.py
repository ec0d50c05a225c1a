"""The file `latest`: written in one step when the checkpoint is durable; a hint that nothing depends on."""

import json
import os
import time

import pytest
import torch

from fmegatron.checkpoint import Manager
from fmegatron.checkpoint.files.notes import Notes
from fmegatron.checkpoint.manage import manager
from fmegatron.checkpoint.manage.tracker import Latest, read_latest, write_latest
from fmegatron.layout import Layout, Mesh

LAYOUTS = {"w": Layout((8, 16), torch.float32, Mesh())}


def save(directory, step, **options):
    with Manager(directory, keep=2) as m:
        m.save(step, {"w": torch.full((8, 16), float(step))}, LAYOUTS, **options)
        return m


def test_it_names_what_a_restore_would_take(tmp_path):
    began = time.time()
    save(tmp_path, 10)
    latest = read_latest(tmp_path)
    assert (latest.step, latest.path) == (10, "step_00000010")
    assert began <= latest.saved_at <= time.time()
    save(tmp_path, 12)
    assert read_latest(tmp_path).path == "step_00000012"
    with pytest.raises(ValueError, match="newer ones"):
        save(tmp_path, 3)
    assert read_latest(tmp_path).step == 12 == Manager(tmp_path).restore_latest(LAYOUTS)[0]
    assert json.loads((tmp_path / "latest").read_text())["format"] == "fmegatron.latest"


def test_it_comes_after_durability(tmp_path, monkeypatch):
    """Whoever reads it finds the checkpoint that it names; a save that fails does not touch it."""
    real = manager.write_latest

    def checked(notes, latest):
        assert Manager(tmp_path).steps()[-1] == latest.step
        real(notes, latest)

    monkeypatch.setattr(manager, "write_latest", checked)
    save(tmp_path, 1)
    monkeypatch.setattr(manager, "save", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("disk full")))
    with pytest.raises(RuntimeError, match="disk full"):
        save(tmp_path, 2)
    assert read_latest(tmp_path).step == 1


@pytest.mark.parametrize("damage", ["missing", "empty", "torn", "binary", "old", "other", "directory", "deep"])
def test_damage_is_no_problem(tmp_path, damage):
    save(tmp_path, 1), save(tmp_path, 2)
    at, text = tmp_path / "latest", (tmp_path / "latest").read_text()
    at.unlink()
    if damage == "directory":
        at.mkdir()
    elif damage != "missing":
        wrong = {"empty": "", "torn": text[:20], "other": '{"step": -3}', "deep": "[" * 100_000}
        wrong["old"] = json.dumps({**json.loads(text), "step": 1, "path": "step_00000001"})
        at.write_bytes(b"\xff\0\xfe" if damage == "binary" else wrong[damage].encode())
    assert read_latest(tmp_path) is None or damage == "old"
    assert Manager(tmp_path).latest() == 2 and Manager(tmp_path).restore_latest(LAYOUTS)[0] == 2
    if damage == "directory":
        with pytest.warns(RuntimeWarning, match="the tracker could not be written"):
            save(tmp_path, 3)
        assert Manager(tmp_path).latest() == 3
    else:
        save(tmp_path, 3)
        assert read_latest(tmp_path).step == 3


def test_a_killed_writer_leaves_the_old_one(tmp_path, monkeypatch):
    """At every moment there is a whole tracker, the old one or the new one; what the dead left is removed later."""
    notes = Notes(tmp_path)
    write_latest(notes, Latest(1, "a", 1.0))
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                write_latest(notes, Latest(2, "b", 2.0))
        assert read_latest(tmp_path) == Latest(1, "a", 1.0) and os.listdir(tmp_path) == ["latest"]
    (tmp_path / ".new-0123456789ab").write_text("torn")
    os.utime(tmp_path / ".new-0123456789ab", (0, 0))
    (tmp_path / ".new-ab0123456789").write_text("of another node, and in use")
    notes.clean()
    assert sorted(os.listdir(tmp_path)) == [".new-ab0123456789", "latest"]


def test_durable_means_synced_before_it_is_named(tmp_path, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: events.append("sync") or fsync(fd))
    monkeypatch.setattr(os, "replace", lambda a, b: events.append("name") or replace(a, b))
    write_latest(Notes(tmp_path), Latest(1, "a", 1.0))
    assert events == ["sync", "name", "sync"]

"""`gc` and whose things are: by processes that live or are gone, and never by comparing clocks of two machines."""

import json
import os
import shutil
import sys
import time
import types

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint import Manager
from fmegatron.checkpoint.files import leases
from fmegatron.checkpoint.files.notes import Notes
from fmegatron.checkpoint.tools.gc import collect
from fmegatron.checkpoint.tools.ls import listing
from fmegatron.files.owners import owner
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.test_tools_gc import aged, call
from tests.checkpoint.tokens import plain

LAYOUTS = {"x": Layout((30, 30), torch.float32, Mesh())}
TOKEN = "0123456789ab"


@pytest.fixture
def run(tmp_path):
    """Steps 1 and 2."""
    for step in (1, 2):
        Manager(tmp_path / "run").save(step, {"x": torch.full((30, 30), float(step))}, LAYOUTS)
    return tmp_path / "run"


def dead():
    """What a process of this machine that is gone called itself."""
    where, pid, _ = owner().split("-")
    return f"{where}-{pid}-1"  # the number is another's by now


def leave(run, name, whose, kind="saving", beat=0, seconds=7200):
    """A hidden directory with its note."""
    if kind == "saving":
        shutil.copytree(run / "step_00000001", run / f".{name}.tmp-{TOKEN}")
        aged(run / f".{name}.tmp-{TOKEN}", seconds)
    value = {"time": time.time(), "host": "n7", "owner": whose, "beat": beat, "held": True}
    (run / f".{name}.{kind}-{TOKEN}").write_text(json.dumps(value))


def hidden(run):
    return sorted(name for name in os.listdir(run) if name.startswith("."))


def test_what_a_dead_process_left_goes_at_once(run):
    leave(run, "step_00000009", dead(), seconds=0)
    leave(run, "final", dead(), seconds=0)
    for kind in ("reading", "leaving", "claim"):
        leave(run, "step_00000001" if kind != "claim" else "run", dead(), kind)
    leave(run, "step_00000007", dead(), "saving", seconds=0)
    shutil.rmtree(run / f".step_00000007.tmp-{TOKEN}")  # it had not come to that
    (run / f".new-{dead()}-01234567").write_text("torn")
    before = hidden(run)
    assert len([a for a in collect(run, dry_run=True).actions if a.kind == "remove"]) == len(before) == 9
    assert hidden(run) == before
    status, out, _ = call("gc", run)
    assert status == 0 and hidden(run) == [] and "the process that wrote it is gone" in out


def test_what_a_living_process_has_stays_whatever_its_age(run):
    leave(run, "step_00000009", owner())
    leave(run, "step_00000001", owner(), "reading")
    leave(run, "run", owner(), "claim")
    (run / f".new-{owner()}-01234567").write_text("in use")
    before = hidden(run)
    aged(run, 1e6)
    done = collect(run, age=0.0)
    assert hidden(run) == before and [a.kind for a in done.actions] == ["keep"]
    assert f"process {os.getpid()} on n7, since " in done.actions[0].why and "saves there" in done.actions[0].why


@pytest.mark.parametrize("seconds", [0, 1e6, -1e6])
def test_of_another_machine_only_by_watching(run, monkeypatch, seconds):
    """Its files may have times of any clock; what counts is whether it renews its note while we look."""
    leave(run, "step_00000008", "elsewhere-41-9", seconds=seconds)
    leave(run, "step_00000001", "elsewhere-41-9", "reading")
    before = hidden(run)
    status, out, _ = call("gc", run, "--age", "0s")
    assert status == 0 and hidden(run) == before and out.count("--watch 5m looks whether it does") == 2
    now, renewed = [0.0], [0]

    def sleep(seconds):
        now[0] += seconds
        if renewed[0] is not None:
            renewed[0] += 1
            for kind, name in (("saving", "step_00000008"), ("reading", "step_00000001")):
                value = {"time": 0.0, "host": "n7", "owner": "elsewhere-41-9", "beat": renewed[0] // 6}
                (run / f".{name}.{kind}-{TOKEN}").write_text(json.dumps(value))

    clock = types.SimpleNamespace(sleep=sleep, monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr(sys.modules["fmegatron.checkpoint.tools.gc"], "time", clock)
    monkeypatch.setattr(leases.Watch.__init__, "__defaults__", (lambda: now[0], leases.Watch.__init__.__defaults__[1]))
    done = collect(run, age=0.0, watch=120.0)  # it lives
    assert hidden(run) == before and {a.kind for a in done.actions} == {"keep"} and now[0] < 120.0
    renewed[0] = None
    done = collect(run, age=0.0, watch=120.0)  # it does not
    assert hidden(run) == [] and {a.kind for a in done.actions} == {"remove"}


@pytest.mark.parametrize("shift", [-7200.0, 7200.0])
def test_a_clock_that_is_wrong(run, monkeypatch, shift):
    """Ours is two hours off that of the file system: what is young stays, and what is old goes."""
    for name, seconds in (("step_00000008", 60), ("step_00000009", 7200)):
        shutil.copytree(run / "step_00000001", run / f".{name}.tmp-{TOKEN}")
        aged(run / f".{name}.tmp-{TOKEN}", seconds)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + shift)
    assert [(a.kind, os.path.basename(a.path)[:14]) for a in collect(run).actions] == [
        ("keep", ".step_00000008"),
        ("remove", ".step_00000009"),
    ]


@pytest.mark.parametrize("shift", [-7200.0, 7200.0])
def test_retention_by_age_and_a_clock_that_is_wrong(run, monkeypatch, shift):
    """A server's clock two hours behind ours would make every step too old the moment it is saved."""
    at = time.time() - 10_000
    os.utime(run / "step_00000001" / "COMPLETE", (at, at))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + shift)
    with Manager(run, keep=checkpoint.Keep(newer_than_s=3600)) as manager:
        manager.save(3, {"x": torch.zeros(30, 30)}, LAYOUTS)
        manager.save(4, {"x": torch.zeros(30, 30)}, LAYOUTS)
    assert manager.steps() == [2, 3, 4]


def test_a_directory_that_is_read_only(run, monkeypatch):
    """A dry run needs no right to write: then our own clock has to do."""
    leave(run, "step_00000009", dead())
    shutil.copytree(run / "step_00000001", run / f".step_00000008.tmp-{TOKEN}")
    aged(run / f".step_00000008.tmp-{TOKEN}", 7200)

    def refused(self):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Notes, "now", refused)
    assert sum(a.kind == "remove" for a in collect(run, dry_run=True).actions) == 3


def test_asides_are_listed_and_go_by_the_time_they_were_set_aside(run):
    """Their content may be old; the hour begins when the run went back."""
    aged(run / "step_00000002", 1e6)
    manager = Manager(run)
    manager.rewind(1)
    with pytest.warns(RuntimeWarning, match="set aside"):
        manager.save(2, {"x": torch.zeros(30, 30)}, LAYOUTS)
    (left,) = listing(run).leftovers
    assert left.kind == "aside" and abs(left.changed - time.time()) < 600
    status, out, _ = call("ls", run)
    assert status == 0 and "set aside: a run went on from an older step" in out
    assert "set aside" in call("gc", run)[1] and len(listing(run).leftovers) == 1
    assert "removed" in call("gc", run, "--age", "0s")[1] and listing(run).leftovers == ()


def test_what_was_set_aside_of_version_3_is_no_bad_checkpoint(run):
    plain(run / "step_00000002")
    manager = Manager(run)
    manager.rewind(1)
    with pytest.warns(RuntimeWarning, match="set aside"):
        manager.save(3, {"x": torch.zeros(30, 30)}, LAYOUTS)
    found = listing(run)
    assert [left.kind for left in found.leftovers] == ["aside"]
    assert [(one.step, one.problem) for one in found.checkpoints] == [(1, None), (3, None)]


@pytest.mark.parametrize("watch", [5.0, -1.0, float("nan")])
def test_wrong_requests(run, watch):
    with pytest.raises(ValueError, match="wanted 0, or 90 or more"):
        collect(run, watch=watch)

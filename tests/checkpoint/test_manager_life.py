"""What a run does with its Manager: rules, metrics, restores by step, failures."""

import math
import os
import time
from pathlib import Path

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint import CheckpointError, Manager
from fmegatron.checkpoint.files.folder import Folder
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.manage.retention import Keep, with_metrics
from fmegatron.checkpoint.manage.tracker import read_latest
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run
from tests.checkpoint.tokens import files_of

ONE = {"w": Layout((64, 1024), torch.float32, Mesh(fsdp=1), ("fsdp",)), "step": Layout((), torch.int64, Mesh(fsdp=1))}
TWO = {"w": Layout((64, 1024), torch.float32, Mesh(fsdp=2), ("fsdp",)), "step": Layout((), torch.int64, Mesh(fsdp=2))}


def state(step):
    return {"w": torch.full((64, 1024), float(step)), "step": torch.tensor(step)}


def files(path):
    """All files below a path, with their content."""
    return {str(at.relative_to(path)): at.read_bytes() for at in sorted(Path(path).rglob("*")) if at.is_file()}


def spoil(manager, step):
    with open(os.path.join(manager.path(step), "arrays", "w", "c.0.0"), "r+b") as f:
        f.seek(1000)
        f.write(b"\1")


# ---- rules


def test_few_quick_ones_between_those_that_last(tmp_path):
    """The newest wins; two quick ones stay, and every fourth step for ever."""
    with Manager(tmp_path, keep=Keep(last=2, every=4)) as manager:
        seen = []
        for step in range(1, 10):
            report = manager.save(step, state(step), ONE, metadata={"at": step})
            assert report.path == manager.path(step)
            found, got, metadata = manager.restore_latest(ONE)
            assert (found, metadata) == (step, {"at": step}) and manager.latest() == step
            assert_same_bits(got, state(step))
            seen.append(manager.steps())
    assert seen == [[1], [1, 2], [2, 3], [3, 4], [4, 5], [4, 5, 6], [4, 6, 7], [4, 7, 8], [4, 8, 9]]


def test_two_saves_of_one_state_are_the_same_checkpoint(tmp_path):
    """Byte by byte."""
    with Manager(tmp_path) as manager:
        for step in (3, 4):
            manager.save(step, state(3), ONE, metadata={"a": 1})
    one, other = files(files_of(manager.path(3))), files(files_of(manager.path(4)))
    assert one.keys() == other.keys()
    differ = {name for name in one if one[name] != other[name]}
    assert differ == {"COMPLETE", "manifest.json"}  # the number of the step
    assert_same_bits(checkpoint.restore(manager.path(4), ONE), state(3))


def test_rules_together(tmp_path):
    keep = Keep(last=1, every=4, best=("loss", "min", 2))
    loss = {1: 9.0, 2: 1.0, 3: math.nan, 4: 8.0, 5: 2.0, 6: 7.0, 7: 6.0}
    with Manager(tmp_path, keep=keep) as manager:
        for step, value in loss.items():
            manager.save(step, state(step), ONE, metrics={"loss": value})
    assert manager.steps() == [2, 4, 5, 7]
    assert checkpoint.metadata(manager.path(2)) == {"metrics": {"loss": 1.0}}
    with Manager(tmp_path, keep=keep) as later:  # another run reads the metrics of the first one's steps
        later.save(8, state(8), ONE, metadata={"metrics": {"loss": 0.5}})
    assert later.steps() == [2, 4, 8]


def test_rules_in_an_object_store():
    """Which tells no times: they are noted beside the steps, and go with them."""
    store = open_store("memory://runs/rules", {})
    with Manager(store, keep=Keep(newer_than_s=3600, best=("loss", "min", 1))) as manager:
        for step, loss in ((1, 0.5), (2, 0.7), (3, 0.9)):
            manager.save(step, state(step), ONE, metrics={"loss": loss})
        assert manager.steps() == [1, 2, 3]
        for step in (1, 2):
            store.notes().write(f".step_0000000{step}.saved", str(time.time() - 4000).encode())
        manager.pin(3)
        manager.save(5, state(5), ONE, metrics={"loss": 0.6})
    assert manager.steps() == [1, 3, 5]
    assert not store.child("step_00000002").values.names() and read_latest(store).step == 5
    names = [f".step_0000000{step}.saved" for step in (1, 3, 5)]
    assert store.notes().names() == sorted([*names, ".step_00000003.pinned", "latest"])


def test_age(tmp_path):
    with Manager(tmp_path, keep=Keep(newer_than_s=3600)) as manager:
        for step in (1, 2):
            manager.save(step, state(step), ONE)
        old = time.time() - 4000
        os.utime(os.path.join(manager.path(1), "COMPLETE"), (old, old))
        manager.save(3, state(3), ONE)
    assert manager.steps() == [2, 3]


def test_a_step_whose_metadata_is_damaged_is_not_the_best(tmp_path):
    with Manager(tmp_path, keep=Keep(last=1, best=("loss", "min", 1))) as manager:
        manager.save(1, state(1), ONE, metrics={"loss": 1.0})
    (files_of(tmp_path / "step_00000001") / "manifest.json").write_text("{}")
    with Manager(tmp_path, keep=manager.keep) as manager:
        manager.save(2, state(2), ONE, metrics={"loss": 5.0})
        manager.save(3, state(3), ONE, metrics={"loss": 6.0})
    assert manager.steps() == [2, 3]


def test_metrics_are_given_once():
    assert with_metrics(None, None) == {} and with_metrics({"a": 1}, None) == {"a": 1}
    assert with_metrics(None, {"loss": torch.tensor(2.0), "x": math.inf}) == {"metrics": {"loss": 2.0, "x": None}}
    with pytest.raises(ValueError, match="one place"):
        with_metrics({"metrics": {}}, {"loss": 1.0})


@pytest.mark.parametrize("options", [{"keep": 1.5}, {"keep": "all"}, {"keep": True}, {"keep": 0}])
def test_bad_arguments(tmp_path, options):
    with pytest.raises(ValueError, match=f"got {next(iter(options))}="):
        Manager(tmp_path, **options)


# ---- restore


def test_options_of_restore_are_passed_on(tmp_path):
    with Manager(tmp_path) as manager:
        manager.save(1, state(1), ONE)
    half = {"w": ONE["w"].replace(dtype=torch.bfloat16)}
    step, got, _ = manager.restore_latest(half, strict="subset", cast=True, device="cpu", verify=False)
    assert step == 1 and got["w"].dtype == torch.bfloat16
    assert manager.restore(1, half, strict="subset", cast=True)[0]["w"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="stored as float32"):
        manager.restore(1, half, strict="subset")
    with pytest.raises(CheckpointError, match="step_00000007.*does not exist"):
        manager.restore(7, ONE)


def test_all_ranks_restore_one_step(tmp_path):
    with Manager(tmp_path) as manager:
        manager.save(1, state(1), ONE, metadata={"note": "one rank"})
        manager.save(2, state(2), ONE)
    parts = cut_tree(state(1), TWO)
    for rank, (got, metadata) in enumerate(run(2, lambda world: Manager(tmp_path, world=world).restore(1, TWO))):
        assert_same_bits(got, parts[rank])
        assert metadata == {"note": "one rank"}
    assert_same_bits(manager.restore(1, TWO, rank=1)[0], parts[1])
    spoil(manager, 1)
    errors = run(2, lambda world: Manager(tmp_path, world=world).restore(1, TWO))
    assert all(isinstance(e, CheckpointError) and "w: its chunk file" in str(e) for e in errors)


def test_one_rank_with_another_request_ends_all(tmp_path):
    """Not a damaged step: nothing is walked past; its own error on the rank, and its message on the others."""
    with Manager(tmp_path) as manager:
        manager.save(1, state(1), ONE)
    wrong = {**TWO, "w": TWO["w"].replace(shape=(64, 1022))}
    got = run(2, lambda world: Manager(tmp_path, world=world).restore_latest(wrong if world.rank else TWO))
    assert type(got[1]) is ValueError and "stored with global shape" in str(got[1])
    assert type(got[0]) is RuntimeError and "stored with global shape" in str(got[0])


def test_a_step_that_goes_while_it_is_chosen(tmp_path, monkeypatch):
    """Retention of the running job deletes what a reader has listed: the reader looks again, and finds the new one."""
    with Manager(tmp_path) as manager:
        manager.save(1, state(1), ONE)
    reader = Manager(tmp_path)
    real, once = reader._steps.complete, []

    def late(above=-1):
        found = real(above)
        if not once:
            once.append(1)
            with Manager(tmp_path, keep=1) as writer:
                writer.save(2, state(2), ONE)
        return found

    monkeypatch.setattr(reader._steps, "complete", late)
    with pytest.warns(RuntimeWarning, match="skipped the checkpoint of step 1"):
        step, got, _ = reader.restore_latest(ONE)
    assert step == 2
    assert_same_bits(got, state(2))


def test_what_a_manager_tells_the_loggers(tmp_path):
    manager = Manager(tmp_path)
    assert manager.last is None
    saved = manager.save(1, state(1), ONE)
    assert manager.last is saved and saved.durable and saved.error is None
    assert (saved.what, saved.step, saved.bytes) == ("save", 1, 64 * 1024 * 4 + 8) and saved.seconds > 0
    assert saved.record().keys() == {"save_seconds", "save_stall_seconds", "save_gb", "save_gb_per_s"}
    manager.restore_latest(ONE)
    assert manager.last.what == "restore" and manager.last.bytes == saved.bytes and manager.last.step == 1
    assert manager.last.gb_per_s == pytest.approx(saved.bytes / manager.last.seconds / 1e9)


# ---- failures of a save


@pytest.mark.parametrize("broken", [0, 1])
def test_a_full_disk_on_one_rank(tmp_path, monkeypatch, broken):
    """An error on all ranks, the steps before intact and the tracker too; the next save works, and old steps go."""
    parts = {step: cut_tree(state(step), TWO) for step in (1, 2, 3)}
    manager = Manager(tmp_path)

    def save(step):
        def work(world):
            with Manager(tmp_path, keep=1, world=world) as mine:
                return mine.save(step, parts[step][world.rank], TWO)

        return run(2, work)

    assert all(report.durable for report in save(1))
    write = Folder.write

    def full(self, name, blocks, durable=True):
        if name == f"arrays/w/c.{broken}.0":
            raise OSError(28, "No space left on device")
        return write(self, name, blocks, durable)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "write", full)
        errors = save(2)
    assert all(isinstance(e, RuntimeError) and "No space left" in str(e) for e in errors)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000001"] and manager.latest() == 1
    assert_same_bits(manager.restore_latest(ONE)[1], state(1))
    assert all(report.durable for report in save(3))
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000003"]

"""A directory without a complete step that is not empty: a new run in the place of one that was meant is said."""

import os
import shutil
import warnings
from dataclasses import dataclass

import pytest

from fmegatron import checkpoint, loop
from fmegatron.checkpoint import CheckpointError, Manager
from fmegatron.checkpoint.files.folder import FolderStore
from fmegatron.checkpoint.files.stores import open_store
from tests.checkpoint.fake_world import run
from tests.checkpoint.test_line import filled
from tests.checkpoint.test_manager import ONE, state
from tests.interop.torch_layout import write_megatron


@dataclass(frozen=True)
class Config:
    """Of a run."""

    model_type: str = "gpt"


def begun(directory):
    return loop.Settings(Config()).begin(Manager(directory), ONE, lambda: state(0)).step


def without_marker(at):
    filled(at, 100)
    os.remove(at / "step_00000100/COMPLETE")


def foreign_run(at):
    write_megatron(at / "iter_0000007")
    (at / "latest_checkpointed_iteration.txt").write_text("7")


CASES = {
    "partial copy": (without_marker, ("step_00000100 without COMPLETE",)),
    "another name": (
        lambda at: checkpoint.save(at / "step_100", state(1), ONE),
        ("step_100: this is a checkpoint of fmegatron: fmegatron.checkpoint.restore reads it",),
    ),
    "an empty one": (lambda at: (at / "global_step500").mkdir(), ("global_step500, which is no name of ours",)),
    "the folder above": (
        lambda at: filled(at / "checkpoints", 3),
        ("checkpoints: this is a directory of",),
    ),
    "a checkpoint": (lambda at: checkpoint.save(at / "a", state(1), ONE), ("a: this is a checkpoint of fmegatron",)),
    "megatron": (foreign_run, ("a run of Megatron", "iter_0000007: this is a torch_dist", "interop.source(path)")),
    "dcp": (write_megatron, ("checkpoint.restore(interop.source(path), layouts, rules=...) restores it",)),
    "hugging face": (lambda at: (at / "model.safetensors").write_bytes(b"x"), ("a folder of Hugging Face", "interop.")),
}


@pytest.mark.parametrize("name", CASES)
def test_what_lies_there_is_named_once(tmp_path, name):
    make, words = CASES[name]
    at = tmp_path / "run"
    at.mkdir()
    make(at)
    for call in (Manager(at).latest, lambda: begun(at)):
        with pytest.warns(RuntimeWarning, match="begins anew; but there is: ") as caught:
            assert not call()
        text = str(caught[0].message)
        assert (
            len(caught) == 1 and all(word in text for word in words) and "Manager(path)" not in text.partition(": c")[0]
        )
    with pytest.warns(RuntimeWarning) as caught, pytest.raises(CheckpointError, match="begins anew") as got:
        Manager(at).restore_latest(ONE)
    assert len(caught) == 1 and all(word in str(got.value) for word in words)
    manager = Manager(at)
    with pytest.warns(RuntimeWarning) as caught:
        assert [manager.latest() for _ in range(3)] == [None] * 3
    assert len(caught) == 1


def test_rank_0_warns(tmp_path):
    without_marker(tmp_path)
    with pytest.warns(RuntimeWarning) as caught:
        assert run(2, lambda world: Manager(tmp_path, world=world).latest()) == [None] * 2
    assert len(caught) == 1


def test_a_first_start_is_silent(tmp_path):
    """Nothing there, or only what a run of ours writes before its first save, and what killed ones have left."""
    at = tmp_path / "run"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert begun(at) == 0
        filled(tmp_path / "other", 1)
        at.mkdir()
        for kind in ("tmp", "gone", "aside"):
            shutil.copytree(tmp_path / "other/step_00000001", at / f".step_00000001.{kind}-0123456789ab")
        loop.Settings(Config()).write(at / "config.json")
        for name in ("metrics.jsonl", "train.log", "step_100.log", "latest"):
            (at / name).write_text("{}")
        for name in ("logs", "wandb", "temporary", "tensorboard"):
            (at / name).mkdir()
        (at / "logs/events.out").write_text("x")
        assert begun(at) == 0 and Manager(at).latest() is None
        with checkpoint.claim(at):
            assert Manager(at).latest() is None
        with pytest.raises(CheckpointError, match="or start a new run$"):
            Manager(at).restore_latest(ONE)
        store = open_store("memory://runs/new", {})
        assert Manager(store).latest() is None


@pytest.mark.parametrize("newest", [None, 10, 30])
def test_a_newer_step_that_an_older_release_kept_apart(tmp_path, newest):
    checkpoint.save(tmp_path / "temporary" / "step_00000020", state(1), ONE)
    with Manager(tmp_path) as manager:
        if newest is not None:
            checkpoint.save(manager.path(newest), state(2), ONE)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert [manager.latest(), manager.latest()] == [newest] * 2
    texts = [str(one.message) for one in said if "temporary: got step 20" in str(one.message)]
    assert len(texts) == (newest != 30) and all(f"move step_00000020 to {tmp_path}" in text for text in texts)


def test_the_newest_step_is_found_in_one_listing(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / "step_00000020", state(1), ONE)
    manager, listed, real = Manager(tmp_path), [], FolderStore.children

    def children(store):
        listed.append(store.path)
        return real(store)

    monkeypatch.setattr(FolderStore, "children", children)
    assert manager.latest() == 20 and listed.count(str(tmp_path)) == 1

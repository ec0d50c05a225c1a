"""What anybody leaves beside checkpoints: no note, name or file of theirs ends a run whose step is durable."""

import json
import warnings

import numpy as np
import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint import CheckpointError, Manager
from fmegatron.checkpoint.files import leases
from fmegatron.checkpoint.files.leases import Watch, alive, why_held
from fmegatron.checkpoint.files.notes import Notes

STATE = {"w": torch.ones(3)}
OWNER = "ff00ff-123-4"
NOTES = {
    "nan": '{"time": NaN, "host": "h", "owner": "ff-1-1"}',
    "infinite": '{"time": -Infinity, "host": "h", "owner": "ff-1-1"}',
    "digits": f'{{"time": {"7" * 300}, "host": "h", "owner": "ff-1-1"}}',
    "year": '{"time": 1e18, "host": "h", "owner": "ff-1-1"}',
    "negative": '{"time": -1e300, "host": "h", "owner": "ff-1-1"}',
    "text": '{"time": "nan", "host": 3, "owner": ["a"]}',
    "list": "[1, 2]",
    "number": "7",
    "deep": "[" * 100_000,
    "long": json.dumps({"time": 1, "host": "h" * 500_000, "owner": "o" * 500_000}),
    "bytes": "\x00\x1b[2J",
}


@pytest.mark.long
@pytest.mark.parametrize("text", NOTES.values(), ids=NOTES)
@pytest.mark.parametrize("kind", ["reading", "leaving", "saving"])
def test_a_save_beside_a_note_of_anybody(tmp_path, text, kind):
    """The save that would delete the step of the note is durable, and returns."""
    with Manager(tmp_path, keep=1, show_progress=False) as manager:
        manager.save(1, STATE)
        (tmp_path / f".step_00000001.{kind}-{'ab' * 6}").write_text(text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            manager.save(2, STATE)
        assert manager.latest() == 2
    why = why_held(Notes(tmp_path), "step_00000001", Watch())
    assert why is None or (len(why) < 200 and why.isprintable())


def test_names_in_a_note_are_shown_without_what_moves_the_cursor(tmp_path):
    note = json.dumps({"time": 1e9, "host": "\x1b[2Jnode\n7\u202e", "owner": "ff-\x1b[31m-1"})
    (tmp_path / f".a.reading-{'ab' * 6}").write_text(note)
    who = str(alive(Notes(tmp_path), f".a.reading-{'ab' * 6}", Watch()))
    assert who.isprintable() and "\\x1b[2Jnode\\n7" in who and "2001" in who
    assert leases.Holder("h", "o", 1e9).since == 1e9


@pytest.mark.parametrize("name", ["step_" + "7" * 30, "step_" + "0" * 30, "step_٠٠٠٠٠٠٠٩", "step_" + "9" * 19])
def test_a_directory_with_more_digits_than_a_step(tmp_path, name):
    """It is no step: named where a run would begin anew, and nothing of it is a number."""
    with Manager(tmp_path, keep=1, show_progress=False) as manager:
        manager.save(1, STATE)
        (tmp_path / "step_00000001").rename(tmp_path / name)
        with pytest.warns(RuntimeWarning, match=f"{name}: this is a checkpoint"):
            assert manager.latest() is None and manager.steps() == []
            with pytest.raises(CheckpointError, match="holds no complete"):
                manager.restore_latest(STATE)
        manager.save(2, STATE)
        assert manager.latest() == 2 and torch.equal(checkpoint.restore(tmp_path / name)["w"], STATE["w"])


def test_work_behind_a_save_does_not_end_training(tmp_path, monkeypatch):
    """Whatever it raises: the step is durable, and the warning says what was not done."""

    def broken(*_, **__):
        raise ZeroDivisionError("a bug in retention")

    with Manager(tmp_path, keep=1, show_progress=False) as manager:
        manager.save(1, STATE)
        monkeypatch.setattr("fmegatron.checkpoint.manage.manager.to_delete", broken)
        with pytest.warns(RuntimeWarning, match="could not be deleted: a bug in retention"):
            manager.save(2, STATE)
        assert manager.steps() == [1, 2]


def test_a_sparse_digest_file_and_a_manifest_of_numbers(tmp_path):
    """Neither takes memory or time by its size: both are refused, naming what is wrong."""
    checkpoint.save(tmp_path / "a", STATE)
    (digests,) = tmp_path.glob("a/*/digests.bin")
    with digests.open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="digests"):
        checkpoint.restore(tmp_path / "a")
    checkpoint.save(tmp_path / "b", {"w": np.ones(3)})
    (manifest,) = tmp_path.glob("b/*/manifest.json")
    for text in ("7" * 100_000, json.dumps([1e308] * 100_000), "1" + "0" * 5000):
        manifest.write_text(text)
        with pytest.raises(CheckpointError) as refused:
            checkpoint.restore(tmp_path / "b")
        assert len(str(refused.value)) < 1000

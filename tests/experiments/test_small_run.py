"""One process of a run around a small step: what it keeps when numbers are not finite, and who may write its folder."""

import math
import os
import signal
import socket
import sys
import time

import pytest

from fmegatron import checkpoint, loop
from fmegatron.checkpoint.files.claims import ClaimedError
from fmegatron.loop.nonfinite import NonFiniteError
from tests.experiments.given import made
from tests.experiments.small_run import Config, main
from tests.house import ROOT


def losses(run):
    return {r["step"]: r["loss"] for r in loop.read_metrics(run / "metrics.jsonl") if "loss" in r}


@pytest.mark.long
def test_a_number_that_is_not_finite_loses_nothing(tmp_path, monkeypatch):
    """Saves after it say so, whatever `keep` is the newest sound one stays, and the next start goes on from there."""
    train = loop.train

    def broken(step, state, batch_at, **settings):
        left = iter([*[1.0] * 6, math.nan])  # the seventh step finds it; a run that goes on from there does not

        def update(state, batch):
            state["w"][3, 1] *= next(left, 1.0) if settings["start"] == 0 else 1.0
            return step(state, batch)

        return train(update, state, batch_at, **settings)

    monkeypatch.setattr(loop, "train", broken)
    run = tmp_path / "run"
    config = made(Config, run=str(run), save_every=1, log_every=10)
    with pytest.raises(NonFiniteError) as raised:
        main(config)
    assert str(raised.value).startswith("step 10: loss is nan (finite at step 1); not finite in the state: w, 1 of 1")
    manager = checkpoint.Manager(run / "checkpoints")
    assert manager.steps() == [6, 8, 9]  # keep=2 kept the two newest, and the newest that is sound
    with pytest.warns(RuntimeWarning) as warned:
        main(config)
    told = [str(warning.message) for warning in warned]
    assert any("9" in text and "not finite" in text for text in told), told
    assert sorted(losses(run)) == [1, 7, 10, 12] and all(map(math.isfinite, losses(run).values()))
    monkeypatch.undo()
    main(made(Config, run=str(tmp_path / "clean"), save_every=1, log_every=10))
    assert losses(run)[12] == losses(tmp_path / "clean")[12]


def test_a_second_run_in_a_folder_is_refused_before_it_writes(tmp_path, capsys):
    run = tmp_path / "run"
    main(made(Config, run=str(run)))
    with checkpoint.claim(run):
        kept = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        with pytest.raises(ClaimedError) as refused:
            main(made(Config, run=str(run), steps=20))
        with pytest.raises(SystemExit) as ended:
            loop.launch(main, Config, ["small_run.py", f"--run.folder={run}"])
        assert ended.value.code == 1
        assert kept == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for text in (str(refused.value), capsys.readouterr().err):
        assert str(run) in text and str(os.getpid()) in text and socket.gethostname() in text
        assert "Traceback" not in text
    assert main(made(Config, run=str(run), steps=14)) is not None


def test_a_run_that_was_killed_is_taken_over_at_once(tmp_path, python):
    run = tmp_path / "run"
    flags = [f"--run.folder={run}", "--run.steps=1000000", "--run.log.every=1", "--run.save.every=1"]
    command = [sys.executable, "-m", "tests.experiments.small_run", *flags]
    process = python.popen(command, cwd=ROOT)
    try:
        while not list(run.glob("checkpoints/step_*/COMPLETE")):
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = checkpoint.Manager(run / "checkpoints").latest()
    main(made(Config, run=str(run), steps=done + 2))
    assert checkpoint.Manager(run / "checkpoints").latest() == done + 2

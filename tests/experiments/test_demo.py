"""make demo, in small: both halves as processes, the table, the picture."""

import subprocess
import types

import pytest

from experiments import demo
from tests.experiments.given import flags as flags_of
from tests.experiments.test_shakespeare import SMALL


@pytest.mark.long
def test_demo(python, tmp_path, capfd, monkeypatch):
    """The first half is a torchrun as users have it, one of whose ranks is stopped; what follows is forked."""
    starts = iter([subprocess.Popen])
    forked = types.SimpleNamespace(Popen=lambda *args, **how: next(starts, python.popen)(*args, **how))
    monkeypatch.setattr(demo, "subprocess", forked)
    small = {name: value for name, value in SMALL.items() if name != "steps"}
    flags = tuple(flags_of({**small, "eval_every": 1000}))
    meshes = {"first": "fsdp=2", "second": "fsdp=1"}  # four ranks: test_shakespeare.py
    result = demo.main(demo.Config(folder=str(tmp_path), steps=12, target=9.0, flags=flags, **meshes))
    assert abs(result["before"] - result["after"]) <= 1e-5
    out = capfd.readouterr().out
    assert "held-out loss before the stop" in out and "Try next:" in out
    assert (tmp_path / "loss.png").stat().st_size > 10_000

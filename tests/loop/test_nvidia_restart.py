"""Restarts by the wrapper of nvidia-resiliency-ext, on two gloo ranks under torchrun; without it, what to install."""

import json
import os
import sys

import pytest

from fmegatron.layout import Mesh
from fmegatron.loop import nvidia_restart
from tests.house import ROOT

WHY = "`make test-all` installs it, on Python 3.11"


def ended(python, folder, where):
    """(status, what each rank printed, what was written on stderr) of a job of `nvidia_restarting.py`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--max-restarts=1"] if where == "killed" else []
    command += [ROOT / "tests/loop/nvidia_restarting.py", folder / where, where]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = python.run(command, cwd=ROOT, env=environment, timeout=300)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, sorted(lines, key=lambda line: line["rank"]), done.stderr


@pytest.mark.slow
def test_a_run_goes_on_to_the_bits_of_one_that_was_not_interrupted(python, tmp_path):
    """While the other rank waits in the step, and in an agreement; with the graph that was compiled at first. One that
    is killed is started again by torchrun, with all."""
    pytest.importorskip("nvidia_resiliency_ext.inprocess", reason=WHY)
    status, clean, err = ended(python, tmp_path, "nowhere")
    assert status == 0 and [rank["attempts"] for rank in clean] == [[0], [0]], err
    for where, before in (("step", 5), ("barrier", 6), ("killed", 0)):
        status, ranks, err = ended(python, tmp_path, where)
        assert status == 0 and len(ranks) == 2, err
        for rank, alone in zip(ranks, clean, strict=True):
            assert rank["attempts"] == ([0, 1] if before else [0]) and rank["graphs"] == alone["graphs"] == 1
            assert rank["bits"] == alone["bits"]
            assert rank["updates"] == [*range(1, before + 1), *range(5, 11)]


@pytest.mark.slow
def test_a_fault_that_comes_again_ends_all(python, tmp_path):
    pytest.importorskip("nvidia_resiliency_ext.inprocess", reason=WHY)
    status, ranks, err = ended(python, tmp_path, "always")
    assert status == 1 and not ranks
    assert "ValueError: rank 1 saw a bad thing" in err and "No restart in the process" in err


def test_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext.inprocess", None)
    with pytest.raises(ValueError, match=r"pip install 'fmegatron\[resiliency\]'"):
        nvidia_restart(lambda world, call: None, Mesh(dp=2))

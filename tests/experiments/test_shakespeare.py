"""The experiment of the demo, in small: resuming changes nothing, and bad input ends in one clear line."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from experiments import shakespeare
from fmegatron import checkpoint, loop, tree
from fmegatron.layout import Mesh
from tests.house import ROOT

SMALL = {
    **{"dim": 16, "layers": 2, "heads": 2, "seq_len": 16, "batch_size": 4, "steps": 6, "warmup": 2, "lr": 1e-2},
    **{"eval_windows": 8, "eval_every": 3, "save_every": 3, "log_every": 1, "backend": "eager", "sample": 8},
}


def config(run, **changes):
    return shakespeare.Config(run=str(run), **{**SMALL, **changes})


def losses(run):
    return {r["step"]: r["loss"] for r in loop.read_metrics(run / "metrics.jsonl") if "loss" in r}


def stored(run, step):
    """Paths and leaves of a checkpoint, whole."""
    manager = checkpoint.Manager(run / "checkpoints")
    layouts = checkpoint.layouts(manager.path(step))
    alone = tree.map(lambda layout: layout.replace(mesh=Mesh(), spec=()), layouts)
    state = checkpoint.restore(manager.path(step), alone)
    return dict(zip(tree.paths(state), tree.leaves(state), strict=True))


def flags(run_, **changes):
    return [f"--config_{name}={value}" for name, value in {**SMALL, "run": run_, **changes}.items()]


def start(*flags, ranks=1, **settings):
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *torchrun, str(ROOT / "experiments" / "shakespeare.py"), *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=ROOT, **settings)


def test_a_resumed_run_is_bitwise_the_run_that_was_never_stopped(tmp_path, monkeypatch, capsys):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    result = shakespeare.main(config(whole))
    assert "ROMEO:" in capsys.readouterr().out

    save = checkpoint.Manager.save

    def save_and_ask_to_stop(self, step, *args, **kwargs):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)  # comes while step 3 is saved: step 4 is the last
        return save(self, step, *args, **kwargs)

    monkeypatch.setattr(checkpoint.Manager, "save", save_and_ask_to_stop)
    shakespeare.main(config(halves))
    assert "stopped after step 4" in capsys.readouterr().out
    assert sorted(losses(halves)) == [1, 2, 3, 4]
    resumed = shakespeare.main(config(halves))
    assert resumed == result
    assert losses(whole) == losses(halves)
    a, b = stored(whole, 6), stored(halves, 6)
    assert a.keys() == b.keys() and all(torch.equal(a[path], b[path]) for path in a)


def test_saves_in_the_background_are_the_same_saves(tmp_path, capsys, monkeypatch):
    """Also when a signal stops the run: the last save is waited for, and no process is left."""
    shakespeare.main(config(tmp_path / "waits"))
    started, start_writer = [], checkpoint.AsyncSaver.__init__
    monkeypatch.setattr(
        checkpoint.AsyncSaver, "__init__", lambda self: (start_writer(self), started.append(self.writer_pid))[0]
    )
    save = checkpoint.Manager.save

    def save_and_ask_to_stop(self, step, *args, **kwargs):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        assert kwargs["wait"] is (step in (4, 6))
        return save(self, step, *args, **kwargs)

    monkeypatch.setattr(checkpoint.Manager, "save", save_and_ask_to_stop)
    shakespeare.main(config(tmp_path / "async", async_save=True, save_every=1))
    assert checkpoint.Manager(tmp_path / "async" / "checkpoints").steps() == [3, 4]
    shakespeare.main(config(tmp_path / "async", async_save=True, save_every=1))
    a, b = stored(tmp_path / "waits", 6), stored(tmp_path / "async", 6)
    assert a.keys() == b.keys() and all(torch.equal(a[path], b[path]) for path in a)
    assert checkpoint.Manager(tmp_path / "async" / "checkpoints").steps() == [5, 6]
    assert losses(tmp_path / "waits") == losses(tmp_path / "async")
    saves = [r for r in loop.read_metrics(tmp_path / "async" / "metrics.jsonl") if "save_seconds" in r]
    told = {r["step"] for r in saves}  # of those that end while the run closes, nothing is logged any more
    assert {1, 2, 4, 6} - told <= {2} and all(r["save_gb_per_s"] > 0 for r in saves)
    assert checkpoint.read_latest(tmp_path / "async" / "checkpoints").step == 6
    assert len(started) == 2
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_finished_run_only_samples(tmp_path, capsys):
    result = shakespeare.main(config(tmp_path, steps=3))
    assert shakespeare.main(config(tmp_path, steps=3)) == result
    assert capsys.readouterr().out.count("ROMEO:") == 2
    assert sorted(losses(tmp_path)) == [1, 2, 3]


def test_another_mesh_goes_on_with_the_same_numbers(tmp_path):
    """4 ranks, stopped by a signal to one of them, then one rank: the losses of one rank all the way."""
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    changes = {"steps": 60, "save_every": 1000, "eval_every": 1000}
    shakespeare.main(config(whole, **changes))
    process = start(*flags(moved, **changes, mesh="fsdp=2,tp=2"), ranks=4)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.split()[:1] == ["5"]:
            children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
            os.kill(int(children[-1]), signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "stopped after step" in lines[-1], lines
    stopped = checkpoint.Manager(moved / "checkpoints").latest()
    assert 5 <= stopped < 60
    shakespeare.main(config(moved, **changes))
    records = loop.read_metrics(moved / "metrics.jsonl")
    before = next(r["heldout_loss"] for r in records if r["step"] == stopped and "heldout_loss" in r)
    after = next(r["resumed_heldout_loss"] for r in records if "resumed_heldout_loss" in r)
    assert after == pytest.approx(before, abs=1e-5)
    one, other = losses(whole), losses(moved)
    assert one.keys() == other.keys() == set(range(1, 61))
    # fp32: rounding differs between meshes and grows with the steps, so all steps only nearly, the first ones tightly.
    assert all(other[step] == pytest.approx(one[step], abs=1e-5) for step in range(1, 11))
    assert [r["mesh"] for r in records][:: len(records) - 1] == ["fsdp2·tp2", str(Mesh())]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"mesh": "tp=2"}, "mesh tp2 has 2 ranks, but 1 process run; start 2 processes (torchrun --nproc-per-node=2"),
        ({"heads": 3}, "Config.dim: got 16, wanted a multiple of heads=3"),
        ({"eval_windows": 0}, "got windows=0"),
        ({"stepps": 3}, "Unknown command line flag 'config_stepps'. Did you mean: config_steps"),
        ({"run": "/dev/null/x"}, "/dev/null"),
    ],
)
def test_bad_input(tmp_path, changes, words):
    process = start(*flags(tmp_path, **changes))
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert words in errors.splitlines()[-1 if "stepps" not in changes else 0]


def test_a_damaged_checkpoint_is_named_and_skipped(tmp_path, capsys):
    shakespeare.main(config(tmp_path, steps=6))
    chunk = max((tmp_path / "checkpoints" / "step_00000006").rglob("*"), key=lambda p: p.is_file() and p.stat().st_size)
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    chunk.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="skipped the checkpoint of step 6"):
        shakespeare.main(config(tmp_path, steps=6))
    assert "steps        3 to 6" in capsys.readouterr().out


def test_ctrl_c_twice_while_saving_leaves_the_earlier_checkpoint(tmp_path):
    """The second Ctrl-C falls into a save that was made slow; the step before can still be restored."""
    script = tmp_path / "slow.py"
    script.write_text(
        "import os, signal, sys, threading, time\n"
        "from experiments import shakespeare\n"
        "from fmegatron import checkpoint, loop\n"
        "save = checkpoint.Manager.save\n"
        "def slow(self, step, *args, **kwargs):\n"
        "    if step == 4:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        threading.Timer(1.2, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "        while True: save(self, step, *args, **kwargs)\n"
        "    return save(self, step, *args, **kwargs)\n"
        "checkpoint.Manager.save = slow\n"
        "loop.launch(shakespeare.main, shakespeare.Config)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *flags(tmp_path / "run", save_every=1)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 130, done.stderr
    assert "a second Ctrl-C" in done.stderr
    state = stored(tmp_path / "run", 3)
    assert int(state["step"]) == 3 and all(x.isfinite().all() for x in state.values())
    assert sorted(losses(tmp_path / "run"))[:3] == [1, 2, 3]
    shakespeare.main(config(tmp_path / "run"))  # and the run goes on from whatever is complete

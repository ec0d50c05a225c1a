"""The experiment of the demo, in small: resuming changes nothing, and bad input ends in one clear line."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from experiments import shakespeare
from fmegatron import checkpoint, data, loop, tree
from fmegatron.checkpoint.manage.tracker import read_latest
from fmegatron.layout import Mesh
from fmegatron.loop.config import UsageError
from tests.experiments.given import flags as flags_of
from tests.experiments.given import made
from tests.house import ROOT

SMALL = {
    **{"dim": 16, "layers": 1, "heads": 2, "seq_len": 16, "batch_size": 4, "steps": 6, "warmup": 2, "lr": 1e-2},
    **{"eval_windows": 8, "eval_every": 3, "save_every": 3, "log_every": 1, "backend": "eager", "sample": 8},
    "peak": 1e12,  # else each run measures that of this machine
}


def config(run, **changes):
    return made(shakespeare.Config, run=str(run), **{**SMALL, **changes})


def trained(config):
    """The last metrics."""
    return shakespeare.experiment(config).metrics


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
    return flags_of({**SMALL, "run": run_, **changes})


def start(python, *flags, ranks=1, **settings):
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *torchrun, str(ROOT / "experiments" / "shakespeare.py"), *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return python.popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=ROOT, **settings)


@pytest.mark.slow
@pytest.mark.long
def test_a_resumed_run_is_bitwise_the_run_that_was_never_stopped(tmp_path, monkeypatch, capsys):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    result = trained(config(whole))
    assert "ROMEO:" in capsys.readouterr().out

    save = checkpoint.Manager.save

    def save_and_ask_to_stop(self, step, *args, **kwargs):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)  # comes while step 3 is saved: step 4 is the last
        return save(self, step, *args, **kwargs)

    monkeypatch.setattr(checkpoint.Manager, "save", save_and_ask_to_stop)
    trained(config(halves))
    assert "stopped after step 4" in capsys.readouterr().out
    assert sorted(losses(halves)) == [1, 2, 3, 4]
    resumed = trained(config(halves))
    assert resumed == result
    assert losses(whole) == losses(halves)
    a, b = stored(whole, 6), stored(halves, 6)
    assert a.keys() == b.keys() and all(torch.equal(a[path], b[path]) for path in a)


@pytest.mark.slow
@pytest.mark.long
def test_saves_in_the_background_are_the_same_saves(tmp_path, capsys, monkeypatch):
    """Also when a signal stops the run: the last save is waited for, and no process is left."""
    trained(config(tmp_path / "waits"))
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
    trained(config(tmp_path / "async", async_save=True, save_every=1))
    assert checkpoint.Manager(tmp_path / "async" / "checkpoints").steps() == [3, 4]
    trained(config(tmp_path / "async", async_save=True, save_every=1))
    a, b = stored(tmp_path / "waits", 6), stored(tmp_path / "async", 6)
    assert a.keys() == b.keys() and all(torch.equal(a[path], b[path]) for path in a)
    assert checkpoint.Manager(tmp_path / "async" / "checkpoints").steps() == [5, 6]
    assert losses(tmp_path / "waits") == losses(tmp_path / "async")
    saves = [r for r in loop.read_metrics(tmp_path / "async" / "metrics.jsonl") if "save_seconds" in r]
    told = {r["step"] for r in saves}  # of those that end while the run closes, nothing is logged any more
    assert {1, 2, 4, 6} - told <= {2} and all(r["save_gb_per_s"] > 0 for r in saves)
    assert read_latest(tmp_path / "async" / "checkpoints").step == 6
    assert len(started) == 2
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
@pytest.mark.long
def test_a_finished_run_only_samples(tmp_path, capsys):
    """Also when fewer steps are asked for than are done, which is said; without prompts it only evaluates."""
    result = trained(config(tmp_path, steps=3))
    assert capsys.readouterr().out.count("ROMEO:") == 1
    assert trained(config(tmp_path, steps=3)) == result
    assert capsys.readouterr().out.count("ROMEO:") == 1
    with pytest.warns(RuntimeWarning, match="got steps=2, but 3 steps are done: nothing is trained"):
        assert trained(config(tmp_path, steps=2, warmup=1, prompts=())) == result
    out = capsys.readouterr().out
    assert "3 to 3: 0 tokens (more than the 2 that were asked for are done)" in out and "\nROMEO:" not in out
    assert sorted(losses(tmp_path)) == [1, 2, 3]


def stopped_by_a_signal(rank, settings):
    """On a real rank: a run during whose step 6 the last rank gets SIGTERM."""
    at = data.Batches.rows

    def at_and_signal(self, step, ranges):
        if step == 5 and rank == settings.mesh.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return at(self, step, ranges)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(data.Batches, "rows", at_and_signal)
        trained(settings)


@pytest.mark.slow
def test_another_mesh_goes_on_with_the_same_numbers(tmp_path, ranks):
    """4 ranks, stopped by a signal to one of them, then one rank: the losses of one rank all the way.

    By torchrun, from the command line: test_demo.py.
    """
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    changes = {"steps": 12, "save_every": 1000, "eval_every": 1000}
    trained(config(whole, **changes))
    ranks.run(stopped_by_a_signal, config(moved, **changes, mesh=Mesh(fsdp=2, tp=2)))
    stopped = checkpoint.Manager(moved / "checkpoints").latest()
    assert 4 <= stopped <= 8  # the batch of step 6 is made up to two steps before
    trained(config(moved, **changes))
    records = loop.read_metrics(moved / "metrics.jsonl")
    before = next(r["heldout_loss"] for r in records if r["step"] == stopped and "heldout_loss" in r)
    after = next(r["resumed_heldout_loss"] for r in records if "resumed_heldout_loss" in r)
    assert after == pytest.approx(before, abs=1e-5)
    one, other = losses(whole), losses(moved)
    assert one.keys() == other.keys() == set(range(1, 13))
    # fp32: rounding differs between meshes and grows with the steps, so all steps only nearly, the first ones tightly.
    assert all(other[step] == pytest.approx(one[step], abs=1e-5) for step in range(1, 11))
    assert [r["mesh"] for r in records][:: len(records) - 1] == ["fsdp2·tp2", str(Mesh())]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"heads": 3}, "llama.dim: got 16, wanted a multiple of heads=3"),
        ({"save_every": 0}, "Save.every: got 0, wanted at least 1"),
        ({"log_every": -1}, "Log.every: got -1, wanted at least 1"),
        ({"batch_size": 0}, "Config.batch_size: got 0, wanted at least 1"),
        ({"steps": 0}, "Options.steps: got 0, wanted at least 1"),
        ({"lr": 0}, "Config.lr: got 0.0, wanted a number above 0"),
        ({"warmup": 6}, "schedule: got warmup=6, start of the decay=6, total=6"),
        ({"strategy": "zero4"}, "zero4"),
        ({"backend": "indutcor"}, "got 'indutcor', wanted one of inductor, compile, aot_eager, eager"),
        ({"prompts": "a,bc"}, "Config.prompts: got lengths [1, 2], wanted one length of 1 to 15"),
        ({"prompts": "ROMEO ROMEO ROMEO"}, "Config.prompts: got lengths [17], wanted one length of 1 to 15"),
        ({"steps": "many"}, "steps"),
        ({"stepps": 3}, "Unknown command line flag 'stepps'. Did you mean: run.steps"),
        (
            {"allow": "haeds"},
            "allow: got 'haeds', wanted names of the Config's fields or of facts (did you mean heads?)",
        ),
        ({"run": ""}, "Options.folder: got '', wanted at least 1 characters"),
        # What only the text, the model or the number of ranks can show:
        (
            {"run": "~/x"},
            "path: got '~/x/checkpoints', wanted no '~', which only a shell replaces; pass os.path.expanduser",
        ),
        (
            {"mesh": "tp=2"},
            "which has 2 ranks, wanted 1, since 1 process run; start 2 processes (torchrun --nproc-per-node=2",
        ),
        (
            {"microbatches": 3},
            "got 4 rows, which 1 data-parallel ranks and 3 microbatches cannot share evenly, wanted 3",
        ),
        ({"eval_windows": 10**6}, "EvaluationBatches: got windows=1000000, wanted 1 to"),
        ({"seq_len": 2_000_000}, "wanted one window of seq_len + 1 = 2,000,001 or more; give a longer text"),
        ({"prompts": "R0MEO:"}, "1 of 6 characters that are not among the 65 of the vocabulary: '0'"),
    ],
)
def test_a_wrong_flag_is_one_line_and_nothing_is_written(tmp_path, changes, words, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        loop.launch(shakespeare.experiment, argv=["shakespeare.py", *flags(tmp_path / "run", **changes)])
    assert ended.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert words in first and second == "Try --help." and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_the_systems_fault():
    with pytest.raises(RuntimeError, match="claiming /dev/null/x for a run failed: NotADirectoryError"):
        loop.launch(shakespeare.experiment, argv=["shakespeare.py", *flags("/dev/null/x")])


def test_every_field_says_what_a_change_of_it_means():
    """Also those of the groups of `Options`, which say it for all their fields, or for themselves."""

    def silent(config, said=None):
        for item in dataclasses.fields(config):
            value, here = getattr(config, item.name), item.metadata.get("resume", said)
            if dataclasses.is_dataclass(value) and not isinstance(value, Mesh):
                yield from silent(value, here)
            elif here is None and not isinstance(value, Mesh):  # which may always change, and is named
                yield item.name

    assert not list(silent(shakespeare.Config())), "write loop.field(default, resume=refused, named or free)"
    assert [item.metadata.get("resume") for item in dataclasses.fields(shakespeare.Config)].count("refused") >= 5


@pytest.mark.medium
def test_a_run_that_is_resumed_with_another_configuration(tmp_path, capsys, monkeypatch):
    trained(config(tmp_path, steps=3))
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["config"]["heads"] == 2 and written["facts"]["data"]["tokens"].startswith("1115394 tokens, xxh3 ")
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for change, words in (
        ({"heads": 4}, "heads 2 -> 4"),
        ({"batch_size": 8, "seed": 1}, "run.seed 0 -> 1, batch_size 4 -> 8"),
        ({"dim": 32}, "dim 16 -> 32"),
        ({"seq_len": 8, "prompts": ("A",)}, "seq_len 16 -> 8"),
    ):
        with pytest.raises(UsageError, match=f"step 3 is of a run with other settings: {words}. These change"):
            trained(config(tmp_path, **change))
    text = tmp_path / "other.txt"
    text.write_text(shakespeare.TEXT.read_text().replace("ROMEO", "RAMEO"))
    with (
        monkeypatch.context() as patched,
        pytest.raises(UsageError, match='data {"tokens": "1115394 tokens.* -> {"tokens": "1115394'),
    ):
        patched.setattr(shakespeare, "TEXT", text)
        trained(config(tmp_path))
    text.unlink()
    assert kept == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}  # nothing was written

    capsys.readouterr()
    renamed = tmp_path.with_name("renamed")
    tmp_path.rename(renamed)
    shown = {}
    at = data.Batches.rows
    monkeypatch.setattr(data.Batches, "rows", lambda self, step, rows: shown.setdefault(step, at(self, step, rows)))
    trained(config(renamed, batch_size=2, heads=4, lr=1e-3, save_every=2, allow=("batch_size", "heads")))
    out = capsys.readouterr().out
    assert "  allowed    heads 2 -> 4, batch_size 4 -> 2\n  named      run.steps 3 -> 6, lr 0.01 -> 0.001\n" in out
    assert "  free       run.folder " in out and "run.save.every 3 -> 2" in out
    train = data.train_and_held_out(range(1115394))[0]
    ids = data.CharTokenizer.from_text(shakespeare.TEXT.read_text()).encode(shakespeare.TEXT.read_text())
    one = data.Batches(ids, 1, 16, 0, train)
    for step in (3, 4, 5):  # 12 samples were read before
        rows = [one.at(12 + 2 * (step - 3) + row)["tokens"] for row in range(2)]
        assert torch.equal(shown[step]["tokens"], torch.cat(rows))
    assert checkpoint.metadata(renamed / "checkpoints" / "step_00000006")["samples"] == 18
    assert json.loads((renamed / "config.json").read_text())["config"]["heads"] == 4


@pytest.mark.slow
@pytest.mark.long
def test_a_damaged_checkpoint_is_named_and_skipped(tmp_path, capsys):
    trained(config(tmp_path, steps=6))
    chunk = max((tmp_path / "checkpoints" / "step_00000006").rglob("*"), key=lambda p: p.is_file() and p.stat().st_size)
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    chunk.write_bytes(content)
    with (
        pytest.warns(RuntimeWarning, match="steps 6 were set aside"),
        pytest.warns(RuntimeWarning, match="skipped the checkpoint of step 6"),
    ):
        trained(config(tmp_path, steps=6))
    assert "steps        3 to 6" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.long
def test_ctrl_c_twice_while_saving_leaves_the_earlier_checkpoint(tmp_path, python):
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
        "loop.launch(shakespeare.experiment)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *flags(tmp_path / "run", save_every=1)]
    done = python.run(command, env=environment, timeout=600)
    assert done.returncode == 130, done.stderr
    assert "a second Ctrl-C" in done.stderr
    state = stored(tmp_path / "run", 3)
    assert int(state["step"]) == 3 and all(x.isfinite().all() for x in state.values())
    assert sorted(losses(tmp_path / "run"))[:3] == [1, 2, 3]
    trained(config(tmp_path / "run"))  # and the run goes on from whatever is complete

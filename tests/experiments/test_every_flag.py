"""Every option of a run is a flag of every experiment, and does something: here each in the Shakespeare experiment."""

import importlib.machinery
import os
import re
import signal
import sys
import types
import warnings

import pytest

from experiments import shakespeare
from fmegatron import checkpoint, data, loop
from fmegatron.loop.config import UsageError
from fmegatron.loop.events import read_events
from fmegatron.loop.flags import parse
from fmegatron.loop.sources import fields_of
from fmegatron.step.jitted import Jitted
from tests.experiments.given import flags as flags_of
from tests.experiments.test_shakespeare import SMALL
from tests.house import ROOT
from tests.pairs import few

SEEN = """
run.folder run.steps run.seed run.allow run.backend run.deterministic
run.log.every run.log.eval_every run.save.every run.save.on_failure run.save.in_background run.save.keep_newer_s
"""  # their effects are those of other tests: test_shakespeare.py, test_resume_equivalence.py, tests/loop


def command(folder, text, **changes):
    small = {**SMALL, "prompts": "", "run": str(folder), **changes}
    return ["shakespeare.py", *flags_of(small), *text.split()]


def launched(folder, text, **changes):
    """Words of all warnings of a run in this process."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loop.launch(shakespeare.experiment, argv=command(folder, text, **changes))
    return "\n".join(str(one.message) for one in seen)


class Service(types.ModuleType):
    """A package of a service that is not installed."""

    def __init__(self, name, written):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.written, self.given = written, None

    def SummaryWriter(self, folder, purge_step=None):
        return types.SimpleNamespace(add_scalar=lambda name, value, step: self.written(step, name), close=lambda: None)

    def init(self, **settings):
        self.given = settings
        log = lambda values: [self.written(values["step"], name) for name in values]  # noqa: E731
        return types.SimpleNamespace(define_metric=lambda *_, **__: None, log=log, finish=lambda: None)


ALONE = """
--run.log.profile=trace:steps=1 --run.log.flops_per_token=1000 --run.log.peak_flops=1e6
--run.log.to=tensorboard,wandb=letters --run.memory.planned_bytes=3221225472 --run.memory.limit_bytes=4e9
--run.save.keep=1 --run.save.keep_every=4 --run.save.keep_best=heldout_loss,max,1
--run.save.local.folder={ram} --run.save.local.run=mine --run.save.local.every=1 --run.save.local.copies=1
--run.save.local.keep=2 --run.save.local.durable=false
--run.faults.inject=exception:step=3+nan:step=7,at=step --run.faults.restart.most=1 --run.faults.restart.meet_s=9
--run.faults.spike.factor=1.0001 --run.faults.spike.window=1 --run.faults.spike.warmup=1 --run.faults.spike.then=warn
--run.faults.stuck.updates=2 --run.faults.stuck.least=9 --run.faults.stuck.then=warn
"""
LAST = "--run.faults.nonfinite=roll back"


@pytest.mark.medium
def test_on_one_rank(tmp_path, monkeypatch, capfd):
    """Loggers, checkpoints that stay, local copies, a restart, a roll back, losses that are bad, what was planned."""
    written = set()
    for name in ("tensorboard", "torch.utils.tensorboard", "wandb"):
        package = Service(name, lambda step, metric, name=name: written.add((name, step, metric)))
        monkeypatch.setitem(sys.modules, name, package)
    flags = [*ALONE.format(ram=tmp_path / "ram").split(), LAST]
    folder = tmp_path / "run"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loop.launch(
            shakespeare.experiment, argv=[*command(folder, "", steps=8, save_every=2, eval_every=8, lr=0.5), *flags]
        )
    warned, (out, err) = "\n".join(str(one.message) for one in seen), capfd.readouterr()
    assert {("wandb", 8, "heldout_loss"), ("torch.utils.tensorboard", 8, "heldout_loss")} <= written
    given = sys.modules["wandb"].given
    assert (given["project"], given["name"], given["dir"]) == ("letters", "run", str(folder))
    assert [path.name for path in (folder / "profiles").iterdir()] == ["trace_steps_00000001-00000001_rank_0.json.gz"]
    records = loop.read_metrics(folder / "metrics.jsonl")
    speeds = [(r["mfu"], r["tokens_per_second"]) for r in records if "mfu" in r]
    assert speeds and all(mfu == pytest.approx(speed * 1000 / 1e6) for mfu, speed in speeds)
    assert "3 GiB planned" in out
    heldout = {r["step"]: r["heldout_loss"] for r in records if "heldout_loss" in r}
    assert set(heldout) == {2, 4, 6, 8}  # evaluated before each save
    assert checkpoint.Manager(folder / "checkpoints").steps() == sorted({4, 8, max(heldout, key=heldout.__getitem__)})
    assert any((tmp_path / "ram").rglob("*mine*"))
    assert "restart 1 in the process, after 2 updates" in err and "ValueError: injected: got exception:step=3" in err
    assert re.search(r"step [78]: loss is nan.*\nrolled back to step \d", warned)
    assert "times the median" in warned and "loss does not move" in warned


UNTIL = (
    ("--run.until.hours=1e-9", "hours have passed", 1),
    ("--run.until.file={stop}", "STOP is there", 1),
    ("--run.until.metric=heldout_loss --run.until.at_most=99", "at most 99 was wanted", 3),
    ("--run.until.metric=loss --run.until.at_least=0", "at least 0 was wanted", 1),
    ("--run.until.signals=SIGUSR1=stop", "SIGUSR1", 1),
)


@pytest.mark.medium
@pytest.mark.parametrize(("text", "why", "least"), few(2, UNTIL))
def test_until(tmp_path, monkeypatch, text, why, least):
    (tmp_path / "STOP").touch()
    rows = data.Batches.rows

    def signalled(self, step, ranges):
        if step == 1 and "signals" in text:
            os.kill(os.getpid(), signal.SIGUSR1)
        return rows(self, step, ranges)

    monkeypatch.setattr(data.Batches, "rows", signalled)
    launched(tmp_path / "run", text.format(stop=tmp_path / "STOP"), steps=9)
    (stopped,) = [x for x in read_events(tmp_path / "run" / "events.jsonl") if x["event"] == "stopped"]
    assert why in stopped["why"] and least <= stopped["step"] < 9
    assert checkpoint.Manager(tmp_path / "run" / "checkpoints").steps()[-1] == stopped["step"]


@pytest.mark.medium
def test_an_update_is_skipped(tmp_path):
    """It needs the state of before, so the step of the experiment does not donate it."""
    spike = "--run.faults.spike.factor=1.0001 --run.faults.spike.window=1 --run.faults.spike.warmup=1"
    warned = launched(tmp_path, f"{spike} --run.faults.spike.then=skip --run.faults.nonfinite=skip", lr=0.5)
    assert "its update is skipped" in warned


@pytest.mark.slow
def test_a_hang_ends_the_process(tmp_path, python):
    text = "--run.faults.patience=step=1,factor=1 --run.faults.inject=hang:step=3"
    shown = [sys.executable, str(ROOT / "experiments/shakespeare.py"), *command(tmp_path, text)[1:]]
    done = python.run(shown, timeout=600)
    assert done.returncode == 75 and "hang: rank 0" in done.stderr and list((tmp_path / "stacks").iterdir())


def on_rank(rank, argv):
    """(warnings, the run)."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        shakespeare.experiment(parse(argv, shakespeare.Config))
    return "\n".join(str(one.message) for one in seen)


TWO = """
--mesh=dp=2 --strategy=replicated --run.faults.hash_every=1 --run.faults.on_difference=rerun
--run.log.straggler_ratio=1.1 --run.faults.inject=bitflip:rank=1,step=4+slow:rank=1,step=1,seconds=0.2
"""


@pytest.mark.slow
@pytest.mark.long
def test_on_two_ranks(tmp_path, ranks):
    """Replicas that are compared, and what follows where they differ; a rank that is slow."""
    text = TWO.replace("rerun", "roll_back")
    argv = [x.replace("_back", " back") for x in command(tmp_path, text, steps=6, save_every=1)]
    warned, _ = ranks.run(on_rank, argv, ranks=2)
    assert "hold different bits" in warned and "rolled back to step 3" in warned
    assert re.search(r"step \d: rank 1 .* works 0.\d+ s a step, the median is .*: the others wait for it", warned)
    assert (tmp_path / "ranks.jsonl").read_text().count("\n") >= 3


ORDER = "--run.overlap=false"


def test_the_order_of_the_graph(tmp_path):
    """Of the step and of evaluations; by default their collectives overlap."""
    for text, overlaps in (("", True), (ORDER, False)):
        config = parse(command(tmp_path, text), shakespeare.Config)
        run, _ = shakespeare.experiment.prepare(config)
        assert isinstance(run.step, Jitted) and (run.step.target.overlap is not None) == overlaps


GRAPH = "--run.cuda_graph"


def test_a_graph_of_cuda(tmp_path):
    """The step has it; where there is no CUDA, its first call says so. Skipped updates do not go with it."""
    run, _ = shakespeare.experiment.prepare(parse(command(tmp_path, GRAPH), shakespeare.Config))
    assert isinstance(run.step, Jitted) and run.step.cuda_graph
    with pytest.raises(UsageError, match="--run.cuda_graph: got it with updates that are skipped"):
        shakespeare.experiment.prepare(
            parse(command(tmp_path, f"{GRAPH} --run.faults.nonfinite=skip"), shakespeare.Config)
        )


@pytest.mark.medium
def test_a_step_that_cannot_fit_ends_before_anything_is_written(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        launched(tmp_path / "run", "--run.memory.limit_bytes=20000")
    line = capsys.readouterr().err
    assert ended.value.code == 2 and not (tmp_path / "run").exists()
    assert re.search(
        r"memory: got a step that takes [\d,]+ bytes on one rank \(its state alone\), wanted at most 20,000 bytes", line
    )
    launched(tmp_path / "run", "--run.memory.limit_bytes=20000 --run.memory.plan=off")


def test_no_option_is_left_out():
    """Of all flags of a run each is in a test of this file, or named as one of another's."""
    until = (flags for flags, _, _ in UNTIL)
    text = "".join([SEEN, ALONE, LAST, TWO, ORDER, GRAPH, *until, "run.memory.plan run.faults.patience"])
    names = [one.name for one in fields_of(shakespeare.Config()) if one.name.startswith("run.")]
    assert [name for name in names if not re.search(rf"{re.escape(name)}\b", text)] == []

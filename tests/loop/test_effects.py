"""What can never take effect is refused before anything is written: the flag, its value, and what would."""

import dataclasses

import pytest
import torch

from fmegatron import checkpoint, data, loop, step, tree
from fmegatron.layout import Layout, Mesh
from fmegatron.loop import Experiment, Options
from fmegatron.loop.config import UsageError
from fmegatron.loop.effects import require_axes
from fmegatron.loop.flags import parse

SPECS = {"w": tree.ArraySpec(Layout((4,), torch.float64, Mesh()), 1.0)}
STEPS = 6


@dataclasses.dataclass(frozen=True)
class Config:
    mesh: Mesh = Mesh()
    run: Options = Options(log=loop.Log(every=1), backend="eager")


def toward(state, batch):
    return {"w": (state["w"] + batch) / 2}, {"loss": ((state["w"] - batch) ** 2).sum()}


@data.source
def numbers(position):
    return torch.full((4,), float(position), dtype=torch.float64)


def run_of(folder, *flags, evaluate=None, **given):
    config = parse(["prog", f"--run.folder={folder}", *flags], Config)
    return loop.Run(config.run.folder, toward, SPECS, settings=config, evaluate=evaluate, **given)


def train(folder, *flags, **given):
    run = run_of(folder, *flags, **given)
    for _ in run(numbers, STEPS):
        pass
    return run


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--run.faults.inject=kill:rank=9", "inject=kill:rank=9,step=1,at=step: .*wanted a rank below 1; give rank=0"),
        ("--run.faults.inject=kill:step=7", "wanted a step of a run of 6 updates in all; give step=1 to 6"),
        ("--run.faults.inject=nan:at=evaluation", "in a run without evaluations; give evaluate="),
        ("--run.log.profile=trace:steps=7-9", "profile=trace:steps=7-9,rank=0: .*of 6 updates in all; give steps=1-6"),
        ("--run.log.profile=trace:steps=1,rank=1", "wanted a rank below 1"),
        ("--run.log.eval_every=2", "--run.log.eval_every=2: .*wanted an experiment with evaluations"),
        ("--run.log.peak_flops=1e12", "wanted the FLOPs of a token"),
        ("--run.save.keep_every=1000", "keep_every=1000: .*wanted one that divides a step"),
        ("--run.save.local.every=2", "local.every=2: .*wanted folder with it.*; --run.save.local.folder=/dev/shm/me"),
        ("--run.save.local.folder={folder} --run.save.local.every=7", "local.every=7: .*wanted fewer steps"),
        ("--run.faults.spike.then=warn", "spike.then=warn: .*wanted factor with it.*; --run.faults.spike.factor=3"),
        ("--run.faults.spike.factor=3", "spike.warmup=16: .*wanted fewer losses that are never spikes.*give 1 to 5"),
        ("--run.faults.stuck.least=0.1", "--run.faults.stuck.updates=1000"),
        ("--run.faults.stuck.updates=9", "stuck.updates=9: .*in a run of 6 updates.*give 2 to 6"),
        ("--run.faults.restart.meet_s=9", "--run.faults.restart.most=3"),
        ("--run.faults.on_difference=rerun", "on_difference=rerun: .*--run.faults.hash_every=100"),
        ("--run.faults.patience=evaluation=3", "wanted no limit of 'evaluation', which a run without evaluations"),
        ("--run.faults.patience=restart=3", "wanted no limit of 'restart', which a run without faults.restart.most"),
        ("--run.faults.hash_every=2", "hash_every=2: .*wanted several ranks"),
        ("--run.log.straggler_ratio=2", "straggler_ratio=2.0: .*wanted several ranks"),
        ("--run.until.file=/nowhere/at/all", "until.file=/nowhere/at/all: .*/nowhere/at is none; make it first"),
    ],
)
def test_it_is_refused_before_anything_is_written(tmp_path, flags, words):
    flags = flags.format(folder=tmp_path / "local").split(" ")
    with pytest.raises(UsageError, match=words):
        train(tmp_path / "run", *flags)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [
        "--run.faults.inject=slow:rank=0,step=6,seconds=0",
        "--run.log.profile=trace:steps=6-9",
        "--run.save.keep_every=6",
        "--run.save.keep_every=4 --run.save.every=2",
        "--run.faults.spike.factor=9 --run.faults.spike.warmup=5 --run.faults.spike.then=warn",
        "--run.faults.stuck.updates=6 --run.faults.stuck.then=warn",
        "--run.faults.patience=step=60,end=60",
        "--run.until.metric=loss --run.until.at_least=1e9",
        "--run.until.file={run}/stop",
        "--run.until.file=stop",
        "--run.log.straggler_ratio=none",
        "--run.memory.plan=off --run.memory.planned_bytes=1e9",
    ],
)
def test_what_can_take_effect_is_not(tmp_path, flags):
    run = tmp_path / "run"
    train(run, *flags.format(run=run).split(" "))


def test_what_compares_ranks_is_warned_of_in_a_run_that_goes_on(tmp_path):
    """It may have been one of several ranks, and goes on by the same command line."""
    run_of(tmp_path / "run", f"--run.folder={tmp_path / 'run'}")
    train(tmp_path / "run", "--run.steps=3")
    with pytest.warns(RuntimeWarning, match="hash_every=2: got one rank, wanted several ranks.*nothing is compared"):
        run_of(tmp_path / "run", "--run.faults.hash_every=2")


def test_signals_that_there_are_not():
    with pytest.raises(UsageError, match=r"Until: signals: got 'SIGUSR3=save'.*did you mean SIGUSR"):
        parse(["prog", "--run.until.signals=SIGUSR3=save"], Config)


def held_out(state):
    return {"norm": float(state["w"].sum())}


@pytest.mark.parametrize("option", ["--run.until.metric={} --run.until.at_most=-1", "--run.save.keep_best={},min,2"])
def test_a_metric_that_there_is_not_is_refused_behind_the_first_update(tmp_path, option):
    with pytest.raises(UsageError, match=r"=los: .*wanted a metric of the step or .*: loss \(did you mean loss\?\)"):
        train(tmp_path / "run", *option.format("los").split(" "))
    assert checkpoint.Manager(tmp_path / "run" / "checkpoints").steps() == []
    with pytest.raises(UsageError, match=r"=heldout_norn: .*\(did you mean heldout_norm\?\)"):
        train(tmp_path / "run", *option.format("heldout_norn").split(" "), evaluate={"heldout": held_out})
    train(tmp_path / "run", *option.format("heldout_norm").split(" "), evaluate={"heldout": held_out})


@pytest.mark.parametrize("metric", ["loss", "norm"])
def test_the_best_checkpoints_stay(tmp_path, metric):
    """By a metric of the step, or of an evaluation that is made before each save."""
    flags = "--run.save.every=1", "--run.save.keep=none", f"--run.save.keep_best={metric},min,2"
    evaluated = []
    run = train(tmp_path, *flags, evaluate=lambda state: evaluated.append(1) or held_out(state))
    records = {r["step"]: r[metric] for r in loop.read_metrics(tmp_path / "metrics.jsonl") if metric in r}
    best = sorted(records, key=lambda step: (records[step], -step))[:2]
    assert run.manager.steps() == sorted({*best, STEPS}) and len(records) == (STEPS if metric == "norm" else 6)
    metrics = checkpoint.metadata(run.manager.path(best[0]))["metrics"]
    assert metrics == {metric: records[best[0]]} and len(evaluated) == (STEPS + 1 if metric == "norm" else 1)


def test_an_axis_that_is_a_typo_is_named_as_the_flag(tmp_path):
    def describe(config):
        return step.Description(toward, tree.map(lambda x: x.replace(mesh=config.mesh), tree.layouts(SPECS)), {})

    experiment = Experiment(Config, describe, lambda config: numbers)
    with pytest.raises(UsageError, match=r"^--mesh=fdsp=2: got the axis 'fdsp' \(did you mean fsdp or dp\?\), over wh"):
        experiment.prepare(parse(["prog", "--mesh=fdsp=2"], Config))
    with pytest.raises(UsageError, match=r"^--mesh=fsdp=2: connect: got mesh fsdp2, which has 2 ranks, wanted 1"):
        experiment.prepare(parse(["prog", "--mesh=fsdp=2"], Config))
    own = Mesh(rows=2)
    require_axes(own, [Layout((4,), torch.float64, own, ("rows",))])


class Torn(data.Source):
    def at(self, position):
        if position == 2:
            raise OSError("a torn file")
        return numbers.at(position)


class Counts(Torn):
    count = 0

    def state(self):
        return {"count": self.count}

    def restore(self, state):
        self.count = state["count"]


@pytest.mark.parametrize("kind", [Torn, Counts])
def test_an_error_of_a_source_names_its_class_and_line(tmp_path, kind):
    line = Torn.at.__code__.co_firstlineno + 2
    experiment = Experiment(Config, lambda config: step.Description(toward, SPECS, {}), lambda config: kind())
    flags = f"--run.folder={tmp_path}", "--run.steps=4"
    with pytest.raises(OSError, match="a torn file") as raised:
        loop.launch(experiment, argv=["prog", *flags])
    note = f"Raised by the data source {kind.__name__}, position 2 (test_effects.py:{line})"
    assert raised.value.__notes__ == [note]
    names = [entry.name for entry in raised.traceback]  # of ours only how it was called
    assert names[-1] == "at" and len(names) <= 4 and "_read" not in names


def test_a_wrong_batch_of_a_source_with_a_state_is_one_of_its_class(tmp_path):
    class Short(Counts):
        def at(self, position):
            return {"y": torch.zeros(4)}

    described = step.Description(toward, SPECS, {"x": Layout((4,), torch.float64, Mesh())})
    with pytest.raises(ValueError, match=r"^Short: the batch of position 0: got the arrays 'y', wanted 'x' among"):
        next(loop.Run(tmp_path, toward, described)(Short(), 3))

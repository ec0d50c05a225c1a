"""Experiment: functions of a config, of which a run, its evaluations and the tools follow; nothing of it is copied."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fmegatron import data, loop, optim, step, tree
from fmegatron.collectives import Axes, psum
from fmegatron.layout import Mesh
from fmegatron.loop import Experiment, Options, field
from fmegatron.loop.config import UsageError
from fmegatron.loop.experiment import load_experiment

IDS = np.random.default_rng(0).integers(0, 11, 4000).astype(np.uint16)


@dataclasses.dataclass(frozen=True)
class Config:
    mesh: Mesh = field(Mesh(), resume="named")
    run: Options = Options("runs/bigram", 4, backend="eager", log=loop.Log(1, eval_every=2))
    lr: float = field(0.5, resume="named", above=0)
    summed: bool = True  # whether an evaluation adds up what the ranks have


def describe(config):
    """A bigram model that is whole on every rank."""
    specs, axes = tree.specs({"table": (11, 11)}, config.mesh, init=tree.Normal(0.5)), Axes(config.mesh)
    ranks = axes[axes.data]

    def loss_fn(params, batch):
        logits, labels = params["table"][batch["tokens"]].flatten(0, 1), batch["labels"].flatten()
        loss = F.cross_entropy(logits, labels, reduction="sum") / (labels.numel() * ranks.size)
        return loss, {"loss": psum(loss.detach(), ranks)}

    def evaluate(state, batch):
        loss, metrics = loss_fn(state.params, batch)
        return metrics if config.summed else {"loss": loss}

    shape = {"tokens": (8, 8), "labels": (8, 8)}
    return step.build(loss_fn, optim.sgd(config.lr), specs, shape, evaluate=evaluate)


def read(config):
    return data.Batches(IDS, 8, 8, config.run.seed, (0, 3000))


def held_out(config):
    return {name: data.EvaluationBatches(IDS, 8, 8, (3000, 4000), windows) for name, windows in (("a", 16), ("b", 32))}


experiment = Experiment(Config, describe, read, held_out)


def at(folder, **changes):
    return Config(run=dataclasses.replace(Config().run, folder=str(folder), **changes))


def test_it_trains_evaluates_finishes_and_resumes(tmp_path):
    finished = []
    own = dataclasses.replace(experiment, finish=lambda config, run: finished.append((config.run.steps, run.metrics)))
    run = own(at(tmp_path / "run"))
    assert set(run.metrics) == {"a_loss", "b_loss"} and finished == [(4, run.metrics)] and int(run.state.step) == 4
    records = [r["step"] for r in loop.read_metrics(tmp_path / "run" / "metrics.jsonl") if "a_loss" in r]
    assert records == [2, 4]
    again = own(at(tmp_path / "run", steps=6))
    straight = experiment(at(tmp_path / "straight", steps=6))
    assert again.start == 4 and torch.equal(again.state.params["table"], straight.state.params["table"])
    assert again.metrics == straight.metrics


def test_a_run_that_is_stopped_is_not_finished(tmp_path):
    stop = tmp_path / "STOP"
    stop.touch()
    own = dataclasses.replace(experiment, finish=lambda config, run: pytest.fail("it was stopped"))
    run = own(at(tmp_path / "run", until=loop.Until(file=str(stop))))
    assert run.stopped and int(run.state.step) < 4


def test_what_is_prepared_has_written_nothing_and_trains_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, source = experiment.prepare(Config())
    assert not list(tmp_path.iterdir()) and run.described.microbatches == 1
    losses = [info.metrics["loss"] for info in run(source, 3)]
    assert len(losses) == 3 and losses[0] > losses[-1] and (tmp_path / "runs" / "bigram" / "config.json").exists()


def test_other_initial_values(tmp_path):
    def init(config, described, world):
        zeros = tree.map(lambda spec: torch.zeros(spec.layout.local_shape(world.rank)), described.state.params)
        return tree.init(described.state, 0, world.rank, world.device, given=zeros)

    run, source = dataclasses.replace(experiment, init=init).prepare(at(tmp_path))
    first = next(info for info in run(source, 1))
    assert first.metrics["loss"] == pytest.approx(np.log(11), abs=1e-6)


def test_the_seed_of_the_options_draws_the_initial_values(tmp_path):
    tables = []
    for number, seed in enumerate((0, 0, 1)):
        run, _ = experiment.prepare(at(tmp_path / str(number), seed=seed))
        tables.append(run.init().params["table"])
    assert torch.equal(tables[0], tables[1]) and not torch.equal(tables[0], tables[2])


def test_launch_reads_the_flags(tmp_path, capsys):
    metrics = loop.launch(experiment, argv=["prog", f"--run.folder={tmp_path / 'run'}", "--run.steps=2", "--lr=0.1"])
    assert set(metrics) == {"a_loss", "b_loss"} and (tmp_path / "run" / "checkpoints" / "step_00000002").exists()
    with pytest.raises(SystemExit) as ended:
        loop.launch(experiment, argv=["prog", "--lr=0"])
    assert ended.value.code == 2 and "Config.lr: got 0.0, wanted a number above 0" in capsys.readouterr().err


def test_an_error_of_set_up_names_the_line_of_the_experiment(tmp_path):
    def wrong(config):
        raise ValueError("text: got none, wanted one")

    line = wrong.__code__.co_firstlineno + 1
    with pytest.raises(UsageError, match=rf"text: got none, wanted one \(test_experiment.py:{line}\)"):
        dataclasses.replace(experiment, data=wrong).prepare(at(tmp_path))


def unsummed(rank, folder):
    config = dataclasses.replace(at(folder), mesh=Mesh(dp=2), summed=False)
    try:
        experiment(config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def summed(rank, folder):
    run = experiment(dataclasses.replace(at(folder), mesh=Mesh(dp=2)))
    return run.metrics, run.state.params["table"]


@pytest.mark.medium
def test_an_evaluation_is_checked_on_ranks(tmp_path, ranks):
    """One that forgets to add up is refused at its line; a right one is that of one rank."""
    for text in ranks.run(unsummed, str(tmp_path / "wrong"), ranks=2):
        assert "test_experiment.py" in text and "dp" in text, text
    alone = experiment(at(tmp_path / "alone"))
    for metrics, table in ranks.run(summed, str(tmp_path / "two"), ranks=2):
        assert metrics == pytest.approx(alone.metrics, abs=1e-5)
        torch.testing.assert_close(table, alone.state.params["table"], rtol=0, atol=1e-5)


@dataclasses.dataclass(frozen=True)
class NoMesh:
    run: Options = Options()


@dataclasses.dataclass(frozen=True)
class OldRun:
    mesh: Mesh = Mesh()
    run: str = "runs/a"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Experiment(NoMesh, describe, read),
            "NoMesh: got the fields run, wanted mesh; write mesh: Mesh = Mesh()",
        ),
        (
            lambda: Experiment(OldRun, describe, read),
            "OldRun: got run of type <class 'str'>, wanted run; write run: loop",
        ),
        (
            lambda: dataclasses.replace(experiment, describe=lambda config: tuple(describe(config))).prepare(),
            "wanted a step.Description",
        ),
        (
            lambda: dataclasses.replace(
                experiment, describe=lambda config: dataclasses.replace(describe(config), evaluate=None)
            ).prepare(),
            "evaluate: got a, b, and a Description without `evaluate`, wanted one",
        ),
        (lambda: experiment.prepare()[0].inference(), "Run.inference: got a step of another model, wanted that of a"),
    ],
)
def test_wrong_ones(make, words):
    with pytest.raises(ValueError) as raised:
        make()
    assert words in str(raised.value)


def test_a_file_gives_its_experiment_or_its_parts(tmp_path):
    (tmp_path / "whole.py").write_text("from tests.loop.test_experiment import experiment\n")
    (tmp_path / "parts.py").write_text("from tests.loop.test_experiment import Config, describe\n")
    (tmp_path / "none.py").write_text("from tests.loop.test_experiment import Config\n")
    for name in ("whole", "parts"):
        config, found = load_experiment(str(tmp_path / f"{name}.py"))
        assert config.__name__ == "Config" and found(config()).microbatches == 1
    with pytest.raises(ValueError, match="got a file that defines no experiment, wanted experiment = loop.Experiment"):
        load_experiment(str(tmp_path / "none.py"))

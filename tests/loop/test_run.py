"""Run: what it does around the steps, alone and on real ranks; its parts are tested each on its own."""

import dataclasses
import json
import os
import signal
import sys
import types

import numpy as np
import pytest
import torch

from fmegatron import checkpoint, data, loop, optim, step, tree
from fmegatron.collectives import Axes, World, connect
from fmegatron.data import source
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.loop import Log, Options, Run, Save
from fmegatron.loop.config import UsageError
from fmegatron.loop.events import read_events
from fmegatron.loop.nonfinite import NonFiniteError
from fmegatron.loop.signals import catch

LAYOUT = Layout((4,), torch.float64, Mesh())
SPECS = {"w": tree.ArraySpec(LAYOUT, 1.0), "n": tree.ArraySpec(Layout((), torch.int64, Mesh()))}
TOKENS = np.arange(4000) % 11


def halve(state, batch):
    """w moves half of its way to the batch."""
    loss = ((state["w"] - batch) ** 2).sum()
    return {"w": (state["w"] + batch) / 2, "n": state["n"] + 1}, {"loss": loss}


@source
def batch_at(position):
    return torch.full((4,), float(position), dtype=torch.float64)


def records(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def straight(steps):
    state = tree.init(SPECS, 0, 0)
    for position in range(steps):
        state, _ = halve(state, batch_at.at(position))
    return state


def test_a_run_is_resumed_where_it_stopped(tmp_path):
    first = Run(tmp_path, halve, SPECS, options=Options(save=Save(every=3), log=Log(every=1)))
    seen = []
    for info in first(batch_at, steps=100):
        seen.append(info.step)
        if info.step == 7:
            break  # the caller leaves: steps 3 and 6 are saved
    assert first.start == 0 and seen == list(range(1, 8))
    second = Run(tmp_path, halve, SPECS, options=Options(save=Save(every=3), log=Log(every=1)))
    steps = [info.step for info in second(batch_at, steps=9)]
    assert second.start == 6 and steps == [7, 8, 9]
    newest = [record["loss"] for record in records(tmp_path) if "loss" in record][-1]
    assert second.metrics == {"loss": newest}  # nothing is evaluated: those of the last logged step
    assert torch.equal(second.state["w"], straight(9)["w"]) and second.state["n"] == 9
    assert [record["step"] for record in records(tmp_path) if "loss" in record] == list(range(1, 10))
    assert second.manager.steps() == [6, 9]


def test_evaluations_are_logged_and_kept(tmp_path):
    def evaluate(state):
        return {"heldout_loss": float(state["w"].sum())}

    first = Run(tmp_path, halve, SPECS, evaluate=evaluate, options=Options(log=Log(eval_every=2), save=Save(every=2)))
    for _ in first(batch_at, steps=5):
        pass
    assert first.metrics == evaluate(straight(5))
    evaluated = [record["step"] for record in records(tmp_path) if "heldout_loss" in record]
    assert evaluated == [2, 4, 5]
    again = Run(tmp_path, halve, SPECS, evaluate=evaluate)
    with pytest.warns(RuntimeWarning, match="got steps=3, but 5 steps are done"):
        assert list(again(batch_at, steps=3)) == []
    assert again.metrics == first.metrics and torch.equal(again.state["w"], first.state["w"])
    assert records(tmp_path)[-1]["resumed_heldout_loss"] == first.metrics["heldout_loss"]


@dataclasses.dataclass(frozen=True)
class Config:
    heads: int = 2
    lr: float = loop.field(0.5, resume="named")
    run: Options = Options()


def test_settings_that_must_not_change(tmp_path, capsys):
    list(Run(tmp_path, halve, SPECS, settings=Config())(batch_at, steps=2))
    assert json.loads((tmp_path / "config.json").read_text())["config"]["heads"] == 2
    with pytest.raises(UsageError, match="heads 2 -> 4"):
        list(Run(tmp_path, halve, SPECS, settings=Config(heads=4))(batch_at, steps=4))
    list(Run(tmp_path, halve, SPECS, settings=Config(lr=0.1))(batch_at, steps=3))
    assert "named      lr 0.5 -> 0.1" in capsys.readouterr().out
    allowed = Run(tmp_path, halve, SPECS, settings=Config(heads=4, run=Options(allow=("heads",))))
    assert [info.step for info in allowed(batch_at, steps=4)] == [4]


def test_without_a_field_allow_no_flag_is_advised(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Own:
        heads: int = 2

    list(Run(tmp_path, halve, SPECS, settings=Own())(batch_at, steps=2))
    with pytest.raises(
        UsageError, match=r"heads 2 -> 4.*Settings\(config, allow=\('heads',\)\), or give.*loop.field\("
    ) as e:
        list(Run(tmp_path, halve, SPECS, settings=Own(heads=4))(batch_at, steps=4))
    assert "--run.allow" not in str(e.value)


def test_a_second_process_is_refused(tmp_path):
    with checkpoint.claim(tmp_path):
        with pytest.raises(ValueError, match="is in use|has it|another"):
            next(Run(tmp_path, halve, SPECS)(batch_at, steps=2))
    assert not (tmp_path / "checkpoints").exists()


def test_a_signal_saves_and_ends(tmp_path, capsys):
    run = Run(tmp_path, halve, SPECS, options=Options(save=Save(every=100)))
    for info in run(batch_at, steps=50):
        if info.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
    assert run.stopped and run.manager.steps() == [5] and run.state["n"] == 5
    assert "stopped after step 5; the same command goes on from there" in capsys.readouterr().out


def test_ctrl_c_in_a_notebook_does_not_end_the_cell(monkeypatch):
    """In a program it does, after the save; a cell shows its plot of what there is."""
    with pytest.raises(KeyboardInterrupt):
        with catch():
            os.kill(os.getpid(), signal.SIGINT)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=object))
    with catch() as stop:
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.signal == "SIGINT"


@pytest.mark.filterwarnings("ignore:.*were set aside")
def test_what_is_not_finite_ends_the_run_and_is_not_the_newest_good_one(tmp_path):
    def breaks(state, batch):
        state, metrics = halve(state, batch)
        return {**state, "w": state["w"] * (float("nan") if batch[0] == 4 else 1.0)}, metrics

    with pytest.raises(NonFiniteError):
        list(Run(tmp_path, breaks, SPECS, options=Options(save=Save(every=1), log=Log(every=1)))(batch_at, steps=10))
    again = Run(tmp_path, halve, SPECS)
    with pytest.warns(RuntimeWarning, match="not finite"):
        steps = [info.step for info in again(batch_at, steps=6)]
    assert again.start == 4 and steps == [5, 6]


def replicated(mesh, microbatches=1):
    """(step, specs) of a bigram model that is whole on every rank; gradients are summed over dp."""
    specs, axes = tree.specs({"table": (11, 11)}, mesh, init=tree.Normal(0.5), dtype=torch.float64), Axes(mesh)

    def loss_fn(params, batch):
        logits = params["table"][batch["tokens"]]
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        return nll / axes[axes.data].size, {}

    optimizer = optim.sgd(0.5)
    train_step = step.build_train_step(
        loss_fn, optimizer, tree.layouts(specs), axes, microbatches=microbatches, clip_norm=None
    )
    rows = DataParallel().batch_layout((8, 8), torch.int64, mesh, microbatches)
    return train_step, step.Description(train_step, step.state_specs(specs, optimizer), rows, microbatches)


def train_on_ranks(rank, path, steps, microbatches):
    mesh = Mesh(dp=2)
    with connect(mesh, device="cpu") as world:
        train_step, specs = replicated(mesh, microbatches)
        run = Run(
            path,
            step.jit(train_step, world=world, backend="eager"),
            specs,
            world=world,
            options=Options(save=Save(every=2)),
        )
        for _ in run(data.Batches(TOKENS, batch_size=8, seq_len=8, seed=0), steps):
            pass
        return run.start, run.state.params["table"]


@pytest.mark.long
@pytest.mark.parametrize("microbatches", [1, 2])
def test_batches_are_given_to_ranks_as_the_step_declares(tmp_path, ranks, microbatches):
    """Two ranks, then one goes on: the run of one rank alone."""
    got = ranks.run(train_on_ranks, str(tmp_path / "run"), 4, microbatches, ranks=2)
    train_step, specs = replicated(Mesh(), microbatches)
    batches = data.Batches(TOKENS, batch_size=8, seq_len=8, seed=0)
    on = Run(tmp_path / "run", step.jit(train_step, backend="eager"), specs)
    for _ in on(batches, 6):
        pass
    alone = Run(tmp_path / "alone", step.jit(train_step, backend="eager"), specs)
    for info in alone(batches, 6):
        if info.step == 4:
            assert all(start == 0 and torch.allclose(table, info.state.params["table"]) for start, table in got)
    assert on.start == 4
    torch.testing.assert_close(on.state.params["table"], alone.state.params["table"], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda at: Run(at, halve, SPECS, options=Options(save=Save(every=0))),
            "Save.every: got 0, wanted at least 1",
        ),
        (
            lambda at: Run(at, halve, SPECS, options=Options(save=Save(in_background="no"))),
            "Save.in_background: got 'no' of type str, wanted bool",
        ),
        (
            lambda at: Run(at, halve, SPECS, options=Options(log=Log(straggler_ratio=-1))),
            "Log.straggler_ratio: got -1.0, wanted at least 1",
        ),
        (lambda at: Run(at, halve, {}), "Run: specs: got a tree without leaves"),
        (
            lambda at: Run(at, halve, SPECS, world=World(Mesh(dp=2), 0, torch.device("cpu"))),
            "the world of the mesh dp2",
        ),
        (
            lambda at: Run(at, halve, SPECS)([1, 2], steps=2),
            "Run: batches: got a list of 2, wanted a data.Source; give data.Batches",
        ),
        (
            lambda at: Run(at, halve, SPECS)(batch_at.at, steps=2),
            r"wanted a data.Source; give data.source\(function\), whose function gives the batch of all ranks",
        ),
        (
            lambda at: Run(at, halve, SPECS, options=Options(save=Save(keep=0))),
            "Save.keep: got 0, wanted a whole number of at least 1, or None",
        ),
    ],
)
def test_errors(tmp_path, make, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def reading(folder, batches, **options):
    def update(state, batch):
        return {"w": state["w"] + batch["tokens"].sum(), "n": state["n"] + 1}, {"loss": state["w"].sum()}

    run = Run(folder, update, SPECS, **options)
    list(run(batches, steps=run.manager.latest() + 1 if run.manager.latest() else 2))


def test_data_of_another_kind_are_refused_without_a_word(tmp_path, capsys):
    """A corpus, a tokenizer, a seed that is no field of the Config: each is named, and may be allowed."""
    corpora = {}
    for name, ids in (("a", TOKENS), ("b", TOKENS[::-1])):
        corpora[name] = data.write_indexed(tmp_path / name, [ids], "uint16")
    (tmp_path / "a.json").write_text(json.dumps({"tokenizer": {"kind": "byte"}}))
    folder, first = tmp_path / "run", data.Batches(corpora["a"], 2, 8, 0)
    reading(folder, first)
    stated = checkpoint.metadata(folder / "checkpoints" / "step_00000002")["facts"]["data"]
    assert stated == json.loads(json.dumps(first.describe()))
    others = {
        "tokens": data.Batches(corpora["b"], 2, 8, 0),
        "seed": data.Batches(corpora["a"], 2, 8, 1),
        "parts": data.Blend([(1, first)]),
    }
    for name, batches in others.items():
        with pytest.raises(UsageError, match=rf'other settings: data {{.*"{name}".*allow=\(.data.,\)'):
            reading(folder, batches)
    (tmp_path / "a.json").write_text(json.dumps({"tokenizer": {"kind": "char", "vocab": "ab"}}))
    with pytest.raises(
        UsageError, match=r'data {"tokenizer": "[0-9a-f]{16}"} -> {"tokenizer": "[0-9a-f]{16}"}\. These'
    ):
        reading(folder, first)
    reading(folder, first, settings=Config(run=Options(allow=("data",))))
    assert 'allowed    data {"tokenizer"' in capsys.readouterr().out
    reading(folder, data.Batches(corpora["a"], 4, 8, 0))  # another batch size is no other data
    reading(folder, batch_at_of(first))
    assert "named      data {" in capsys.readouterr().out  # a function says nothing: it is said that it does not


def batch_at_of(batches):
    return source(batches.at)


def test_a_change_of_the_config_is_not_named_twice(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Own:
        run: Options = Options()

    reading(tmp_path, data.Batches(TOKENS, 2, 8, 0), settings=Own())
    with pytest.raises(UsageError, match=r"settings: run.seed 0 -> 1\. These"):
        reading(tmp_path, data.Batches(TOKENS, 2, 8, 1), settings=Own(Options(seed=1)))
    with pytest.raises(UsageError, match=r'run.seed 0 -> 1, data {"seed": 0} -> {"seed": 2}\. These'):
        reading(tmp_path, data.Batches(TOKENS, 2, 8, 2), settings=Own(Options(seed=1)))
    reading(tmp_path, data.Batches(TOKENS, 2, 8, 1), settings=Own(Options(seed=1, allow=("run.seed",))))


def test_another_tokenizer_kept_with_the_model_is_refused(tmp_path):
    """The ids are the same array; what they mean is not."""
    char = data.CharTokenizer
    was, now, again = (loop.Settings(Config(), kept={"tokenizer": char(x).describe()}) for x in ("ab", "ba", "ab"))
    reading(tmp_path, data.Batches(TOKENS, 2, 8, 0), settings=was)
    with pytest.raises(UsageError, match=r'settings: tokenizer {"vocab": "ab"} -> {"vocab": "ba"}\. These'):
        reading(tmp_path, data.Batches(TOKENS, 2, 8, 0), settings=now)
    reading(tmp_path, data.Batches(TOKENS, 2, 8, 0), settings=again)
    reading(tmp_path, data.Batches(TOKENS, 2, 8, 0), settings=Config())  # one without a tokenizer says nothing


class Own(data.Source):
    """Data of one's own that say what they are."""

    def __init__(self, name):
        self.name = name

    def at(self, position):
        return {"tokens": batch_at.at(position)}

    def describe(self):
        return {"name": self.name}


def test_data_of_ones_own_that_describe_themselves(tmp_path):
    reading(tmp_path, Own("a"))
    with pytest.raises(UsageError, match=r'data {"name": "a"} -> {"name": "b"}'):
        reading(tmp_path, Own("b"))
    reading(tmp_path, Own("a"))


def test_each_save_in_the_background_is_recorded_also_one_that_ends_last(tmp_path):
    """The steps take no time, so that most saves are under way when the last one, which is waited for, begins."""
    run = Run(tmp_path, halve, SPECS, options=Options(save=Save(every=1, in_background=True, keep=None)))
    assert [info.step for info in run(batch_at, steps=4)] == [1, 2, 3, 4]
    saved = [event["step"] for event in read_events(tmp_path / "events.jsonl") if event["event"] == "saved"]
    assert sorted(saved) == [1, 2, 3, 4] == list(run.manager.steps())

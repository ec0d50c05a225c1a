"""A preference loss on two models of one state: trained, checked, equal on meshes, resumed; the reference stays."""

import dataclasses
import importlib

import pytest
import torch

from experiments import preferences, shakespeare
from fmegatron import loop, model, step, testing, tree
from fmegatron.layout import Mesh
from fmegatron.loop import Log, Options, Save, flags

SMALL = {"dim": 24, "layers": 2, "heads": 2, "seq_len": 16, "batch_size": 8, "warmup": 1, "sample": 0}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The folder of a short run of Shakespeare."""
    folder = tmp_path_factory.mktemp("start")
    run = Options(str(folder), steps=3, backend="eager", log=Log(eval_every=3))
    shakespeare.experiment(shakespeare.Config(run=run, eval_windows=8, **SMALL))
    return str(folder)


def config(start, folder, **changes):
    text = str(shakespeare.TEXT)
    run = Options(str(folder), steps=6, backend="eager", log=Log(every=1), save=Save(every=3))
    return preferences.Config(run=run, beginning=start, text=text, seq_len=12, lr=3e-3, **changes)


@pytest.mark.slow
def test_it_learns_to_prefer_and_the_reference_stays(start, tmp_path):
    run = preferences.experiment(config(start, tmp_path / "a"))
    records = [r for r in loop.read_metrics(tmp_path / "a" / "metrics.jsonl") if "accuracy" in r]
    assert records[0]["accuracy"] == 0 and records[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert records[-1]["accuracy"] > 0.5 and records[-1]["loss/count"] == 8
    before = model.opened(start).params
    assert all(map(torch.equal, tree.leaves(run.state.params["reference"]), tree.leaves(before)))
    assert not any(map(torch.equal, tree.leaves(run.state.params["policy"]), tree.leaves(before)))


@pytest.mark.slow
def test_a_resumed_run_is_the_same(start, tmp_path):
    whole = preferences.experiment(config(start, tmp_path / "whole"))
    of = config(start, tmp_path / "parts")
    preferences.experiment(dataclasses.replace(of, run=dataclasses.replace(of.run, steps=3)))
    parts = preferences.experiment(of)
    assert all(map(torch.equal, tree.leaves(whole.state), tree.leaves(parts.state)))


@pytest.mark.slow
def test_it_is_proven(start, tmp_path):
    described = preferences.describe(dataclasses.replace(config(start, tmp_path), mesh=Mesh(dp=2, tp=2)))
    report = step.check(described.function, described.state, described.batch)
    assert report.ok and not report.unproven, report


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(fsdp=2), Mesh(dp=2, tp=2)], ids=str)
def test_it_is_equal_to_one_rank(start, tmp_path, mesh):
    of = config(start, tmp_path)
    described = preferences.describe(dataclasses.replace(of, mesh=mesh))
    found = testing.parity(
        lambda mesh: preferences.describe(dataclasses.replace(of, mesh=mesh)),
        mesh,
        tree.init(preferences.describe(of).state, 0, 0),
        preferences.read(of).at,
        layouts=(tree.layouts(described.state), tree.layouts(described.batch)),
        steps=2,
        fp64=True,
    )
    assert found.ok, found


def test_the_file_is_one_that_tools_load():
    assert importlib.import_module("experiments.preferences").experiment.Config is preferences.Config


def test_its_fields_are_flags(capsys):
    with pytest.raises(SystemExit):
        flags.parse(["preferences.py", "--help"], preferences.Config)
    assert "--beginning=" in capsys.readouterr().out

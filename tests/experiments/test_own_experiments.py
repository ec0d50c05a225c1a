"""Experiments of one's own, each in 80 lines: they learn, are checked, mean the same on every mesh, and go on there."""

import dataclasses
import importlib
import io
import os
import signal
from typing import NamedTuple

import pytest
import torch

from fmegatron import check, checkpoint, loop, tree
from fmegatron.layout import Mesh
from fmegatron.testing import assert_parity
from tests.code_lines import code_lines
from tests.house import ROOT

TINY = {"dim": 16, "layers": 1, "batch_size": 8, "steps": 20, "every": 10, "lr": 1e-2, "backend": "eager"}


class Case(NamedTuple):
    """An experiment: the mesh that it is made for, two ranks of it, its sizes, and how far its loss falls."""

    mesh: Mesh
    two: Mesh
    sizes: dict
    falls: float

    def config(self, name, run="", **changes):
        made = importlib.import_module(f"experiments.{name}").Config
        return made(**{**TINY, **self.sizes, "run": str(run), **changes})


CASES = {
    "mixer": Case(Mesh(dp=2, fsdp=2), Mesh(fsdp=2), {"seq_len": 16}, 1.0),
    "windowed": Case(Mesh(tp=2), Mesh(tp=2), {"seq_len": 16, "window": 4, "heads": 2}, 1.0),
    "own_model": Case(Mesh(fsdp=2, tp=2), Mesh(tp=2), {"seq_len": 16, "heads": 2}, 1.0),
    "two_towers": Case(Mesh(dp=2, fsdp=2), Mesh(fsdp=2), {"image": 32, "text": 24, "out": 8, "hidden": 4}, 0.5),
}
every_experiment = pytest.mark.parametrize("name", CASES)


def describe(name, config):
    return importlib.import_module(f"experiments.{name}").describe(config)


def batch_of(name, config, layouts):
    """A global batch for layouts of tokens, or the experiment's own."""
    if name == "two_towers":
        return importlib.import_module("experiments.two_towers").pairs(config, 0)
    draw = torch.Generator().manual_seed(0)
    return tree.map(lambda layout: torch.randint(0, 256, layout.shape, generator=draw), layouts)


@every_experiment
def test_simulated_ranks_compute_what_one_computes(name):
    case = CASES[name]
    config = case.config(name, mesh=case.mesh, dtype="float64")
    _, specs, rows = describe(name, config)
    alone = describe(name, dataclasses.replace(config, mesh=Mesh()))[1]
    state, batch = tree.init(alone, key=0, rank=0), batch_of(name, config, rows)

    def step_on(mesh):
        return describe(name, dataclasses.replace(config, mesh=mesh))[0]

    layouts = tree.layouts(specs)
    assert_parity(step_on, case.mesh, state, batch, layouts=(layouts, rows), out_layouts=(layouts, None), steps=2)


@every_experiment
def test_the_command_finds_nothing_and_proves_all(name):
    case, out = CASES[name], io.StringIO()
    sizes = {**case.sizes, "dim": 16, "layers": 1, "batch_size": 8}
    mesh = ",".join(f"{axis}={size}" for axis, size in zip(case.mesh.names, case.mesh.sizes, strict=True))
    flags = [f"--config_{key}={value}" for key, value in sizes.items()]
    assert check.main([str(ROOT / f"experiments/{name}.py"), f"--mesh={mesh}", *flags], out=out) == 0, out.getvalue()


def stopped(rank, name, config):
    """On a real rank: a run that is asked to stop while it saves for the first time."""
    save = checkpoint.Manager.save

    def save_and_ask_to_stop(self, step, *args, **kwargs):
        if rank == 1 and step == config.every:
            os.kill(os.getpid(), signal.SIGTERM)
        return save(self, step, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint.Manager, "save", save_and_ask_to_stop)
        importlib.import_module(f"experiments.{name}").main(config)


@every_experiment
def test_it_learns_on_one_rank_and_goes_on_there_from_two(name, tmp_path, ranks):
    case, main = CASES[name], importlib.import_module(f"experiments.{name}").main
    main(case.config(name, tmp_path / "one", dtype="float64"))
    ranks.run(stopped, name, case.config(name, tmp_path / "two", mesh=case.two, dtype="float64"), ranks=2)
    assert checkpoint.Manager(tmp_path / "two" / "checkpoints").latest() in (11, 12)
    main(case.config(name, tmp_path / "two", dtype="float64"))
    one, two = ({r["step"]: r["loss"] for r in read(tmp_path / run) if "loss" in r} for run in ("one", "two"))
    assert one[20] < one[1] - case.falls
    assert {1, 10, 20} <= two.keys() & one.keys()
    assert all(two[step] == pytest.approx(one[step], abs=1e-9) for step in two.keys() & one.keys())
    assert [r["mesh"] for r in read(tmp_path / "two")][:: len(read(tmp_path / "two")) - 1] == [
        str(case.two),
        str(Mesh()),
    ]


def read(run):
    return loop.read_metrics(run / "metrics.jsonl")


@every_experiment
def test_it_is_small(name):
    assert code_lines(ROOT / f"experiments/{name}.py") <= 80


def test_the_peer_of_the_mixer_has_as_many_lines():
    assert code_lines(ROOT / "experiments/mixer.py") <= code_lines(ROOT / "experiments/benchmarks/peers/mixer.py")

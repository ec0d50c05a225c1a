"""Experiments of one's own, each in 80 lines: they learn, are checked, mean the same on every mesh, and go on there."""

import importlib
import io
import os
import signal
from typing import NamedTuple

import pytest

from fmegatron import check, checkpoint, loop, parity
from fmegatron.layout import Mesh
from tests.code_lines import code_lines
from tests.experiments.given import flags as flags_of
from tests.experiments.given import made
from tests.house import ROOT
from tests.pairs import few

TINY = {"dim": 16, "layers": 1, "batch_size": 8, "steps": 20, "every": 10, "lr": 1e-2, "backend": "eager"}


class Case(NamedTuple):
    """An experiment: the mesh that it is made for, two ranks of it, its sizes, how far its loss falls, and how near the
    losses of two meshes are in fp32 (Muon's iteration is in bf16)."""

    mesh: Mesh
    two: Mesh
    sizes: dict
    falls: float
    near: float

    def config(self, name, run="", **changes):
        of = importlib.import_module(f"experiments.{name}").Config
        return made(of, **{**TINY, **self.sizes, "run": str(run), **changes})


CASES = {
    "mixer": Case(Mesh(dp=2, fsdp=2), Mesh(fsdp=2), {"seq_len": 16}, 1.0, 1e-4),
    "windowed": Case(Mesh(tp=2), Mesh(tp=2), {"seq_len": 16, "window": 4, "heads": 2}, 1.0, 1e-4),
    "own_model": Case(Mesh(fsdp=2, tp=2), Mesh(tp=2), {"seq_len": 16, "heads": 2}, 1.0, 1e-4),
    "two_towers": Case(Mesh(dp=2, fsdp=2), Mesh(fsdp=2), {"image": 32, "text": 24, "out": 8, "hidden": 4}, 1.0, 0.1),
}
every_experiment = pytest.mark.parametrize("name", CASES)


@pytest.mark.medium
@every_experiment
@pytest.mark.parametrize("command", [check, parity], ids=["check", "parity"])
def test_the_command_proves_it(name, command):
    """The check: no finding, nothing unproven. Parity: two steps on simulated ranks, in fp64 to 1e-10."""
    case, out = CASES[name], io.StringIO()
    mesh = ",".join(f"{axis}={size}" for axis, size in zip(case.mesh.names, case.mesh.sizes, strict=True))
    flags = flags_of({**TINY, **case.sizes})
    assert command.main([str(ROOT / f"experiments/{name}.py"), f"--mesh={mesh}", *flags], out, out) == 0, out.getvalue()
    if command is parity:
        assert "2 steps in fp64" in out.getvalue() and "bar 1e-10" in out.getvalue()


def stopped(rank, name, config):
    """On a real rank: a run that is asked to stop while it saves for the first time."""
    save = checkpoint.Manager.save

    def save_and_ask_to_stop(self, step, *args, **kwargs):
        if rank == 1 and step == config.run.save.every:
            os.kill(os.getpid(), signal.SIGTERM)
        return save(self, step, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint.Manager, "save", save_and_ask_to_stop)
        importlib.import_module(f"experiments.{name}").experiment(config)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", few(2, [(name,) for name in CASES], CASES))
def test_it_learns_on_one_rank_and_goes_on_there_from_two(name, tmp_path, ranks):
    case, main = CASES[name], importlib.import_module(f"experiments.{name}").experiment
    main(case.config(name, tmp_path / "one"))
    ranks.run(stopped, name, case.config(name, tmp_path / "two", mesh=case.two), ranks=2)
    assert checkpoint.Manager(tmp_path / "two" / "checkpoints").latest() in (11, 12)
    main(case.config(name, tmp_path / "two"))
    one, two = ({r["step"]: r["loss"] for r in read(tmp_path / run) if "loss" in r} for run in ("one", "two"))
    assert one[20] < one[1] - case.falls and two[1] == pytest.approx(one[1], abs=1e-5)
    assert {1, 10, 20} <= two.keys() & one.keys()
    assert all(two[step] == pytest.approx(one[step], abs=case.near) for step in two.keys() & one.keys())
    assert [r["mesh"] for r in read(tmp_path / "two")][:: len(read(tmp_path / "two")) - 1] == [
        str(case.two),
        str(Mesh()),
    ]


def read(run):
    return loop.read_metrics(run / "metrics.jsonl")


@every_experiment
def test_it_is_small(name):
    assert code_lines(ROOT / f"experiments/{name}.py") <= 80


def peer(rank, folder, **changes):
    """On a real rank: the mixer in FSDP2 and DCP."""
    mixer = importlib.import_module("experiments.benchmarks.peers.mixer")
    sizes = {"dim": 16, "layers": 1, "seq_len": 16, "batch_size": 8, "every": 2, "backend": "eager"}
    mixer.main(mixer.Config(folder=folder, **sizes, **changes))


def peer_stopped(rank, folder):
    peer(rank, folder, fsdp=2, steps=2)


def peer_resumed(rank, folder):
    peer(rank, folder, dp=2, steps=4)


@pytest.mark.slow
@pytest.mark.long
def test_the_peer_of_the_mixer_runs_and_is_resumed(tmp_path, ranks):
    ranks.run(peer_stopped, str(tmp_path), ranks=2)
    ranks.run(peer_resumed, str(tmp_path), ranks=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000004"]


def test_the_peer_of_the_mixer_has_as_many_lines():
    assert code_lines(ROOT / "experiments/mixer.py") <= code_lines(ROOT / "experiments/benchmarks/peers/mixer.py")

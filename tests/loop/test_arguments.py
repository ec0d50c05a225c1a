"""What `Run` is given is checked when it is made, before anything is written."""

import pytest
import torch

from fmegatron import data, loop
from fmegatron.layout import Layout, Mesh
from fmegatron.loop.arguments import check_hashes
from fmegatron.loop.config import UsageError
from fmegatron.tree import ArraySpec

SPECS = {"w": ArraySpec(Layout((4,), torch.float32, Mesh(), (None,)), 1.0)}


def halve(state, batch):
    w = state["w"] * 0.5
    return {"w": w}, {"loss": w.sum()}


def train(folder, call=None, faults=None, options=None, **given):
    options = options or loop.Options(log=loop.Log(every=1), faults=loop.Faults(**(faults or {})))
    numbers = data.source(lambda position: position)
    for _ in loop.Run(folder, halve, SPECS, options=options, **given)(numbers, 3, **(call or {})):
        pass


def policies(loggers):
    return {"policies": loop.Policies(loggers=loggers)}


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ({"faults": {"restart": True}}, r"Faults.restart: got True of type bool, wanted Restart"),
        ({"faults": {"spike": 3.0}}, r"Faults.spike: got 3.0 of type float, wanted LossSpike"),
        ({"faults": {"stuck": 100}}, r"Faults.stuck: got 100 of type int, wanted LossStuck"),
        ({"faults": {"patience": 30}}, r"Faults.patience: got 30 of type int, wanted str"),
        ({"faults": {"patience": "stepp=30"}}, r"patience: got 'stepp=30', wanted SECTION=SECONDS of setup, .*or off"),
        ({"faults": {"patience": "step=x"}}, r"patience: got 'step=x', wanted SECTION=SECONDS"),
        ({"faults": {"patience": "step=-1"}}, r"Patience: step: got -1.0, wanted a number above 0"),
        ({"options": 3600}, r"write options=loop.Options\(steps=1000\)"),
        ({"policies": [1]}, r"write policies=loop.Policies\(loggers=\[logger\]\)"),
        ({"world": 3}, r"write world=collectives.connect\(mesh\)"),
        (policies(loop.TensorBoard), r"wanted a list.*policies=loop.Policies\(loggers="),
        (policies(["wandb"]), r"wanted objects with write"),
        (policies([loop.TensorBoard]), r"wanted objects with write"),
        ({"faults": {"inject": "exception:step=0"}}, r"wanted at least 1"),
        ({"faults": {"inject": "exception:rank=-1"}}, r"wanted at least 0"),
        ({"faults": {"inject": "slow:seconds=nan"}}, r"wanted a number of at least 0"),
        ({"faults": {"inject": "kill:rank=0,rank=1"}}, r"rank twice"),
        ({"faults": {"inject": "kill:at=evaluation"}}, r"without evaluations; give evaluate="),
        ({"faults": {"inject": ["kill"]}}, r"Faults.inject: got \['kill'\] of type list, wanted str"),
        ({"call": {"skip": (1, 2)}}, r"wanted pairs of whole numbers; such as \(\(4096, 4160\),\)"),
        ({"call": {"skip": ((1.7, 2),)}}, r"wanted pairs of whole numbers"),
        ({"call": {"batch_sizes": (0, 4)}}, r"wanted pairs of whole numbers; such as \(\(0, 16\), \(200, 32\)\)"),
    ],
)
def test_a_wrong_argument_is_an_error_with_its_fix_before_anything_is_written(tmp_path, given, fix):
    with pytest.raises(ValueError, match=fix):
        train(tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "given",
    [
        {"faults": {"inject": "kill:rank=5"}},
        {"options": loop.Options(log=loop.Log(profile="trace:steps=1,rank=9"))},
    ],
)
def test_what_is_asked_of_a_rank_that_is_not_is_refused(tmp_path, given):
    """And warned of in a run that goes on: it may do so with fewer ranks."""
    with pytest.raises(UsageError, match="got what can never take effect, wanted a rank below 1; give rank=0"):
        train(tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()
    train(tmp_path / "run")
    with pytest.warns(RuntimeWarning, match="wanted a rank below 1: it will not happen"):
        train(tmp_path / "run", **given)


def test_an_evaluation_that_returns_nothing_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"evaluate\['wiki'\]: got None, wanted a mapping"):
        train(tmp_path / "run", evaluate={"wiki": lambda state: None})


def test_a_comparison_of_replicas_that_are_none_is_warned_of():
    mesh = Mesh(dp=2)
    cut, whole = (Layout((4,), torch.float32, mesh, (axis,)) for axis in ("dp", None))
    with pytest.warns(RuntimeWarning, match="no replicas on other ranks.*nothing is compared; leave it out"):
        check_hashes(4, [cut, Layout((), torch.int64, mesh)], ranks=2)
    assert check_hashes(4, [cut, whole], ranks=2) == 4 and check_hashes(4, [cut], ranks=1) == 4

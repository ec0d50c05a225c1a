"""What `Run` is given is checked when it is made, before anything is written."""

import pytest
import torch

from fmegatron import data, loop
from fmegatron.layout import Layout, Mesh
from fmegatron.loop.arguments import check_hashes
from fmegatron.tree import ArraySpec, Constant

SPECS = {"w": ArraySpec(Layout((4,), torch.float32, Mesh(), (None,)), Constant(1.0))}


def halve(state, batch):
    w = state["w"] * 0.5
    return {"w": w}, {"loss": w.sum()}


def train(folder, call=None, **given):
    numbers = data.source(lambda position: position)
    for _ in loop.Run(folder, halve, SPECS, log_every=1, **given)(numbers, 3, **(call or {})):
        pass


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ({"restart": True}, r"got True.*write restart=loop.Restart\(most=3\)"),
        ({"until": 3600}, r"write until=loop.Until\(hours=11.5\)"),
        ({"spike": 3.0}, r"write spike=loop.LossSpike"),
        ({"stuck": 100}, r"write stuck=loop.LossStuck"),
        ({"patience": 30}, r"write patience=loop.Patience\(step=300\)"),
        ({"local": "/tmp"}, r"write local=checkpoint.LocalReplicas"),
        ({"peak": 1e12}, r"write peak=loop.Peak"),
        ({"world": 3}, r"write world=collectives.connect\(mesh\)"),
        ({"loggers": loop.TensorBoard}, r"wanted a list"),
        ({"loggers": ["wandb"]}, r"wanted objects with write"),
        ({"loggers": [loop.TensorBoard]}, r"wanted objects with write"),
        ({"inject": "exception:step=0"}, r"wanted at least 1"),
        ({"inject": "exception:rank=-1"}, r"wanted at least 0"),
        ({"inject": "slow:seconds=nan"}, r"wanted a number of at least 0"),
        ({"inject": "kill:rank=0,rank=1"}, r"rank twice"),
        ({"inject": "kill:at=evaluation"}, r"without evaluations; give evaluate="),
        ({"inject": ["kill"]}, r"wanted a text"),
        ({"call": {"skip": (1, 2)}}, r"wanted pairs of whole numbers; such as \(\(4096, 4160\),\)"),
        ({"call": {"skip": ((1.7, 2),)}}, r"wanted pairs of whole numbers"),
        ({"call": {"batch_sizes": (0, 4)}}, r"wanted pairs of whole numbers; such as \(\(0, 16\), \(200, 32\)\)"),
    ],
)
def test_a_wrong_argument_is_an_error_with_its_fix_before_anything_is_written(tmp_path, given, fix):
    with pytest.raises(ValueError, match=fix):
        train(tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("given", [{"inject": "kill:rank=5"}, {"profile": "trace:steps=1,rank=9"}])
def test_what_is_asked_of_a_rank_that_is_not_is_warned_of(tmp_path, given):
    with pytest.warns(RuntimeWarning, match="wanted a rank below 1: it will not happen"):
        train(tmp_path / "run", **given)


def test_a_metric_that_no_record_has_is_warned_of_once(tmp_path):
    with pytest.warns(RuntimeWarning, match=r"got 'los', wanted one of .*did you mean loss") as seen:
        train(tmp_path / "run", until=loop.Until(metric="los", at_most=1.0))
    assert len([one for one in seen if "Until" in str(one.message)]) == 1


def test_an_evaluation_that_returns_nothing_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"evaluate\['wiki'\]: got None, wanted a mapping"):
        train(tmp_path / "run", evaluate={"wiki": lambda state: None})


def test_a_comparison_of_replicas_that_are_none_is_warned_of():
    mesh = Mesh(dp=2)
    cut, whole = (Layout((4,), torch.float32, mesh, (axis,)) for axis in ("dp", None))
    with pytest.warns(RuntimeWarning, match="no replicas on other ranks.*nothing is compared; leave it out"):
        check_hashes(4, [cut, Layout((), torch.int64, mesh)], ranks=2)
    assert check_hashes(4, [cut, whole], ranks=2) == 4 and check_hashes(4, [cut], ranks=1) == 4

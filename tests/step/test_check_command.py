"""`python -m fmegatron.check`: findings of an experiment's step, and exit statuses."""

import io
import sys

import pytest

from fmegatron.check import main
from tests.house import ROOT

EXPERIMENT = """
from dataclasses import dataclass
import torch
from fmegatron import collectives, step as steps
from fmegatron.layout import Layout, Mesh

@dataclass(frozen=True)
class Config:
    mesh: Mesh = Mesh()
    right: bool = False
    odd: bool = False

def describe(config):
    axis = collectives.Axes(config.mesh)["dp"]
    def step(params, batch):
        batch = torch.segment_reduce(batch, "sum", lengths=torch.ones(4, dtype=torch.int64)) if config.odd else batch
        grad = batch.sum(0)
        grad = collectives.psum(grad, axis) if config.right else grad
        return params - grad, {}
    rows = Layout((8, 4), torch.float32, config.mesh, ("dp",))
    return steps.Description(step, Layout((4,), torch.float32, config.mesh), rows)
"""


@pytest.fixture
def experiment(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text(EXPERIMENT)
    return str(path)


def run(*argv):
    out, err = io.StringIO(), io.StringIO()
    return main(argv, out, err), out.getvalue(), err.getvalue()


def test_findings(experiment):
    status, out, err = run(experiment, "--mesh", "dp=2")
    assert (status, err) == (1, "")
    assert "wrong.py:19: sub over 'dp': adds a pending sum and a complete value" in out and "1 findings" in out


def test_none(experiment):
    assert run(experiment, "--mesh", "dp=2", "--right=true")[0] == 0
    assert run(experiment, "--mesh", "dp=1")[0] == 0
    assert run(experiment, "--mesh", "tp=2")[0] == 0  # a standard axis that a mesh lacks has size 1
    status, out, _ = run(experiment, "--mesh", "dp=2", "--allow", "x/wrong.py:19=for a test")
    assert status == 0 and "silenced (for a test)" in out


def test_what_is_not_proven_has_a_status_of_its_own(experiment):
    odd = (experiment, "--mesh", "dp=2", "--right=true", "--odd=true")
    status, out, err = run(*odd)
    assert (status, err) == (3, "") and out.startswith("no findings\nwrong.py:16: unproven: segment_reduce over 'dp'")
    assert "so 0 may be wrong. Go on:" in out and "0 findings, 0 silenced, 1 unproven outputs" in out
    assert run(*odd, "--allow", "wrong.py:16=each row is a segment")[0] == 0


@pytest.mark.parametrize(
    "argv, said",
    [
        (["nowhere.py", "--mesh", "dp=2"], "nowhere.py"),
        ([str(ROOT / "experiments" / "minimal.py"), "--mesh", "dp=2"], "defines no Config and no describe"),
        (["EXPERIMENT", "--mesh", "dp=x"], "wanted axes and their sizes"),
        (["EXPERIMENT", "--mesh", "dp=2", "--wrong=1"], "Unknown command line flag"),
        (["EXPERIMENT", "--mesh", "dp=3"], "uneven|not divisible"),
    ],
)
def test_wrong_use(argv, said, experiment):
    status, out, err = run(*[experiment if a == "EXPERIMENT" else a for a in argv])
    assert status == 2 and out == "" and any(word in err for word in said.split("|")), err


def test_wrong_flags(experiment, capsys):
    assert run(experiment, "--mesh", "dp=2", "--allow", "wrong.py:19")[0] == 2
    assert "wanted FILE:LINE=REASON" in capsys.readouterr().err
    assert run(experiment)[0] == 2


@pytest.mark.long
def test_as_a_program(python):
    command = [sys.executable, "-m", "fmegatron.check", "experiments/shakespeare.py", "--mesh", "dp=2,fsdp=2,tp=2"]
    done = python.run(command, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("no findings\n") and "0 unproven outputs" in done.stdout

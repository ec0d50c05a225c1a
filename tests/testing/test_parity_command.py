"""`python -m fmegatron.parity`: what differs, the line to blame, and exit statuses; and `fp64` of simulated ranks."""

import io

import pytest
import torch

from fmegatron import nn, testing
from fmegatron.layout import Layout, Mesh
from fmegatron.parity import main
from fmegatron.step.layer import compiled_layer
from tests.house import ROOT

EXPERIMENT = """
from dataclasses import dataclass
import torch
from fmegatron import collectives, step as steps, tree
from fmegatron.layout import Layout, Mesh

@dataclass(frozen=True)
class Config:
    mesh: Mesh = Mesh()
    right: bool = True
    width: int = 4

def describe(config):
    axis = collectives.Axes(config.mesh)["dp"]
    def step(params, batch):
        rows = params["table"][batch["ids"]]
        grad = (rows * batch["x"].to(torch.bfloat16).float()).sum(0)
        grad = collectives.psum(grad, axis) if config.right else grad
        return {"table": params["table"] - 0.1 * grad}, {}
    specs = tree.specs({"table": (6, config.width)}, config.mesh)
    rows = {"ids": Layout((8,), torch.int64, config.mesh, ("dp",))}
    rows["x"] = Layout((8, config.width), torch.float32, config.mesh, ("dp",))
    return steps.Description(step, specs, rows)
"""


@pytest.fixture
def experiment(tmp_path):
    path = tmp_path / "table.py"
    path.write_text(EXPERIMENT)
    return str(path)


def run(*argv):
    out, err = io.StringIO(), io.StringIO()
    return main(argv, out, err), out.getvalue(), err.getvalue()


def test_a_right_step(experiment):
    status, out, err = run(experiment, "--mesh", "dp=4", "--width=3")
    assert (status, err) == (0, "")
    assert out.startswith("dp4 computes what one rank computes (largest relative error ")
    assert "table.py on dp4: 1 outputs of 2 steps in fp64" in out
    assert "of the batch below 6," in out  # rows of the table


def test_a_missing_sum_is_found_and_its_line_named(experiment):
    status, out, err = run(experiment, "--mesh", "dp=2", "--right=false")
    assert (status, err) == (1, "")
    assert out.startswith("on dp2, step 0: 1 of 1 outputs differ from one rank; first 0/table")
    assert "meaning is lost at\n  table.py:19: sub" in out


@pytest.mark.parametrize(
    "argv, said",
    [
        (["nowhere.py", "--mesh", "dp=2"], "nowhere.py"),
        ([str(ROOT / "experiments" / "minimal.py"), "--mesh", "dp=2"], "defines no experiment"),
        (["EXPERIMENT", "--mesh", "dp=3"], "uneven"),
        (["EXPERIMENT", "--mesh", "dp=2", "--wrong=1"], "Unknown command line flag"),
        (["EXPERIMENT", "--mesh", "dp=2", "--below", "7"], "index 6 is out of bounds"),
    ],
)
def test_wrong_use(argv, said, experiment):
    status, out, err = run(*[experiment if a == "EXPERIMENT" else a for a in argv])
    assert status == 2 and out == "" and said in err, err


def test_wrong_flags(experiment, capsys):
    assert run(experiment)[0] == 2 and run(experiment, "--mesh", "dp=2", "--steps", "0")[0] == 2
    assert "got '0', wanted a whole number of at least 1" in capsys.readouterr().err
    assert run("--help")[0] == 0


@pytest.mark.slow
@pytest.mark.long
def test_shakespeare():
    small = {"dim": 16, "layers": 1, "heads": 2, "seq_len": 8, "batch_size": 4, "microbatches": 2}
    flags = [f"--{name}={value}" for name, value in small.items()]
    status, out, _ = run(str(ROOT / "experiments" / "shakespeare.py"), "--mesh", "fsdp=2,tp=2", *flags)
    assert status == 0 and "outputs of 2 steps in fp64" in out, out


def test_fp64_is_the_same_on_all_meshes_whatever_the_dtypes_of_the_step():
    mesh = Mesh(dp=4)

    def step(x, samples):
        return nn.dropout(x.to(torch.bfloat16) / 3, 0.5, key=1, count=samples).float()

    x, samples = torch.randn(8, 16), torch.arange(8)
    layouts = (Layout((8, 16), x.dtype, mesh, ("dp",)), Layout((8,), samples.dtype, mesh, ("dp",)))
    sim = testing.simulate(step, mesh, x, samples, layouts=layouts, fp64=True)
    y, narrow = sim.globals(), testing.simulate(step, mesh, x, samples, layouts=layouts).globals()
    assert y.dtype is torch.float64 and torch.equal(y != 0, narrow != 0)
    kept = y != 0
    torch.testing.assert_close(y[kept], (x.double() / 3 * 2)[kept], rtol=1e-14, atol=0)
    assert not torch.allclose(narrow.double(), y, rtol=1e-4)  # bf16 in the step as it is
    again = sim.again(x, samples)
    assert torch.equal(again.globals(), y)


def test_fp64_of_bits_is_refused():
    with pytest.raises(ValueError, match="test_parity_command.py:.*got a view of bits as torch.int32, wanted a step"):
        testing.simulate(lambda x: x.view(torch.int32), Mesh(), torch.ones(2), fp64=True)


def test_fp64_of_keyed_numbers():
    """`nn.normal` reads the bits of an fp64, which fp64 leaves as they are; inside a layer as well."""
    mesh = Mesh(dp=2)
    layer = compiled_layer()(lambda x, w, n: x * w["w"] + nn.normal(x, key=3, count=n))

    def step(x, samples):
        noise = nn.normal(x, key=1, count=samples) + nn.uniform(x, key=2, count=samples)
        return layer(noise, {"w": x[:1] * 0}, samples)

    x, samples = torch.ones(4, 8), torch.arange(4)
    layouts = (Layout((4, 8), x.dtype, mesh, ("dp",)), Layout((4,), samples.dtype, mesh, ("dp",)))
    sim = testing.simulate(step, mesh, x, samples, layouts=layouts, fp64=True)
    one = nn.normal(x, key=3, count=samples).double()
    torch.testing.assert_close(sim.globals(), one, rtol=1e-6, atol=0)

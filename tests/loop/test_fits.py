"""A step is planned before it runs, and one that cannot fit is refused: by its state, by formulas, or counted."""

import dataclasses

import pytest
import torch

from experiments import shakespeare
from fmegatron import optim, plan, step, tree
from fmegatron.collectives import World
from fmegatron.layout import Layout, Mesh
from fmegatron.loop.config import UsageError
from fmegatron.loop.fits import container_bytes, planned_bytes, resident_bytes
from fmegatron.loop.options import Memory
from tests.experiments.given import made
from tests.experiments.test_shakespeare import SMALL

CONFIG = made(shakespeare.Config, **SMALL)
WORLD = World.alone(torch.device("cpu"))


def describe(mesh):
    return shakespeare.describe(dataclasses.replace(CONFIG, mesh=mesh))


def planned(**options):
    return planned_bytes(describe(Mesh()), WORLD, Memory(**options), describe)


def test_far_from_the_limit_formulas_do():
    assert planned() == planned(limit_bytes=1e9) == plan.quick(describe(Mesh())).peak
    assert planned(plan="off") is None and planned(plan="off", planned_bytes=1e15) == planned(planned_bytes=1e3) * 1e12


@pytest.mark.slow
def test_near_it_the_step_is_counted(monkeypatch):
    """Both sides of the bytes that it takes: one byte less is refused, with what takes the most and a mesh."""
    exact = plan.exact(*(described := describe(Mesh())), Mesh())
    counted, asked = exact.peak, []
    monkeypatch.setattr(
        plan, "exact", lambda *given, overlap: asked.append((*given[1:], overlap)) or exact
    )  # seconds each
    assert planned(limit_bytes=counted) == planned(limit_bytes=1e9, plan="exact") == counted
    with pytest.raises(UsageError) as raised:
        planned(limit_bytes=counted - 1)
    assert asked == [(described.state, described.batch, Mesh(), True)] * 3
    text = str(raised.value)
    assert "(planned exactly), wanted at most" in text and "as --run.memory.limit_bytes says" in text
    assert f"takes {counted:,} bytes on one rank" in text and f"at most {counted - 1:,} bytes, as" in text
    parts = [float(x.split(" MiB")[0]) for x in text.partition("largest parts: ")[2].split("; ")[:3]]
    assert len(parts) == 3 and parts == sorted(parts, reverse=True)
    assert "--mesh=dp=2 of 2 ranks with as much memory each would fit, or --run.memory.plan=off" in text


def test_on_a_gpu_the_limit_is_what_is_free_and_what_the_process_holds(monkeypatch):
    """Another process has 30 GiB of 80; of the rest this one holds 10 already."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 << 30)
    world = World(Mesh(), 0, torch.device("cuda", 0))
    assert planned_bytes(describe(Mesh()), world, Memory(planned_bytes=float(50 << 30)), describe) == 50 << 30
    with pytest.raises(UsageError, match=r"wanted at most 51,200.0 MiB, the 81,920.0 MiB of cuda:0 without the 30,720"):
        planned_bytes(describe(Mesh()), world, Memory(planned_bytes=float(51 << 30)), describe)


@pytest.mark.medium
def test_a_state_that_is_too_large_is_not_counted(monkeypatch):
    monkeypatch.setattr(plan, "exact", lambda *_: pytest.fail("it is not needed"))
    with pytest.raises(UsageError, match=r"\(its state alone\).*of the optimizer's state; .*of parameters; "):
        planned(limit_bytes=1e4)
    with pytest.raises(UsageError, match=r"\(as planned before\), wanted at most .*beside them.*give that of"):
        planned(planned_bytes=1e15)


@pytest.mark.slow
def test_a_step_without_formulas_is_counted_where_its_state_takes_a_quarter():
    """Its activations, too: a matrix of 1024 columns that 512 rows are multiplied with."""
    mesh, optimizer = Mesh(), optim.sgd(0.1)
    specs = tree.specs({"w": (64, 1024)}, mesh, init=tree.Normal(0.1))

    def loss_fn(params, batch):
        h = torch.tanh(batch["x"] @ params["w"])
        return (h * h.sum()).mean(), {}

    described = step.build(loss_fn, optimizer, specs, {"x": Layout((512, 64), torch.float32, mesh)})
    state = sum(x.local_nbytes(0) for x in tree.leaves(tree.layouts(described.state)))

    def of(limit):
        return planned_bytes(described, WORLD, Memory(limit_bytes=limit), lambda mesh: described)

    assert of(20 * state) < 5 * state
    with pytest.raises(UsageError, match=r"planned exactly.*python -m fmegatron.plan EXPERIMENT --search 1 --memory"):
        of(3 * state)


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_container(tmp_path, version):
    """The least of the group's and of those that it is in; a word or the largest number is none."""
    top, name = (tmp_path / "memory", "memory.limit_in_bytes") if version == 1 else (tmp_path, "memory.max")
    inner = top / "job" / "task"
    inner.mkdir(parents=True)
    groups = tmp_path / "groups"
    groups.write_text("4:cpu,memory:/job/task\n1:pids:/x\n" if version == 1 else "0::/job/task\n")
    assert container_bytes(tmp_path, groups) is None
    (inner / name).write_text("max\n" if version == 2 else "9223372036854771712\n")
    (top / "job" / name).write_text("4000000000\n")
    assert container_bytes(tmp_path, groups) == 4_000_000_000
    (inner / name).write_text("3000000000\n")
    assert container_bytes(tmp_path, groups) == 3_000_000_000 and 10_000_000 < resident_bytes() < 1e12

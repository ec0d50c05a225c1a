"""Plans with state in host memory: bytes of the device and of the host apart, and what fits."""

import io

import pytest
import torch

from fmegatron import model, optim, plan, tree
from fmegatron.collectives import World
from fmegatron.layout import DataParallel, Mesh
from fmegatron.loop.config import UsageError
from fmegatron.loop.fits import _require_room, planned_bytes
from fmegatron.loop.options import Memory
from fmegatron.plan import __main__ as command

CARD = 80e9  # bytes, of 80 GB
LLAMA_8B = {"vocab_size": 128256, "dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn_dim": 14336}
WORLD = World.alone(torch.device("cpu"))


def described(memory, mesh=Mesh(), length=16, **sizes):  # noqa: B008
    """A step of a decoder of 16-bit parameters, with the optimizer's state in a memory."""
    of = model.llama(**sizes, max_seq=length, param_dtype=torch.bfloat16, compute_dtype=torch.bfloat16)
    how = {"strategy": DataParallel.zero3(), "save": "inputs", "memory": memory}
    return model.build(of, optim.adamw(1e-4), mesh, (4, length), **how)


def small(memory, mesh=Mesh()):  # noqa: B008
    """Wide enough that its weights are what counts."""
    return described(memory, mesh, vocab_size=64, dim=256, layers=2, heads=4, kv_heads=2, ffn_dim=512)


def test_8b_on_one_card():
    """AdamW of bf16 parameters: the state of the optimizer makes the difference."""
    on_device, on_host = (plan.quick(described(memory, Mesh(), 4096, **LLAMA_8B)) for memory in ("device", "host"))
    assert not on_device.unknown_memory and not on_host.unknown_memory
    assert on_device.state > CARD and on_host.peak < CARD / 2
    assert on_device.state == on_host.state + on_host.host
    assert 12 * on_host.state / 2 == pytest.approx(on_host.host, rel=1e-6)  # moments and master of each 2 bytes
    assert "in host memory" in str(on_host) and "in host memory" not in str(on_device)
    assert on_host.step_seconds()["state from and to the host"] == on_host.host / 5e10
    there = plan.quick(
        described("host-update", Mesh(), 4096, **LLAMA_8B)
    )  # gradients down, parameters up: 2 bytes each
    assert there.host == on_host.host and there.peak <= on_host.peak
    assert there.travels == pytest.approx(on_host.host / 6, rel=1e-6)


@pytest.mark.slow
def test_8b_on_one_card_counted():
    """The same by the exact plan, of layers compiled once."""

    def build(layers):
        return described("host", Mesh(), 4096, **LLAMA_8B | {"layers": layers})

    found = plan.deep(build, LLAMA_8B["layers"], Mesh())
    assert found.depth is not None and found.peak < CARD, str(found)
    assert found.host == plan.quick(build(LLAMA_8B["layers"])).host


@pytest.mark.slow
@pytest.mark.long
def test_counted():
    """The exact plan: what is on the host is not on the device, and buckets are what the update takes there."""
    counted = {}
    for memory in ("device", "host", "host-update"):
        of = small(memory)
        counted[memory] = plan.exact(of.function, of.state, of.batch, Mesh(), host_bytes=1 << 18)
    on_device, on_host = counted["device"], counted["host"]
    assert on_device.host == 0 and on_device.state == on_host.state + on_host.host
    sizes = [x.nbytes for x in tree.leaves(tree.layouts(small("host").state)) if x.memory == "host"]
    assert sum(sizes) == on_host.host
    assert on_host.peak < on_device.peak
    there = counted["host-update"]
    assert (there.state, there.host) == (on_host.state, on_host.host) and there.peak <= on_host.peak
    assert not any(held.name == "buckets" and held.nbytes for held in there.held)
    bucket = 1 << 18
    assert (
        on_host.phases["end"] <= on_device.phases["end"] + 4 * bucket
    )  # two that were fetched, one of results, copies
    of = small("host")
    whole = plan.exact(of.function, of.state, of.batch, Mesh())
    assert whole.transient > on_host.transient  # one bucket has it all


def test_ranks_share_it():
    whole, half = (plan.quick(small("host", mesh=Mesh(fsdp=n))) for n in (1, 2))
    assert half.host == whole.host / 2


@pytest.fixture
def experiment(tmp_path):
    """A file of an experiment whose optimizer is on the host."""
    path = tmp_path / "on_host.py"
    path.write_text(
        "from dataclasses import dataclass\n"
        "from fmegatron import loop\n"
        "from fmegatron.layout import Mesh\n"
        "from fmegatron.loop import field\n"
        "from tests.plan.test_host_memory import small\n"
        "@dataclass(frozen=True)\n"
        "class Config:\n"
        "    mesh: Mesh = Mesh()\n"
        "    run: loop.Options = loop.Options('runs/x')\n"
        "experiment = loop.Experiment(Config, lambda c: small('host', mesh=c.mesh), lambda c: None)\n"
    )
    return str(path)


@pytest.mark.parametrize(("host", "status", "says"), [(1.0, 0, "fits: "), (1e-3, 1, "does not fit: ")])
def test_the_command(experiment, host, status, says):
    out, err = io.StringIO(), io.StringIO()
    given = [experiment, "--mesh", "fsdp=1", "--quick", "--memory", "1", "--host-memory", str(host)]
    assert command.main(given, out, err) == status, err.getvalue()
    assert f"host memory: {says}" in out.getvalue() and "\nfits: " in out.getvalue()


@pytest.mark.medium
def test_a_run_on_a_cpu_counts_both():
    """There they are one memory."""
    of = small("host")
    quick = plan.quick(of)
    assert planned_bytes(of, WORLD, Memory(limit_bytes=1e12), lambda mesh: of) == quick.peak + quick.host
    with pytest.raises(UsageError, match="its state alone"):
        planned_bytes(of, WORLD, Memory(limit_bytes=quick.state + quick.host - 99), lambda mesh: of)


def test_a_host_without_room():
    with pytest.raises(UsageError, match="on each rank are to be in host memory, wanted at most .*fewer ranks"):
        _require_room([("of the optimizer's state", 1e15)], WORLD)
    _require_room([("of the optimizer's state", 1.0)], WORLD)

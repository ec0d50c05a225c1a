"""World: of a single process, and where a rank's tensors are."""

import os
import types

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.collectives import World, connect, process_group
from fmegatron.layout import Layout, Mesh
from fmegatron.tree.arrivals import Arrivals
from tests.streams import Late


def test_alone_is_a_world_of_one_rank():
    world = World.alone("cpu")
    assert (world.mesh, world.rank, world.size, world.device) == (Mesh(), 0, 1, torch.device("cpu"))
    assert world.broadcast_text("a") == "a" and world.ask(True, False)() == (True, False)
    row = torch.tensor([3, -1])
    assert torch.equal(world.gather_rows(row), row[None]) and torch.equal(world.minimum(row), row)
    sent, received = torch.arange(3.0), torch.zeros(3)
    world.exchange([(0, sent)], [(0, received)])
    assert torch.equal(sent, received)
    world.barrier()
    with pytest.raises(RuntimeError, match="saving failed: no space"):
        world.agree("no space", "saving")


def test_alone_whatever_torchrun_says(monkeypatch):
    """`connect` asks for the ranks that torchrun has started; this world is of this process only."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert (World.alone().rank, World.alone().size) == (0, 1)


def test_put_brings_a_tree_to_the_device():
    state = {"w": torch.ones(2), "n": [torch.tensor(3)]}
    put = World.alone("meta").put(state)
    assert put["w"].device == put["n"][0].device == torch.device("meta") and put["w"].shape == (2,)
    assert World.alone("cpu").put(state)["w"] is state["w"]


def test_restored_tensors_are_on_the_device_of_the_world(tmp_path):
    """Unless another is asked for; without a world it is the CPU."""
    layouts, state = {"w": Layout((4,), torch.float32, Mesh())}, {"w": torch.ones(4)}
    world = World.alone("meta")  # stands for an accelerator
    with checkpoint.Manager(tmp_path, world=world) as manager:
        manager.save(1, state, layouts)
        assert manager.restore_latest(layouts)[1]["w"].device.type == "meta"
        assert torch.equal(manager.restore(1, layouts, device="cpu")[0]["w"], state["w"])
    path = manager.path(1)
    assert checkpoint.restore(path, layouts, world=world)["w"].device.type == "meta"
    assert checkpoint.restore(path, layouts)["w"].device.type == "cpu"


def test_replicas_and_their_fallback_have_one_world(tmp_path):
    other = World(Mesh(fsdp=2), 0, torch.device("cpu"))
    local = checkpoint.LocalReplicas(tmp_path / "a", "run", copies=1)
    with pytest.raises(ValueError, match="got a fallback of 2 ranks, wanted one of 1; give the Manager the same world"):
        local.restore_latest({}, fallback=checkpoint.Manager(tmp_path / "b", world=other))


# ---- devices of CUDA, of which there is none here --------------------------------------------------------------------
@pytest.fixture
def cuda(monkeypatch):
    """What is asked of CUDA, in order: ("current", 3), ("start", backend, device_id, NCCL's variables)."""
    asked = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.append(("current", device.index)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    properties = types.SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for name in process_group.OF_NCCL:
        monkeypatch.setenv(name, "")  # so that it is as it was when the test ends
        monkeypatch.delenv(name)

    def started(backend, device_id, **_):
        asked.append(("start", backend, device_id, [os.environ.get(name) for name in process_group.OF_NCCL]))

    monkeypatch.setattr(torch.distributed, "init_process_group", started)
    return asked


def test_a_device_of_a_world_of_one_becomes_the_current_one(cuda, monkeypatch):
    """What allocates without naming a device then opens nothing on another GPU."""
    for name in ("WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    assert connect(Mesh(), device="cuda:3").device == torch.device("cuda", 3)
    assert World.alone("cuda").device == torch.device("cuda", 1)
    assert cuda == [("current", 3), ("current", 1)]
    World.alone("cpu")
    assert len(cuda) == 2


def test_nothing_waits_for_what_is_put_on_a_gpu():
    """Nothing is copied yet when `put` returns; what the caller has pinned, and may write next, is."""
    world, late = World(Mesh(), 0, torch.device("cuda", 0)), Late()
    world._arrivals = Arrivals(world.device, lambda device: late)
    given, pinned = torch.ones(2), torch.ones(3)
    put = world.put({"a": given})["a"]
    given.fill_(7)  # it is pinned in memory of its own before
    assert late.waits == 0 and put.isnan().all()
    late.held.append(pinned)
    late.launch(seen := Seen(put))
    other = world.put({"b": pinned})["b"]
    assert late.waits == 1 and torch.equal(other, torch.ones(3)) and seen.values is None  # for its copy alone
    late.finish()
    assert torch.equal(seen.values, torch.ones(2))


class Seen:
    """Reads a tensor when it is called."""

    def __init__(self, x):
        self.x, self.values = x, None

    def __call__(self):
        self.values = self.x.clone()


def test_nccl_knows_its_device_and_records_what_it_does_before_it_starts(cuda, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    device, store = torch.device("cuda", 0), torch.distributed.HashStore()
    process_group.start(store, 0, 2, "cpu:gloo,cuda:nccl", 60, device)
    assert cuda == [("start", "cpu:gloo,cuda:nccl", device, ["2", "1", "7", "2000"])]
    process_group.start(store, 0, 2, "gloo", 60, device)
    assert cuda[1][1:3] == ("gloo", None)


def test_two_ranks_on_one_gpu_are_refused_before_nccl_starts(cuda):
    device, store = torch.device("cuda", 0), torch.distributed.HashStore()
    process_group.start(store, 0, 2, "nccl", 60, device)
    with pytest.raises(ValueError, match="ranks 0 and 1: got the GPU GPU-1 for both, .* backend='gloo'"):
        process_group.start(store, 1, 2, "nccl", 60, device)
    assert len(cuda) == 1
    process_group.start(store, 1, 2, "gloo", 60, device)
    process_group.start(torch.distributed.HashStore(), 1, 2, "nccl", 60, device)  # the job's next start
    assert len(cuda) == 3

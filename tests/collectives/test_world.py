"""World: of a single process, and where a rank's tensors are."""

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.collectives import World
from fmegatron.layout import Layout, Mesh


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

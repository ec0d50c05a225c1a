"""States under any layout written as DCP directories, which torch loads into tensors and DTensors of any placement."""

import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fmegatron import checkpoint, interop, tree
from fmegatron.collectives import connect
from fmegatron.interop.dcp_read import read_dcp_object
from fmegatron.layout import Layout, Mesh, Split
from tests.checkpoint.fake_world import cut_tree
from tests.interop.torch_layout import whole

SHAPE = (12, 7)
SPECS = {
    "rows": (("fsdp",), {}),
    "both": (("fsdp", "tp"), {}),
    "fused": ((Split("tp", 3),), {}),
    "flat": ((), {"flat": ("fsdp", "tp")}),
    "cut_flat": ((None, "tp"), {"flat": "fsdp"}),
    "same": ((), {}),
}


def tree_on(mesh):
    """(whole state, layouts)."""
    state = {"model": {name: whole(SHAPE, torch.float32) + i for i, name in enumerate(SPECS)}}
    state["opt"] = [{"step": torch.tensor(3.0)}, {"none": torch.empty(0, 4), "low": whole((5,), torch.bfloat16)}]
    layouts = {"model": {n: Layout(SHAPE, torch.float32, mesh, spec, **o) for n, (spec, o) in SPECS.items()}}
    layouts["opt"] = [
        {"step": Layout((), torch.float32, mesh)},
        {"none": Layout((0, 4), torch.float32, mesh, ("tp",)), "low": Layout((5,), torch.bfloat16, mesh, ("fsdp",))},
    ]
    return state, layouts


VALUES = {"lr": 0.5, "opt/betas": (0.9, 0.98)}


def save(rank, path, sizes):
    state, layouts = tree_on(mesh := Mesh(**sizes))
    with connect(mesh, device="cpu") as world:
        mine = tree.place(cut_tree(state, layouts)[rank], layouts, rank)
        interop.save_dcp(path, mine, world, VALUES)
        with pytest.raises((ValueError, RuntimeError), match="exists"):
            interop.save_dcp(path, mine, world)


def load(rank, path, size):
    state, _ = tree_on(Mesh(fsdp=1, tp=1))
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    for placement in (Shard(0), Shard(1), Replicate()):
        into = {name: distribute_tensor(torch.zeros(SHAPE), mesh, [placement]) for name in SPECS}
        low = torch.zeros(5, dtype=torch.bfloat16)
        got = {"model": into, "lr": 0, "opt": {"1": {"low": low}, "betas": None}}
        dcp.load(got, checkpoint_id=path)
        assert all(torch.equal(got["model"][n].full_tensor(), state["model"][n]) for n in SPECS)
        assert torch.equal(low, state["opt"][1]["low"]) and (got["lr"], got["opt"]["betas"]) == (0.5, (0.9, 0.98))
    dist.barrier()


@pytest.mark.long
@pytest.mark.parametrize("sizes", [{"fsdp": 1, "tp": 1}, {"fsdp": 1, "tp": 2}, {"fsdp": 2, "tp": 2}], ids=str)
def test_torch_loads_what_we_write(ranks, tmp_path, sizes):
    path, count = str(tmp_path / "c"), sizes["fsdp"] * sizes["tp"]
    ranks.run(save, path, sizes, ranks=count)
    for size in (1, 2, 4):
        ranks.run(load, path, size, ranks=size)
    state, layouts = tree_on(Mesh(dp=3, fsdp=1, tp=1))
    for rank in range(3):
        got = checkpoint.restore(interop.source(path), layouts, rank=rank)
        assert all(torch.equal(got["model"][n], state["model"][n].reshape(got["model"][n].shape)) for n in SPECS)
        assert torch.equal(got["opt"][1]["low"], state["opt"][1]["low"]) and got["opt"][1]["none"].shape == (0, 4)
    assert read_dcp_object(path, "opt/betas") == (0.9, 0.98)
    with open(f"{path}/.metadata", "rb") as f:
        written = pickle.load(f)
    assert len(written.state_dict_metadata["model.same"].chunks) == 1  # of replicas one writes
    assert len(written.state_dict_metadata["model.rows"].chunks) == sizes["fsdp"]


def test_requests_that_do_not_fit(tmp_path):
    layouts = {"a": {"b": Layout((2,), torch.float32, Mesh())}, "a.b": Layout((2,), torch.float32, Mesh())}
    state = {"a": {"b": torch.zeros(2)}, "a.b": torch.ones(2)}
    with pytest.raises(ValueError, match="torch's name for a"):
        interop.save_dcp(tmp_path / "c", tree.place(state, layouts))
    with pytest.raises(ValueError, match="w: got <built-in function print>"):
        interop.save_dcp(tmp_path / "c", {"a": state["a"]}, values={"w": print})
    wide = {"x": Layout((2,), torch.float32, Mesh(tp=2))}
    with pytest.raises(ValueError, match="without torch.distributed|save together"):
        interop.save_dcp(tmp_path / "c", tree.place({"x": torch.zeros(2)}, wide))
    assert not (tmp_path / "c").exists() or not list((tmp_path / "c").glob(".metadata"))

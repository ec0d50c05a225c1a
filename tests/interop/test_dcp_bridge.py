"""torch.distributed.checkpoint with our files: DTensors on other meshes, digests, all or nothing."""

import gc
import os
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fmegatron import checkpoint, interop
from fmegatron.interop.dcp_bridge import FmegatronReader, FmegatronWriter
from fmegatron.layout import Layout, Mesh
from tests.interop.models import build, full, same, state_of
from tests.interop.torch_layout import whole


def save(rank, path, kind, size, with_torchs_names):
    net, optimizer = build(kind, size)
    state = dict(zip(("model", "optim"), get_state_dict(net, optimizer), strict=True)) if with_torchs_names else None
    state = state or state_of(net, optimizer)
    dcp.save(state, storage_writer=FmegatronWriter(path, {"note": kind}, step=5))
    return full(state)


def load(rank, path, kind, size, wanted, with_torchs_names):
    net, optimizer = build(kind, size, seed=3)
    if with_torchs_names:
        model, optim = get_state_dict(net, optimizer)
        dcp.load({"model": model, "optim": optim}, storage_reader=FmegatronReader(path))
        set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=optim)
        got = dict(zip(("model", "optim"), get_state_dict(net, optimizer), strict=True))
    else:
        got = state_of(net, optimizer)
        dcp.load(got, storage_reader=FmegatronReader(path))
    return same(full(got), wanted)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind, size, names", [("fsdp", 1, False), ("tp", 2, True), ("fsdp_tp", 4, True)])
def test_save_and_load_on_any_mesh(ranks, tmp_path, kind, size, names):
    path = str(tmp_path / "c")
    wanted = ranks.run(save, path, kind, size, names, ranks=size)[0]
    for other, count in (("fsdp", 1), ("fsdp", 4), ("tp", 2), ("fsdp_tp", 4)):
        assert ranks.run(load, path, other, count, wanted, names, ranks=count) == [True] * count, (other, count)
    # It is a checkpoint like any other of ours.
    assert checkpoint.metadata(path)["note"] == kind and sorted(os.listdir(tmp_path)) == ["c"]
    layouts = {"model": {n: Layout(x.shape, x.dtype, Mesh(a=2), ("a",)[: x.ndim]) for n, x in wanted["model"].items()}}
    for rank in range(2):
        got = checkpoint.restore(path, layouts, rank=rank, strict="subset")["model"]
        for name, x in wanted["model"].items():
            for box in layouts["model"][name].boxes(rank):
                assert torch.equal(box.view(got[name]), x[box.slices])


def big(rank, path, size):
    """Leaves that get arrays of their own, cut over the ranks; stages of a pipeline; objects of one rank's making."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    rows, columns = whole((512, 96), torch.float32), whole((300, 250), torch.float32)
    state = {
        "rows": distribute_tensor(rows, mesh, [Shard(0)]),
        "columns": distribute_tensor(columns, mesh, [Shard(1)]),
        f"stage{rank}": {"w": whole((40, 1000), torch.bfloat16) + rank, "n": rank},
        "same": whole((3,), torch.int64),
    }
    dcp.save(state, storage_writer=FmegatronWriter(path))
    return rows, columns


@pytest.mark.parametrize("size", [2, 4])
def test_arrays_and_pipeline_stages(ranks, tmp_path, size):
    path = str(tmp_path / "c")
    rows, columns = ranks.run(big, path, size, ranks=size)[0]
    stored = checkpoint.layouts(path)
    got = checkpoint.restore(path, stored)
    assert torch.equal(got["rows"], rows) and torch.equal(got["columns"], columns)
    for rank in range(size):
        assert torch.equal(got[f"stage{rank}"]["w"], whole((40, 1000), torch.bfloat16) + rank)
    values = {f"stage{rank}": {"n": None} for rank in range(size)}
    tensors = {"rows": torch.zeros(512, 96)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(values | tensors, storage_reader=FmegatronReader(path), no_dist=True)
    assert [values[f"stage{rank}"]["n"] for rank in range(size)] == list(range(size))
    assert torch.equal(tensors["rows"], rows)
    assert os.path.exists(f"{path}/arrays/rows/c.0.0"), "a large leaf is an array that any zarr reader opens"


class Odd:
    """No plain data."""


def fail(rank, path, how):
    state = {"w": torch.full((4,), 2.0), "mine": whole((4, 4), torch.float32)}
    if how == "object":
        state["odd"] = Odd()
    else:
        state["gone"] = distribute_tensor(torch.zeros(40_000), init_device_mesh("cpu", (2,)), [Shard(0)])
        if rank == 1:  # this rank cannot write: its folder is a file
            FmegatronWriter.write_data = refuse_to_write
    try:
        dcp.save(state, storage_writer=FmegatronWriter(path))
    except CheckpointException as error:
        return str(error)
    finally:
        if rank == 1 and how != "object":
            del FmegatronWriter.write_data
            FmegatronWriter.write_data = WRITE
    return None


WRITE = FmegatronWriter.write_data


def refuse_to_write(self, plan, planner):
    raise OSError("disk full")


def forget(rank):
    """The writer hangs on the error that torch has raised."""
    gc.collect()


@pytest.mark.parametrize("how", ["object", "disk"])
def test_all_or_nothing(ranks, tmp_path, how):
    path = str(tmp_path / "c")
    interop.save_state_dict(path, {"w": torch.ones(4), "mine": torch.zeros(4, 4)})
    errors = ranks.run(fail, path, how, ranks=2)
    assert all(error and ("odd: got" in error if how == "object" else "disk full" in error) for error in errors)
    into = {"w": torch.zeros(4), "mine": torch.ones(4, 4)}
    interop.load_state_dict(path, into)
    assert into["w"].eq(1).all() and into["mine"].eq(0).all()
    ranks.run(forget, ranks=2)
    interop.save_state_dict(path, {"w": torch.ones(4)})  # what the failed save left hidden goes
    assert os.listdir(tmp_path) == ["c"]


def load_damaged(rank, path):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    state = {"rows": distribute_tensor(torch.zeros(512, 96), mesh, [Shard(0)])}
    try:
        dcp.load(state, storage_reader=FmegatronReader(path))
    except CheckpointException as error:
        return str(error)
    return None


def test_corruption_is_an_error_on_all_ranks(ranks, tmp_path):
    path = str(tmp_path / "c")
    ranks.run(big, path, 2, ranks=2)
    assert ranks.run(load_damaged, path, ranks=2) == [None, None]
    with open(f"{path}/arrays/rows/c.1.0", "r+b") as f:
        f.seek(1000)
        byte = f.read(1)
        f.seek(1000)
        f.write(bytes([byte[0] ^ 4]))
    for error in ranks.run(load_damaged, path, ranks=2):
        assert "rows: " in error and "is damaged" in error
    os.remove(f"{path}/COMPLETE")
    assert all("holds no complete checkpoint" in error for error in ranks.run(load_damaged, path, ranks=2))


def from_ours(rank, path):
    state = {"a": {"b": torch.zeros(3, 4), "lr": 0}, "t": torch.zeros((), dtype=torch.int32), "none": torch.empty(0, 2)}
    dcp.load(state, storage_reader=FmegatronReader(path))
    with pytest.raises(CheckpointException, match="absent|Missing key"):
        dcp.load({"b": torch.zeros(3, 4)}, storage_reader=FmegatronReader(path))
    dist.barrier()
    return state


def test_torch_loads_what_save_state_dict_saved(ranks, tmp_path):
    path = str(tmp_path / "c")
    saved = {"a": {"b": whole((3, 4), torch.float32), "lr": (0.1, [1])}, "t": torch.tensor(7, dtype=torch.int32)}
    saved["none"] = torch.empty(0, 2)
    interop.save_state_dict(path, saved)
    for got in ranks.run(from_ours, path, ranks=2):
        assert same(got, saved)


def background(rank, path):
    net, optimizer = build("fsdp", 2)
    state = state_of(net, optimizer)
    wanted = full(state)
    future = dcp.async_save(state, storage_writer=FmegatronWriter(path))
    with torch.no_grad():
        net.up.weight.zero_()
    future.result()
    return wanted


def test_torchs_async_save(ranks, tmp_path):
    path = str(tmp_path / "c")
    wanted = ranks.run(background, path, ranks=2)[0]
    assert ranks.run(load, path, "tp", 2, wanted, False, ranks=2) == [True, True]


def refusals(rank, path):
    state = {"w": torch.ones(4), "n": 1}
    cached = dcp.DefaultSavePlanner(enable_plan_caching=True)
    dcp.save(state, storage_writer=FmegatronWriter(f"{path}/first"), planner=cached)
    errors = []
    for name, options in (("cached", {"planner": cached}), ("alone", {"use_collectives": False})):
        try:
            dcp.save(state, storage_writer=FmegatronWriter(f"{path}/{name}"), **options)
        except (CheckpointException, ValueError) as error:
            errors.append(str(error))
    return errors


def test_what_is_refused(ranks, tmp_path):
    for cached, alone in ranks.run(refusals, str(tmp_path), ranks=2):
        assert "do not cache plans" in cached and "use_collectives=False" in alone
    assert os.listdir(tmp_path) == ["first"]


def test_names_that_torch_cannot_tell_apart(tmp_path):
    interop.save_state_dict(tmp_path / "c", {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)})
    with pytest.raises(ValueError, match="got several leaves with torch's name a.b"):
        FmegatronReader(tmp_path / "c").read_metadata()

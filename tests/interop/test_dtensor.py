"""DTensor <-> Layout on real ranks: same memory, same indices as torch says, refusals that name what is wrong."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from fmegatron.interop import to_dtensor
from fmegatron.interop.dtensor import layout_of, mesh_of
from fmegatron.layout import Layout, Mesh, Split

S0, S1, R = Shard(0), Shard(1), Replicate()


def whole(shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def same_indices(layout, local, rank, shape):
    """Whether the local tensor is what the layout cuts out of `whole(shape)`."""
    return all(torch.equal(box.view(local.contiguous()), whole(shape)[box.slices]) for box in layout.boxes(rank))


def every_placement(rank):
    checked = 0
    for sizes, names in (((4,), ("fsdp",)), ((2, 2), ("fsdp", "tp")), ((4, 1), ("a", "b")), ((2, 2), None)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        for shape in ((8, 6), (5, 3), (1, 7), (3, 0), (7,), (4, 4, 4)):
            options = [R, *(Shard(d) for d in range(len(shape)))]
            for placements in (
                [(p,) for p in options] if len(sizes) == 1 else [(p, q) for p in options for q in options]
            ):
                x = distribute_tensor(whole(shape), mesh, placements)
                layout, local = layout_of(x)
                assert layout.shape == shape and local.data_ptr() == x._local_tensor.data_ptr()
                assert same_indices(layout, local, rank, shape), (shape, placements, layout)
                back = to_dtensor(local, layout, mesh)
                assert back.placements == x.placements and back.shape == x.shape, (back, x)
                assert back._local_tensor.data_ptr() == local.data_ptr() and back.stride() == x.stride()
                checked += 1
    return checked


@pytest.mark.medium
def test_every_placement(ranks):
    two, three, one = 3, 4, 2  # placements that a tensor of so many dims can have on one mesh dim
    on = [(n, n * n) for n in (two, two, two, two, one, three)]
    assert ranks.run(every_placement, ranks=4) == [sum(line + 3 * grid for line, grid in on)] * 4


def strided(rank):
    """What FSDP makes of a tensor-parallel dim: tp cuts first, in the data as in the layout."""
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp")), []
    for n in (8, 6, 5, 3, 2, 1):
        tp = whole((n, 3)).chunk(2, 0)
        tp = tp[mesh["tp"].get_local_rank()] if mesh["tp"].get_local_rank() < len(tp) else whole((0, 3))
        parts = tp.chunk(2, 0)
        i = mesh["fsdp"].get_local_rank()
        local = (parts[i] if i < len(parts) else tp[:0]).clone()
        x = DTensor.from_local(
            local, mesh, (_StridedShard(0, split_factor=2), S0), run_check=False, shape=(n, 3), stride=(3, 1)
        )
        layout, mine = layout_of(x)
        assert layout.spec[0] == ("tp", "fsdp") and same_indices(layout, mine, rank, (n, 3))
        assert to_dtensor(mine, layout, mesh).placements == x.placements
        found.append(n)
    return found


def test_strided(ranks):
    assert ranks.run(strided, ranks=4) == [[8, 6, 5, 3, 2, 1]] * 4


def meshes(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sub = mesh["tp"]
    x = distribute_tensor(whole((5, 4)), sub, (S0,))
    layout, local = layout_of(x)
    assert layout.mesh == Mesh(rest=2, tp=2) == mesh_of(sub) and layout.replicas == 2
    assert same_indices(layout, local, rank, (5, 4)) and to_dtensor(local, layout, sub).placements == (S0,)
    outer, local = layout_of(distribute_tensor(whole((5, 4)), mesh["dp"], (S0,)))
    assert outer.mesh.group(0, "dp") == (0, 2) and same_indices(outer, local, rank, (5, 4))
    turned = dist.device_mesh.DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("a", "b"))
    layout, local = layout_of(distribute_tensor(whole((5, 4)), turned, (S0, S1)))
    assert same_indices(layout, local, rank, (5, 4)) and layout.mesh.group(0, "b") == (0, 2)
    with pytest.raises(ValueError, match="no regular grid"):
        layout_of(distribute_tensor(whole((5, 4)), dist.device_mesh.DeviceMesh("cpu", [0, 3, 1, 2]), (S0,)))


def test_meshes(ranks):
    ranks.run(meshes, ranks=4)


def refusals(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ours = Mesh(tp=2)
    with pytest.raises(ValueError, match="pending sum.*redistribute"):
        layout_of(DTensor.from_local(whole((4,)), mesh, (Partial(),)))
    with pytest.raises(ValueError, match="split factor 3"):
        layout_of(DTensor.from_local(whole((2, 2)), mesh, (_StridedShard(0, split_factor=3),), run_check=False))
    with pytest.raises(ValueError, match="got local shape"):
        layout_of(DTensor.from_local(whole((2 + rank, 2)), mesh, (S0,), run_check=False, shape=(8, 2), stride=(2, 1)))
    for layout, match in (
        (Layout((8,), torch.float32, ours, flat="tp"), "flattened ranges"),
        (Layout((8,), torch.float32, ours, (Split("tp", 2),)), "interleaved"),
        (Layout((8,), torch.float32, ours, (Split("tp", sizes=(3, 5)),)), "pieces of sizes or an order of their own"),
        (Layout((8,), torch.float32, ours, (Split("tp", order=(0, 1, 1, 0)),)), "reshard to a plain layout first"),
        (Layout((8,), torch.float32, ours, unreduced="tp"), "pending sums"),
        (Layout((8,), torch.float32, Mesh(fsdp=2), ("fsdp",)), "wanted the same axes and ranks"),
    ):
        with pytest.raises(ValueError, match=match):
            to_dtensor(torch.zeros(layout.local_shape(rank)), layout, mesh)
    with pytest.raises(ValueError, match="wanted \\(4,\\)"):
        to_dtensor(torch.zeros(3), Layout((8,), torch.float32, ours, ("tp",)), mesh)


def test_refusals(ranks):
    ranks.run(refusals, ranks=2)

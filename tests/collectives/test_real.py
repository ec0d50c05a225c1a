"""The real binding: every collective on gloo ranks has the bits of the simulated ranks."""

import pytest
import torch

from fmegatron.collectives import Axes, connect, psum
from fmegatron.collectives.real import by_index, by_position
from fmegatron.layout import Mesh
from fmegatron.testing import Ranks, simulate
from tests.collectives.definitions import AXES, CASES, inputs, make_step


def run_all(rank, mesh):
    """Every case over every axis of the mesh, on this rank."""
    axes = Axes(mesh, connect(mesh))
    found = {}
    for axis in AXES[mesh]:
        for name in CASES:
            xs, gs = inputs(mesh, name, axis)
            found[name, axis] = make_step(name, axes[axis])(xs[rank], gs[rank])
    return found


@pytest.mark.long
@pytest.mark.parametrize("mesh", AXES, ids=str)
def test_bits_of_simulated_ranks(ranks, mesh):
    real = ranks.run(run_all, mesh, ranks=mesh.size)
    for name, axis in real[0]:
        xs, gs = inputs(mesh, name, axis)
        sim = simulate(make_step(name, Axes(mesh)[axis]), mesh, Ranks(xs), Ranks(gs))
        for rank in range(mesh.size):
            for kind, got, wanted in zip(("value", "gradient"), real[rank][name, axis], sim.outputs[rank], strict=True):
                assert torch.equal(got, wanted), f"{kind} of {name} over {axis} on rank {rank}"


def test_positions_in_a_group_and_indices_along_its_axes():
    """An order that is not its own inverse, which needs more than 4 ranks: index i stands at position order[i]."""
    order, parts = (1, 2, 0), ["of index 0", "of index 1", "of index 2"]
    placed = by_position(parts, order)
    assert [placed[position] for position in order] == parts == by_index(placed, order)


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.int16)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # which torch moves, and hardly computes with
MOVES = ("all_gather", "all_gather_negative_dim", "all_to_all", "all_to_all_same_dim", "ppermute")


def values_only(name, axis):
    """A collective without its gradient, which integers do not have."""
    return lambda x: CASES[name][0](x, axis)


def unsigned(rank, mesh):
    """Values above those of the signed dtypes."""
    local = inputs(mesh, "psum", "a")[0][rank]
    return {dtype: (local * 100).to(torch.int64).abs().neg().to(dtype) for dtype in UNSIGNED}


def in_bytes(x):
    return x.contiguous().view(torch.uint8)


def run_dtypes(rank, mesh):
    axis = Axes(mesh, connect(mesh))["a"]
    moved = {
        (name, dtype): in_bytes(values_only(name, axis)(x))  # as files of torch do not hold them
        for name in MOVES
        for dtype, x in unsigned(rank, mesh).items()
    }
    xs = {dtype: local.to(dtype) for dtype in DTYPES for local in [inputs(mesh, "psum", "a")[0][rank]]}
    return {(name, dtype): values_only(name, axis)(x) for name in CASES for dtype, x in xs.items()} | moved


@pytest.mark.medium
def test_dtypes(ranks):
    """Sums in the dtype that came in, on real ranks as simulated; integers and booleans too."""
    mesh = Mesh(a=2)
    real = ranks.run(run_dtypes, mesh, ranks=2)
    for name, dtype in real[0]:
        by_hand = [unsigned(rank, mesh)[dtype] for rank in range(2)] if dtype in UNSIGNED else None
        local = Ranks(by_hand or [x.to(dtype) for x in inputs(mesh, name, "a")[0]])
        sim = simulate(values_only(name, Axes(mesh)["a"]), mesh, local)
        for rank in range(2):
            got, wanted = real[rank][name, dtype], sim.outputs[rank]
            wanted = in_bytes(wanted) if dtype in UNSIGNED else wanted
            assert got.dtype == wanted.dtype and torch.equal(got, wanted), f"{name} of {dtype} on rank {rank}"


def wrong_mesh(rank):
    connect(Mesh(a=3))


def test_mesh_of_another_size(ranks):
    with pytest.raises(RuntimeError, match="3 ranks, wanted 2, since 2 processes"):
        ranks.run(wrong_mesh, ranks=2)


def _host_exchange(rank):
    with connect(Mesh(dp=4)) as world:
        rows = world.gather_rows(torch.tensor([rank, rank * rank]))
        least = world.minimum(torch.tensor([rank, -rank]))
        text = world.broadcast_text(f"from {rank}", source=2)
        # Everyone sends its rank to the next one twice (two sizes) and to itself; rank 3 gets an empty tensor, too.
        to, source = (rank + 1) % 4, (rank - 1) % 4
        got = [torch.zeros(3), torch.zeros(5, dtype=torch.bfloat16), torch.zeros(2)]
        sends = [(to, torch.full((3,), float(rank))), (to, torch.full((5,), rank + 10.0).bfloat16())]
        sends += [(rank, torch.full((2,), 7.0))] + [(3, torch.empty(0))] * (rank == 0)
        receives = [(source, got[0]), (source, got[1]), (rank, got[2])] + [(0, torch.empty(0))] * (rank == 3)
        world.exchange(sends, receives)
        return rows.tolist(), least.tolist(), text, [x.tolist() for x in got]


def test_host_exchange(ranks):
    for rank, (rows, least, text, got) in enumerate(ranks.run(_host_exchange, ranks=4)):
        before = (rank - 1) % 4
        assert rows == [[r, r * r] for r in range(4)] and text == "from 2"
        assert least == [0, -3]
        assert got == [[before] * 3, [before + 10] * 5, [7, 7]]


def open_beside_each_other(rank):
    """Sums over the axis x of three open worlds: a cell that connects is run twice, then another mesh is tried."""
    x, found, names = torch.tensor([float(rank)]), [], []
    for mesh in (Mesh(x=2, y=2), Mesh(x=2, y=2), Mesh(y=2, x=2)):
        world = connect(mesh)
        found.append(psum(x, Axes(mesh, world)["x"]).item())
        names.append(world.group_name(("x",)))
    world.close()
    closed_last = psum(x, Axes(Mesh(x=2, y=2), connect(Mesh(x=2, y=2)))["x"]).item()
    return found, names, closed_last


def test_worlds_that_are_open_beside_each_other(ranks):
    for rank, (found, names, after) in enumerate(ranks.run(open_beside_each_other, ranks=4)):
        across, along = float(2 * (rank % 2) + 2), float(4 * (rank // 2) + 1)
        assert found == [across, across, along] and after == across
        assert names == ["fmegatron:x", "fmegatron:x", "fmegatron:x#1"]

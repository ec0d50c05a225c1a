"""Hashes of a state: every bit counts, and ranks that should hold the same are compared without exchanging leaves."""

import random
import threading

import pytest
import torch

from fmegatron import tree
from fmegatron.collectives import World
from fmegatron.layout import Layout, Mesh
from fmegatron.step.replicas import ReplicasDifferError, compare, hashes

KINDS = (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_every_bit_counts(dtype):
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    x = torch.randn(64, 16, generator=generator)
    x = (x > 0) if dtype == torch.bool else (100 * x).to(dtype)
    before = hashes({"x": x})
    assert torch.equal(before, hashes({"x": x.clone()}))
    raw = (torch.view_as_real(x) if x.is_complex() else x).view(torch.uint8).view(-1)
    for _ in range(50):
        at, bit = draw.randrange(raw.numel()), 0 if dtype == torch.bool else draw.randrange(8)
        raw[at] ^= 1 << bit
        assert not torch.equal(before, hashes({"x": x}))
        raw[at] ^= 1 << bit
    if dtype != torch.bool:
        swapped = x.clone()
        swapped[3], swapped[4] = x[4], x[3]
        assert not torch.equal(before, hashes({"x": swapped}))


def test_positions_count_in_long_arrays_and_nan_is_equal_to_itself(monkeypatch):
    monkeypatch.setattr("fmegatron.step.replicas._CHUNK", 7)
    x = torch.arange(50.0)
    y = x.clone()
    y[[10, 40]] = x[[40, 10]]
    assert not torch.equal(hashes([x]), hashes([y]))
    x[3] = float("nan")
    assert torch.equal(hashes([x]), hashes([x.clone()])) and hashes([]).numel() == 0


def disagreement(mesh, states, specs):
    """What `compare` raises on each rank, with the agreements between them played one after another."""
    barrier, rows, found = threading.Barrier(mesh.size), {}, {}

    class World:
        size = mesh.size

        def __init__(self, rank):
            self.rank, self.calls = rank, 0

        def _all(self, row):
            self.calls += 1
            rows[self.calls, self.rank] = row
            barrier.wait(20)
            return torch.stack([rows[self.calls, r] for r in range(mesh.size)])

        def gather_rows(self, row):
            return self._all(row)

        def minimum(self, row):
            return self._all(row).min(0).values

    def work(rank):
        try:
            compare(states[rank], specs, World(rank), 7)
        except ReplicasDifferError as error:
            found[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(mesh.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


MESH = Mesh(dp=2, fsdp=2)
SPECS = {
    "all": Layout((3,), torch.float32, MESH),
    "none": Layout((4,), torch.float32, MESH, (("dp", "fsdp"),)),
    "over_dp": Layout((4, 2), torch.float32, MESH, ("fsdp",)),
}


@pytest.mark.parametrize("path, rank, expected", [("all", 3, (0, 3)), ("over_dp", 3, (1, 3)), ("none", 2, None)])
def test_the_leaf_and_the_ranks_are_named(path, rank, expected):
    specs = tree.map(lambda layout: tree.ArraySpec(layout, tree.Normal(1.0)), SPECS)
    states = [tree.init(specs, 0, r) for r in range(4)]
    assert disagreement(MESH, states, specs) == {}
    states[rank][path].view(torch.int32).view(-1)[-1] ^= 1
    found = disagreement(MESH, states, specs)
    if expected is None:
        assert found == {}
        return
    assert sorted(found) == [0, 1, 2, 3]
    assert {(error.path, error.ranks) for error in found.values()} == {(path, expected)}
    assert f"{path}: after step 7 ranks {expected[0]} and {rank} hold different bits" in str(found[0])


def test_one_rank_has_nobody_to_compare_with():
    compare({"x": torch.ones(2)}, {"x": Layout((2,), torch.float32, Mesh())}, World.alone("cpu"), 1)

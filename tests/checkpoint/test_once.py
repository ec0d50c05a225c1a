"""read="once": replicas share the reading; every byte is read once and all have everything, or all have the error."""

import itertools
import threading
import time

import pytest
import torch

from fmegatron import tree
from fmegatron.checkpoint import CheckpointError, explain, restore
from fmegatron.checkpoint.reading import once
from fmegatron.collectives import connect
from fmegatron.layout import Layout, Mesh, Split
from tests.checkpoint.counting import counting
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run, save_all, small_sizes
from tests.checkpoint.test_reshard import layouts_on, state_for
from tests.pairs import each_value, few, product

SOURCE = Mesh(dp=1, fsdp=2, tp=2)
TARGETS = (
    Mesh(dp=4, fsdp=1, tp=1),
    Mesh(dp=2, fsdp=1, tp=3),
    Mesh(fsdp=2, dp=2, tp=2),
    Mesh(dp=3, fsdp=2, tp=1),
    Mesh(dp=2, fsdp=2, tp=1).view(order=("fsdp", "dp", "tp"), dp=2, tp=2, fsdp=1),
)


@pytest.mark.medium
@pytest.mark.parametrize(("target", "sizes"), each_value(TARGETS, ((128, 32), (1 << 20, 1 << 20))))
def test_all_kinds_of_leaves(tmp_path, target, sizes, monkeypatch):
    monkeypatch.setattr(once, "_IN_PLACE_BYTES", 64)
    saved, wanted = layouts_on(SOURCE), layouts_on(target)
    state = state_for(saved)
    with small_sizes(*sizes):
        save_all(tmp_path / "a", state, saved)
        for most in (64, 1 << 20):
            monkeypatch.setattr(once, "_ROUND_BYTES", most)
            got = run(target.size, lambda world: restore(tmp_path / "a", wanted, world=world, read="once"))
            for rank, local in enumerate(cut_tree(state, wanted)):
                assert_same_bits(got[rank], local, f"{target} rank {rank}")


def big(mesh, shape=(1024, 640)):
    """2.5 MiB leaves: whole on all ranks, split over tp, with its own order of ranks, and a few small ones."""
    return {
        "whole": Layout(shape, torch.float32, mesh),
        "split": Layout(shape, torch.float32, mesh, ("tp",)),
        "columns": Layout(shape, torch.float32, mesh, (None, Split("tp", 2))),
        "small": [Layout((9,), torch.float32, mesh) for _ in range(20)],
        "count": Layout((), torch.int64, mesh),
    }


@pytest.mark.parametrize("tp", [1, 2])
def test_every_byte_is_read_once_and_sent_to_the_others(tmp_path, tp):
    saved, mesh = big(Mesh(tp=2)), Mesh(dp=4 // tp, tp=tp)
    state, wanted = state_for(saved), big(mesh)
    save_all(tmp_path / "a", state, saved)
    store, count = counting(tmp_path / "a")

    def work(world):
        return restore(store, wanted, world=world, read="once"), world.exchanged

    got = run(4, work)
    for rank, local in enumerate(cut_tree(state, wanted)):
        assert_same_bits(got[rank][0], local)
    needed = sum(layout.nbytes for layout in tree.leaves(wanted))
    # Leaves that are split by columns share rows' bands between the two groups; small ones are one band of a file.
    shared = 0 if tp == 1 else wanted["columns"].nbytes
    assert needed <= count.nbytes <= needed + shared + 4096 * 4
    for rank, (_, exchanged) in enumerate(got):
        local = sum(layout.local_nbytes(rank) for layout in tree.leaves(wanted))
        assert local * (1 - tp / 4) - (2 << 20) <= exchanged <= local * (1 - tp / 4) + (2 << 20)
    explained = [explain(tmp_path / "a", wanted, rank, read="once") for rank in range(4)]
    assert sum(read.nbytes for reads in explained for read in reads) == count.nbytes
    per_rank = [sum(read.nbytes for read in reads) for reads in explained]
    assert max(per_rank) - min(per_rank) <= 2 << 20  # a band of at most 1 MiB either way, for each group


def test_one_replica_exchanges_nothing(tmp_path):
    mesh = Mesh(fsdp=2, tp=2)
    layouts = {
        "w": Layout((64, 64), torch.float32, mesh, ("fsdp", "tp")),
        "n": Layout((8,), torch.int64, mesh, (mesh.names,)),
    }
    state = state_for(layouts)
    with small_sizes():
        save_all(tmp_path / "a", state, layouts)

        def work(world):
            calls = []
            world.exchange = lambda sends, receives: calls.append((sends, receives))
            return restore(tmp_path / "a", layouts, world=world, read="once"), calls, world.exchanged

        for (got, calls, exchanged), local in zip(run(4, work), cut_tree(state, layouts), strict=True):
            assert_same_bits(got, local)
            assert calls == [] and exchanged == 0
    alone = {"w": Layout((64, 64), torch.float32, Mesh())}
    got = restore(tmp_path / "a", alone, read="once", strict="subset")
    assert_same_bits(got, {"w": state["w"]})


def test_an_error_on_one_rank_ends_all_before_the_exchange(tmp_path):
    mesh = Mesh(dp=4)
    layouts = {"w": Layout((64, 64), torch.float32, mesh)}
    with small_sizes():
        save_all(tmp_path / "a", state_for(layouts), layouts)
        at = tmp_path / "a" / "arrays" / "w" / "c.0.0"
        data = bytearray(at.read_bytes())
        data[0] ^= 1
        at.write_bytes(data)
        exchanged = []

        def work(world):
            try:
                return restore(tmp_path / "a", layouts, world=world, read="once")
            finally:
                exchanged.append(world.exchanged)

        got = run(4, work)
    assert isinstance(got[0], CheckpointError) and all(isinstance(e, RuntimeError) for e in got[1:])
    assert all("w: its chunk file" in str(e) and "is damaged" in str(e) for e in got)
    assert exchanged == [0] * 4


def failing_packets(rank, method, n):
    """Packets whose `method` finds no memory at its n-th call on a rank (a thread of that name)."""
    calls, real = itertools.count(1), getattr(once._Packet, method)

    def fails(self, *arguments):
        if threading.current_thread().name == f"rank {rank}" and next(calls) == n:
            raise MemoryError("no room for a round")
        return real(self, *arguments)

    return type("Packet", (once._Packet,), {method: fails})


@pytest.mark.long
@pytest.mark.parametrize(("method", "n", "rank"), product(("__init__", "fill", "empty"), (1, 2, 3), (0, 3)))
def test_an_error_between_two_rounds_ends_all_at_once(tmp_path, monkeypatch, method, n, rank):
    """Whoever waits for bytes of the rank that failed hears of it, directly or through a group that shares a rank."""
    saved, mesh = big(Mesh(tp=2), (256, 64)), Mesh(dp=2, tp=2)
    save_all(tmp_path / "a", state_for(saved), saved)
    monkeypatch.setattr(once, "_ROUND_BYTES", 1 << 14)
    monkeypatch.setattr(once, "_Packet", failing_packets(rank, method, n))

    def work(world):
        threading.current_thread().name = f"rank {world.rank}"
        return restore(tmp_path / "a", big(mesh, (256, 64)), world=world, read="once")

    began = time.monotonic()
    got = run(4, work)
    assert time.monotonic() - began < 300  # the others do not wait for the time limit of the exchange
    assert all(isinstance(error, RuntimeError) for error in got), got
    assert all(f"failed on rank {rank} of 4: MemoryError: no room for a round" in str(error) for error in got)


def test_ranks_that_ask_for_different_trees_are_told(tmp_path):
    mesh = Mesh(dp=2)
    layouts = {"w": Layout((64,), torch.float32, mesh), "v": Layout((64,), torch.float32, mesh)}
    save_all(tmp_path / "a", state_for(layouts), layouts)

    def work(world):
        wanted = layouts if world.rank else {"w": layouts["w"]}
        return restore(tmp_path / "a", wanted, world=world, read="once", strict="subset")

    for error in run(2, work):
        assert "got different trees from ranks 0 and 1" in str(error)


def test_requests_that_make_no_sense(tmp_path):
    layouts = {"w": Layout((64,), torch.float32, Mesh(dp=2))}
    save_all(tmp_path / "a", state_for(layouts), layouts)
    with pytest.raises(ValueError, match="read: got 'twice', wanted 'own' or 'once'"):
        restore(tmp_path / "a", layouts, rank=0, read="twice")
    with pytest.raises(ValueError, match="read='once': got no world"):
        restore(tmp_path / "a", layouts, rank=0, read="once")


def restore_real(rank, path, sizes):
    """On a real rank: the local tensors of both ways to read are the same; returns a digest of them."""
    mesh = Mesh(**sizes)
    wanted = big(mesh)
    with connect(mesh, device="cpu") as world:
        own = restore(path, wanted, world=world)
        shared = restore(path, wanted, world=world, read="once")
    assert_same_bits(shared, own)
    return float(own["whole"].double().nan_to_num(0, 0, 0).sum())


def break_a_round(rank, path):
    """On a real rank: rank 2 has no memory for the second round. Returns the error, and how long it took."""
    mesh, wanted, fill = Mesh(dp=2, tp=2), big(Mesh(dp=2, tp=2)), once._Packet.fill
    rounds, once._ROUND_BYTES, calls = once._ROUND_BYTES, 1 << 18, itertools.count(1)

    def fails(packet):
        if rank == 2 and next(calls) == 2:
            raise MemoryError("no room for a round")
        fill(packet)

    once._Packet.fill = fails
    try:
        with connect(mesh, device="cpu", timeout_s=600) as world:
            began = time.monotonic()
            try:
                restore(path, wanted, world=world, read="once")
            except RuntimeError as error:
                text, seconds = str(error), time.monotonic() - began
            world.barrier()  # nothing is left on its way between the ranks
            assert_same_bits(restore(path, wanted, world=world, read="once"), restore(path, wanted, world=world))
            return text, seconds
    finally:
        once._Packet.fill, once._ROUND_BYTES = fill, rounds


@pytest.mark.medium
def test_real_ranks_without_memory_for_a_round(ranks, tmp_path):
    saved = big(Mesh(tp=2))
    save_all(tmp_path / "a", state_for(saved), saved)
    got = ranks.run(break_a_round, str(tmp_path / "a"), ranks=4)
    assert len({text for text, _ in got}) == 1 and "rank 2 of 4: MemoryError: no room for a round" in got[0][0]
    assert max(seconds for _, seconds in got) < 300  # not until the exchange's time limit


def break_real(rank, path):
    """On a real rank: an error on one is an error on all."""
    mesh = Mesh(dp=4, tp=1)
    with connect(mesh, device="cpu") as world:
        try:
            restore(path, big(mesh), world=world, read="once")
        except Exception as error:
            return type(error).__name__, "is damaged" in str(error)


@pytest.mark.parametrize(
    "sizes", few(2, [({"dp": 2, "tp": 1},), ({"dp": 2, "tp": 2},), ({"dp": 4, "tp": 1},), ({"tp": 2, "dp": 2},)])
)
def test_real_ranks(ranks, tmp_path, sizes):
    saved = big(Mesh(tp=2))
    state = state_for(saved)
    save_all(tmp_path / "a", state, saved)
    size = Mesh(**sizes).size
    got = ranks.run(restore_real, str(tmp_path / "a"), sizes, ranks=size)
    assert len(set(map(str, got))) == 1 and len(got) == size


def test_real_ranks_with_a_damaged_file(ranks, tmp_path):
    saved = big(Mesh(tp=2))
    save_all(tmp_path / "a", state_for(saved), saved)
    at = tmp_path / "a" / "arrays" / "whole" / "c.0.0"
    data = bytearray(at.read_bytes())
    data[0] ^= 1
    at.write_bytes(data)
    got = ranks.run(break_real, str(tmp_path / "a"))
    assert sorted(got) == [("CheckpointError", True)] + [("FailedOnRank", True)] * 3

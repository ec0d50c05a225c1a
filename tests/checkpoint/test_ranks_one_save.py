"""Ranks that restore together return one save, whatever is saved meanwhile and whatever each of them sees."""

import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadPlan

from fmegatron import checkpoint, interop
from fmegatron.checkpoint import Manager
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.reading import agreed, fetch
from fmegatron.interop.dcp_bridge import FmegatronReader
from tests.checkpoint.fake_world import FakeWorld, assert_same_bits, cut_tree, run, small_sizes
from tests.checkpoint.test_saved_again import MESH, ONE, layouts_on, save, seed_of, state

TWO = layouts_on(MESH)


@pytest.fixture(autouse=True)
def _tiny():
    with small_sizes():
        yield


class Counting(FakeWorld):
    """Counts what the ranks say to each other."""

    calls: list

    def agree(self, error, what):
        self.calls.append("agree")
        return super().agree(error, what)

    def minimum(self, row):
        self.calls.append("minimum")
        return super().minimum(row)

    def gather_rows(self, row):
        self.calls.append("gather_rows")
        return super().gather_rows(row)

    def broadcast_text(self, text, source=0):
        self.calls.append("broadcast_text")
        return super().broadcast_text(text, source)


class View:
    """A Store as one rank sees it: `views` are the places that its looks find, one after another, the last for ever."""

    def __init__(self, text, *views):
        self.text, self.views = text, list(views)

    def __getattr__(self, name):
        return getattr(self.views[-1], name)

    def locate(self):
        found = self.views.pop(0) if len(self.views) > 1 else self.views[0]
        return found.locate()


@pytest.fixture
def two(tmp_path):
    """Two saves, of which ranks may see one or the other at one path."""
    stores = [open_store(tmp_path / f"save {seed}") for seed in (1, 2)]
    for seed, store in enumerate(stores, 1):
        save(store, seed)
    return stores


def read_as(views, read, calls=None):
    """What the ranks got whose stores find these views."""

    def work(world):
        world.__class__, world.calls = Counting, [] if calls is None else calls[world.rank]
        return checkpoint.restore(View("/run/step", *views[world.rank]), TWO, world=world, read=read)

    return run(2, work)


@pytest.mark.parametrize("read", ["own", "once"])
def test_ranks_that_see_two_saves_look_again(two, monkeypatch, read):
    """A view that is late for some looks: then all return the save that all see."""
    monkeypatch.setattr(agreed, "_PAUSES_S", (0.0,) * 5)
    old, new = two
    for late in (1, 3):
        got, wanted = read_as([[new], [old] * late + [new]], read), cut_tree(state(2), TWO)
        for rank in range(2):
            assert_same_bits(got[rank], wanted[rank], (late, rank))


@pytest.mark.parametrize("read", ["own", "once"])
def test_ranks_that_go_on_seeing_two_saves_are_told(two, monkeypatch, read):
    """On all ranks; with the path, who sees what, and what differs."""
    monkeypatch.setattr(agreed, "_PAUSES_S", (0.0,) * 5)
    old, new = two
    for error in read_as([[new], [old]], read):
        assert type(error) is RuntimeError
        for word in ("/run/step", new.text, "rank 0 has step 7", "rank 1 step 7", "metadata seed", "leaves n, v, w"):
            assert word in str(error), (word, error)


def test_a_save_again_between_two_ranks_reads(tmp_path, monkeypatch):
    """Rank 0 has read all when save 2 takes the place; rank 1 comes later."""
    at, late = tmp_path / "run", threading.Event()
    save(at, 1)
    real = fetch.Fetch.__exit__

    def exit_then_save(self, *args):
        result = real(self, *args)
        if threading.current_thread().name == "rank 0" and not late.is_set():
            save(at, 2)
            late.set()
        return result

    monkeypatch.setattr(fetch.Fetch, "__exit__", exit_then_save)

    def work(world):
        threading.current_thread().name = f"rank {world.rank}"
        if world.rank:
            assert late.wait(60)
        return checkpoint.restore(at, TWO, world=world)

    got, wanted = run(2, work), cut_tree(state(2), TWO)
    for rank in range(2):
        assert_same_bits(got[rank], wanted[rank], rank)


def test_the_comparison_costs_no_collective(two):
    """One small all-reduce, as before; with exchanges one less than before."""
    for read, wanted in (("own", ["minimum"]), ("once", ["minimum", "agree"])):
        calls = [[], []]
        read_as([[two[0]], [two[0]]], read, calls)
        assert calls == [wanted, wanted], calls


def test_a_snapshot_is_not_looked_for_again(two, monkeypatch):
    """Of one that a rank has opened of another save than the others, all are told at once."""
    monkeypatch.setattr(agreed, "_PAUSES_S", (pytest.fail,))

    def work(world):
        with checkpoint.open_snapshot(two[world.rank]) as saved:
            return checkpoint.restore(saved, TWO, world=world)

    assert all("the ranks see different saves" in str(error) for error in run(2, work))


def test_a_manager_on_ranks_that_see_two_saves(two, tmp_path, monkeypatch):
    """No older step is taken in its place: it is not damaged."""
    monkeypatch.setattr(agreed, "_PAUSES_S", (0.0,))
    manager = Manager(tmp_path / "run")
    for step in (1, 2):
        manager.save(step, state(step), ONE)
    real = type(open_store("/")).locate

    def locate(self):
        elsewhere = self.text.endswith("step_00000002") and threading.current_thread().name == "rank 1"
        return real(two[0] if elsewhere else self)

    monkeypatch.setattr(type(open_store("/")), "locate", locate)

    def work(world):
        threading.current_thread().name = f"rank {world.rank}"
        return Manager(tmp_path / "run", world=world).restore_latest(TWO)

    for error in run(2, work):
        assert type(error) is RuntimeError and "the ranks see different saves" in str(error), error


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torchs_own_load_compares_too(two):
    """In the plan, which torch gathers anyway."""
    readers = [FmegatronReader(store) for store in two]
    for reader in readers:
        reader.read_metadata()
    plans = [reader.prepare_local_plan(LoadPlan([])) for reader in readers]
    assert readers[0].prepare_global_plan(plans[:1] * 2) == plans[:1] * 2
    with pytest.raises(RuntimeError, match="ranks 0 and 1 see different saves"):
        readers[0].prepare_global_plan(plans)
    into = state(0)
    dcp.load(into, storage_reader=readers[1], no_dist=True)
    assert seed_of(into) == 2


@pytest.mark.slow
@pytest.mark.long
def test_a_directory_of_torch_that_ranks_see_differently(tmp_path):
    layouts = {"w": TWO["w"]}
    for seed in (1, 2):
        interop.save_dcp(tmp_path / f"{seed}", {"w": state(seed)["w"]}, values={"seed": f"{seed}" * seed})
    for view, good in (((1, 1), True), ((1, 2), False)):
        got = run(
            2,
            lambda world, view=view: checkpoint.restore(
                interop.source(tmp_path / f"{view[world.rank]}"), layouts, world=world
            ),
        )
        if good:
            assert all(torch.equal(x["w"], state(1)["w"][:4]) for x in got)
        else:
            assert all(
                type(error) is RuntimeError and "the ranks see different saves" in str(error) for error in got
            ), got

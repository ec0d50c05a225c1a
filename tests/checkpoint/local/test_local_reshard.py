"""Local replicas under other layouts, on other numbers of ranks: bitwise, from whichever disks are left, of one set."""

import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmegatron import tree
from fmegatron.checkpoint import CheckpointError
from fmegatron.checkpoint.local import fetch
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run, small_sizes
from tests.checkpoint.local.nodes import Cluster, layouts_on
from tests.checkpoint.states import covering_pairs, dense, experts, features, meshes
from tests.checkpoint.test_reshard import DTYPES, state_for
from tests.checkpoint.tokens import files_of
from tests.layout import strategies

MESHES = meshes()
PAIRS = list(covering_pairs(MESHES, features))
FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None
LINE = {"w": Layout((64,), torch.uint8, Mesh(fsdp=4), ("fsdp",))}
TWICE = Mesh(dp=2, fsdp=2)  # two replicas of each half


@pytest.fixture(autouse=True)
def _tiny():
    with small_sizes():
        yield


def moved(root, to, *nodes):
    """The nodes that are left, as the first ones of a new cluster."""
    to.mkdir(exist_ok=True)
    for i, node in enumerate(nodes):
        (root / f"node-{node}").rename(to / f"node-{i}")
    return to


def damage(shard, name="w"):
    """A bit of a leaf's first chunk."""
    path = min((files_of(shard) / "arrays" / name).glob("c*"))
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


def shard_of(cluster, node, rank, step):
    (path,) = (p for p in cluster.shards() if f"node-{node}/" in str(p) and f"{step:08d}.rank_{rank:05d}." in str(p))
    return path


def there_and_back(folder, saved, wanted, **options):
    """Save under one tree of layouts and restore under another, then from what protection has stored again."""
    whole, target = state_for(saved), tree.leaves(wanted)[0].mesh.size
    source = Cluster(folder, tree.leaves(saved)[0].mesh.size, layouts=saved, **options)
    local = cut_tree(whole, saved)
    assert run(source.size, lambda w: source.replicas(w.rank, w).save(3, local[w.rank], saved)) == [None] * source.size
    asking, local = Cluster(folder, target, layouts=wanted, **options), cut_tree(whole, wanted)
    # Nodes beyond those that ask are gone, so a copy of each shard is put where somebody looks.
    for path in source.shards():
        node = int(path.parent.parent.name.removeprefix("node-"))
        if node >= target and not (kept := asking.directory(node % target) / "run" / path.name).exists():
            path.rename(kept)
    for _ in range(2):
        got, warned = asking.restore()
        for rank, result in enumerate(got):
            if isinstance(result, BaseException):
                raise result
            assert_same_bits(result[1], local[rank], f"rank {rank}")
        assert warned == []


@pytest.mark.long
@pytest.mark.parametrize("mesh", [Mesh(fsdp=2, tp=2), Mesh(fsdp=2), Mesh(fsdp=8), Mesh(fsdp=1)], ids=str)
@pytest.mark.filterwarnings("ignore:local replicas. some shards:RuntimeWarning")
def test_other_layouts(tmp_path, mesh):
    """All kinds of leaves, four ranks to four, two, eight and one; afterwards every node has what it should have."""
    saved = Cluster(tmp_path, 4)
    saved.save(7)
    if mesh.size == 1:  # nodes 0 and 1 have a copy of each other only
        for path in shard_of(saved, 2, 2, 7), shard_of(saved, 2, 3, 7):
            path.rename(saved.directory(0) / "run" / path.name)
    asking = Cluster(tmp_path, mesh.size, layouts=layouts_on(mesh), copies=min(2, mesh.size))
    if mesh.size == 2:
        moved(tmp_path, tmp_path, 0)
        saved.wipe(1), moved(tmp_path, tmp_path, 0, 2)
    got, warned = asking.restore()
    asking.assert_restored(got, 7)
    assert warned == []
    for rank in range(mesh.size):
        assert asking.kept(rank) == [(7, one) for one in sorted({rank, rank ^ (mesh.size > 1)})]
    assert asking.save(8) == [None] * mesh.size
    asking.assert_restored(asking.restore()[0], 8)


def test_asking_without_protection_changes_nothing(tmp_path):
    saved = Cluster(tmp_path, 4)
    saved.save(7)
    before = saved.content()
    asking = Cluster(tmp_path, 2, layouts=layouts_on(Mesh(fsdp=2)))
    got, _ = asking.restore(protect=False)  # nodes 0 and 1 hold the halves of ranks 0 and 1 only
    assert all(isinstance(e, CheckpointError) and "no node holds the shards of ranks 2, 3" in str(e) for e in got)
    (tmp_path / "node-0/run/.abandoned").unlink(), (tmp_path / "node-1/run/.abandoned").unlink()
    assert saved.content() == before
    eight = Cluster(tmp_path, 8, layouts=layouts_on(Mesh(fsdp=4, tp=2)))
    eight.assert_restored(eight.restore(protect=False)[0], 7)
    assert saved.content() == before
    saved.assert_restored(saved.restore()[0], 7)


def test_one_of_each_pair_of_nodes_is_left(tmp_path):
    """Four nodes to two, whichever of each pair that is; both halves come, and only what is not here is sent."""
    cluster, local = Cluster(tmp_path / "four", 4, layouts=LINE), torch.arange(64, dtype=torch.uint8)
    half, sent = {"w": Layout((64,), torch.uint8, Mesh(tp=2), ("tp",))}, []

    def save(world):
        cluster.replicas(world.rank, world).save(1, {"w": local[16 * world.rank :][:16]}, LINE)

    def restore(world):
        found = Cluster(folder, 2).replicas(world.rank, world).restore_latest(half, protect=False)
        sent.append(world.exchanged)
        return found

    for left in ((0, 2), (1, 3), (1, 2), (2, 1)):
        assert run(4, save) == [None] * 4
        folder = moved(tmp_path / "four", tmp_path / f"{left}", *left)
        for rank, (step, got, _) in enumerate(run(2, restore)):
            assert step == 1 and torch.equal(got["w"], local[32 * rank :][:32])
        cluster.wipe(*range(4))
    here = [0] * 6
    assert sorted(sent[:6]) == here and min(sent[6:]) >= 32  # the last pair has what the other one wants


def test_replicas_stand_in_for_shards_that_are_nowhere(tmp_path):
    """Two replicas of each half, no copies: a lost node, and a damaged one, are the other replica's."""
    layouts = {"w": Layout((8, 16), torch.float32, TWICE, ("fsdp",)), "n": Layout((5,), torch.float32, TWICE)}
    cluster = Cluster(tmp_path, 4, layouts=layouts, copies=1)
    whole = {"w": torch.randn(8, 16), "n": torch.randn(5)}
    local = cut_tree(whole, layouts)
    assert run(4, lambda w: cluster.replicas(w.rank, w).save(1, local[w.rank], layouts)) == [None] * 4
    cluster.wipe(0)
    got, warned = cluster.restore(protect=False)
    assert_same_bits([one[1] for one in got], local)
    assert warned == []
    damage(shard_of(cluster, 1, 1, 1))
    got, warned = cluster.restore(protect=False)
    assert_same_bits([one[1] for one in got], local)
    assert "is damaged between bytes" in warned[0] and "node-1/run" in warned[0]
    damage(shard_of(cluster, 3, 3, 1))
    got, warned = cluster.restore(protect=False)
    assert all(isinstance(e, CheckpointError) and "no good copy of the shards of ranks 1, 3" in str(e) for e in got)


def test_a_bad_copy_falls_to_the_next_one(tmp_path):
    saved = Cluster(tmp_path, 4)
    saved.save(1)
    damage(shard_of(saved, 0, 0, 1)), damage(shard_of(saved, 3, 2, 1))
    asking = Cluster(tmp_path, 4, layouts=layouts_on(Mesh(fsdp=2, tp=2)))
    got, warned = asking.restore()
    asking.assert_restored(got, 1)
    assert any("node-0/run/step_00000001.rank_00000" in w for w in warned)
    assert asking.restore()[1] == []


def test_a_peer_that_dies_while_it_sends(tmp_path):
    """The connection is gone: an error on those that are left, and nothing on the disks has changed."""
    saved = Cluster(tmp_path, 4)
    saved.save(1)
    saved.wipe(1)
    before, dead = saved.content(), []

    def restore(world):
        def broken(sends, receives):
            dead.append(world.rank)
            raise RuntimeError("Connection closed by peer")

        world.exchange = broken if world.rank < 2 else world.exchange
        try:
            return saved.replicas(world.rank, world).restore_latest(saved.layouts)
        except RuntimeError:
            world._barrier.abort()  # the others see it, too
            raise

    got = run(4, restore)
    assert dead and set(dead) <= {0, 1} and all(isinstance(e, RuntimeError) for e in got)
    assert saved.content() == before
    saved.assert_restored(saved.restore()[0], 1)


def test_of_two_sets_none_is_mixed(tmp_path):
    """The newer step lacks a shard of which the older one has all: the older one comes, all of it."""
    saved = Cluster(tmp_path, 4, copies=1, keep=2)
    saved.save(1), saved.save(2)
    for path in saved.shards():
        if "00000002.rank_00003" in str(path):
            damage(path)
    asking = Cluster(tmp_path, 8, layouts=layouts_on(Mesh(fsdp=8)))
    got, warned = asking.restore(protect=False)
    asking.assert_restored(got, 1)
    assert any("step 2: no good copy of the shards of ranks 3" in w for w in warned)


def test_nodes_with_several_ranks(tmp_path):
    """Eight ranks on four nodes to six on three: ranks of a node share its directory."""
    saved = Cluster(tmp_path, 8, spacing=2, layouts=layouts_on(Mesh(fsdp=4, tp=2)))
    saved.save(5)
    saved.wipe(2)
    (tmp_path / "node-3").rename(tmp_path / "node-1")
    asking = Cluster(tmp_path, 6, spacing=2, layouts=layouts_on(Mesh(fsdp=3, tp=2)))
    got, warned = asking.restore()
    asking.assert_restored(got, 5)
    assert warned == []
    asking.wipe(2)
    asking.assert_restored(asking.restore()[0], 5)


def test_other_leaves_are_none_of_ours(tmp_path):
    saved = Cluster(tmp_path, 2)
    saved.save(1)
    layouts = {**saved.layouts, "more": Layout((2,), torch.float32, Mesh(fsdp=2))}
    for wanted, text in (
        (layouts, "more"),
        ({**saved.layouts, "w": Layout((8, 17), torch.float32, Mesh(fsdp=2))}, r"stored with global shape \(8, 16\)"),
        ({**saved.layouts, "w": Layout((8, 16), torch.float64, Mesh(fsdp=2))}, "stored as float32"),
    ):
        got, warned = saved.restore(wanted)
        assert all(isinstance(e, CheckpointError) for e in got)
        assert any("skipped the local replicas of step 1: got leaves that do not fit" in w for w in warned)
        with pytest.raises(AssertionError, match=text):
            raise AssertionError("".join(warned))


def test_memory_of_others_is_a_portion(tmp_path, monkeypatch):
    """Whoever serves several ranks, or is served by several, holds no more than one that serves one."""
    made, real = [], torch.empty

    def empty(*shape, **options):
        x = real(*shape, **options)
        made.append(0 if x.is_meta else x.nbytes)
        return x

    saved = {"w": Layout((40_000,), torch.uint8, Mesh(fsdp=1))}
    one = Cluster(tmp_path, 1, layouts=saved, copies=1, portion_bytes=4096)
    assert run(1, lambda w: one.replicas(0, w).save(1, {"w": torch.zeros(40_000, dtype=torch.uint8)}, saved)) == [None]
    asking = Cluster(tmp_path, 4, layouts={"w": Layout((40_000,), torch.uint8, Mesh(fsdp=4), ("fsdp",))})
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        got = run(4, lambda w: one.replicas(w.rank, w).restore_latest(asking.layouts, protect=False))
    assert [len(x[1]["w"]) for x in got] == [10_000] * 4
    assert sum(made) <= 40_000 + 2 * 4096 + 6 * 64, made  # each is a multiple of 64 bytes


def test_the_check_sees_a_wrong_place(tmp_path, monkeypatch):
    """A row beside the right one, or bytes that land nowhere, make these tests fail."""
    saved = {"w": Layout((8, 16), torch.float32, Mesh(fsdp=2), ("fsdp",))}
    wanted = {"w": Layout((8, 16), torch.float32, Mesh(fsdp=4), ("fsdp",))}

    def row_above(layout, start, stop):
        for shard, boxes in overlapping(layout, start, stop):
            yield shard, [x._replace(offset=max(0, x.offset - 16)) for x in boxes]

    overlapping, part_of = Layout.overlapping, fetch.part_of
    wrong = (Layout, "overlapping", row_above), (fetch, "part_of", lambda target, box: part_of(target, box).clone())
    for i, change in enumerate(wrong):
        with monkeypatch.context() as patch, pytest.raises(AssertionError):
            patch.setattr(*change)
            there_and_back(tmp_path / f"{i}", saved, wanted)
    there_and_back(tmp_path / "right", saved, wanted)


FOUR, TWO = Mesh(pp=1, dp=2, fsdp=2, tp=1), Mesh(pp=1, dp=1, fsdp=1, tp=2)


@pytest.mark.medium
@pytest.mark.parametrize("source, target", [(FOUR, TWO), (TWO, FOUR)], ids=["4 to 2", "2 to 4"])
def test_a_training_state(tmp_path, source, target):
    """Parameters, moments and masters (flat ranges over dp), each on two nodes."""
    with small_sizes(4096, 1024, 1 << 14):
        there_and_back(tmp_path, dense(source), dense(target), copies=2, portion_bytes=1000)


@pytest.mark.slow
@pytest.mark.parametrize("i", range(len(PAIRS)))
def test_states_of_all_pairs(tmp_path, i):
    source, target = PAIRS[i]
    with small_sizes(512, 128):
        options = {"copies": 1, "portion_bytes": 1000}
        there_and_back(tmp_path / "a", dense(source, virtual=True), dense(target, virtual=i % 2 == 0), **options)
        there_and_back(tmp_path / "b", experts(source), experts(target), **options)


@pytest.mark.medium
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_layout_to_any_layout(data):
    mesh, shape = data.draw(strategies.meshes(6)), data.draw(strategies.shapes())
    dtype = data.draw(st.sampled_from(DTYPES))
    saved = {"x": data.draw(strategies.layouts(shape=shape, mesh=mesh, dtype=dtype))}
    wanted = {"x": data.draw(strategies.layouts(shape=shape, dtype=dtype))}
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder, small_sizes():
        there_and_back(Path(folder), saved, wanted, copies=1)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_layout_to_any_layout_often(data):
    test_any_layout_to_any_layout.hypothesis.inner_test(data)

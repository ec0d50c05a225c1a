"""The way back: own disk, peers, older steps, the global checkpoint; every source verified, none tried twice."""

import os
import shutil

import pytest
import torch

from fmegatron.checkpoint import CheckpointError, Manager
from fmegatron.checkpoint.local import fetch
from fmegatron.checkpoint.local.replicas import LocalReplicas
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run, small_sizes
from tests.checkpoint.local.nodes import RUN, Cluster, layouts_on, state
from tests.checkpoint.tokens import files_of


@pytest.fixture(autouse=True)
def _tiny():
    with small_sizes():
        yield


def flip(path, at=5):
    """Damage a file; of a shard, a chunk of its leaf w."""
    if path.is_dir():
        path = min(path.glob("arrays/w/c*"))
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def shard_of(cluster, holder, rank, step):
    places = cluster.replicas(holder).shelf.keys().items()
    (place,) = (place for (s, _, r), place in places if (s, r) == (step, rank))
    return cluster.root / place.path


def save_global(cluster, directory, *steps):
    for step in steps:
        local = cut_tree(state(cluster.layouts, step), cluster.layouts)
        metadata = {"step": step, "loss": 0.1}
        run(
            cluster.size,
            lambda w: Manager(directory, world=w).save(step, local[w.rank], cluster.layouts, metadata),  # noqa: B023
        )
    return directory


def test_own_disk_first_and_nothing_sent(tmp_path):
    cluster = Cluster(tmp_path, 4)
    cluster.save(1)
    sent = []

    def restore(world):
        result = cluster.replicas(world.rank, world).restore_latest(cluster.layouts)
        sent.append(world.exchanged)
        return result

    cluster.assert_restored(run(4, restore), 1)
    assert sent == [0] * 4


@pytest.mark.long
@pytest.mark.parametrize("wiped", [(0,), (1, 2), (0, 3), (0, 2)], ids=str)
def test_replaced_nodes_get_their_shards_and_replicas_back(tmp_path, wiped):
    cluster = Cluster(tmp_path, 4)
    cluster.save(1), cluster.save(2)
    before = cluster.content()
    cluster.wipe(*wiped)
    got, warned = cluster.restore()
    cluster.assert_restored(got, 2)
    assert warned == []
    assert cluster.content() == before
    cluster.wipe(*(rank ^ 1 for rank in wiped))  # now those go that the replaced nodes were filled from
    cluster.assert_restored(cluster.restore()[0], 2)


def test_protection_can_be_left_out(tmp_path):
    cluster = Cluster(tmp_path, 4)
    cluster.save(1)
    cluster.wipe(1)
    cluster.assert_restored(cluster.restore(protect=False)[0], 1)
    assert cluster.kept(1) == []


def test_protection_that_fails_does_not_fail_the_recovery(tmp_path):
    cluster = Cluster(tmp_path, 4)
    cluster.save(1)
    cluster.wipe(1)
    cluster.directory(1).write_text("no directory can be made here")
    got, warned = cluster.restore()
    cluster.assert_restored(got, 1)
    assert "step 1 could not be stored again for ranks [1]" in warned[0]


def test_a_bad_replica_falls_to_the_next_holder(tmp_path):
    cluster = Cluster(tmp_path, 4, copies=4)
    cluster.save(1)
    before = cluster.content()
    flip(shard_of(cluster, 1, 1, 1))
    flip(shard_of(cluster, 2, 1, 1), at=100)
    manifest = files_of(shard_of(cluster, 3, 1, 1)) / "manifest.json"
    os.truncate(manifest, manifest.stat().st_size - 1)
    got, warned = cluster.restore()
    cluster.assert_restored(got, 1)
    texts = " ".join(warned)
    for holder, reason in ((1, "between bytes 0 and"), (2, "between bytes 96 and"), (3, "was altered after the save")):
        assert f"node-{holder}/run/step_00000001.rank_00001" in texts and reason in texts
    assert len({w for w in warned if "rank 1:" in w}) == 1  # the same words on all ranks
    assert cluster.content() == before  # the bad ones were replaced


@pytest.mark.medium
def test_no_source_is_tried_twice(tmp_path, monkeypatch):
    def turn(wanted, pieces, holders, world, told):
        asked.extend((world.rank, shard, holder, wanted.mine[shard].key[0]) for shard, holder in holders.items())
        return real(wanted, pieces, holders, world, told)

    asked, real = [], fetch._one_turn
    monkeypatch.setattr(fetch, "_one_turn", turn)
    cluster = Cluster(tmp_path, 4, copies=4, keep=2)
    cluster.save(1), cluster.save(2)
    for path in cluster.shards():
        flip(path)
    got, _ = cluster.restore()
    assert all(isinstance(e, CheckpointError) and "no good copy" in str(e) for e in got)
    assert len(asked) == len(set(asked)) == 32


@pytest.mark.medium
def test_older_steps_then_the_global_checkpoint(tmp_path):
    cluster = Cluster(tmp_path / "nodes", 4, keep=3)
    of = save_global(cluster, tmp_path / "global", 0)
    for step in (1, 2, 3):
        cluster.save(step)
    for holder in (0, 1):
        flip(shard_of(cluster, holder, 0, 3))
    got, warned = cluster.restore(fallback=of, protect=False)
    cluster.assert_restored(got, 2)
    assert any("step 3: no good copy of the shards of ranks 0" in w for w in warned)
    shutil.rmtree(shard_of(cluster, 2, 2, 2)), shutil.rmtree(shard_of(cluster, 3, 2, 2))
    cluster.assert_restored(cluster.restore(fallback=of, protect=False)[0], 1)
    cluster.wipe(2, 3)
    got, warned = cluster.restore(fallback=of)
    cluster.assert_restored(got, 0)
    assert any("step 1: no node holds the shards of ranks 2, 3" in w for w in warned)
    got, _ = cluster.restore()
    assert all(isinstance(e, CheckpointError) and "pass fallback=Manager" in str(e) for e in got)


def test_training_goes_on_from_an_older_step(tmp_path):
    """After a recovery that had to leave newer steps out, saves go back once; then the newer ones are gone."""
    cluster = Cluster(tmp_path, 4, keep=3)
    for step in (10, 20):
        cluster.save(step)
    flip(shard_of(cluster, 0, 0, 20)), flip(shard_of(cluster, 1, 0, 20))
    cluster.assert_restored(cluster.restore()[0], 10)
    assert cluster.save(15) == [None] * 4
    assert cluster.kept(0) == [(10, 0), (10, 1), (15, 0), (15, 1)]
    assert all(isinstance(e, ValueError) for e in cluster.save(14))
    cluster.assert_restored(cluster.restore()[0], 15)


def test_newer_global_checkpoints_come_first(tmp_path):
    cluster = Cluster(tmp_path / "nodes", 2)
    of = save_global(cluster, tmp_path / "global", 3, 5, 7)
    cluster.save(5)
    cluster.assert_restored(cluster.restore(fallback=of)[0], 7)
    flip(next((tmp_path / "global" / "step_00000007").rglob("c.*")), 3)
    opened = []
    real = Manager.restore
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Manager, "restore", lambda self, step, *a, **k: (opened.append(step), real(self, step, *a, **k))[1]
        )
        got, warned = cluster.restore(fallback=of)
    cluster.assert_restored(got, 5)  # of the same step the local one
    assert any("skipped the global checkpoint of step 7" in w for w in warned)
    assert opened == [7, 7]  # once by each rank


def test_a_function_as_the_last_resort(tmp_path):
    cluster = Cluster(tmp_path, 2)
    got, _ = cluster.restore(fallback=lambda layouts: (4, {"w": 1}, {"from": "elsewhere"}))
    assert got == [(4, {"w": 1}, {"from": "elsewhere"})] * 2
    cluster.save(1)
    cluster.assert_restored(cluster.restore(fallback=lambda layouts: 1 / 0)[0], 1)


def test_nothing_anywhere(tmp_path):
    cluster = Cluster(tmp_path / "none", 2)
    got, warned = cluster.restore(fallback=tmp_path / "nor-here")
    assert all(isinstance(e, CheckpointError) and "no global checkpoint either" in str(e) for e in got)
    assert warned == [] and not (tmp_path / "none").exists()


def test_global_checkpoints_that_cannot_be_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(Manager, "steps", lambda self, **_: os.listdir("/nowhere"))
    cluster = Cluster(tmp_path, 2)
    cluster.save(1)
    got, warned = cluster.restore(fallback=tmp_path)
    cluster.assert_restored(got, 1)
    assert any("cannot be looked at" in w for w in warned)


def test_what_local_ones_do_not_have_comes_from_the_global_checkpoint(tmp_path):
    """Fewer nodes, and another mesh: those that are left do not have all of it."""
    saved = Cluster(tmp_path / "nodes", 4)
    of = save_global(saved, tmp_path / "global", 3)
    saved.save(7)
    kept = saved.content()
    asking = Cluster(tmp_path / "nodes", 2, layouts=layouts_on(Mesh(tp=2)))
    got, warned = asking.restore(fallback=of)
    asking.assert_restored(got, 3)
    assert any("step 7: no node holds the shards of ranks 2, 3" in w for w in warned)
    saved.assert_restored(saved.restore(fallback=of)[0], 7)  # whoever asked in vain has broken nothing
    assert {path: data for path, data in saved.content().items() if not path.endswith(b".abandoned")} == kept


def test_targets_that_do_not_fit(tmp_path):
    cluster = Cluster(tmp_path, 2)
    cluster.save(1)
    f32 = torch.float32
    for layouts, message in (
        (layouts_on(Mesh(fsdp=4)), "4 ranks"),
        ({"w": Layout((4,), f32, Mesh(fsdp=2), unreduced=("fsdp",))}, "pending sum"),
    ):
        got, _ = cluster.restore(layouts)
        assert all(isinstance(e, ValueError) and not isinstance(e, CheckpointError) and message in str(e) for e in got)

    def differ(world):
        layouts = {"w": Layout((4 + world.rank,), f32, Mesh(fsdp=2))}
        return cluster.replicas(world.rank, world).restore_latest(layouts)

    assert all("got different layouts on the ranks" in str(e) for e in run(2, differ))


def test_files_of_another_run_or_rank_or_step(tmp_path):
    """Good files in wrong places and under wrong names are not what is asked for."""
    cluster = Cluster(tmp_path / "a", 2, copies=1)
    other = Cluster(tmp_path / "b", 2, copies=1)
    cluster.save(1), other.save(2)
    run(2, lambda w: other.replicas(w.rank, w).save(3, *_tiny_state(w)))
    source = shard_of(other, 0, 0, 3)
    target = cluster.directory(0) / RUN
    mine = shard_of(cluster, 0, 0, 1)
    shutil.copytree(source, target / source.name.replace("step_00000003", "step_00000009"))
    shutil.copytree(mine, target / mine.name.replace("rank_00000", "rank_00001"))
    stranger = LocalReplicas(tmp_path / "c", "stranger", copies=1, portion_bytes=64)
    layouts = layouts_on(Mesh(fsdp=1))
    stranger.save(8, *cut_tree(state(layouts, 8), layouts), layouts)
    (theirs,) = (tmp_path / "c" / "stranger").iterdir()
    shutil.copytree(theirs, target / theirs.name)
    got, warned = cluster.restore()
    cluster.assert_restored(got, 1)
    texts = " ".join(warned)
    assert "holds another shard: step_00000003" in texts and "holds another shard: step_00000001.rank_00000" in texts
    assert "belongs to the run 'stranger'" in texts


def _tiny_state(world):
    layouts = {"w": Layout((2,), torch.float32, Mesh(fsdp=2), ("fsdp",))}
    return {"w": torch.full((1,), float(world.rank))}, layouts


def test_shards_of_two_saves_of_one_step_never_mix(tmp_path):
    """Half of the ranks have one set, half the other: neither is whole, and no mixture is made of them."""
    one, two = Cluster(tmp_path / "one", 4, copies=1), Cluster(tmp_path / "two", 4, copies=1)
    one.save(5)
    local = cut_tree(state(two.layouts, 6), two.layouts)
    run(4, lambda w: two.replicas(w.rank, w).save(5, local[w.rank], two.layouts, {"step": 5}))
    for rank in (0, 1):
        shutil.rmtree(one.directory(rank))
        shutil.copytree(two.directory(rank), one.directory(rank))
    got, warned = one.restore()
    assert all(isinstance(e, CheckpointError) for e in got)
    assert len({w for w in warned if "no node holds" in w}) == 2


def test_nodes_that_changed_places(tmp_path):
    """Directories are found by what is in them, not by which rank they belonged to."""
    cluster = Cluster(tmp_path, 4)
    cluster.save(1)
    names = [cluster.directory(rank) for rank in range(4)]
    for i, path in enumerate(names):
        path.rename(tmp_path / f"moved-{i}")
    for i, path in enumerate(names):
        (tmp_path / f"moved-{(i + 1) % 4}").rename(path)
    got, _ = cluster.restore()
    cluster.assert_restored(got, 1)
    for rank in range(4):
        assert set(cluster.kept(rank)) >= {(1, rank), (1, rank ^ 1)}


def test_one_rank_alone(tmp_path):
    layouts = layouts_on(Mesh(fsdp=1))
    (local,) = cut_tree(state(layouts, 1), layouts)
    replicas = LocalReplicas(tmp_path, RUN, copies=1, portion_bytes=64)
    replicas.save(1, local, layouts, metadata={"a": [1, 2.5, None, "ü"]})
    step, got, metadata = replicas.restore_latest(layouts)
    assert (step, metadata) == (1, {"a": [1, 2.5, None, "ü"]})
    assert_same_bits(got, local)

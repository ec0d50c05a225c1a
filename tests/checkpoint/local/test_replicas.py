"""Saving local replicas: who holds what, all or nothing, older ones go when all have agreed and never before."""

import io
import json
import math
import os
import shutil

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint import CheckpointError
from fmegatron.checkpoint.__main__ import main
from fmegatron.checkpoint.files.folder import Folder, FolderStore
from fmegatron.checkpoint.local import shard
from fmegatron.checkpoint.local.replicas import LocalReplicas
from fmegatron.checkpoint.local.shard import open_shard, parse_name, shard_name, shard_plan
from fmegatron.checkpoint.tools import verify
from fmegatron.checkpoint.tools.ls import listing
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run, small_sizes
from tests.checkpoint.local.nodes import RUN, Cluster, layouts_on, state
from tests.checkpoint.tokens import files_of

PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]
IRREGULAR = [[2, 6, 7], [3, 1], [5], [0, 4]]


@pytest.fixture(autouse=True)
def _tiny():
    with small_sizes():
        yield


def test_file_names_tell_step_and_rank():
    assert shard_name(1200, 7, 0xAB) == "step_00001200.rank_00007.00000000000000ab"
    for step in (0, 1, 99_999_999, 10**17):
        for rank in (0, 16_383, 123_456):
            assert parse_name(shard_name(step, rank, 2**64 - 1)) == (step, 2**64 - 1, rank)
    for name in (
        "step_1.rank_0.ab",
        "step_000000001.rank_00000.00000000000000ab",
        "../x",
        "step_00000001",
        ".abandoned",
    ):
        assert parse_name(name) is None


@pytest.mark.long
@pytest.mark.parametrize("groups", [PAIRS, IRREGULAR], ids=["pairs", "irregular"])
def test_each_directory_holds_exactly_its_cliques_files(tmp_path, groups):
    cluster = Cluster(tmp_path, 8, layouts=layouts_on(Mesh(fsdp=4, tp=2)), groups=groups)
    assert cluster.save(1) == [None] * 8
    for rank in range(8):
        assert cluster.kept(rank) == [(1, of) for of in sorted(next(g for g in groups if rank in g))]
    wiped = [0, 3, 7]  # at most one of each pair; 5, which is alone in the irregular groups, stays
    cluster.wipe(*wiped)
    got, warned = cluster.restore()
    cluster.assert_restored(got, 1)
    assert warned == []
    assert cluster.kept(0) == [(1, of) for of in sorted(groups[-1 if groups is IRREGULAR else 0])]  # protected again


@pytest.mark.long
@pytest.mark.parametrize("durable", [True, False], ids=["disk", "ramdisk"])
@pytest.mark.parametrize("mesh", [Mesh(fsdp=1), Mesh(fsdp=2, tp=2), Mesh(fsdp=4)], ids=str)
def test_save_and_restore(tmp_path, mesh, durable):
    """Into a directory that does not exist; the newest is found by the same object and by another process's."""
    cluster = Cluster(tmp_path / "not" / "there", mesh.size, layouts=layouts_on(mesh), durable=durable, copies=1)
    for step in (1, 2):
        assert cluster.save(step) == [None] * mesh.size
        assert [cluster.replicas(rank).steps() for rank in range(mesh.size)] == [[step]] * mesh.size
        got, warned = cluster.restore()
        cluster.assert_restored(got, step)
        assert warned == []


@pytest.mark.parametrize("durable", [True, False])
def test_only_durable_shards_wait_for_the_disk(tmp_path, monkeypatch, durable):
    synced, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")) or real(fd))
    assert Cluster(tmp_path, 2, durable=durable).save(1) == [None] * 2
    files = [name for name in synced if "/arrays/" in name and not os.path.isdir(name)]
    assert bool(files) == durable, synced


def test_without_copies_one_lost_file_leaves_nothing(tmp_path):
    cluster = Cluster(tmp_path, 4, copies=1)
    cluster.save(1)
    before = cluster.content()
    shutil.rmtree(next(iter(cluster.replicas(2).shelf.keys().values())).path)
    got, warned = cluster.restore()
    assert all(isinstance(error, CheckpointError) for error in got)
    assert all("step 1: no node holds the shards of ranks 2" in str(error) for error in got)
    assert "no node holds" in warned[0]
    cluster.save(1)
    assert cluster.content() == before  # the same state gives the same bytes
    cluster.save(2)
    assert [cluster.kept(rank) for rank in range(4)] == [[(2, rank)] for rank in range(4)]


def test_keep(tmp_path):
    cluster = Cluster(tmp_path, 2, keep=2)
    for step in (3, 5, 9):
        cluster.save(step)
    assert cluster.kept(0) == cluster.kept(1) == [(5, 0), (5, 1), (9, 0), (9, 1)]


def test_ranks_of_a_node_share_a_directory(tmp_path):
    cluster = Cluster(tmp_path, 8, spacing=2, layouts=layouts_on(Mesh(fsdp=4, tp=2)))
    assert cluster.save(1) == [None] * 8
    assert cluster.kept(0) == cluster.kept(1) == [(1, r) for r in (0, 1, 2, 3)]
    cluster.wipe(0, 4)
    got, warned = cluster.restore()
    cluster.assert_restored(got, 1)
    assert warned == [] and cluster.kept(0) == [(1, r) for r in (0, 1, 2, 3)]


def test_one_step_saved_twice_with_other_values(tmp_path):
    """A run that was set back reaches the step again: the sets do not mix, and the later one stays alone."""
    cluster = Cluster(tmp_path, 4)
    cluster.save(7)
    first = {path.name for path in cluster.shards()}

    def again(world):
        x = {"w": torch.full((1,), float(world.rank))}
        layouts = {"w": Layout((4,), torch.float32, Mesh(fsdp=4), ("fsdp",))}
        return cluster.replicas(world.rank, world).save(7, x, layouts)

    assert run(4, again) == [None] * 4
    assert not first & {path.name for path in cluster.shards()} and len(cluster.shards()) == 8


def test_steps_only_go_up(tmp_path):
    cluster = Cluster(tmp_path, 2)
    cluster.save(10)
    errors = cluster.save(9)
    assert all(type(e) is ValueError and "got step 9 to save, wanted 10 or more" in str(e) for e in errors)
    assert cluster.kept(0) == [(10, 0), (10, 1)]
    assert cluster.save(10) == [None] * 2 and cluster.save(11) == [None] * 2


def fail_on(monkeypatch, rank, where, when, error=OSError):
    """The n-th call of a function of the disk fails, on the node of `rank`."""
    holder, method, *names = where
    real, calls = getattr(holder, method), []

    def failing(self, *args):
        if f"/node-{rank}/" in self.text and (not names or args[0] in names):
            calls.append(1)
            if len(calls) == when:
                raise error(28, "No space left on device")
        return real(self, *args)

    monkeypatch.setattr(holder, method, failing)


WRITE, BEGIN, PUBLISH = (Folder, "write"), (FolderStore, "begin"), (FolderStore, "publish")
MANIFEST = (Folder, "write", "manifest.json")


@pytest.mark.long
@pytest.mark.parametrize(
    "where, when",
    [(BEGIN, 1), (BEGIN, 2), (WRITE, 1), (WRITE, 9), (MANIFEST, 2), (PUBLISH, 1), (PUBLISH, 2)],
    ids=lambda x: str(x) if isinstance(x, int) else x[-1],
)
@pytest.mark.parametrize("existing", [True, False], ids=["older", "first"])
def test_a_failure_on_one_rank(tmp_path, monkeypatch, where, when, existing):
    """An error on all, partial files removed, the older set as it was, and the next save works."""
    cluster = Cluster(tmp_path, 4)
    if existing:
        cluster.save(1)
    before = cluster.content()
    with monkeypatch.context() as patch:
        fail_on(patch, 2, where, when)
        got = cluster.save(2)
    assert len({str(e) for e in got}) == 1 and all(isinstance(e, RuntimeError) for e in got)
    assert "saving local replicas of step 2 failed on rank 2 of 4" in str(got[0])
    assert cluster.content() == before
    got, _ = cluster.restore()
    if existing:
        cluster.assert_restored(got, 1)
    else:
        assert all(isinstance(e, CheckpointError) for e in got)
    assert cluster.save(2) == [None] * 4
    assert cluster.kept(2) == [(2, 2), (2, 3)] and len(cluster.shards()) == 8


def test_a_directory_that_cannot_be_made(tmp_path):
    cluster = Cluster(tmp_path, 2)
    cluster.directory(1).write_text("a file")
    got = cluster.save(1)
    assert all(isinstance(e, RuntimeError) and "rank 1" in str(e) and "node-1" in str(e) for e in got)
    assert cluster.kept(0) == []


def test_ranks_of_a_node_clean_it_together(tmp_path, monkeypatch):
    """What one is about to remove another has removed: it looks again; for ever it does not."""
    cluster = Cluster(tmp_path, 2, spacing=2, copies=1)
    with monkeypatch.context() as patch:
        fail_on(patch, 0, (FolderStore, "clean"), 1, FileNotFoundError)
        assert cluster.save(1) == [None] * 2
        patch.setattr(FolderStore, "clean", lambda *_: os.listdir(tmp_path / "never"))
        assert all("never" in str(error) for error in cluster.save(2))
    assert cluster.kept(0) == [(1, 0), (1, 1)]


def test_an_interrupt_on_one_rank_ends_all(tmp_path, monkeypatch):
    fail_on(monkeypatch, 1, WRITE, 3, KeyboardInterrupt)
    cluster = Cluster(tmp_path, 4)
    got = cluster.save(1)
    assert isinstance(got[1], KeyboardInterrupt)
    assert all(isinstance(got[r], RuntimeError) and "KeyboardInterrupt" in str(got[r]) for r in (0, 2, 3))
    assert cluster.paths() == []


def test_a_shard_that_changes_on_its_way(tmp_path):
    def save(world):
        exchange = world.exchange

        def flipping(sends, receives):
            exchange(sends, receives)
            for _, x in receives:
                if world.rank == 1 and x.numel() > 20:
                    x.view(-1).view(torch.uint8)[17] ^= 4

        world.exchange = flipping
        local = {"w": torch.arange(64.0)}
        layouts = {"w": Layout((256,), torch.float32, Mesh(fsdp=4), ("fsdp",))}
        return cluster.replicas(world.rank, world).save(1, local, layouts)

    cluster = Cluster(tmp_path, 4)
    got = run(4, save)
    assert all("rank 0: its shard was altered on its way to rank 1" in str(e) for e in got)
    assert cluster.paths() == []


def test_ragged_shards(tmp_path):
    """Shards of very different sizes, also none at all, in one clique; views do not drag their storage along."""
    layouts = {
        "w": Layout((401, 3), torch.int16, Mesh(fsdp=4), ("fsdp",)),
        "tiny": Layout((2,), torch.bool, Mesh(fsdp=4), ("fsdp",)),
    }
    cluster = Cluster(tmp_path, 4, layouts=layouts, copies=4)
    whole = {"w": torch.arange(1203, dtype=torch.int16).view(401, 3), "tiny": torch.tensor([True, False])}

    def part(rank, name):
        (box,) = layouts[name].boxes(rank) or (None,)
        return whole[name][box.slices] if box else torch.empty(layouts[name].local_shape(rank), dtype=whole[name].dtype)

    got = run(4, lambda w: cluster.replicas(w.rank, w).save(1, {n: part(w.rank, n) for n in layouts}, layouts))
    assert got == [None] * 4
    assert len({path.name for path in cluster.shards()}) == 4
    assert max(report.nbytes for report in map(verify, cluster.shards())) < 20_000
    cluster.wipe(0, 2, 3)
    got, _ = cluster.restore()
    for rank, (step, local, _) in enumerate(got):
        assert step == 1
        assert_same_bits(local, {name: part(rank, name) for name in layouts})


def test_tensors_that_are_not_contiguous(tmp_path):
    x = torch.randn(20, 30, dtype=torch.complex64)
    layouts = {
        "t": Layout((30, 20), x.dtype, Mesh()),
        "conj": Layout((20, 30), x.dtype, Mesh()),
        "every": Layout((10, 30), x.dtype, Mesh()),
    }
    local = LocalReplicas(tmp_path, RUN, copies=1, portion_bytes=64)
    local.save(1, {"t": x.t(), "conj": x.conj(), "every": x[::2].requires_grad_()}, layouts)
    step, got, metadata = local.restore_latest(layouts)
    assert (step, metadata) == (1, {})
    assert_same_bits(got, {"t": x.t().contiguous(), "conj": x.conj().resolve_conj(), "every": x[::2].contiguous()})


def test_the_hollow_part_is_small_typed_json(tmp_path):
    cluster = Cluster(tmp_path, 2)
    cluster.save(5)
    for place in cluster.replicas(0).shelf.keys().values():
        shard = open_shard(place)
        manifest = json.loads((files_of(cluster.root / place.path) / "manifest.json").read_text())
        about = manifest["metadata"]["replica"]
        assert (about["run"], manifest["step"], about["world"]) == (RUN, 5, 2)
        assert manifest["metadata"]["metadata"] == shard.metadata == {"step": 5, "loss": 0.1}
        assert list(about["layouts"]) == list(manifest["leaves"]) == ["empty", "flat", "fp8", "step", "uneven", "w"]
        assert about["layouts"]["fp8"][0] == [9] and manifest["leaves"]["fp8"]["dtype"] == "float8_e4m3fn"


def call(*argv):
    out, err = io.StringIO(), io.StringIO()
    return main([str(a) for a in argv], out, err), out.getvalue() + err.getvalue()


def test_a_shard_is_a_checkpoint_for_every_tool(tmp_path):
    """ls, show, verify, diff, layouts and restore read what a node keeps; gc finds nothing to remove."""
    cluster = Cluster(tmp_path, 2)
    cluster.save(5)
    folder, (one, two) = cluster.directory(0) / RUN, (p for p in cluster.shards() if "node-0" in str(p))
    found = listing(folder)
    assert [(c.name, c.step, c.problem) for c in found.checkpoints] == [(p.name, 5, None) for p in (one, two)]
    assert found.leftovers == () and call("ls", folder)[0] == 0
    status, text = call("verify", folder)
    assert status == 0 and text.count("good (step 5") == 2
    assert "uneven" in call("show", one, "--stats")[1]
    status, text = call("diff", one, cluster.directory(1) / RUN / one.name)
    assert (status, "0 of 6 leaves differ" in text) == (0, True)
    assert call("diff", one, two)[0] == 1
    assert "0 in all" in call("gc", folder)[1]
    local = cut_tree(state(cluster.layouts, 5), cluster.layouts)
    for rank, path in enumerate((one, two)):
        assert_same_bits(checkpoint.restore(path, checkpoint.layouts(path)), local[rank])
    path = next(path for path in one.rglob("c.*"))
    path.write_bytes(path.read_bytes()[:-1])
    status, text = call("verify", folder)
    assert status == 1 and f"{files_of(one)}: 1 damage" in text


@pytest.mark.medium
def test_memory_is_a_portion_for_each_of_the_clique(tmp_path, monkeypatch):
    """All host memory that save and restore ask for beside the state itself, counted."""
    made = []

    def empty(*shape, **kwargs):
        x = real(*shape, **kwargs)
        made.append(0 if x.is_meta else x.nbytes)
        return x

    real = torch.empty
    monkeypatch.setattr(shard, "_CHUNK_BYTES", 512)
    layouts = {"w": Layout((100_000,), torch.uint8, Mesh(fsdp=4), ("fsdp",))}
    cluster = Cluster(tmp_path, 4, layouts=layouts, copies=2, portion_bytes=1024)
    local = torch.zeros(25_000, dtype=torch.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        assert run(4, lambda w: cluster.replicas(w.rank, w).save(1, {"w": local}, layouts)) == [None] * 4
    assert sum(made) <= 4 * 2 * 1024, made
    made.clear()
    cluster.wipe(1)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        got, _ = cluster.restore(protect=False)
    assert not any(isinstance(e, BaseException) for e in got)
    assert sum(made) <= 4 * 25_000 + 5 * 1024, made


def test_no_chunk_is_larger_than_what_is_held():
    """A vocabulary of 29 * 1733 rows has no divisor that gives moderate chunks; the last one is padded."""
    for shape in ((50257, 4096), (100_000_007,), (3, 50257, 1024)):
        (plan,) = shard_plan(["w"], [Layout(shape, torch.float32, Mesh())], 0)
        stored = math.prod(-(-n // c) * c for n, c in zip(shape, plan.chunk, strict=True))
        assert 4 * math.prod(plan.chunk) <= 32 << 20 and stored < 1.01 * math.prod(shape), plan.chunk


@pytest.mark.parametrize(
    "options, message",
    [
        ({"run": "../x"}, "got run"), ({"run": ".x"}, "got run"), ({"run": ""}, "got run"), ({"copies": 0}, "copies=0"),
        ({"keep": 0}, "keep=0"), ({"portion_bytes": 0}, "portion_bytes=0"), ({"keep": True}, "keep=True"),
    ],
)  # fmt: skip
def test_bad_arguments(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        LocalReplicas(tmp_path, **{"run": RUN, "portion_bytes": 64, **options})


def test_bad_requests(tmp_path):
    layouts, local = layouts_on(Mesh(fsdp=1)), LocalReplicas(tmp_path / "a", RUN, copies=1, portion_bytes=64)
    (good,) = cut_tree(state(layouts, 1), layouts)
    for step in (-1, 1.0, torch.tensor(1), True, 10**18):
        with pytest.raises(ValueError, match="step: got"):
            local.save(step, good, layouts)
    with pytest.raises(ValueError, match="wanted a JSON value"):
        local.save(1, good, layouts, metadata={"x": {1}})
    with pytest.raises(ValueError, match="w: got dtype"):
        local.save(1, {**good, "w": good["w"].double()}, layouts)
    assert not (tmp_path / "a").exists()


def test_too_few_nodes_are_said(tmp_path):
    cluster = Cluster(tmp_path, 2, spacing=2)
    with pytest.warns(RuntimeWarning, match="some shards are on 1 node only, 2 were wanted"):
        assert cluster.save(1) == [None, None]
    assert cluster.kept(0) == [(1, 0), (1, 1)]

"""Files made to harm: an error for that shard, quickly and in little memory; nothing outside is read or written.

Manifests, markers and chunks that are hostile in themselves are in tests/checkpoint/test_malice.py and test_bombs.py.
"""

import json
import os
import random
import shutil
from dataclasses import replace

import pytest

from fmegatron.checkpoint import CheckpointError
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.local.shard import open_shard, set_id, shard_name
from tests.checkpoint.fake_world import small_sizes
from tests.checkpoint.local.nodes import RUN, Cluster, resign
from tests.checkpoint.tokens import files_of
from tests.work import counted


@pytest.fixture(autouse=True)
def _tiny():
    with small_sizes():
        yield


@pytest.fixture
def shard(tmp_path):
    """The directory of a good shard of rank 0 of 2."""
    cluster = Cluster(tmp_path / "nodes", 2)
    cluster.save(1)
    return cluster.shards()[0]


def altered(shard, *at, to):
    """The manifest of a shard with another value at a place of its metadata (or of all)."""
    manifest = json.loads((files_of(shard) / "manifest.json").read_text())
    *above, last = at
    value = manifest
    for key in above:
        value = value[key]
    value[last] = to
    return manifest


REPLICA = ("metadata", "replica")
WRONG = {
    "rank beyond": (*REPLICA, "rank", 2),
    "rank below": (*REPLICA, "rank", -1),
    "rank true": (*REPLICA, "rank", True),
    "rank text": (*REPLICA, "rank", "0"),
    "step huge": ("step", 1 << 80),
    "step none": ("step", None),
    "world other": (*REPLICA, "world", 3),
    "world huge": (*REPLICA, "world", 1 << 62),
    "no layouts": (*REPLICA, "layouts", None),
    "no ids": (*REPLICA, "shards", []),
    "ids of numbers": (*REPLICA, "shards", [1, 2]),
    "ids of text": (*REPLICA, "shards", ["../../x", "y" * 16]),
    "many ids": (*REPLICA, "shards", ["0" * 16] * 1_000_000),
    "metadata list": ("metadata", "metadata", []),
    "no replica": (*REPLICA, None),
    "nothing": ("metadata", {}),
}


@pytest.mark.long
@pytest.mark.parametrize("what", WRONG)
def test_a_bad_description_with_right_digests(shard, what):
    *at, value = WRONG[what]
    manifest = altered(shard, *at, to=value)
    resign(shard, manifest, None if "ids" in what else [5, 7])
    size = (files_of(shard) / "manifest.json").stat().st_size
    with counted() as work, pytest.raises(CheckpointError, match=shard.name):
        open_shard(open_store(shard))
    assert work.calls < 60_000 and work.read < 2 * size + (1 << 16) and work.memory < 200 << 20, (size, work)


@pytest.mark.parametrize("text", [b"[]", b"\xff\xfe{", b"", b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"], ids=len)
def test_no_manifest_with_a_right_marker(shard, text):
    resign(shard, text)
    with counted() as work, pytest.raises(CheckpointError, match=shard.name):
        open_shard(open_store(shard))
    assert work.calls < 5000 and work.memory < 200 << 20, work


def test_a_forged_member_of_a_set_is_refused(tmp_path):
    """Right digests, the name and the ids of a real set, but another content: its id is not among the set's."""
    cluster = Cluster(tmp_path, 4)
    cluster.save(1)
    shard = next(p for p in cluster.shards() if "node-0" in str(p) and "rank_00000" in p.name)
    resign(shard, altered(shard, "metadata", "metadata", to={"step": 1, "loss": -7.0}))
    got, warned = cluster.restore()
    cluster.assert_restored(got, 1)
    assert any("were altered after the save" in w for w in warned)


@pytest.mark.parametrize("pointer", [False, True], ids=["token", "pointer, too"])
def test_a_forged_set_is_refused(tmp_path, pointer):
    """All ids are right, for the forged content: then the pointer names another manifest; or it is of another set, of
    which no node has the rest."""
    cluster = Cluster(tmp_path, 4)
    cluster.save(1)
    shard = next(p for p in cluster.shards() if "node-0" in str(p) and "rank_00000" in p.name)
    resign(shard, altered(shard, "metadata", "metadata", to={"step": 1, "loss": -7.0}), [1, 2, 3, 4], pointer)
    got, warned = cluster.restore()
    cluster.assert_restored(got, 1)
    text = "step 1: no node holds the shards of ranks 1, 2, 3" if pointer else "as its pointer says"
    assert any(text in w and (pointer or "rank_00000" in w) for w in warned), warned


def test_names_and_paths_lead_nowhere(tmp_path):
    """Leaves that are named after files, links, pipes, directories with the names of shards: skipped, untouched."""
    cluster = Cluster(tmp_path / "nodes", 2)
    cluster.save(1)
    shelf, good = cluster.directory(0) / RUN, cluster.shards()[0]
    secret = tmp_path / "secret"
    secret.write_text("not for you")
    for step, leaf in ((5, "../../../secret"), (6, "/etc/passwd")):
        for rank in (0, 1):
            forged = shutil.copytree(good, tmp_path / "forged")
            manifest, ids = altered(forged, *REPLICA, "layouts", leaf, to=[[1 << 61, 1 << 61], {}]), [rank, rank]
            manifest["step"], manifest["metadata"]["replica"]["rank"] = step, rank
            resign(forged, manifest, ids)
            forged.rename(shelf / shard_name(step, rank, set_id(ids)))
    (shelf / shard_name(7, 0, 7)).symlink_to(secret)
    (shelf / shard_name(7, 1, 7)).symlink_to(shard_name(7, 1, 7))
    os.mkfifo(shelf / shard_name(8, 0, 8))
    (shelf / shard_name(8, 1, 8)).mkdir()
    (shelf / shard_name(9, 1, 9)).symlink_to(good)
    got, warned = cluster.restore()
    cluster.assert_restored(got, 1)
    for step in (5, 6):
        assert any(f"step_{step:08d}" in w and "layouts of other leaves than it holds" in w for w in warned)
    for name in (shard_name(7, 0, 7), shard_name(7, 1, 7), shard_name(8, 0, 8), shard_name(8, 1, 8)):
        assert any(name in w for w in warned), name
    assert sum("it is a link" in w for w in warned) == 3
    assert secret.read_text() == "not for you" and sorted(os.listdir(tmp_path)) == ["nodes", "secret"]
    assert cluster.save(10) == [None] * 2  # what cannot be removed as a shard is removed as what it is
    assert {path.name[:13] for path in cluster.shards()} == {"step_00000010"}
    assert secret.read_text() == "not for you"


def test_a_link_in_the_way_of_a_save_is_not_followed(tmp_path):
    cluster = Cluster(tmp_path / "nodes", 2)
    cluster.save(1)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "mine").write_text("mine")
    assert cluster.save(2) == [None] * 2
    for path in cluster.shards():
        shutil.rmtree(path)
        path.symlink_to(victim)
    assert cluster.save(2) == [None] * 2
    assert [path.read_text() for path in victim.iterdir()] == ["mine"]
    assert not any(path.is_symlink() for path in cluster.shards())
    cluster.assert_restored(cluster.restore()[0], 2)


def fuzz(tmp_path, count):
    cluster = Cluster(tmp_path / "nodes", 2)
    cluster.save(1)
    good = cluster.shards()[0]
    saved = open_shard(open_store(good))
    manifest = (files_of(good) / "manifest.json").read_bytes()
    rng, path = random.Random(0), tmp_path / "x"
    shutil.copytree(good, path, symlinks=True)
    file = files_of(path) / "manifest.json"
    for i in range(count):
        data = bytearray(manifest)
        for _ in range(rng.randrange(1, 4)):
            a = rng.randrange(len(data))
            new = rng.choice(
                (rng.randbytes(1), rng.randbytes(8), b"\xff" * 8, b"", b"0", b'"', bytes(rng.randrange(40)))
            )
            data[a : a + rng.choice((len(new), 0, 8))] = new
        resign(path, bytes(data)) if rng.random() < 0.7 else file.write_bytes(data)
        try:
            shard = open_shard(open_store(path))
        except CheckpointError:
            continue
        if shard.set != saved.set:  # ids of other ranks: of a set that no node has the rest of
            continue
        assert shard.key == saved.key, i
        assert replace(shard.save.manifest, digest="") == replace(saved.save.manifest, digest=""), i


@pytest.mark.medium
def test_fuzzed(tmp_path):
    fuzz(tmp_path, 1500)


@pytest.mark.slow
def test_fuzzed_more(tmp_path):
    fuzz(tmp_path, 30_000)

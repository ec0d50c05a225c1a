"""Files made to harm: an error for that file, quickly and in little memory; nothing outside is read or written."""

import os
import random
import struct
import tracemalloc

import numpy as np
import pytest

from fmegatron.checkpoint import CheckpointError
from fmegatron.checkpoint.files.format import digest
from fmegatron.checkpoint.local import blob
from fmegatron.checkpoint.local.shelf import shard_name
from tests.checkpoint.local.nodes import RUN, Cluster, tiny_bands
from tests.work import counted

MAGIC = int.from_bytes(b"fmlocal1", "little")


@pytest.fixture(autouse=True)
def _tiny():
    with tiny_bands():
        yield


def trailer(*values):
    front = struct.pack("<7Q", *values, *([0] * (7 - len(values))))
    return front + struct.pack("<Q", digest(front))


def signed(text, rank=0, world=2, step=1):
    """A file without payload whose every digest is right, as far as one file can tell."""
    ids = np.zeros(world, "<u8")
    ids[rank] = blob.shard_id(np.zeros(0, "<u8"), text)
    return shard_name(step, rank, blob.set_id(ids)), blob.tail_bytes(0, np.zeros(0, "<u8"), ids, text)


def plain(**changes):
    header = {
        "run": RUN,
        "step": 1,
        "rank": 0,
        "world": 2,
        "payload_bytes": 0,
        "metadata": {},
        "meshes": [],
        "leaves": [],
    }
    return blob.to_json_text({**header, **changes}).encode()


TEXTS = {
    "no object": b"[]",
    "nonsense": b"\xff\xfe{",
    "empty": b"",
    "deep": b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "twice": plain()[:-1] + b',"step":1}',
    "NaN": plain()[:-1] + b',"x":NaN}',
    "many": b'{"leaves":[' + b"[]," * 5_000_000 + b"[]]}",
    "rank beyond": plain(rank=2),
    "rank below": plain(rank=-1),
    "rank true": plain(rank=True),
    "rank text": plain(rank="0"),
    "step huge": plain(step=1 << 80),
    "world other": plain(world=3),
    "payload other": plain(payload_bytes=1),
    "no leaves": plain(leaves=None),
    "metadata list": plain(metadata=[]),
}


@pytest.mark.parametrize("what", TEXTS)
def test_bad_json_with_right_digests(tmp_path, what):
    path = tmp_path / "x"
    path.write_bytes(signed(TEXTS[what])[1])
    with counted() as work, pytest.raises(CheckpointError, match="/x: "):
        blob.read_shard(str(path))
    size = path.stat().st_size
    assert work.calls < 5000 and work.read < 2 * size + (1 << 16) and work.memory < 200 << 20, (size, work)


@pytest.mark.parametrize(
    "values, size",
    [
        ((MAGIC, 1 << 63, 2, 2), 4096), ((MAGIC, 1 << 45, 2, 2), 1 << 45), ((MAGIC, 0, 1 << 44, 2), 1 << 44),
        ((MAGIC, 0, 2, 1 << 40), 1 << 43), ((MAGIC, (1 << 64) - 64, 2, 2), 4096), ((7, 0, 2, 2), 4096), ((MAGIC,), 64),
    ],
    ids=str,
)  # fmt: skip
def test_huge_sizes(tmp_path, values, size):
    """Sparse files, trailers that promise the world."""
    path = tmp_path / "x"
    end = trailer(*values)
    with open(path, "wb") as f:
        f.truncate(max(size, 64) - 64)
        f.seek(0, os.SEEK_END)
        f.write(end)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="/x: "):
        blob.read_shard(str(path))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_forged_member_of_a_set_is_refused(tmp_path):
    """Right digests, the name and the trailer of a real set, but another content: its id is not among the set's."""
    cluster = Cluster(tmp_path, 4)
    cluster.save(1)
    keys = cluster.replicas(0).shelf.keys()
    path = keys[next(key for key in keys if key[2] == 0)]
    real = blob.read_shard(path)
    ids = np.frombuffer(real.tail, "<u8", 4, 8 * len(real.digests)).copy()
    text = blob.to_json_text({**real.header, "metadata": {"step": 1, "loss": -7.0}}).encode()
    ids[0] = blob.shard_id(real.digests, text)
    end = trailer(MAGIC, real.payload_bytes, len(text), 4, int(ids[0]), real.set)
    with open(path, "r+b") as f:
        f.seek(real.payload_bytes)
        f.write(real.digests.tobytes() + ids.tobytes() + text + end)
        f.truncate()
    got, warned = cluster.restore()
    cluster.assert_restored(got, 1)
    assert any("were altered after the save" in w for w in warned)


def test_names_and_paths_lead_nowhere(tmp_path):
    """Leaves that are named after files, links, pipes, directories with the names of shards: skipped, untouched."""
    cluster = Cluster(tmp_path / "nodes", 2)
    cluster.save(1)
    shelf = cluster.directory(0) / RUN
    secret = tmp_path / "secret"
    secret.write_text("not for you")
    for step, leaf in ((5, "../../../secret"), (6, "/etc/passwd")):
        row = [leaf, [1 << 61, 1 << 61], "float32", {"mesh": 0, "spec": [], "flat": []}]
        for rank in (0, 1):
            name, data = signed(plain(step=step, rank=rank, leaves=[row]), rank, step=step)
            (shelf / name).write_bytes(data)
    (shelf / shard_name(7, 0, 7)).symlink_to(secret)
    (shelf / shard_name(7, 1, 7)).symlink_to(shard_name(7, 1, 7))
    os.mkfifo(shelf / shard_name(8, 0, 8))
    (shelf / shard_name(8, 1, 8)).mkdir()
    got, warned = cluster.restore()
    cluster.assert_restored(got, 1)
    for step in (5, 6):
        assert any(f"step {step}: they have other layouts" in w for w in warned)
    for name in (shard_name(7, 0, 7), shard_name(7, 1, 7), shard_name(8, 0, 8), shard_name(8, 1, 8)):
        assert any(name in w and "cannot be read" in w for w in warned)
    assert secret.read_text() == "not for you" and sorted(os.listdir(tmp_path)) == ["nodes", "secret"]


def test_a_link_in_the_way_of_a_save_is_not_followed(tmp_path):
    cluster = Cluster(tmp_path / "nodes", 2)
    cluster.save(1)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    replicas = cluster.replicas(0)
    for rank in (0, 1):
        os.symlink(victim, replicas.shelf.hidden(0, 2, rank))
    assert cluster.save(2) == [None] * 2
    for path in cluster.paths():
        content = path.read_bytes()
        path.unlink()
        path.symlink_to(victim)
        assert content
    assert cluster.save(2) == [None] * 2  # renamed over the links
    assert victim.read_text() == "mine" and not any(path.is_symlink() for path in cluster.paths())
    cluster.assert_restored(cluster.restore()[0], 2)


def fuzz(tmp_path, count):
    cluster = Cluster(tmp_path, 2)
    cluster.save(1)
    good = cluster.paths()[0].read_bytes()
    rng, path = random.Random(0), tmp_path / "x"
    for i in range(count):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            a = rng.randrange(len(data)) if rng.random() < 0.5 else max(0, len(data) - 1 - rng.randrange(64))
            new = rng.choice((rng.randbytes(1), rng.randbytes(8), b"\xff" * 8, b"", bytes(rng.randrange(40))))
            data[a : a + rng.choice((len(new), 0, 8))] = new
        if rng.random() < 0.7 and len(data) >= 64:  # the trailer's own digest is right again
            data[-8:] = struct.pack("<Q", digest(bytes(data[-64:-8])))
        path.write_bytes(data)
        try:
            shard = blob.read_shard(str(path))
        except CheckpointError:
            continue
        assert shard.tail == good[-len(shard.tail) :], i  # only the payload differs; reading that finds it


def test_fuzzed(tmp_path):
    fuzz(tmp_path, 3000)


@pytest.mark.slow
def test_fuzzed_more(tmp_path):
    fuzz(tmp_path, 30_000)

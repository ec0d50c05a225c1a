"""Random damage: what comes back is, bit for bit, the newest step that an independent look at the bytes finds whole."""

import os
import random
import shutil

import pytest

from fmegatron.checkpoint import CheckpointError, Manager
from fmegatron.checkpoint.local import blob, cliques
from fmegatron.checkpoint.local.shelf import shard_name
from fmegatron.layout import Mesh
from tests.checkpoint.fake_world import cut_tree, run
from tests.checkpoint.local.nodes import RUN, Cluster, layouts_on, state, tiny_bands
from tests.sampling import seeds

CLUSTERS = (  # (ranks, spacing, copies or groups)
    (2, 1, 2), (4, 1, 1), (4, 1, 2), (4, 2, 2), (4, 1, 4), (8, 2, 2), (8, 2, [[2, 6, 7], [3, 1], [5], [0, 4]]),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _tiny():
    with tiny_bands():
        yield


def shards(cluster):
    return [p for p in cluster.paths() if p.parent.name == RUN and not p.name.startswith(".")]


# ---- damage: each takes a random source, the cluster, and one of its files


def flip(rng, cluster, path):
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(rng, cluster, path):
    os.truncate(path, rng.randrange(path.stat().st_size))


def extend(rng, cluster, path):
    path.write_bytes(path.read_bytes() + bytes(rng.randrange(1, 100)))


def zero(rng, cluster, path):
    data = bytearray(path.read_bytes())
    a = rng.randrange(len(data))
    data[a : a + 64] = bytes(len(data[a : a + 64]))
    path.write_bytes(data)


def delete(rng, cluster, path):
    path.unlink()


def swap(rng, cluster, path):
    other = rng.choice(shards(cluster))
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs), other.write_bytes(mine)


def move(rng, cluster, path):
    """To another node, under its own name: still good there."""
    target = cluster.directory(rng.randrange(cluster.size)) / RUN
    target.mkdir(parents=True, exist_ok=True)
    shutil.move(path, target / path.name)


def rename(rng, cluster, path):
    path.rename(path.with_name(shard_name(rng.randrange(60), rng.randrange(cluster.size), rng.getrandbits(64))))


def link(rng, cluster, path):
    """The same good bytes, but reached through a link out of the directory."""
    away = cluster.root.parent / f"away-{rng.getrandbits(64):x}"
    shutil.move(path, away)
    path.symlink_to(away)


def wipe(rng, cluster, path):
    cluster.wipe(rng.randrange(cluster.size))


def edit(rng, cluster, path):
    """Change JSON, payload or digests and make the digests of the file right again; sometimes its name, too."""
    try:
        shard = blob.read_shard(str(path))
    except CheckpointError:
        return
    digests, header = shard.digests.copy(), dict(shard.header)
    payload = bytearray(path.read_bytes()[: shard.payload_bytes])
    what = rng.choice(("step", "rank", "metadata", "leaves", "payload", "payload_bytes"))
    if what == "payload" and payload:
        payload[0] ^= 1
        digests[0] = blob.digest(payload[: blob.BAND_BYTES])
    elif what in ("step", "rank"):
        header[what] = rng.randrange(99) if what == "step" else rng.randrange(cluster.size)
    elif what == "payload_bytes":
        payload = payload[:-1]
    else:
        header[what] = rng.choice(
            ({}, [], {"step": 98}, None, 7, "../../../etc/passwd", [["../../x", [1 << 61], "float32", {}]])
        )
    ids = [
        int.from_bytes(shard.tail[i : i + 8], "little")
        for i in range(8 * len(digests), 8 * len(digests) + 8 * cluster.size, 8)
    ]
    new = blob.to_json_text(header).encode()
    if rng.random() < 0.5:
        ids[shard.header["rank"]] = blob.shard_id(digests, new)
    path.write_bytes(bytes(payload) + blob.tail_bytes(len(payload), digests, ids, new))
    if rng.random() < 0.5 and isinstance(header["step"], int):
        name = shard_name(header["step"], header["rank"], blob.set_id(ids))
        path.rename(path.with_name(name))


DAMAGES = (flip, flip, truncate, extend, zero, delete, swap, move, rename, link, wipe, edit, edit, edit)


# ---- the oracle: nothing but names and bytes


def newest_recoverable(cluster, pristine):
    """The newest step of one set of which every rank's file is, somewhere, byte for byte what was saved; -1: none."""
    good = set()
    for path in shards(cluster):
        if not path.is_symlink() and pristine.get(path.name) == path.read_bytes():
            step, rank, one = path.name.split(".")[0][5:], path.name.split(".")[1][5:], path.name.split(".")[2]
            good.add((int(step), one, int(rank)))
    whole = {(step, one) for step, one, _ in good if all((step, one, r) in good for r in range(cluster.size))}
    return max((step for step, _ in whole), default=-1)


def one_life(seed, root):
    """Save some steps, damage, recover, look, save again, recover. Returns (damages, step that came back)."""
    rng = random.Random(seed)
    size, spacing, how = rng.choice(CLUSTERS)
    options = {"groups": how} if isinstance(how, list) else {"copies": how}
    mesh = Mesh(fsdp=size // 2, tp=2) if size > 2 and rng.random() < 0.5 else Mesh(fsdp=size)
    cluster = Cluster(root / "nodes", size, spacing, layouts_on(mesh), keep=rng.choice((1, 2, 3)), **options)
    pristine, of = {}, None
    if rng.random() < 0.5:
        of, local = root / "global", cut_tree(state(cluster.layouts, 2), cluster.layouts)
        metadata = {"step": 2, "loss": 0.1}
        run(size, lambda w: Manager(of, world=w).save(2, local[w.rank], cluster.layouts, metadata))
    for step in range(1, rng.randrange(2, 6)):
        assert cluster.save(step) == [None] * size
        pristine.update((path.name, path.read_bytes()) for path in shards(cluster))
    count = rng.choice((1, 2, 3, 5, 8, 13))
    for _ in range(count):
        if files := shards(cluster):
            rng.choice(DAMAGES)(rng, cluster, rng.choice(files))
    wanted = newest_recoverable(cluster, pristine)
    if of is not None:
        wanted = max(wanted, 2)
    outside = sorted(p for p in root.iterdir())
    got, warned = cluster.restore(fallback=of)
    assert sorted(p for p in root.iterdir()) == outside
    if wanted < 0:
        assert all(isinstance(error, CheckpointError) for error in got), (seed, got)
        assert cluster.save(0) == [None] * size  # a new start
        return count, None
    cluster.assert_restored(got, wanted)
    if wanted < step and any(f"step_{step:08d}" in path.name for path in shards(cluster)):
        assert warned, (seed, "a newer step was left out in silence")
    if newest_recoverable(cluster, pristine) == wanted and not (of and wanted == 2):
        groups = how if isinstance(how, list) else cliques(size, how, spacing)
        for group in groups:  # the replication is back
            for rank in group:
                assert set(cluster.files(rank)) >= {(wanted, of) for of in group}, (seed, rank)
    assert cluster.save(wanted + 1) == [None] * size, seed
    cluster.assert_restored(cluster.restore()[0], wanted + 1)
    for rank in range(size):
        steps = {step for step, _ in cluster.files(rank)}
        assert max(steps) == wanted + 1 and len(steps) <= cluster.options["keep"]
    return count, wanted


def lives(tmp_path, seeds):
    damages, ends = 0, []
    for seed in seeds:
        root = tmp_path / str(seed)
        root.mkdir()
        count, end = one_life(seed, root)
        damages += count
        ends.append(end)
        shutil.rmtree(root)
    return damages, ends


def test_fifty_damages(tmp_path):
    damages, ends = lives(tmp_path, seeds("damaged replicas", 8, 6))
    assert damages >= 45 and {None, 2} < set(ends)


@pytest.mark.slow
def test_three_thousand_damages(tmp_path):
    damages, _ = lives(tmp_path, range(1000, 1700))
    assert damages >= 3000

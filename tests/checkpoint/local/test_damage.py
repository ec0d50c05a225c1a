"""Random damage: what comes back is, bit for bit, a step as it was saved, and none older than the newest that an
independent look at the bytes finds whole. (A newer one where what is damaged has replicas, or nobody wants it.)"""

import contextlib
import json
import math
import os
import random
import shutil

import pytest

from fmegatron.checkpoint import CheckpointError, Manager
from fmegatron.checkpoint.files.format import digest, digest_text
from fmegatron.checkpoint.files.leases import step_name
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.local.cliques import cliques
from fmegatron.checkpoint.local.shard import open_shard, set_id, shard_name
from fmegatron.layout import Mesh
from tests.checkpoint.fake_world import cut_tree, run, small_sizes
from tests.checkpoint.local.nodes import RUN, Cluster, layouts_on, resign, state
from tests.checkpoint.tokens import files_of
from tests.sampling import seeds

CLUSTERS = (  # (ranks, spacing, copies or groups)
    (2, 1, 2), (4, 1, 1), (4, 1, 2), (4, 2, 2), (4, 1, 4), (8, 2, 2), (8, 2, [[2, 6, 7], [3, 1], [5], [0, 4]]),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _tiny():
    with small_sizes():
        yield


def shards(cluster):
    return [p for p in cluster.shards() if not p.name.startswith(".")]


def content(shard):
    """What a restore reads of a shard: all files but the descriptions of groups, which are for other programs; of
    packed leaves (there is one, in the first band) not the bands that are only padding, but their size. A token has
    another name in each copy."""
    files = sorted(p for p in shard.rglob("*") if p.is_file() and (p.name != "zarr.json" or [*p.parent.glob("c*")]))
    with contextlib.suppress(OSError, ValueError, CheckpointError):
        token = files_of(shard).name
        found = {}
        for p in files:
            data = p.read_bytes()[: 32 if p == files_of(shard) / "packed/0/c.0" else None]
            data = data.replace(token.encode(), b"TOKEN") if p == shard / "COMPLETE" else data
            found[str(p.relative_to(shard)).replace(token, "TOKEN")] = p.stat().st_size, data
        return found
    return None


# ---- damage: each takes a random source, the cluster, and one of its shards


def some_file(rng, shard):
    """A file of a shard; the large ones are not hit more often than the small ones."""
    return rng.choice([p for p in sorted(shard.rglob("*")) if p.is_file() and p.stat().st_size])


def in_a_file(damage):
    """Damage of bytes: not where links or directories were put in the place of a shard."""

    def work(rng, cluster, shard):
        if shard.is_dir() and not shard.is_symlink() and any(p.is_file() for p in shard.rglob("*")):
            damage(rng, some_file(rng, shard))

    return work


@in_a_file
def flip(rng, path):
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


@in_a_file
def truncate(rng, path):
    os.truncate(path, rng.randrange(path.stat().st_size))


@in_a_file
def extend(rng, path):
    path.write_bytes(path.read_bytes() + bytes(rng.randrange(1, 100)))


@in_a_file
def zero(rng, path):
    data = bytearray(path.read_bytes())
    a = rng.randrange(len(data))
    data[a : a + 64] = bytes(len(data[a : a + 64]))
    path.write_bytes(data)


@in_a_file
def delete_file(rng, path):
    path.unlink()


def delete(rng, cluster, shard):
    shard.unlink() if shard.is_symlink() else shutil.rmtree(shard)


def swap(rng, cluster, shard):
    other, between = rng.choice(shards(cluster)), cluster.root / "between"
    if other != shard:
        shard.rename(between), other.rename(shard), between.rename(other)


def move(rng, cluster, shard):
    """To another node, under its own name: still good there."""
    target = cluster.directory(rng.randrange(cluster.size)) / RUN
    target.mkdir(parents=True, exist_ok=True)
    if not (target / shard.name).exists():
        shutil.move(shard, target / shard.name)


def rename(rng, cluster, shard):
    shard.rename(shard.with_name(shard_name(rng.randrange(60), rng.randrange(cluster.size), rng.getrandbits(64))))


def link(rng, cluster, shard):
    """The same good bytes, but reached through a link out of the directory."""
    away = cluster.root.parent / f"away-{rng.getrandbits(64):x}"
    shutil.move(shard, away)
    shard.symlink_to(away)


def wipe(rng, cluster, shard):
    cluster.wipe(rng.randrange(cluster.size))


def edit(rng, cluster, shard):
    """Change metadata, leaves or elements and make the digests of the shard right again; sometimes its name, too."""
    try:
        found = open_shard(open_store(shard))
    except (CheckpointError, OSError):
        return
    files = files_of(shard)
    manifest = json.loads((files / "manifest.json").read_text())
    about, ids = manifest["metadata"]["replica"], [int(x, 16) for x in found.about["shards"]]
    what = rng.choice(("step", "rank", "metadata", "leaves", "elements", "shape"))
    if what == "elements" and (files / "arrays/w/c.0.0").exists() and (files / "digests.bin").exists():
        array, digests = found.save.manifest.arrays["arrays/w"], bytearray((files / "digests.bin").read_bytes())
        data = bytearray((files / "arrays/w/c.0.0").read_bytes())
        data[0] ^= 1
        (files / "arrays/w/c.0.0").write_bytes(data)
        nbytes = math.prod(array.band) * array.itemsize
        lo, hi = 8 * array.first_digest, 8 * (array.first_digest + array.digest_count)
        digests[lo : lo + 8] = digest(data[:nbytes]).to_bytes(8, "little")
        (files / "digests.bin").write_bytes(digests)
        manifest["arrays"]["arrays/w"]["digest"] = digest_text(bytes(digests[lo:hi]))
    elif what == "step":
        manifest["step"] = rng.randrange(99)
    elif what == "rank":
        about["rank"] = rng.randrange(cluster.size)
    elif what == "shape":
        about["layouts"]["w"] = [[1 << 61, 1 << 61], {}]
    else:
        new = rng.choice(({}, [], {"step": 98}, None, 7, "../../../etc/passwd", {"../../x": [[1 << 61], {}]}))
        manifest["metadata"][what if what == "metadata" else "replica"] = new
    if manifest == json.loads((files / "manifest.json").read_text()):  # another rank was wanted, by chance its own
        return
    resign(shard, manifest, ids if rng.random() < 0.5 else None)
    target = shard.with_name(shard_name(manifest["step"], found.about["rank"], set_id(ids)))
    if rng.random() < 0.5 and not target.exists():
        shard.rename(target)


DAMAGES = (
    flip, flip, truncate, extend, zero, delete_file, delete, swap, move, rename, link, wipe, edit, edit, edit,
)  # fmt: skip


# ---- the oracle: nothing but names and bytes


def newest_recoverable(cluster, pristine):
    """The newest step of one set of which every rank's shard is, somewhere, byte for byte what was saved; -1: none."""
    good = set()
    for path in shards(cluster):
        step, rank, _ = path.name.split(".")  # what a directory's save is called does not matter: its token names it
        if not path.is_symlink():
            for name, was in pristine.items():
                if name.startswith(f"{step}.{rank}.") and was == content(path):
                    good.add((int(step[5:]), name.split(".")[2], int(rank[5:])))
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
        pristine.update((path.name, content(path)) for path in shards(cluster))
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
    if all(isinstance(error, CheckpointError) for error in got):
        assert wanted < 0, (seed, got)
        assert cluster.save(0) == [None] * size  # a new start
        return count, None
    assert got[0][0] >= wanted, (seed, got)
    wanted = got[0][0]
    cluster.assert_restored(got, wanted)
    if wanted < step and any(step_name(step) in path.name for path in shards(cluster)):
        assert warned, (seed, "a newer step was left out in silence")
    if newest_recoverable(cluster, pristine) == wanted and not (of and wanted == 2):
        groups = how if isinstance(how, list) else cliques(size, how, spacing)
        for group in groups:  # the replication is back
            for rank in group:
                assert set(cluster.kept(rank)) >= {(wanted, of) for of in group}, (seed, rank)
    assert cluster.save(wanted + 1) == [None] * size, seed
    cluster.assert_restored(cluster.restore()[0], wanted + 1)
    for rank in range(size):
        steps = {step for step, _ in cluster.kept(rank)}
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


@pytest.mark.slow
@pytest.mark.long
def test_fifty_damages(tmp_path):
    damages, ends = lives(tmp_path, seeds("damaged replicas", 8, 6))
    assert damages >= 45 and {None, 2} < set(ends)


@pytest.mark.slow
def test_three_thousand_damages(tmp_path):
    damages, _ = lives(tmp_path, range(1000, 1700))
    assert damages >= 3000

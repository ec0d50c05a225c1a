"""Ranks that die at random moments of a save: a whole step is always left, and the next save leaves nothing behind."""

import os
import random
import shutil
import threading

import pytest

from fmegatron.checkpoint.files import trees
from fmegatron.checkpoint.files.folder import Folder, FolderStore
from fmegatron.checkpoint.local import saving, shelf
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run, small_sizes
from tests.checkpoint.faulty import Killed, lives
from tests.checkpoint.local.nodes import Cluster, state
from tests.sampling import seeds


@pytest.fixture(autouse=True)
def _tiny():
    with small_sizes():
        yield


class Fates:
    """Threads that die at their n-th thing done to a file; `done`: the most things that one of them lived to do."""

    def __init__(self, patch):
        self.left, self.done = threading.local(), 0
        for holder, name in (
            (FolderStore, "begin"), (FolderStore, "publish"), (FolderStore, "end"), (Folder, "write"),
            (saving, "write_part"), (saving, "complete"), (trees, "remove"), (FolderStore, "fill"),
            (os, "rename"), (os, "remove"), (os, "rmdir"), (os, "mkdir"), (os, "fsync"), (shelf.Shelf, "retain"),
        ):  # fmt: skip
            patch.setattr(holder, name, self.mortal(getattr(holder, name)))

    def mortal(self, function):
        def call(*args, **kwargs):
            left = getattr(self.left, "count", None)
            if left is not None:
                if left <= 0:
                    raise Killed
                self.left.count, self.left.did = left - 1, getattr(self.left, "did", 0) + 1
                self.done = max(self.done, self.left.did)
            return function(*args, **kwargs)

        return call


def one_death(seed, root, bury):
    """Save state 1, then die while state 2 is saved (as another step, or as the same again). Returns what was found."""
    rng = random.Random(seed)
    size, spacing = rng.choice(((2, 1), (4, 1), (4, 2)))
    cluster = Cluster(root, size, spacing, durable=rng.random() < 0.5)
    step = rng.choice((1, 2, 2))
    local = {n: cut_tree(state(cluster.layouts, n), cluster.layouts) for n in (1, 2)}

    def save(patch, number, content, moments):
        fates = Fates(patch)

        def work(world):
            if world.rank in moments:
                fates.left.count = moments[world.rank]
            try:
                cluster.replicas(world.rank, world).save(number, local[content][world.rank], cluster.layouts)
            except Killed:
                world._barrier.abort()  # the others see that the connection is gone
                raise

        got = run(size, work)
        bury()
        assert all(error is None or isinstance(error, RuntimeError | Killed) for error in got), got
        return any(isinstance(error, Killed) for error in got), fates.done

    with pytest.MonkeyPatch.context() as patch:
        _, most = save(patch, 1, 1, dict.fromkeys(range(size), 10**9))
    with pytest.MonkeyPatch.context() as patch:
        late = rng.random() < 0.5  # renames and deletions are few, and the dangerous ones
        moments = {
            r: rng.randrange(most - 12 if late else 0, most) for r in rng.sample(range(size), rng.choice((1, 1, size)))
        }
        dead, _ = save(patch, step, 2, moments)
    found, _ = cluster.restore(protect=rng.random() < 0.5)
    for rank, result in enumerate(found):
        assert isinstance(result, tuple), (seed, result)
        content = int(found[0][1]["step"])
        assert result[0] == (1 if content == 1 else step) and (dead or content == 2), seed
        assert_same_bits(result[1], local[content][rank], seed)
    assert cluster.save(3) == [None] * size
    assert {path.name[:13] for path in cluster.shards()} == {"step_00000003"}
    assert [path.name for path in cluster.root.glob("*/run/.*")] == []
    cluster.assert_restored(cluster.restore()[0], 3)
    return content if dead else None


def deaths(tmp_path, seeds):
    ends = []
    for seed in seeds:
        with lives() as bury:
            ends.append(one_death(seed, tmp_path / str(seed), bury))
        shutil.rmtree(tmp_path / str(seed))
    return ends


@pytest.mark.medium
def test_twenty_deaths(tmp_path):
    ends = deaths(tmp_path, seeds("deaths of replicas", 15, 9))
    assert len(ends) - ends.count(None) >= 15 and {1, 2} <= set(ends)


@pytest.mark.slow
def test_five_hundred_deaths(tmp_path):
    ends = deaths(tmp_path, range(1000, 1600))
    assert len(ends) - ends.count(None) >= 500

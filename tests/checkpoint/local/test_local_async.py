"""save_async: the disk's part in a thread; the set counts when all ranks have agreed, and not before."""

import threading

import pytest
import torch

from fmegatron.checkpoint import CheckpointError
from fmegatron.checkpoint.files.folder import Folder
from fmegatron.checkpoint.local import saving
from tests.checkpoint.fake_world import cut_tree, run, small_sizes
from tests.checkpoint.local.nodes import Cluster, state


@pytest.fixture(autouse=True)
def _tiny():
    with small_sizes():
        yield


@pytest.fixture
def gate(monkeypatch):
    """Nothing is written to a disk while the gate is closed."""
    gate, real = threading.Event(), Folder.write

    def waiting(self, *args, **options):
        assert gate.wait(30)
        real(self, *args, **options)

    monkeypatch.setattr(Folder, "write", waiting)
    yield gate
    gate.set()


def start(cluster, step, world, local, **options):
    metadata = {"step": step, "loss": 0.1}
    return cluster.replicas(world.rank, world).save_async(step, local[world.rank], cluster.layouts, metadata, **options)


def test_the_state_may_change_at_once_and_the_set_counts_at_the_end(tmp_path, gate):
    cluster = Cluster(tmp_path, 4)
    gate.set()
    cluster.save(1)
    gate.clear()
    local, early = cut_tree(state(cluster.layouts, 2), cluster.layouts), []

    def train(world):
        handle = start(cluster, 2, world, local)
        for x in local[world.rank].values():
            x.view(-1).view(torch.uint8).zero_()
        early.append((handle.poll(), cluster.kept(world.rank)))
        world.agree(None, "wait for the others")
        gate.set()
        while not handle.poll():
            pass
        assert handle.poll()  # again, for nothing
        handle.result()

    assert run(4, train) == [None] * 4
    assert {(done, tuple(step for step, _ in files)) for done, files in early} == {(False, (1, 1))}
    assert cluster.kept(0) == [(2, 0), (2, 1)] and len(cluster.shards()) == 8
    cluster.assert_restored(cluster.restore()[0], 2)


def test_a_disk_that_fails_behind_is_said_on_all_ranks(tmp_path, monkeypatch):
    def failing(self, *args, **options):
        if "/node-2/" in self.text:
            raise OSError(28, "No space left on device")
        real(self, *args, **options)

    cluster, real = Cluster(tmp_path, 4), Folder.write
    cluster.save(1)
    before = cluster.content()
    local = cut_tree(state(cluster.layouts, 2), cluster.layouts)

    def train(world):
        handle = start(cluster, 2, world, local)
        for _ in range(2):  # the error stays
            try:
                while not handle.poll():
                    pass
            except RuntimeError as error:
                assert "failed on rank 2 of 4" in str(error) and "No space left" in str(error)
            else:
                raise AssertionError("no error")
        return "told"

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "write", failing)
        # In memory this disk is so quick that the error may be seen at the end of the exchange already.
        got = run(4, train)
    assert all(one == "told" or "No space left" in str(one) for one in got), got
    assert cluster.content() == before
    assert cluster.save(2) == [None] * 4


def test_one_save_at_a_time(tmp_path, gate):
    cluster = Cluster(tmp_path, 2)
    local = cut_tree(state(cluster.layouts, 1), cluster.layouts)

    def train(world):
        handle = start(cluster, 1, world, local)
        try:
            start(cluster, 2, world, local)
        except ValueError as error:
            assert "got a save while another one is under way" in str(error)
        else:
            raise AssertionError("two saves at a time")
        world.agree(None, "wait for the others")
        gate.set()
        handle.result()

    assert run(2, train) == [None] * 2
    cluster.assert_restored(cluster.restore()[0], 1)


def test_what_waits_for_the_disk_is_bounded(tmp_path, monkeypatch):
    waiting, real = [], saving._Disk.write

    def noted(self, draft, portion, data):
        real(self, draft, portion, data)
        waiting.append(self._waiting)

    monkeypatch.setattr(saving._Disk, "write", noted)
    cluster = Cluster(tmp_path, 2)
    local = cut_tree(state(cluster.layouts, 1), cluster.layouts)
    assert run(2, lambda world: start(cluster, 1, world, local, most_bytes=300).result()) == [None] * 2
    assert len(waiting) > 8 and 128 <= max(waiting) <= 300
    cluster.assert_restored(cluster.restore()[0], 1)


def test_a_save_that_is_never_finished_does_not_count(tmp_path):
    cluster = Cluster(tmp_path, 2)
    local, held = cut_tree(state(cluster.layouts, 1), cluster.layouts), []
    run(2, lambda world: held.append(start(cluster, 1, world, local)))
    got, _ = cluster.restore()
    assert all(isinstance(e, CheckpointError) for e in got)
    for handle in held:
        handle._discard()  # as the end of the process would
    assert cluster.save(1) == [None] * 2
    cluster.assert_restored(cluster.restore()[0], 1)

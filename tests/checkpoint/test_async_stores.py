"""Asynchronous saves to object stores: the writer process builds the same Store from its JSON."""

import os
import signal

import pytest

from fmegatron import checkpoint
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.layout import Mesh
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run, small_sizes
from tests.checkpoint.s3_server import s3_endpoint, s3_store
from tests.checkpoint.test_faults import layouts_on, state

ONE, TWO = layouts_on(Mesh(fsdp=1, tp=1)), layouts_on(Mesh(fsdp=1, tp=2))


@pytest.fixture(scope="module")
def endpoint():
    with s3_endpoint() as url:
        yield url


@pytest.fixture
def store(endpoint, tmp_path):
    return s3_store(endpoint, f"{tmp_path.name}/a")


def save_twice(world, store, first, second):
    """A save whose second rank's writer is killed, and then one that works; what the ranks heard of the first."""
    with checkpoint.AsyncSaver() as saver:
        saver.reserve(TWO, world)
        if world.rank == 1:
            os.kill(saver.writer_pid, signal.SIGSTOP)
        handle = checkpoint.save_async(store, first[world.rank], TWO, world, saver=saver)
        if world.rank == 1:
            os.kill(saver.writer_pid, signal.SIGKILL)
        try:
            handle.result()
        except RuntimeError as error:
            heard = str(error)
        assert not store.is_complete()
        checkpoint.save_async(store, second[world.rank], TWO, world, saver=saver).result()
    return heard


@pytest.mark.medium
def test_two_ranks(store):
    with small_sizes(chunk=1 << 20, band=1 << 20):
        first, second = (cut_tree(state(seed), TWO) for seed in (1, 2))
        heard = run(2, lambda world: save_twice(world, store, first, second))
        assert heard[0] == heard[1] and "failed on rank 1 of 2: its writer process" in heard[0], heard
        assert_same_bits(checkpoint.restore(store, ONE), state(2))


def test_memory_of_this_process_cannot_be_written_by_another():
    store = open_store("memory://runs/a", {})
    with checkpoint.AsyncSaver() as saver, pytest.raises(ValueError, match="memory://.*use save"):
        checkpoint.save_async(store, state(), ONE, saver=saver)
    assert not store.is_complete()

"""Asynchronous saves that meet a full disk, a vanished directory, a dead writer; and what they cost in memory."""

import os
import resource
import shutil
import signal
import subprocess
import time

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.layout import Layout, Mesh
from fmegatron.step import jit
from tests.checkpoint import fake_world
from tests.writers import started_by

MIB = 1 << 20
SHAPE = (1024, 1024)
LAYOUTS = {"w": Layout(SHAPE, torch.float32, Mesh()), "n": Layout((), torch.int64, Mesh())}


def a_state(seed):
    return {"w": torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)), "n": torch.tensor(seed)}


@pytest.fixture(scope="module")
def saver():
    with checkpoint.AsyncSaver() as saver:
        saver.reserve(LAYOUTS)
        yield saver


def old_checkpoint(path):
    checkpoint.save(path, a_state(0), LAYOUTS)
    return path


def assert_old_is_whole_and_next_save_works(saver, path):
    """The failed save has left nothing, and the one after it is durable."""
    assert os.listdir(path.parent) == [path.name]
    fake_world.assert_same_bits(checkpoint.restore(path, LAYOUTS), a_state(0))
    checkpoint.save_async(path, a_state(2), LAYOUTS, saver=saver).result()
    fake_world.assert_same_bits(checkpoint.restore(path, LAYOUTS), a_state(2))
    assert os.listdir(path.parent) == [path.name]


def poll_until_error(handle):
    with pytest.raises(RuntimeError) as caught:
        for _ in range(6000):
            handle.poll()
            time.sleep(0.01)
    return str(caught.value)


@pytest.mark.long
def test_full_disk(saver, tmp_path):
    path = old_checkpoint(tmp_path / "c")
    _, most = resource.prlimit(saver.writer_pid, resource.RLIMIT_FSIZE)
    resource.prlimit(saver.writer_pid, resource.RLIMIT_FSIZE, (MIB, most))
    text = poll_until_error(checkpoint.save_async(path, a_state(1), LAYOUTS, saver=saver))
    resource.prlimit(saver.writer_pid, resource.RLIMIT_FSIZE, (most, most))
    assert text.startswith(f"saving the checkpoint {path} failed: OSError: w: ") and "File too large" in text
    assert_old_is_whole_and_next_save_works(saver, path)


def test_directory_vanishes(saver, tmp_path):
    path = old_checkpoint(tmp_path / "c")
    os.kill(saver.writer_pid, signal.SIGSTOP)
    handle = checkpoint.save_async(path, a_state(1), LAYOUTS, saver=saver)
    shutil.rmtree(handle.root)
    os.kill(saver.writer_pid, signal.SIGCONT)
    assert "No such file" in poll_until_error(handle)
    assert_old_is_whole_and_next_save_works(saver, path)


@pytest.mark.medium
def test_writer_killed_with_several_in_flight(tmp_path):
    path = old_checkpoint(tmp_path / "c")
    with checkpoint.AsyncSaver(arena_bytes=32 * MIB) as saver:
        saver.reserve(LAYOUTS)
        os.kill(saver.writer_pid, signal.SIGSTOP)
        handles = [checkpoint.save_async(p, a_state(1), LAYOUTS, saver=saver) for p in (path, tmp_path / "d")]
        os.kill(saver.writer_pid, signal.SIGKILL)
        for handle in handles:
            with pytest.raises(RuntimeError, match=f"{handle.text} failed: its writer process .* killed by SIGKILL"):
                handle.result()
            assert handle.state == "failed"
        assert saver.writer_pid is None and saver.pending == ()
        assert_old_is_whole_and_next_save_works(saver, path)


def test_failure_that_nobody_polls_is_raised_at_the_end(tmp_path):
    with pytest.raises(RuntimeError, match="c failed: its writer process"), checkpoint.AsyncSaver() as saver:
        os.kill(saver.writer_pid, signal.SIGSTOP)
        checkpoint.save_async(tmp_path / "c", a_state(1), LAYOUTS, saver=saver)
        os.kill(saver.writer_pid, signal.SIGKILL)
    assert os.listdir(tmp_path) == []


def test_writer_that_cannot_start_says_why(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch today')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with started_by(subprocess.Popen):
        saver = checkpoint.AsyncSaver()
    with saver:
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match="(?s)ended with status 1: .*no torch today"):
            checkpoint.save_async(tmp_path / "c", a_state(1), LAYOUTS, saver=saver).result()
        checkpoint.save_async(tmp_path / "c", a_state(2), LAYOUTS, saver=saver).result()


def test_donated_state(saver, tmp_path):
    def step(state):
        return {"w": state["w"] * 2 + 1, "n": state["n"] + 1}

    update, state, wanted = jit(step, donate=(0,), backend="eager"), a_state(5), a_state(5)
    update(a_state(6))
    os.kill(saver.writer_pid, signal.SIGSTOP)
    try:  # a failure must not leave the writer stopped: the saver would wait for it
        at = state["w"].data_ptr()
        handle = checkpoint.save_async(tmp_path / "c", state, LAYOUTS, saver=saver)
        state = update(state)
        assert state["w"].data_ptr() == at and not torch.equal(state["w"], wanted["w"])  # the same memory, new values
    finally:
        os.kill(saver.writer_pid, signal.SIGCONT)
    handle.result()
    fake_world.assert_same_bits(checkpoint.restore(tmp_path / "c", LAYOUTS), wanted)


def own_memory(pid):
    """Bytes of a process that are neither files nor shared: what it takes beside the arena."""
    with open(f"/proc/{pid}/status") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith("RssAnon"))


@pytest.mark.slow
def test_memory_beside_the_arena(tmp_path):
    state = {f"w{i}": torch.ones(2 * MIB // 4) for i in range(20)} | {f"s{i}": torch.ones(999) for i in range(50)}
    layouts = {k: Layout(tuple(x.shape), x.dtype, Mesh()) for k, x in state.items()}
    nbytes = sum(x.nbytes for x in state.values())
    with checkpoint.AsyncSaver() as saver:
        checkpoint.save_async(tmp_path / "warm", state, layouts, saver=saver).result()
        assert saver.memory_bytes <= 1.01 * nbytes
        for _ in range(2):
            pids = (os.getpid(), saver.writer_pid)
            before, most = list(map(own_memory, pids)), [0, 0]
            handle = checkpoint.save_async(tmp_path / "c", state, layouts, saver=saver)
            while not handle.poll():
                most = [max(a, own_memory(pid)) for a, pid in zip(most, pids, strict=True)]
                time.sleep(0.001)  # the writer needs the core
            extra = sum(max(0, a - b) for a, b in zip(most, before, strict=True))
            assert extra <= 0.05 * nbytes, (most, before)
        assert saver.memory_bytes <= 1.01 * nbytes

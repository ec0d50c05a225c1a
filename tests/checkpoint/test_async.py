"""Asynchronous saves of one process: what is on disk is the state at the call, several in flight, bounds, times."""

import os
import signal
import time

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint.background.arena import BOARD_BYTES
from fmegatron.checkpoint.background.staging import groups, portions, stage
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.layout import Layout, Mesh
from tests.checkpoint import fake_world
from tests.checkpoint.tokens import files_of

MESH = Mesh()
MIB = 1 << 20


def a_state(seed=0, rows=512):
    g = torch.Generator().manual_seed(seed)
    state = {f"w{i}": torch.randn(rows, 512, generator=g) for i in range(4)}
    state |= {f"small/{i}".replace("/", "_"): torch.randn(7, generator=g) for i in range(9)}
    return state | {
        "bf16": torch.randn(256, 256, generator=g).bfloat16(),
        "fp8": torch.randn(300, 300, generator=g).to(torch.float8_e4m3fn),
        "c64": torch.randn(100, 100, generator=g, dtype=torch.complex64),
        "bool": torch.randn(300, 300, generator=g) > 0,
        "step": torch.tensor(7),
        "empty": torch.empty(0, 3),
    }


def layouts_of(state):
    return {k: Layout(tuple(x.shape), x.dtype, MESH) for k, x in state.items()}


LAYOUTS = layouts_of(a_state())


@pytest.fixture(scope="module")
def saver():
    with checkpoint.AsyncSaver() as saver:
        yield saver


def stopped(saver):
    """The writer stands still until `go`: what is staged is not yet read."""
    saver.reserve(LAYOUTS)
    os.kill(saver.writer_pid, signal.SIGSTOP)


def go(saver):
    os.kill(saver.writer_pid, signal.SIGCONT)


def files(root):
    return {
        str(p.relative_to(files_of(root))): p.read_bytes() for p in sorted(files_of(root).rglob("*")) if p.is_file()
    }


@pytest.mark.long
def test_same_files_as_save(saver, tmp_path):
    state = a_state()
    checkpoint.save(tmp_path / "sync", state, LAYOUTS, metadata={"a": [1, None]}, step=3)
    handle = checkpoint.save_async(tmp_path / "async", state, LAYOUTS, metadata={"a": [1, None]}, step=3, saver=saver)
    assert not handle.done and handle.bytes == sum(x.nbytes for x in state.values())
    handle.result()
    assert files(tmp_path / "async") == files(tmp_path / "sync")
    assert handle.poll() and handle.state == "durable" and handle.progress == (handle.bytes, handle.bytes)
    assert 0 < handle.staged_s < handle.durable_s


def test_state_overwritten_at_once(saver, tmp_path):
    state, wanted = a_state(), a_state()
    stopped(saver)
    handle = checkpoint.save_async(tmp_path / "c", state, LAYOUTS, saver=saver)
    for x in state.values():
        x.view(torch.uint8).fill_(255) if x.ndim else x.fill_(255)
    assert handle.poll() is False and handle.progress == (0, handle.bytes)
    go(saver)
    handle.result()
    fake_world.assert_same_bits(checkpoint.restore(tmp_path / "c", LAYOUTS), wanted)


def test_strided_conjugated_and_device_like_tensors(saver, tmp_path):
    """What is no plain memory goes through torch; parameters and tensors that need gradients are only read."""
    state = {
        "transposed": torch.randn(300, 200).t(),
        "sliced": torch.randn(400, 400)[::2, 1:],
        "conjugated": torch.randn(128, 128, dtype=torch.complex64).conj(),
        "negative": torch.randn(128, 128, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(128, 256)),
        "part": torch.randn(1000, 100)[200:900],
        "big": torch.randn(2, 5 * MIB // 4),
    }
    layouts = layouts_of(state)
    wanted = {k: x.detach().resolve_conj().resolve_neg().clone() for k, x in state.items()}
    torch.set_num_threads(3)
    checkpoint.save_async(tmp_path / "c", state, layouts, saver=saver).result()
    fake_world.assert_same_bits(checkpoint.restore(tmp_path / "c", layouts), wanted)


@pytest.mark.long
def test_several_in_flight_end_in_order(tmp_path):
    states = [a_state(i) for i in range(4)]
    with checkpoint.AsyncSaver(arena_bytes=64 * MIB, in_flight=3) as saver:
        stopped(saver)
        handles = [checkpoint.save_async(tmp_path / str(i), states[i], LAYOUTS, saver=saver) for i in range(3)]
        assert saver.pending == tuple(handles) and not open_store(tmp_path / "0").is_complete()
        go(saver)
        handles.append(checkpoint.save_async(tmp_path / "3", states[3], LAYOUTS, saver=saver))  # waits for the oldest
        assert handles[0].state == "durable" and len(saver.pending) <= 3
        handles[-1].result()
        assert [h.state for h in handles] == ["durable"] * 4
    for i, state in enumerate(states):
        fake_world.assert_same_bits(checkpoint.restore(tmp_path / str(i), LAYOUTS), state)


@pytest.mark.long
def test_same_path_again_waits_for_the_first(saver, tmp_path):
    first = checkpoint.save_async(tmp_path / "c", a_state(1), LAYOUTS, saver=saver)
    second = checkpoint.save_async(tmp_path / "c", a_state(2), LAYOUTS, saver=saver)
    assert first.state == "durable"
    second.result()
    fake_world.assert_same_bits(checkpoint.restore(tmp_path / "c", LAYOUTS), a_state(2))
    assert os.listdir(tmp_path) == ["c"]


def test_state_larger_than_the_arena(tmp_path):
    state = a_state(rows=2048)
    layouts = layouts_of(state)
    with checkpoint.AsyncSaver(arena_bytes=9 * MIB) as saver:
        checkpoint.save_async(tmp_path / "c", state, layouts, saver=saver).result()
        assert saver.memory_bytes <= 9 * MIB + BOARD_BYTES
    fake_world.assert_same_bits(checkpoint.restore(tmp_path / "c", layouts), state)


@pytest.mark.long
def test_arena_smaller_than_a_chunk_goes_back_to_its_bound(tmp_path):
    state = a_state()
    with checkpoint.AsyncSaver(arena_bytes=8192) as saver:
        checkpoint.save_async(tmp_path / "c", state, LAYOUTS, saver=saver).result()
        assert saver.memory_bytes <= 8192 + BOARD_BYTES
    fake_world.assert_same_bits(checkpoint.restore(tmp_path / "c", LAYOUTS), state)


def test_wrong_requests_begin_nothing(saver, tmp_path):
    with pytest.raises(ValueError, match="w0: got"):
        checkpoint.save_async(tmp_path / "c", a_state() | {"w0": torch.zeros(3)}, LAYOUTS, saver=saver)
    with pytest.raises(ValueError, match="metadata"):
        checkpoint.save_async(tmp_path / "c", a_state(), LAYOUTS, None, {"a": object()}, saver=saver)
    with pytest.raises(ValueError, match="structure"):
        checkpoint.save_async(tmp_path / "c", list(a_state().values()), LAYOUTS, saver=saver)
    with pytest.raises(ValueError, match="w0: got dtype f64"):
        checkpoint.save_async(tmp_path / "c", a_state() | {"w0": a_state()["w0"].double()}, LAYOUTS, saver=saver)
    assert os.listdir(tmp_path) == [] and saver.pending == ()
    with pytest.raises(ValueError, match="in_flight=0"):
        checkpoint.AsyncSaver(in_flight=0)


@pytest.mark.medium
def test_a_saver_of_its_own(tmp_path):
    handle = checkpoint.save_async(tmp_path / "c", a_state(), LAYOUTS)
    pid = handle.flights.process.pid
    while not handle.poll():
        time.sleep(0.01)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    fake_world.assert_same_bits(checkpoint.restore(tmp_path / "c", LAYOUTS), a_state())


@pytest.mark.parametrize("limit", [None, 1, 700, 5000])
def test_portions_hold_what_the_rank_writes_once(limit):
    mesh = Mesh(dp=2, tp=2)
    layouts = {
        "grid": Layout((64, 48), torch.float32, mesh, ("tp", None)),
        "whole": Layout((64, 48), torch.int16, mesh, ("dp", "tp")),
        "flat": Layout((7, 5), torch.float32, mesh, flat="dp"),
        "scalar": Layout((), torch.float64, mesh),
    }
    state = {k: torch.arange(x.nbytes // x.dtype.itemsize).view(x.shape).to(x.dtype) for k, x in layouts.items()}
    seen = {k: torch.zeros(x.shape, dtype=torch.int64) for k, x in layouts.items()}
    with fake_world.small_sizes():
        plans = checkpoint.writing.saving.plan(list(layouts), list(layouts.values()))
        for rank, local in enumerate(fake_world.cut_tree(state, layouts)):
            tensors = [local[k] for k in layouts]
            for portion in portions(plans, rank, limit):
                memory = torch.zeros(4096 + portion.nbytes, dtype=torch.uint8)
                stage(portion, plans, tensors, memory, 4096)
                assert limit is None or portion.nbytes <= limit + 64 or len(portion.slots) == 1
                for leaves, views, chunks, _ in groups(portion, plans, rank, memory, 4096):
                    for leaf, x, some in zip(leaves, views, chunks, strict=True):
                        boxes = leaf.layout.boxes(rank) if some is None else [box for _, box in some]
                        for box in boxes:
                            assert torch.equal(box.view(x), state[leaf.path][box.slices])
                            seen[leaf.path][box.slices] += 1
    assert all((count == 1).all() for count in seen.values())

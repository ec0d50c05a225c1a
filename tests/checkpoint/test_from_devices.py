"""Saves of a state on a device: it leaves on a stream of its own, and what is computed next follows on the device."""

import contextlib
import functools
import time

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.checkpoint.background import arena, async_save, staging
from fmegatron.checkpoint.background.staging import begin_staging, portions, stage
from fmegatron.checkpoint.writing.saving import plan
from fmegatron.layout import Layout, Mesh
from tests.checkpoint import fake_world
from tests.streams import Late, there

CUDA = torch.device("cuda", 0)
LAYOUTS = {name: Layout((64, 8), torch.float32, Mesh()) for name in ("a", "b")}


def a_state():
    return {name: torch.randn(64, 8, generator=torch.Generator().manual_seed(ord(name))) for name in LAYOUTS}


class Driver:
    """What CUDA's runtime is asked: ("register", bytes) and ("unregister",); registers `most` pieces."""

    def __init__(self, most=1 << 30):
        self.asked, self.pieces, self.most, self.current = [], set(), most, None

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802  as CUDA calls it
        self.asked.append((self.current, nbytes))
        if len(self.pieces) == self.most:
            return 2
        self.pieces.add(address)
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802
        self.pieces.remove(address)
        return 0

    @contextlib.contextmanager
    def device(self, device):
        self.current = device
        yield
        self.current = None


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(arena, "_cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "device", found.device)
    return found


@pytest.fixture
def late(monkeypatch):
    found = Late()
    own = functools.partial(begin_staging, streams=lambda device: found)
    monkeypatch.setattr(async_save, "begin_staging", own)
    return found


@pytest.fixture(scope="module")
def saver():
    with checkpoint.AsyncSaver(pin=False) as saver:
        yield saver


def durable(handle):
    until = time.monotonic() + 120
    while not handle.poll():
        assert time.monotonic() < until
        time.sleep(0.01)


# ---- no donated buffer is written before its staging event -----------------------------------------------------------
def test_the_next_step_follows_what_leaves(late, saver, tmp_path):
    """It writes into the memory that is saved at once, and what is restored is of before."""
    state = {name: there(x) for name, x in a_state().items()}
    handle = checkpoint.save_async(tmp_path / "c", state, LAYOUTS, saver=saver)
    assert late.waits == 0 and not handle.sent  # nothing has left yet, and the host has not waited
    for x in state.values():
        late.launch(lambda x=x: x.fill_(-1.0), late.compute)
    handle.poll()
    assert not handle.sent
    late.do(late.mark(late.compute))
    durable(handle)
    fake_world.assert_same_bits(checkpoint.restore(tmp_path / "c", LAYOUTS), a_state())


def test_without_the_event_the_next_step_would_be_saved(late, saver, tmp_path, monkeypatch):
    """The device of these tests shows it."""
    follow = late.follow
    monkeypatch.setattr(late, "follow", lambda stream, event: None if stream is late.compute else follow(stream, event))
    handles = []
    monkeypatch.setattr(late, "is_done", lambda event: late.do(event) or True if handles else Late.is_done(late, event))
    state = {name: there(x) for name, x in a_state().items()}
    handles.append(checkpoint.save_async(tmp_path / "c", state, LAYOUTS, saver=saver))
    for x in state.values():
        late.launch(lambda x=x: x.fill_(-1.0), late.compute)
    late.do(late.mark(late.compute))
    durable(handles[0])
    assert all((x == -1).all() for x in checkpoint.restore(tmp_path / "c", LAYOUTS).values())


def test_the_state_is_there_before_it_leaves(late, saver, tmp_path):
    """What computes it was launched before, and is not done when it is saved."""
    state = {name: there(torch.zeros_like(x)) for name, x in a_state().items()}
    for name, x in a_state().items():
        late.launch(lambda name=name, x=x: state[name].copy_(x), late.compute)
    handle = checkpoint.save_async(tmp_path / "c", state, LAYOUTS, saver=saver)
    late.do(late.mark(late.streams[-1]))
    durable(handle)
    fake_world.assert_same_bits(checkpoint.restore(tmp_path / "c", LAYOUTS), a_state())


def test_memory_that_is_filled_is_not_moved_or_given_back(late, saver, tmp_path):
    """Another save wants room, and one is given up: what comes from the device comes first."""
    state = {name: there(x) for name, x in a_state().items()}
    first = checkpoint.save_async(tmp_path / "a", state, LAYOUTS, saver=saver)
    second = checkpoint.save_async(tmp_path / "b", state, LAYOUTS, saver=saver)
    assert late.waits == 1 and first.sent and not second.sent
    second.abandon()
    assert late.waits == 2
    durable(first)
    assert not (tmp_path / "b").exists()


# ---- strided elements, and memory that is page-locked ----------------------------------------------------------------
@pytest.mark.parametrize("bounce", [1 << 20, 256, 24])
def test_strided_boxes_leave_through_memory_of_the_device(monkeypatch, bounce):
    """As many bytes at a time as it has; the same bytes as those of a state on the host."""
    monkeypatch.setattr(staging, "_BOUNCE_BYTES", bounce)
    mesh, late = Mesh(dp=2, tp=2), Late()
    layouts = {
        "grid": Layout((64, 48), torch.float32, mesh, ("tp", None)),
        "whole": Layout((64, 48), torch.int16, mesh, ("dp", "tp")),
        "flat": Layout((7, 5), torch.float32, mesh, flat="dp"),
    }
    state = {k: torch.arange(x.nbytes // x.dtype.itemsize).view(x.shape).to(x.dtype) for k, x in layouts.items()}
    strided, rooms = 0, []
    monkeypatch.setattr(late, "room", lambda nbytes: rooms.append(nbytes) or Late.room(late, nbytes))
    with fake_world.small_sizes():
        plans = plan(list(layouts), list(layouts.values()))
        for rank, local in enumerate(fake_world.cut_tree(state, layouts)):
            tensors = [local[k] for k in layouts]
            for portion in portions(plans, rank, None):
                wanted, memory = (torch.zeros(4096 + portion.nbytes, dtype=torch.uint8) for _ in range(2))
                stage(portion, plans, tensors, wanted, 4096)
                given = [there(x.t().contiguous()).t() if x.dim() == 2 else there(x) for x in tensors]
                landing = begin_staging(portion, plans, given, memory, 4096, lambda device: late)
                assert not landing.is_done and not memory.any()
                landing.wait()
                assert torch.equal(memory, wanted) and landing.is_done
                strided += len(rooms)
                assert set(rooms) <= {bounce} and len(rooms) <= 1
                rooms.clear()
    assert strided


def test_the_arena_is_page_locked_in_pieces_for_states_on_cuda(late, driver, tmp_path, monkeypatch):
    """With its device current, and not for a state on the CPU; given back at the end."""
    monkeypatch.setattr(arena, "_PIN_BYTES", 4096)
    with checkpoint.AsyncSaver() as saver:
        durable(checkpoint.save_async(tmp_path / "a", a_state(), LAYOUTS, saver=saver))
        assert driver.asked == []
        handle = checkpoint.save_async(
            tmp_path / "b", {k: there(x) for k, x in a_state().items()}, LAYOUTS, saver=saver
        )
        late.finish()
        durable(handle)
        assert len(driver.pieces) > 1 and {device for device, _ in driver.asked} == {CUDA}
        assert sum(nbytes for _, nbytes in driver.asked[-len(driver.pieces) :]) == saver.memory_bytes
    assert not driver.pieces


def test_memory_that_is_not_page_locked_is_said(monkeypatch):
    driver = Driver(most=1)
    monkeypatch.setattr(arena, "_cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", driver.device)
    monkeypatch.setattr(arena, "_PIN_BYTES", 4096)
    one = arena.Arena()
    one.reserve(3 * 4096)
    with pytest.raises(RuntimeError, match=r"CUDA error 2 when 4,096 bytes of 16,384 were page-locked; .*pin=False"):
        one.pin(CUDA)
    assert not driver.pieces
    one.close()

"""Asynchronous saves of real ranks: one writer that dies, is stuck or is given up ends the save on all of them."""

import os
import signal
import time

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.collectives import connect
from fmegatron.layout import Layout, Mesh
from tests.checkpoint import fake_world

SHAPE = (256, 192)
SECONDS = 600


def layouts_on(mesh):
    return {
        "cut": Layout(SHAPE, torch.float32, mesh, ("fsdp", "tp")),
        "whole": Layout(SHAPE, torch.bfloat16, mesh),
        "n": Layout((), torch.int64, mesh),
    }


def whole(seed):
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    return {"cut": x, "whole": x.bfloat16(), "n": torch.tensor(seed)}


def poll_until_error(handle):
    """What a training loop does; returns the message."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            if handle.poll():
                return "durable"
        except RuntimeError as error:
            return str(error)
        time.sleep(0.01)
    return "nothing happened"


def everything(rank, path, sizes):
    """A save, then one with each kind of trouble on one rank, each followed by a save that works."""
    mesh, seen = Mesh(**sizes), {}
    layouts, last = layouts_on(mesh), mesh.size - 1
    locals_of = lambda seed: fake_world.cut_tree(whole(seed), layouts)[rank]  # noqa: E731
    with connect(mesh, device="cpu") as world, checkpoint.AsyncSaver() as saver:
        saver.reserve(layouts, world)

        def begin(name, seed, stop=()):
            """Stand-still writers on some ranks, so that the save is surely under way; the state is gone at once."""
            if rank in stop:
                os.kill(saver.writer_pid, signal.SIGSTOP)
            state = locals_of(seed)
            handle = checkpoint.save_async(f"{path}/{name}", state, layouts, world, {"seed": seed}, saver=saver)
            for x in state.values():
                x.zero_()
            return handle

        handle = begin("first", 1)
        handle.result()
        seen["staged"] = handle.bytes

        begin("again", 2).result()
        handle = begin("killed", 3, stop=[last])
        if rank == last:
            os.kill(saver.writer_pid, signal.SIGKILL)
        seen["killed"] = poll_until_error(handle)
        begin("killed", 4).result()

        handle = begin("stuck", 5, stop=[0])
        saver._flights.time_limit_s = 1.0  # only now: a busy machine may starve a healthy writer for as long
        seen["stuck"] = poll_until_error(handle)
        saver._flights.time_limit_s = 600.0
        begin("stuck", 6).result()
        saver.reserve(layouts, world)

        handle = begin("abandoned", 7, stop=[last])
        try:
            handle.result(timeout_s=0.2)
        except TimeoutError as error:
            seen["late"] = str(error)
        if rank == last:
            os.kill(saver.writer_pid, signal.SIGCONT)
        handle.abandon()
        seen["abandoned"] = handle.state, [name for name in os.listdir(path) if "abandoned" in name]

        if rank == last:
            os.kill(saver.writer_pid, signal.SIGSTOP)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
        seen["pressed"] = press_while_waiting(saver, begin("waited", 8), rank == last)
        seen["polled"] = press_after_agreeing(saver, world, begin("polled", 9), rank == last)
        begin("polled", 10).result()
    return seen


def press_after_agreeing(saver, world, handle, mine):
    """Ctrl-C on one rank in the very exchange in which all learn that the save is durable."""
    minimum, presses = world.minimum, 0

    def then_press(row):
        nonlocal presses
        least = minimum(row)
        if int(least[2]) and int(least[3]):  # all have written it, and rank 0 has committed it
            presses += 1
            os.kill(os.getpid(), signal.SIGINT)
        return least

    if mine:
        world.minimum = then_press
    try:
        said = poll_until_error(handle)
    except KeyboardInterrupt:
        said = "KeyboardInterrupt"
    if mine:
        del world.minimum
    return said, handle.state, len(saver.pending), presses


def press_while_waiting(saver, handle, mine):
    """SIGALRM stands for a Ctrl-C that comes while `result` waits."""
    if mine:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        handle.result()
        return "no interrupt"
    except KeyboardInterrupt:
        text = "KeyboardInterrupt"
    except RuntimeError as error:
        text = str(error)
    if mine:
        os.kill(saver.writer_pid, signal.SIGCONT)
    handle.result()
    return text, handle.state


def check(ranks, tmp_path, **sizes):
    mesh = Mesh(**sizes)
    last, n = mesh.size - 1, mesh.size
    seen = ranks.run(everything, str(tmp_path), sizes, ranks=n)
    layouts = layouts_on(mesh)
    stored = sum(x.nbytes for x in layouts.values())
    assert sum(s["staged"] for s in seen) == stored  # replicas share the work, nothing is staged twice
    killed = f"saving the checkpoint {tmp_path}/killed failed on rank {last} of {n}: its writer process"
    assert len({s["killed"] for s in seen}) == 1 and seen[0]["killed"].startswith(killed)
    assert seen[0]["killed"].endswith("was killed by SIGKILL")
    assert len({s["stuck"] for s in seen}) == 1
    assert "failed on rank 0" in seen[0]["stuck"] and "made no progress" in seen[0]["stuck"], seen[0]["stuck"]
    assert "it was stopped" in seen[0]["stuck"]
    assert all("not durable after 0.2 s on rank" in s["late"] for s in seen)
    assert [s["abandoned"] for s in seen] == [("abandoned", [])] * n  # nothing hidden is left either
    assert seen[last]["pressed"] == ("KeyboardInterrupt", "durable")
    others = [s["pressed"] for s in seen[:last]]
    assert all("was interrupted on rank" in text and state == "durable" for text, state in others), others
    polled = [("durable", "durable", 0, 0)] * last + [("KeyboardInterrupt", "durable", 0, 1)]
    assert [s["polled"] for s in seen] == polled
    one = layouts_on(Mesh(fsdp=1, tp=1))
    for name, seed in (("first", 1), ("again", 2), ("killed", 4), ("stuck", 6), ("waited", 8), ("polled", 10)):
        fake_world.assert_same_bits(checkpoint.restore(tmp_path / name, one), whole(seed), name)
        assert checkpoint.metadata(tmp_path / name) == {"seed": seed}
    assert sorted(os.listdir(tmp_path)) == ["again", "first", "killed", "polled", "stuck", "waited"]


# Writers of four ranks are interpreters of their own, which take seconds each time that one is killed.
@pytest.mark.medium
@pytest.mark.parametrize(
    "sizes", [{"fsdp": 1, "tp": 2}, pytest.param({"fsdp": 2, "tp": 2}, marks=pytest.mark.slow)], ids=str
)
def test_ranks(ranks, tmp_path, sizes):
    check(ranks, tmp_path, **sizes)

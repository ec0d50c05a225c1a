"""Restarts in the process, on two ranks: what goes on, and that nothing is left behind, however many there are."""

import json
import os
import re
import signal
import time

import pytest
import torch
from torch.distributed import HashStore

from fmegatron.collectives import World
from fmegatron.layout import Mesh
from fmegatron.loop import Restart
from fmegatron.loop.faults.notice import Faults, Place
from fmegatron.loop.faults.pulse import Pulse
from fmegatron.loop.restart import Restarts, started
from fmegatron.loop.signals import catch


def restarted(python, folder, backend, steps):
    """(what each rank printed last, what the first wrote on stderr) of `restarting`."""
    texts = python.two_ranks("tests.loop.restarting", folder, backend, steps)
    return [json.loads(out.splitlines()[-1]) for out, _ in texts], texts[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_restarts_leave_nothing_behind(python, tmp_path, backend):
    """20 restarts (3 with Inductor), as many on each rank: no descriptor, thread, process or compilation more."""
    steps = 23 if backend == "eager" else 6
    ranks, err = restarted(python, tmp_path / "run", backend, steps)
    assert len(re.findall(r"restart \d+ in the process", err)) == steps - 3
    for rank in ranks:
        assert [int(step) for step in rank["held"]] == list(range(1, steps + 1))
        held = list(rank["held"].values())
        for what, more in ((0, 2), (1, 2), (2, 0)):  # descriptors, threads, child processes
            assert held[-1][what] <= max(one[what] for one in held[: len(held) // 2]) + more, held
        assert rank["graphs"] == 1 and rank["inductor"] <= 1
    clean, _ = restarted(python, tmp_path / "clean", backend, 3)
    assert ranks[0]["graphs"] == clean[0]["graphs"] == 1


def test_one_that_is_told_to_end_waits_for_no_word():
    """torchrun ends the others after a rank was killed; until they have ended it starts nothing."""
    pulse, board, lost = Pulse(rank=0), HashStore(), RuntimeError("Connection closed by peer")
    pulse.opened(board)
    restarts = Restarts(Restart(), World(Mesh(dp=2), 0, torch.device("cpu")), pulse)
    began = time.monotonic()
    assert not restarts.again(lost, 3, given_up=lambda: True)
    with pytest.raises(RuntimeError, match="Connection closed by peer"), catch():
        os.kill(os.getpid(), signal.SIGTERM)
        raise lost
    assert lost.__notes__ == ["Meanwhile this process was sent SIGTERM."]
    faults = Faults(Place(0, 2), "nowhere", 0)
    faults._board = board
    faults._open.set()
    assert faults.report(lost) == "rank 0: RuntimeError: Connection closed by peer"
    assert time.monotonic() - began < 2
    board.set("failed", "rank 1: a word")  # one that is there already is heard
    assert faults.report(lost) == "rank 1: a word"


def test_one_that_has_not_begun_goes_on_after_the_fault_of_another():
    """Ranks finish their first update at different times: whether they go on is decided alike. An own fault before
    the first update is none of a run that goes on."""
    lost, own = RuntimeError("Connection closed by peer"), ValueError("of this rank")
    pulse, world = Pulse(rank=0), World(Mesh(dp=2), 0, torch.device("cpu"))
    pulse.opened(HashStore())
    met = []
    world.renew = lambda *_: met.append(pulse.attempt)
    world.minimum = lambda row: row
    restarts = Restarts(Restart(), world, pulse)
    assert not restarts.again(own, 0, lambda: False, began=False) and pulse.fault() is None
    assert restarts.again(own, 1, lambda: False, began=True) and pulse.fault(0) == "rank 0: ValueError: of this rank"
    pulse.report("of another")
    assert restarts.again(lost, 0, lambda: False, began=False) and met == [0, 1]
    alone = Restarts(Restart(), World.alone("cpu"), Pulse())
    assert not alone.again(own, 0, lambda: False, began=False)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (torch.AcceleratorError, "The device is lost to this process: only a new one .*CUDA_LAUNCH_BLOCKING=1"),
        (torch.OutOfMemoryError, "A new process begins with all of the memory .*--max-restarts"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_a_device_that_is_lost_is_no_restart_in_the_process(kind, says, size):
    """Its ranks would wait for one that fails again in every call. The errors that it caused know it too."""
    pulse, world = Pulse(rank=0), World(Mesh(dp=size), 0, torch.device("cpu"))
    pulse.opened(HashStore())
    world.renew = lambda *_: pytest.fail("it waits for the others")
    for wrapped in (False, True):
        error = caused(kind("CUDA error: device-side assert triggered")) if wrapped else kind("CUDA error")
        assert not Restarts(Restart(), world, pulse).again(error, 3, lambda: False)
        assert re.match(says, error.__notes__[0]) and pulse.fault() is None


def caused(error):
    try:
        try:
            raise error
        except RuntimeError as found:
            raise ValueError("what came of it") from found
    except ValueError as found:
        return found


def test_starts_that_get_no_further_are_counted(tmp_path, monkeypatch):
    """Of one job; whoever starts it by hand begins to count anew."""
    path, world, rules = tmp_path / "starts.json", World.alone("cpu"), Restart(2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    for step in (0, 0, 0, 4, 4, 4):  # a start, then restarts
        started(path, step, rules, world)
    with pytest.raises(RuntimeError, match="2 restarts went on from step 4, and none got to a checkpoint behind it"):
        started(path, 4, rules, world)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    started(path, 4, rules, world)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    started(path, 4, rules, world)
    started(path, 4, rules, world)
    started(path, 4, rules, world)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for text in ("{", "[1]", "7", "[" * 100_000, '{"step": 4, "restarts": null}', '{"step": 4, "restarts": "9"}'):
        path.write_text(text)  # of anybody: the other ranks wait for this one
        started(path, 4, rules, world)
    with pytest.raises(ValueError, match="wanted most of at least 0"):
        Restart(-1)

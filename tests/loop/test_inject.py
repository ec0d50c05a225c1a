"""Faults on request: how they are written, where they happen, and that each happens once."""

import math
import os
import signal
import time

import pytest
import torch

from fmegatron.loop.faults import inject
from fmegatron.loop.faults.inject import Injection, Injector


def test_how_faults_are_written():
    text = "kill:rank=2,step=17+slow:step=3,seconds=0.5+diskfull:rank=all,at=save+nan"
    faults = Injection.parse(text)
    assert faults == (
        Injection("kill", 2, 17),
        Injection("slow", None, 3, seconds=0.5),
        Injection("diskfull", None, 1, "save"),
        Injection("nan"),
    )
    assert Injection.parse("+".join(map(str, faults))) == faults and Injection.parse("") == ()


@pytest.mark.parametrize(
    "text, words",
    [
        ("kil:rank=2", r"inject: got 'kil', wanted one of .*did you mean kill"),
        ("kill:rank=two", r"inject: kill:rank=two: got 'rank=two', wanted rank=, step=, seconds= with a number"),
        ("kill:when=2", "got 'when=2', wanted rank="),
        ("nan:at=lunch", "at: got 'lunch', wanted one of setup, step"),
        ("kill:seconds=3", "seconds: got 3.0, wanted none: it has no duration"),
    ],
)
def test_what_is_no_fault(text, words):
    with pytest.raises(ValueError, match=words):
        Injection.parse(text)


def test_where_and_how_often(tmp_path):
    faults = "exception:rank=1,step=3+exception:rank=0,step=4+exception:step=6,at=save"
    own = Injector(faults, 1, tmp_path)
    own("step", 2)
    own("step", 4)  # of another rank; and the third step has not been seen here, so its fault has not either
    with pytest.raises(ValueError, match="got exception:step=6,at=save, wanted none"):
        own("save", 7)  # the first save at or behind it
    Injector(faults, 1, tmp_path)("save", 8)  # the process that was started again
    with pytest.raises(ValueError, match="injected"):
        Injector(faults, 0, tmp_path)("step", 4)
    with pytest.raises(ValueError, match="injected"):  # without a folder: once in a process
        Injector(faults, 0)("step", 4)


def test_what_happens_to_a_state():
    state = {"n": torch.tensor(3), "w": torch.ones(2, 3, dtype=torch.bfloat16)}
    Injector("nan")("step", 1, state)
    assert math.isnan(state["w"][0, 0]) and state["w"][0, 1] == 1
    for dtype in (torch.float8_e5m2, torch.bfloat16, torch.float32, torch.float64):
        x = torch.ones(3).to(dtype)
        Injector("bitflip")("step", 1, x)
        assert x[0].float() != 1 and math.isfinite(x[0].float()) and x[1].float() == 1
    with pytest.raises(RuntimeError, match="allocate|memory"):
        Injector("oom")("step", 1, state)


def test_how_a_rank_leaves_slows_down_and_stops():
    with pytest.raises(SystemExit) as left:
        Injector("exit")("step", 1)
    assert left.value.code == 3
    slow, began = Injector("slow:seconds=0.02"), time.monotonic()
    step = slow.slowed(lambda state, batch: state + batch)
    for number in (1, 2, 3):
        slow("step", number)
        assert step(number, 2) == number + 2
    assert time.monotonic() - began >= 0.06
    seen = []
    before = signal.signal(signal.SIGCONT, lambda *_: seen.append("goes on"))
    try:
        Injector("stop:seconds=0.05")("step", 1)
        time.sleep(0.01)
    finally:
        signal.signal(signal.SIGCONT, before)
    assert seen == ["goes on"]


def test_a_rank_that_is_slow_from_the_set_up_on():
    slow, began = Injector("slow:seconds=0.02,at=setup"), time.monotonic()
    slow("setup", 0)
    step = slow.slowed(lambda state, batch: state + batch)  # the loop takes the step when all is set up
    assert [step(number, 2) for number in (1, 2)] == [3, 4]
    assert time.monotonic() - began >= 0.04


def test_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "write", os.write)  # put back at the end
    monkeypatch.setattr(inject, "_children", lambda pid: [])
    Injector("diskfull:seconds=0.2")("step", 1)
    with open(tmp_path / "x", "wb") as file:
        with pytest.raises(OSError, match="No space left on device"):
            os.write(file.fileno(), b"x")
        time.sleep(0.25)
        assert os.write(file.fileno(), b"x") == 1

"""Hangs: limits that are learnt, who is behind, stacks of every rank that can, status 75; in real processes."""

import os
import re
import subprocess
import sys
import threading
import time

import pytest
import torch

from fmegatron.collectives import World
from fmegatron.layout import Mesh
from fmegatron.loop import Restart
from fmegatron.loop.events import read_events
from fmegatron.loop.faults import siblings
from fmegatron.loop.faults.hang import HANG, _Watch
from fmegatron.loop.faults.pulse import Patience, Pulse
from fmegatron.loop.faults.siblings import kill_siblings, own_process
from fmegatron.loop.restart import Restarts
from tests.house import ROOT


def test_limits_are_learnt_for_each_section(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pulse = Pulse(Patience(setup=100, step=3, save=7, factor=5), rank=1)
    limits = []
    for section, seconds in (("setup", 50), ("step", 0.5), ("save", 2), ("step", 1.5), ("step", 0.2), ("save", 1)):
        if section != "setup":
            pulse.enter(section, 4)
        limits.append(pulse.now.limit)
        now[0] += seconds
    assert limits == [100, 3, 7, 3, 7.5, 10] and pulse.now.count == 5 and pulse.now.step == 4
    free = Pulse()
    free.enter("step", 1)
    assert free.now.limit == float("inf") and free.fault() is None
    with pytest.raises(ValueError, match="Patience: save: got 0, wanted a number above 0"):
        Patience(save=0)


def test_only_processes_of_this_job_are_killed():
    sleeper = subprocess.Popen(["sleep", "60"])
    other = {**own_process("here"), "pid": sleeper.pid, "started": siblings._started_at(sleeper.pid)}
    wrong = [{"host": "there"}, {"parent": 1}, {"started": 5}, {"started": None}, {"pid": os.getpid()}]
    assert kill_siblings({n: {**other, **w} for n, w in enumerate(wrong)}, "here") == [] and sleeper.poll() is None
    assert kill_siblings({3: other}, "here") == [3] and sleeper.wait() == -9
    assert kill_siblings({3: other}, "here") == []


LOOP = """
import sys, threading, time
from fmegatron.loop.faults import hang
from fmegatron.loop.faults.hang import watched
from fmegatron.loop.faults.pulse import Patience, Pulse

arm, armed = hang._Watch._arm, threading.Event()

def arms(self):
    section = self.pulse.now.section
    arm(self)
    if section == "step":
        armed.set()

hang._Watch._arm = arms

def hangs(pulse, kind):
    pulse.enter("step", 7)
    print(time.time(), flush=True)
    if kind == "gil":
        import ctypes
        ctypes.PyDLL(None).sleep(6)  # PyDLL keeps the GIL
    time.sleep(60)

limits = dict.fromkeys(("compile", "step", "caller", "end"), float(sys.argv[3]))
with watched(Pulse(Patience(setup=30, **limits), 0), sys.argv[1]) as pulse:
    for step in range(1, 4):  # no hang: each takes less than its limit
        pulse.enter("step", step)
        time.sleep(0.05)
    if sys.argv[2] == "none":
        sys.exit(0)
    while sys.argv[2] == "gil" and not armed.is_set():  # the watch looks a few times a second: it has seen a step
        pulse.enter("step", 4)
        time.sleep(0.01)
    hangs(pulse, sys.argv[2])
"""


HOLDS = """
import ctypes, sys, threading
from fmegatron.loop.faults.siblings import write_stacks_into

def holds(seconds):
    print("holds", flush=True)
    for _ in range(seconds):  # PyDLL keeps the GIL: no other thread of Python runs. A signal ends a sleep
        ctypes.PyDLL(None).sleep(1)

with open(sys.argv[1], "a") as file:
    write_stacks_into(file)
    threading.Thread(target=threading.Event().wait, daemon=True, name="pulse").start()
    holds(60)
"""


def test_the_rank_that_holds_the_gil_leaves_its_stack(tmp_path, python):
    """Its own watch cannot run; the ranks beside it ask for its stacks, and then end it."""
    path = tmp_path / "rank-1.txt"
    process = python.popen([sys.executable, "-c", HOLDS, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "holds\n"
    other = {**own_process("here"), "pid": process.pid, "started": siblings._started_at(process.pid)}
    other["stacks"] = True
    assert kill_siblings({1: other}, "here") == [1] and process.wait() == -9
    process.stdout.close()
    text = path.read_text()
    assert "in holds" in text and text.count("hread 0x") == 2  # of all its threads


@pytest.mark.long
@pytest.mark.parametrize("kind", ["none", "sleep", pytest.param("gil", marks=pytest.mark.slow)])
def test_one_process_that_hangs(tmp_path, python, kind):
    """Beyond its limit, half a second to the stacks, also where not even a thread of Python can run."""
    limit = "2.0" if kind == "gil" else "0.6"  # of a machine under load, where nothing measures how late it is
    done = python.run([sys.executable, "-c", LOOP, tmp_path, kind, limit], cwd=ROOT)
    if kind == "none":
        assert done.returncode == 0 and not (tmp_path / "stacks").exists(), done.stderr
        return
    assert done.returncode == HANG, done.stderr
    stacks = tmp_path / "stacks" / "rank-0.txt"
    late = stacks.stat().st_mtime - float(done.stdout) - 0.6
    text = stacks.read_text()
    assert "in hangs" in text and re.search(r"hang: rank 0 \(.*\) makes no progress for .* in section 'step' of", text)
    assert late < 1.5 or kind == "gil"
    (event,) = read_events(tmp_path / "events.jsonl")
    assert (event["event"], event["step"]) == ("hang", 7) and event["text"] in text
    again = python.run([sys.executable, "-c", LOOP, tmp_path, "none", limit], cwd=ROOT)  # one that goes on keeps them
    assert again.returncode == 0 and stacks.read_text() == text
    assert f"update 7 (limit {limit} s, the longest before took 0." in done.stderr and "stacks are in" in done.stderr
    if kind == "gil":
        assert (
            text.startswith("Timeout") and text.count("in hangs") == 2
        )  # from C while it held the GIL, and afterwards


def test_a_fault_that_the_main_thread_learns_meanwhile(tmp_path):
    """`Restarts.again` takes `on_fault` away while the watch asks the store: the watch goes on."""
    pulse, heard = Pulse(rank=0), []
    pulse.on_fault = heard.append

    def fault(attempt):
        pulse.on_fault = None
        return f"rank 1: a fault of attempt {attempt}"

    pulse.fault = fault
    watch = _Watch(pulse, 2, tmp_path, threading.Event())
    watch._see_faults()
    watch._see_faults()
    assert heard == [0]


def test_a_fault_that_is_read_when_the_ranks_have_met_again(tmp_path):
    """It ends nothing of what they do now, and the next fault is heard."""
    pulse, ended = Pulse(rank=0), []
    world = World(Mesh(dp=2), 0, torch.device("cpu"))
    world.abort = lambda: ended.append(pulse.attempt)
    restarts = Restarts(Restart(), world, pulse)
    restarts.listen()

    def slow(attempt):
        if attempt == 0:
            pulse.attempt += 1  # meanwhile
        return "rank 1: a fault"

    pulse.fault = slow
    watch = _Watch(pulse, 2, tmp_path, threading.Event())
    watch._see_faults()
    assert ended == []
    watch._see_faults()
    assert ended == [1]

"""Processes that cannot save: a fork of one that has, and one whose main thread has ended. Refused before it writes."""

import os
import subprocess
import sys

import pytest

from tests.house import ROOT

FORKS = """
import os, sys, torch
from fmegatron import checkpoint
folder, before = sys.argv[1:]
manager = checkpoint.Manager(folder + "/steps", show_progress=False) if before.startswith("manager") else None
if before in ("save", "manager and save"):
    checkpoint.save(folder + "/parent", {"w": torch.ones(3)})
if before == "restore":
    checkpoint.restore(folder + "/given")
pid = os.fork()
if not pid:
    try:
        if manager is not None:
            manager.save(1, {"w": torch.ones(3)})
        else:
            checkpoint.save(folder + "/child", {"w": torch.ones(3)})
            checkpoint.restore(folder + "/child")
        print("saved", flush=True)
    except RuntimeError as error:
        print("error:", error, flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
if before not in ("nothing", "manager"):
    checkpoint.save(folder + "/parent again", {"w": torch.ones(3)})
"""
FLIGHT = """
import contextlib, os, sys, torch
from fmegatron import checkpoint
folder, how = sys.argv[1:]
saver = checkpoint.AsyncSaver()
handle = checkpoint.save_async(folder + "/parent", {"w": torch.ones(3)}, saver=saver)
pid = os.fork()
if not pid:
    with contextlib.suppress(AttributeError):
        try:
            {"close": saver.close, "drop": int}.get(how, getattr(handle, how, None))()
        except RuntimeError as error:
            print("error:", error, flush=True)
    sys.exit(0) if how == "drop" else os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
handle.result()
print(checkpoint.restore(folder + "/parent")["w"].tolist())
"""
LATE = """
import atexit, sys, threading, time, torch
from fmegatron import checkpoint
def late(name):
    try:
        checkpoint.save(sys.argv[1] + "/" + name, {"w": torch.ones(3)})
        print(name, "saved", flush=True)
    except RuntimeError as error:
        print(name, error, flush=True)
def behind_main():
    threading.main_thread().join()
    late("thread")
atexit.register(late, "atexit")
threading.Thread(target=behind_main).start()
"""


def said(python, code, *args):
    done = python.run([sys.executable, "-c", code, *map(str, args)], cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("how", ["result", "poll", "abandon", "close", "drop"])
def test_a_fork_does_not_touch_the_saves_in_flight(tmp_path, python, how):
    """Its copy of a handle heard the reports of the parent's writer, took it for dead, and removed the files."""
    out = said(python, FLIGHT, tmp_path, how)
    assert "[1.0, 1.0, 1.0]" in out and ("error: checkpoint: got a call in process" in out) == (
        how not in ("close", "drop")
    )


@pytest.mark.long
@pytest.mark.parametrize("before", ["nothing", "manager", "save", "manager and save", "restore"])
def test_a_fork_of_a_process_that_has_saved(tmp_path, python, before):
    from fmegatron import checkpoint

    checkpoint.save(tmp_path / "given", {"w": [1]})
    out = said(python, FORKS, tmp_path, before)
    if before in ("nothing", "manager"):
        assert out == "saved\n"
        return
    assert out.startswith("error: checkpoint: got a call in process ") and "a fork of process" in out
    assert not os.path.exists(tmp_path / "child") and not os.path.exists(tmp_path / "steps")


@pytest.mark.medium
def test_behind_the_end_of_the_main_thread(tmp_path):
    """In atexit, and in a thread that outlives it."""
    command = [sys.executable, "-W", "ignore", "-c", LATE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)  # an interpreter that ends
    first, second = done.stdout.splitlines()
    for name, line in (("thread", first), ("atexit", second)):
        assert line.startswith(f"{name} checkpoint: got a call behind the end of the main thread")
    assert done.returncode == 0 and not os.listdir(tmp_path)

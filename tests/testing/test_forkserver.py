"""Processes that are forks of one that has imported modules: what they do, how they end, where nothing is forked."""

import os
import select
import signal
import subprocess

import pytest

from fmegatron.testing.forkserver import Forkserver

# What children do; a module of its own, found by the search path.
MODULE = """
import atexit, os, sys, threading, time

def write(text, to):
    os.write(to, f"{text} {os.getpid()} {'decimal' in sys.modules} {os.environ.get('COLOUR')}\\n".encode())

def at_exit(to):
    atexit.register(os.write, to, b"exit handler\\n")
    threading.Thread(target=lambda: (time.sleep(0.1), os.write(to, b"thread\\n"))).start()

def end(status):
    sys.exit(status)

def fail():
    raise KeyError("of the child")

def sleep(to):
    os.write(to, b"sleeps\\n")
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def path(tmp_path, monkeypatch):
    (tmp_path / "work_of_children.py").write_text(MODULE)
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def lines():
    """(descriptor to write to, file to read lines from)."""
    reads, writes = os.pipe()
    with os.fdopen(reads) as file:
        yield writes, file


def everything(lines, child):
    """(exit status, all that was written)."""
    status = child.wait()
    os.close(lines[0])
    return status, lines[1].read()


@pytest.mark.parametrize("forks", [True, False])
def test_a_child_calls_a_function_with_arguments_and_files(lines, forks, monkeypatch):
    """Without pidfd_open (no Linux) in an interpreter of its own, the same."""
    if not forks:
        monkeypatch.delattr(os, "pidfd_open")
    with Forkserver("decimal", environment={**os.environ, "COLOUR": "red"}) as server:
        assert server.forks is forks
        child = server.start("work_of_children", "write", ["hello"], [lines[0]])
        assert everything(lines, child) == (0, f"hello {child.pid} True red\n") and child.poll() == 0


def test_where_an_import_starts_threads_nothing_is_forked(lines):
    with Forkserver("starts_a_thread") as server:
        assert not server.forks
        child = server.start("work_of_children", "write", ["hello"], [lines[0]])
        assert everything(lines, child) == (0, f"hello {child.pid} False None\n")


def test_children_end_as_any_interpreter_does(lines, capfd):
    with Forkserver() as server:
        last = server.start("work_of_children", "at_exit", [], [lines[0]])
        assert [server.start("work_of_children", "end", [n]).wait() for n in (0, 3, "a message")] == [0, 3, 1]
        assert server.start("work_of_children", "fail").wait() == 1
        assert server.start("no_such_module", "fail").wait() == 1
        assert everything(lines, last) == (0, "thread\nexit handler\n")
    said = capfd.readouterr().err
    assert "a message\n" in said and "KeyError: 'of the child'\n" in said and "No module named 'no_such_module'" in said


def test_signals_and_time_limits(lines):
    with Forkserver() as server:
        first, second = (server.start("work_of_children", "sleep", [], [lines[0]]) for _ in range(2))
        assert [lines[1].readline() for _ in range(2)] == ["sleeps\n"] * 2
        with pytest.raises(subprocess.TimeoutExpired, match=f"process {first.pid}"):
            first.wait(timeout=0.01)
        assert first.poll() is None
        first.kill()
        os.kill(server._process.pid, signal.SIGINT)  # the server ignores it, its children do not
        second.send_signal(signal.SIGINT)
        assert (first.wait(), second.wait()) == (-signal.SIGKILL, -signal.SIGINT)
        first.kill()  # it has ended: nothing happens


def test_the_server_ends_with_its_owner_and_children_live_on(lines):
    """Whatever the end of the owner: the system closes the connection, as `close` does."""
    with Forkserver() as server:
        child = server.start("work_of_children", "sleep", [], [lines[0]])
        assert lines[1].readline() == "sleeps\n"
        end = os.pidfd_open(child.pid)
    assert server._process.returncode == 0 and not select.select([end], [], [], 0)[0]
    signal.pidfd_send_signal(end, signal.SIGKILL)
    assert select.select([end], [], [], 60)[0]
    os.close(end)


def test_a_server_that_does_not_live_is_named():
    with pytest.raises(RuntimeError, match="fork server: the process has ended"):
        Forkserver("no_such_module")
    with Forkserver() as server:
        server._process.kill()
        server._process.wait()
        with pytest.raises(RuntimeError, match="fork server: the process has ended"):
            server.start("os", "getpid")

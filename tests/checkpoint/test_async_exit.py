"""How a trainer with saves in flight can end: by itself, by an error, by signals. Never a hang, an orphan, a lie.

Each trainer is a script of its own without `if __name__ == "__main__"`, as in a notebook: were it imported again by the
writer process, its first line would be printed twice.
"""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

from fmegatron import checkpoint
from fmegatron.layout import Layout, Mesh
from tests.checkpoint import fake_world

LAYOUTS = {"w": Layout((1024, 1024), torch.float32, Mesh())}

BEGIN = """
import os, signal, sys, time
print("imported", flush=True)
import torch
from fmegatron import checkpoint
from fmegatron.collectives import World
from fmegatron.layout import Layout, Mesh
path, writers = sys.argv[1:]
if writers == "forked":
    from tests.writers import Fork, started_by
    started_by(Fork).__enter__()
layouts = {"w": Layout((1024, 1024), torch.float32, Mesh())}
new = {"w": torch.full((1024, 1024), 2.0)}
checkpoint.save(path, {"w": torch.full((1024, 1024), 1.0)}, layouts)

def saver_of(stop=True):
    saver = checkpoint.AsyncSaver()
    saver.reserve(layouts)
    print("writer", saver.writer_pid, flush=True)
    if stop:
        os.kill(saver.writer_pid, signal.SIGSTOP)
    return saver
"""


class Trainer:
    """A running script. `writer`: process id of its writer."""

    def __init__(self, python, path, body, writers):
        script = BEGIN + textwrap.dedent(body)
        command, pipe = [sys.executable, "-c", script, str(path), writers], subprocess.PIPE
        self.process = python.popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        self.lines, self.writer = [], 0
        while self.wait_for_line() != "ready":
            if self.lines[-1].startswith("writer "):
                self.writer = int(self.lines[-1].split()[1])

    def wait_for_line(self):
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        self.lines.append(line.strip())
        return self.lines[-1]

    def end(self, timeout_s=600):
        out, err = self.process.communicate(timeout=timeout_s)
        assert [*self.lines, *out.split("\n")].count("imported") == 1
        return self.process.returncode, out, err


@pytest.fixture
def start(tmp_path, python):
    trainers = []

    def start(body, writers="forked"):
        trainers.append(Trainer(python, tmp_path / "c", body, writers))
        return trainers[-1]

    yield start
    for trainer in trainers:
        for pid in (trainer.process.pid, trainer.writer):
            if pid and alive(pid):
                os.kill(pid, signal.SIGKILL)
        trainer.process.communicate()


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_ends(pid, within_s=600.0):
    end = time.monotonic() + within_s
    while alive(pid):
        assert time.monotonic() < end, f"{pid} is an orphan"
        time.sleep(0.05)


def stored(tmp_path):
    """The value that the checkpoint holds: 1 of the old, 2 of the new."""
    values = checkpoint.restore(tmp_path / "c", LAYOUTS)["w"].unique()
    assert values.numel() == 1
    return int(values)


@pytest.mark.medium
def test_python_ends_without_close(start, tmp_path):
    trainer = start(
        """
        saver = saver_of()
        handle = checkpoint.save_async(path, new, layouts, saver=saver)
        print("ready", flush=True)
    """,
        writers="fresh",
    )  # which end when their trainer does, and import nothing of it
    code, _, err = trainer.end()
    assert code == 0 and "without waiting for" in err
    assert_ends(trainer.writer)
    assert stored(tmp_path) == 1
    checkpoint.save(tmp_path / "c", {"w": torch.full((1024, 1024), 3.0)}, LAYOUTS)
    assert os.listdir(tmp_path) == ["c"] and stored(tmp_path) == 3


def test_a_forked_child_that_exits_leaves_the_writer_alone(tmp_path):
    with checkpoint.AsyncSaver() as saver:
        saver.reserve(LAYOUTS)
        child = os.fork()
        if child == 0:
            saver._flights.process._end()  # as its exit handlers would
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        checkpoint.save_async(tmp_path / "c", {"w": torch.full((1024, 1024), 2.0)}, LAYOUTS, saver=saver).result()
    assert stored(tmp_path) == 2


@pytest.mark.long
@pytest.mark.parametrize("stop", [True, False])
def test_trainer_is_killed(start, tmp_path, stop):
    trainer = start(f"""
        saver = saver_of({stop})
        handle = checkpoint.save_async(path, new, layouts, saver=saver)
        print("ready", flush=True)
        time.sleep(100)
    """)
    os.kill(trainer.process.pid, signal.SIGKILL)
    trainer.process.wait()
    os.kill(trainer.writer, signal.SIGCONT)
    assert_ends(trainer.writer)
    assert stored(tmp_path) in ([1, 2], [1])[stop]
    with checkpoint.AsyncSaver() as saver:
        checkpoint.save_async(tmp_path / "c", {"w": torch.full((1024, 1024), 3.0)}, LAYOUTS, saver=saver)
    assert os.listdir(tmp_path) == ["c"] and stored(tmp_path) == 3


@pytest.mark.medium
@pytest.mark.parametrize("pidfd", [True, False])
def test_a_child_of_the_trainer_does_not_keep_the_writer(start, pidfd):
    """A forked data worker has the socket, too; the writer must not wait for it. Also where there is no pidfd."""
    trainer = start(f"""
        if not {pidfd}:
            del os.pidfd_open
        saver = saver_of(False)
        child = os.fork()
        if child == 0:
            time.sleep(100)
            os._exit(0)
        print("child", child, flush=True)
        print("ready", flush=True)
        time.sleep(100)
    """)
    child = int(trainer.lines[-2].split()[1])
    os.kill(trainer.process.pid, signal.SIGKILL)
    trainer.process.wait()
    try:
        assert_ends(trainer.writer)
        assert alive(child)
    finally:
        os.kill(child, signal.SIGKILL)


def leave(path, how, seen):
    """Save asynchronously with a writer that stands still, let it go on a little later, and leave the block."""
    state = {"w": torch.full((1024, 1024), 2.0)}
    with checkpoint.AsyncSaver() as saver:
        saver.reserve(LAYOUTS)
        os.kill(saver.writer_pid, signal.SIGSTOP)
        handle = checkpoint.save_async(path, state, LAYOUTS, saver=saver)
        writer = saver.writer_pid
        timer = threading.Timer(0.3, os.kill, (writer, signal.SIGCONT))
        timer.start()
        try:
            if isinstance(how, BaseException):
                raise how
            how(saver, handle)
        finally:
            seen += [handle, writer]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("how", "state"),
    [
        (KeyError("mine"), "durable"),
        (KeyboardInterrupt(), "abandoned"),
        (lambda saver, handle: saver.close(wait=False), "abandoned"),
        (lambda saver, handle: saver.close(), "durable"),
        (lambda saver, handle: handle.abandon(), "abandoned"),
    ],
    ids=["error", "ctrl-c", "close-without-wait", "close", "abandon"],
)
def test_ways_to_leave(tmp_path, how, state):
    """An error finishes what one process can finish alone; Ctrl-C and `wait=False` abandon, and leave nothing."""
    checkpoint.save(tmp_path / "c", {"w": torch.full((1024, 1024), 1.0)}, LAYOUTS)
    seen = []
    with pytest.raises(type(how)) if isinstance(how, BaseException) else contextlib.nullcontext():
        leave(tmp_path / "c", how, seen)
    handle, writer = seen
    assert handle.state == state and not alive(writer)
    assert stored(tmp_path) == {"durable": 2, "abandoned": 1}[state] and os.listdir(tmp_path) == ["c"]


@pytest.mark.medium
def test_signals_to_the_process_group_and_to_the_writer(start, tmp_path):
    trainer = start("""
        with saver_of() as saver:
            handle = checkpoint.save_async(path, new, layouts, saver=saver)
            try:
                print("ready", flush=True)
                handle.result()
            except KeyboardInterrupt:
                print("interrupted", handle.state, flush=True)
                os.kill(saver.writer_pid, signal.SIGCONT)
                handle.result()
                print(handle.state, flush=True)
    """)
    time.sleep(0.3)
    os.kill(trainer.writer, signal.SIGTERM)
    os.kill(trainer.writer, signal.SIGINT)
    os.killpg(trainer.process.pid, signal.SIGINT)
    code, out, err = trainer.end()
    assert (code, out.split()) == (0, ["interrupted", "pending", "durable"]), err
    assert stored(tmp_path) == 2


@pytest.mark.slow
def test_a_second_interrupt_does_not_wait(start, tmp_path):
    """`result` of a rank whose peers never come: the first Ctrl-C is held for them, the second is not."""
    trainer = start("""
        class Peers(World):
            stuck = False

            def minimum(self, row):
                time.sleep(100 if self.stuck else 0)
                return super().minimum(row)

        with saver_of() as saver:
            handle = checkpoint.save_async(path, new, layouts, Peers(Mesh(), 0, torch.device("cpu")), saver=saver)
            Peers.stuck = True
            print("ready", flush=True)
            handle.result()
    """)
    time.sleep(0.3)
    os.killpg(trainer.process.pid, signal.SIGINT)
    time.sleep(0.3)
    assert alive(trainer.process.pid)
    os.killpg(trainer.process.pid, signal.SIGINT)
    code, _, err = trainer.end()
    assert code == -signal.SIGINT and "KeyboardInterrupt" in err
    assert_ends(trainer.writer)
    assert stored(tmp_path) == 1


@pytest.mark.medium
def test_nothing_of_the_trainer_reaches_the_writer(tmp_path, monkeypatch, fresh_writers):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    with checkpoint.AsyncSaver(arena_bytes=1 << 20) as saver:
        saver.reserve(LAYOUTS)
        with open(f"/proc/{saver.writer_pid}/environ") as f:
            env = dict(item.split("=", 1) for item in f.read().split("\0") if item)
        assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} & set(env)
        assert env["CUDA_VISIBLE_DEVICES"] == "" and env["OMP_NUM_THREADS"] == "1"
        assert os.getpgid(saver.writer_pid) != os.getpgid(0)
        assert os.getpriority(os.PRIO_PROCESS, saver.writer_pid) >= 10
        checkpoint.save_async(tmp_path / "c", {"w": torch.ones(1024, 1024)}, LAYOUTS, saver=saver).result()
        assert os.readlink(f"/proc/self/fd/{saver._flights.arena.fd}").startswith("/memfd:")  # no name: cannot leak
    assert saver.memory_bytes == 0 and saver.writer_pid is None
    fake_world.assert_same_bits(checkpoint.restore(tmp_path / "c", LAYOUTS), {"w": torch.ones(1024, 1024)})

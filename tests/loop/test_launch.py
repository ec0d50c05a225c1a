"""Processes as a user starts them: scripts, torchrun with real ranks, signals, and a rank that fails."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
import torch

from fmegatron.checkpoint import CheckpointError
from fmegatron.checkpoint.files.claims import ClaimedError
from fmegatron.loop import launch, set_up
from fmegatron.loop.config import UsageError
from fmegatron.loop.faults.notice import Place
from fmegatron.loop.launcher import use_threads
from fmegatron.loop.signals import catch
from tests.house import ROOT

SCRIPT = """
import os, sys, time
from dataclasses import dataclass
import torch
import torch.distributed as dist
from fmegatron import data
from fmegatron.collectives import connect
from fmegatron.layout import Mesh
from fmegatron.loop import launch, train
from fmegatron.loop.signals import catch

@dataclass(frozen=True)
class Config:
    mesh: Mesh = Mesh()
    do: tuple[str, ...] = ("train",)  # in each attempt
    seconds: float = 0.1
    steps: int = 300

def main(config):
    if config.do == ("raise",):
        raise ValueError("a bad thing")
    world = connect(config.mesh)
    print(f"started, {torch.get_num_threads()} threads", flush=True)
    do = config.do[int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))]
    if do == "connects again":
        for count in range(3):
            world.close()
            world = connect(config.mesh)
            print(world.ask(world.rank == count)(), flush=True)
    if do.startswith("one leaves"):
        if world.rank == 1:
            code = {"a number": 3, "a text": "no data here", "nothing": None}[do.removeprefix("one leaves by ")]
            raise SystemExit(code)
        with catch():
            world.barrier() if do.endswith("nothing") else time.sleep(300)
    if do == "closes before it raises":
        world.barrier()
        if world.rank == 1:
            with world:
                raise ValueError("rank 1 saw a bad thing")
        world.barrier()
    if do.startswith("one raises"):
        with catch():  # so that torchrun's SIGTERM alone would not end them
            world.barrier()
            if world.rank == 1:
                raise ValueError("rank 1 saw a bad thing")
            world.barrier() if do.endswith("collective") else time.sleep(300)
    def step(state, batch):
        if config.seconds > 100:
            print("within a step", flush=True)
        time.sleep(config.seconds)
        return state + 1, {"loss": state}
    with catch() as stop:
        world.barrier()  # no rank prints its pid before all can be signalled
        numbers = data.source(lambda i: i)
        for info in train(step, torch.tensor(0.0), numbers, steps=config.steps, stop=stop, world=world):
            if info.step == 1:
                print(f"pid {os.getpid()}", flush=True)
            if info.last:
                sys.stderr.write(f"rank {world.rank} saved step {info.step}\\n")
    print("after the loop", flush=True)

if __name__ == "__main__":
    launch(main, Config)
"""


@pytest.fixture
def start(tmp_path, python):
    """start(ranks, *flags) -> a running process of the script, under torchrun if ranks > 1; ended with the test."""
    path, running = tmp_path / "script.py", []
    path.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}

    def begin(ranks, *flags, restarts=0):
        torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
        torchrun = [*torchrun, f"--max-restarts={restarts}"] if ranks > 1 else []
        command = [sys.executable, *torchrun, str(path), *flags]
        pipe = subprocess.PIPE
        running.append(
            python.popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True)
        )
        return running[-1]

    yield begin
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def ended(process, seconds=600):
    """(status, stdout, stderr) of a process that must end within so many seconds."""
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def until(process, words):
    """Lines of stdout up to one that holds `words`; returns that line."""
    for line in process.stdout:
        if words in line:
            return line
    raise AssertionError(f"{words!r} was never printed:\n{process.stderr.read()}")


@pytest.mark.long
def test_a_bad_flag_ends_a_script_with_one_line(start):
    status, out, err = ended(start(1, "--secnds=1"))
    assert (status, out) == (2, "")
    assert err == "script.py: Unknown command line flag 'secnds'. Did you mean: seconds ?\nTry --help.\n"


@pytest.mark.long
def test_an_error_ends_a_script_with_its_traceback(start):
    status, _, err = ended(start(1, "--do=raise"))
    assert status == 1 and err.rstrip().endswith("ValueError: a bad thing")


@pytest.mark.long
def test_sigterm_saves_and_ends_well(start):
    process = start(1)
    until(process, "pid")
    process.send_signal(signal.SIGTERM)
    status, out, err = ended(process)
    assert status == 0 and "after the loop" in out
    assert "SIGTERM: stops after this step" in err and "saved step" in err


@pytest.mark.long
def test_ctrl_c_saves_and_ends_with_130(start):
    process = start(1)
    until(process, "pid")
    process.send_signal(signal.SIGINT)
    status, out, err = ended(process)
    assert status == 130 and "after the loop" not in out
    assert "saved step" in err and "script.py: stopped by Ctrl-C" in err and "Traceback" not in err


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])  # torchrun makes the other one of it
def test_a_second_ctrl_c_ends_at_once(start, second):
    process = start(1, "--seconds=1000")
    until(process, "within a step")
    process.send_signal(signal.SIGINT)
    while "stops after this step" not in (line := process.stderr.readline()):
        assert line, "it did not hear the first one"
    time.sleep(1.5)  # a second one within a second is taken for the same
    process.send_signal(second)
    status, _, err = ended(process)  # long before the step would
    assert status == 130
    assert "saved step" not in err and "a second Ctrl-C" in err


@pytest.mark.long
def test_one_rank_that_raises_ends_all(start):
    """Two attempts of one job: while the others sleep, and while they wait in a collective."""
    process = start(3, "--mesh=dp=3", "--do=one raises,one raises before a collective", restarts=1)
    until(process, "started")
    status, out, err = ended(process)
    assert status != 0 and "(exitcode: 1)" in err
    assert err.count("rank 1 of 3 failed: ValueError: rank 1 saw a bad thing") == 2
    for rank in (0, 2):
        assert err.count(f"rank {rank} ends because another failed: rank 1: ValueError: rank 1 saw a bad thing") == 2
    own = err.partition("torch.distributed.elastic.multiprocessing.errors.ChildFailedError")[0]
    assert own.count('raise ValueError("rank 1 saw a bad thing")') == 2
    assert own.count("Traceback (most recent call last)") == 3  # the last is torchrun's


@pytest.mark.slow
def test_whatever_one_rank_does_is_told_as_its_doing(start):
    """One job, restarted after each fault: no attempt ends by the fault of the one before, or finds its addresses."""
    faults = "one leaves by a number,one leaves by a text,closes before it raises,one leaves by nothing"
    process = start(2, "--mesh=dp=2", f"--do={faults},connects again", "--steps=2", restarts=4)
    status, out, err = ended(process)
    assert status == 0, err
    assert [line for line in out.splitlines() if line[0] == "("] == ["(True,)", "(True,)", "(False,)"]
    assert out.endswith("after the loop\n")
    for said in ("SystemExit: 3", "SystemExit: no data here", "ValueError: rank 1 saw a bad thing"):
        assert err.count(f"rank 1 of 2 failed: {said}\n") == 1
        assert err.count(f"rank 0 ends because another failed: rank 1: {said}\n") == 1  # without `catch`, too
    # Where it was is told of all but the text, which is meant to be enough; of rank 0 only where nobody else failed.
    assert "(exitcode: 3)" in err and err.count("Traceback (most recent call last)") == 3
    assert err.count("rank 0 of 2 failed: ") == 1
    lost = "rank 0 of 2 lost its connection to another rank: "
    assert f"{lost}rank 1 left by SystemExit(0)\n" in err
    assert err.count(lost) <= 2  # and where rank 1 closed its groups before it told why


@pytest.mark.slow
@pytest.mark.long
def test_a_signal_to_one_rank_stops_all_at_the_same_step(start):
    process = start(2, "--mesh=tp=2")
    assert "threads" in until(process, "started")
    pid = int(until(process, "pid").split()[1])
    os.kill(pid, signal.SIGTERM)
    status, out, err = ended(process)
    assert status == 0, err
    saved = sorted(line for line in err.splitlines() if "saved step" in line)
    assert len(saved) == 2 and len({line.split()[-1] for line in saved}) == 1, err
    assert out.count("after the loop") == 1  # rank 0 only


@pytest.mark.long
def test_ctrl_c_under_torchrun_reaches_every_rank_twice_and_still_saves(start):
    """A terminal signals the whole group, and torchrun then signals its ranks once more."""
    process = start(2, "--mesh=tp=2", "--seconds=0.5")
    until(process, "pid")
    os.killpg(process.pid, signal.SIGINT)
    status, _, err = ended(process)
    assert status != 0
    saved = [line for line in err.splitlines() if "saved step" in line]
    assert len(saved) == 2 and len({line.split()[-1] for line in saved}) == 1, err


def test_threads_are_the_cores_of_a_rank():
    before, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    assert use_threads(Place(local_size=cores, size=cores)) == 1
    assert use_threads(Place(local_size=1)) == 1  # a process of its own keeps what it has
    torch.set_num_threads(before)


def test_a_value_that_set_up_refuses_is_a_line_and_the_same_error_in_a_step_is_not(capsys):
    """Errors that have a type of their own pass set-up: a claimed folder, a damaged checkpoint, a file's encoding."""

    @dataclass(frozen=True)
    class Config:
        raised: str = "in set-up"

    def main(config):
        with set_up():
            if config.raised == "in set-up":
                raise ValueError("windows: got 9, wanted 6")
            if config.raised != "in a step":
                raise {"claimed": ClaimedError, "damaged": CheckpointError, "usage": UsageError, "type": TypeError}[
                    config.raised
                ]("another")
        raise ValueError("windows: got 9, wanted 6")

    with pytest.raises(SystemExit) as left:
        launch(main, Config, ["prog"])
    line = main.__code__.co_firstlineno + 3
    assert left.value.code == 2
    assert capsys.readouterr().err == f"prog: windows: got 9, wanted 6 (test_launch.py:{line})\nTry --help.\n"
    for how, kind, status in (
        ("in a step", ValueError, None),
        ("damaged", CheckpointError, None),
        ("claimed", None, 1),
    ):
        with pytest.raises(kind or SystemExit) as left:
            launch(main, Config, ["prog", f"--raised={how}"])
        assert not isinstance(left.value, UsageError) and getattr(left.value, "code", None) == status
    capsys.readouterr()
    with pytest.raises(UsageError, match=r"wanted 6 \(test_launch.py:") as left:
        main(Config())
    assert type(left.value.__cause__) is ValueError
    with pytest.raises(UsageError, match="^another$"):
        main(Config("usage"))


def test_in_a_notebook_launch_returns_and_raises(monkeypatch):
    @dataclass(frozen=True)
    class Config:
        lr: float = 0.5

    monkeypatch.setattr("builtins.__IPYTHON__", True, raising=False)
    monkeypatch.setattr(sys, "argv", ["kernel", "-f", "connection.json"])
    assert launch(lambda config: config.lr, Config) == 0.5

    def interrupt(config):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(interrupt, Config)


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with catch() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.ask()() == (True,) and not stop.interrupted
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before

"""Jobs of `injected_run.py` under torchrun: started, ended, and what they leave. Used by the tests of faults."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from fmegatron.collectives import Axes, connect, enter, psum
from fmegatron.layout import Mesh
from tests.experiments.injected_run import drawn, layouts_of, rows, state_hash, updated
from tests.house import ROOT

LIMIT_S = 3.0  # of a section that is watched
ENDS_S = 8.0  # for what a job has started to end behind it


@dataclass(frozen=True)
class Done:
    """A job that has ended: its status, what it wrote, how long it took; run: its folder."""

    status: int
    out: str
    err: str
    seconds: float
    run: Path

    def end(self):
        """The hash of the last state."""
        return re.search(r"end: (\w+)", self.out)[1]

    def updates(self):
        """How many updates each rank has finished, in all its processes."""
        found = {}
        for path in self.run.parent.glob(f"{self.run.name}-updates-*"):
            found[int(path.name.rpartition("-")[2])] = path.stat().st_size
        return found


def start(python, folder, *flags, launch=("--standalone",), restarts=1, ranks=4, mesh=None, program="injected_run"):
    """A job in folder/run that works in `folder`, by which its processes are known."""
    command = [sys.executable, "-m", "torch.distributed.run", *launch, f"--max-restarts={restarts}"]
    command += [f"--nproc-per-node={ranks}", ROOT / f"tests/experiments/{program}.py"]
    command += ["--forked-writers"] if "--async_save" in flags else []
    flags = (f"--folder={folder / 'run'}", f"--mesh={f'fsdp={ranks}' if mesh is None else mesh}", *flags)
    command += flags
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    number = len(list(folder.glob("stdout*")))
    files = {name: open(folder / f"{name}{number}", "w+") for name in ("stdout", "stderr")}
    process = python.popen(command, cwd=folder, env=environment, start_new_session=True, **files)
    return process, files, time.monotonic()


def ended(job, folder, timeout_s=300):
    """Its end, as a Done. If it does not end in time, all that works in the folder is killed."""
    process, files, began = job
    try:
        process.wait(timeout=timeout_s)
    finally:
        seconds = time.monotonic() - began
        if process.poll() is None:
            for pid in working_in(folder):
                os.kill(pid, signal.SIGKILL)
            process.wait()
    texts = []
    for file in files.values():
        file.seek(0)
        texts.append(file.read())
        file.close()
    return Done(process.returncode, *texts, seconds, folder / "run")


def torchrun(python, folder, *flags, **settings):
    """A job from its start to its end."""
    return ended(start(python, folder, *flags, **settings), folder)


def working_in(folder):
    """Processes whose working directory is this folder: what a job has started, writers and forks too."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        try:
            pid, where = int(path.parent.name), os.readlink(path)
            if where == str(folder) and (path.parent / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(pid)
        except OSError:  # it has ended
            pass
    return found


def with_all_below(pid):
    """This process and those that it, and they, have started, newest last."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def assert_nothing_works_in(folder):
    """Within some seconds all that a job has started has ended."""
    until = time.monotonic() + ENDS_S
    while (left := working_in(folder)) and time.monotonic() < until:
        time.sleep(0.05)
    said = subprocess.run(["ps", "-o", "pid,ppid,stat,etimes,cmd", "-p", ",".join(map(str, left))], capture_output=True)
    assert not left, said.stdout.decode()


def free_port():
    """One that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def train_without_loop(rank, size, steps, dtype):
    """The hash of the state after some updates by hand, on ranks of a pool: no loop, no checkpoint."""
    mesh = Mesh(fsdp=size)
    world = connect(mesh)
    axis, state = Axes(mesh, world)["fsdp"], drawn(layouts_of(mesh, getattr(torch, dtype)), rank)
    for position in range(steps):
        state, _ = updated(state, rows(position, state["w"].dtype).chunk(size)[rank], axis, enter, psum)
    world.close()
    return state_hash(state)

"""Without what Linux alone has, as on macOS: layouts, check, plan and checkpoints work, and what does not says so.

There is no macOS here: a process loses those names and folders, and says that it is Darwin.
"""

import subprocess
import sys

import pytest

from tests.house import ROOT

LOSES = """
import builtins, ctypes, io, os, platform, resource, signal, sys
import torch, torch._inductor.compile_fx  # the torch of this machine is one for Linux, and stays

for module, names in {
    os: "sched_getaffinity pidfd_open memfd_create posix_fallocate posix_fadvise O_PATH O_TMPFILE copy_file_range",
    resource: "prlimit",
    signal: "pidfd_send_signal",
}.items():
    for name in names.split():
        vars(module).pop(name, None)


def without(function):
    def guarded(path, *args, **how):
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(("/proc", "/dev/shm")):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return function(path, *args, **how)

    return guarded


builtins.open = io.open = without(open)
for name in "readlink listdir scandir stat lstat open".split():
    setattr(os, name, without(getattr(os, name)))


class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("mallinfo2", "renameat2", "malloc_trim", "prctl", "madvise", "syscall"):
            raise AttributeError(name)
        return super().__getattr__(name)


ctypes.CDLL, sys.platform, platform.system = Library, "darwin", lambda: "Darwin"
"""
USES = """
import importlib, pkgutil, sys

import torch

import fmegatron

for found in pkgutil.walk_packages(fmegatron.__path__, "fmegatron."):
    importlib.import_module(found.name)

from fmegatron import checkpoint, doctor, model, optim, step, tree
from fmegatron.layout import DataParallel, Mesh
from fmegatron.loop import faults, hardware
from fmegatron.loop.faults.inject import Injection
from fmegatron.loop.startup import memory
from fmegatron.plan import __main__ as plan

mesh = Mesh(fsdp=2, tp=2)
config = model.llama(vocab_size=256, dim=8, layers=2, heads=2, kv_heads=2, ffn_dim=16, max_seq=16)
specs, optimizer = model.specs(config, mesh), optim.adamw(1e-3)
train_step = step.build_train_step(lambda p, b: model.loss(p, b, config), optimizer, specs)
rows = dict.fromkeys(("tokens", "labels"), DataParallel().batch_layout((8, 16), torch.int64, mesh))
assert step.check(train_step, step.state_specs(specs, optimizer), rows).ok
assert plan.main([sys.argv[1], "--mesh", "fsdp=2", "--layers=1", "--dim=16"]) == 0
read, what = hardware.memory_reader(torch.device("cpu"))
assert what == "largest resident memory of the process" and read() > 0
assert "peak of this rank" in memory(None, torch.device("cpu"), 1.0)
state = {"w": torch.arange(6.0), "n": 3}
for _ in range(2):  # the second stands in the place of the first
    checkpoint.save("saved", state)
assert torch.equal(checkpoint.restore("saved", state)["w"], state["w"])
with checkpoint.Manager("many") as manager:
    manager.save(1, state)
    assert manager.restore(1, state)[0]["n"] == 3
doctor.main(["--size=64"])
try:
    Injection.parse("diskfull:step=2")
except ValueError as error:
    print(error)
"""


@pytest.fixture(params=["fork", pytest.param("own interpreter", marks=pytest.mark.slow)])
def popen(request, python):
    return subprocess.Popen if request.param == "own interpreter" else python.popen


@pytest.mark.slow
def test_it_works_without_what_linux_alone_has(popen, tmp_path):
    """A fork has imported the package before; an interpreter of its own imports it without, too."""
    program = [sys.executable, "-c", LOSES + USES, str(ROOT / "experiments/own_model.py")]
    process = popen(program, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = process.communicate()
    assert process.returncode == 0, err[-3000:]
    assert "inject: diskfull: got the system 'darwin', wanted 'linux'" in out
    assert "to fix" in out and "/dev/shm" not in out

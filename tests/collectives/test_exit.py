"""A script that ends while a collective's last reference is still in gloo's hands ends well; so does one that keeps a
jitted step, whose last question to the other ranks is under way."""

import os
import subprocess
import sys

import pytest
import torch.distributed as dist

from tests.house import ROOT

JOBS = 4  # at once; without a close at exit about every second of them aborts
SCRIPTS = {
    "collectives": """
import time
import torch
import torch.distributed as dist
from fmegatron.collectives import connect
from fmegatron.layout import Mesh

world = connect(Mesh(dp=2), device="cpu")
if world.rank == 1:
    time.sleep(1)  # the other has nothing left to do but to end while its collectives wait
for _ in range(20):
    dist.all_reduce(torch.ones(100_000), async_op=True)  # neither waited for nor kept
print("at the end", flush=True)
""",
    "a jitted step": """
import weakref
import torch
from fmegatron import step
from fmegatron.collectives import Axes, connect, psum
from fmegatron.layout import Mesh

world = connect(Mesh(dp=2), device="cpu")
jitted = step.jit(lambda x: psum(x, Axes(Mesh(dp=2))["dp"]), world=world, backend="eager", check=False)
for _ in range(3):
    jitted(torch.ones(4))
control = weakref.ref(world._control)
world.close()
print("at the end" if control() is None else "its threads are not joined", flush=True)
""",
}


def started(python, script):
    """The ranks of one job."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # what torchrun has
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    command, pipe = [sys.executable, "-c", script], subprocess.PIPE
    ranks = [
        python.popen(command, stdout=pipe, stderr=pipe, text=True, env={**environment, "RANK": f"{rank}"})
        for rank in range(2)
    ]
    return store, ranks


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_that_does_not_close_its_world_ends_well(python, script):
    jobs = [started(python, SCRIPTS[script]) for _ in range(JOBS)]
    ranks = [rank for _, ranks in jobs for rank in ranks]
    ends = [rank.communicate(timeout=600) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), ends
    assert [out for out, _ in ends] == ["at the end\n"] * len(ranks)

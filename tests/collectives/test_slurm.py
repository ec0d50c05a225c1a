"""Slurm's environment: which variables make ranks, and two processes that meet by nothing else."""

import os
import subprocess
import sys

import pytest

from fmegatron.collectives.slurm import first_node, ranks_of_slurm, tasks_per_node

TASK = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "127.0.0.1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
}
PROGRAM = """
import torch
from fmegatron.collectives import Axes, connect, psum
from fmegatron.layout import Mesh
from fmegatron.loop.faults.notice import Place
with connect(Mesh(dp=2), device="cpu") as world:
    total = float(psum(torch.tensor(float(world.rank + 1)), Axes(world.mesh, world)["dp"]))
    print(world.rank, total, Place.of_environment())
"""


def test_what_srun_sets_becomes_what_torchrun_sets():
    found = ranks_of_slurm(TASK)
    port = int(found.pop("MASTER_PORT"))
    assert found == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    assert 61000 <= port < 65000
    assert ranks_of_slurm({**TASK, "SLURM_STEP_ID": "1"})["MASTER_PORT"] != str(port)  # two steps of one job
    assert "MASTER_PORT" not in ranks_of_slurm({**TASK, "MASTER_PORT": "5"})  # what is set is left


def test_who_else_runs_there_is_one_process():
    assert ranks_of_slurm({}) == {}
    assert ranks_of_slurm({**TASK, "WORLD_SIZE": "8"}) == {}  # under torchrun, which srun has started
    batch = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert ranks_of_slurm(batch) == {}  # the batch script itself, or a shell of salloc
    assert ranks_of_slurm({**TASK, "SLURM_STEP_NUM_TASKS": "1"}) == {}


@pytest.mark.parametrize("nodes", ["", "[1-2]extra]", ",", "a[b"])
def test_lists_of_nodes_that_are_none(nodes):
    with pytest.raises(ValueError, match="SLURM_STEP_NODELIST: got .*, wanted"):
        first_node(nodes)


def test_uneven_nodes():
    assert tasks_per_node("4(x2),1") == [4, 4, 1]
    uneven = {**TASK, "SLURM_STEP_TASKS_PER_NODE": "4(x2),1", "SLURM_NODEID": "2", "SLURM_STEP_NUM_TASKS": "9"}
    assert ranks_of_slurm(uneven)["LOCAL_WORLD_SIZE"] == "1"
    with pytest.raises(ValueError, match="SLURM_STEP_TASKS_PER_NODE: got 'four'"):
        tasks_per_node("four")


@pytest.mark.long
def test_two_tasks_meet(python):
    ranks = []
    for rank in range(2):
        own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_JOB_ID": str(os.getpid())}
        clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
        how = {"env": {**clean, **TASK, **own}, "stdout": subprocess.PIPE, "text": True}
        ranks.append(python.popen([sys.executable, "-c", PROGRAM], **how))
    texts = [process.communicate(timeout=200)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    for rank, text in enumerate(texts):
        assert text.split("\n")[0] == f"{rank} 3.0 Place(rank={rank}, size=2, local_rank={rank}, local_size=2)"

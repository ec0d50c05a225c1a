"""Launching on clusters: the templates are what the programs take, and ranks of two torchrun agents are one job."""

import dataclasses
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.house import ROOT

CLUSTER = ROOT / "experiments" / "cluster"
TORCHRUN = Path(sys.executable).with_name("torchrun")
TORCHRUN_FLAGS = ("nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "max-restarts")
PROGRAM = """
import os, socket
import torch
from fmegatron.collectives import Axes, connect, psum
from fmegatron.layout import Mesh
from fmegatron.loop.faults.notice import Place
with connect(Mesh(dp=2, tp=2), device="cpu") as world:
    axes = Axes(world.mesh, world)
    total = [float(psum(torch.tensor(10.0 ** world.rank), axes[name])) for name in ("dp", "tp", ("dp", "tp"))]
    print("rank", world.rank, total, os.environ["GROUP_RANK"], Place.of_environment().local_size, flush=True)
"""


@pytest.mark.slow  # two agents start four processes
def test_two_agents_on_two_addresses_are_one_job(tmp_path):
    """What two nodes are to torchrun: two agents, each with its own address, that meet at the first one's."""
    (tmp_path / "program.py").write_text(PROGRAM)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    agents = []
    for node, address in enumerate(("127.0.0.1", "127.0.0.2")):
        agents.append(
            subprocess.Popen(
                [TORCHRUN, "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=2", "--master-addr=127.0.0.1",
                 f"--master-port={port}", f"--local-addr={address}", tmp_path / "program.py"],
                env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )  # fmt: skip
    texts = [agent.communicate(timeout=400) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], texts
    found = sorted(line for out, _ in texts for line in out.splitlines() if line.startswith("rank"))
    assert found == [
        "rank 0 [101.0, 11.0, 1111.0] 0 2",
        "rank 1 [1010.0, 11.0, 1111.0] 0 2",
        "rank 2 [101.0, 1100.0, 1111.0] 1 2",
        "rank 3 [1010.0, 1100.0, 1111.0] 1 2",
    ]


def test_the_manifest_is_one_of_kubernetes():
    service, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    assert (service["kind"], job["kind"], job["apiVersion"]) == ("Service", "Job", "batch/v1")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None" and pod["subdomain"] == service["metadata"]["name"]
    labels, selector = spec["template"]["metadata"]["labels"], service["spec"]["selector"]
    assert selector.items() <= labels.items()
    (ranks,) = pod["containers"]
    flags = dict(re.fullmatch(r"--([\w.-]+)=(.*)", arg).groups() for arg in ranks["args"] if arg.startswith("--"))
    assert spec["completions"] == spec["parallelism"] == int(flags["nnodes"]) and spec["completionMode"] == "Indexed"
    assert int(flags["nproc-per-node"]) == ranks["resources"]["limits"]["nvidia.com/gpu"]
    host, _, port = flags["rdzv-endpoint"].partition(":")
    assert host == f"{job['metadata']['name']}-0.{pod['subdomain']}"  # as the pods of an indexed Job are called
    assert int(port) == ranks["ports"][0]["containerPort"]
    mesh = [int(part.partition("=")[2]) for part in flags["mesh"].split(",")]
    assert mesh[0] * mesh[1] == int(flags["nnodes"]) * int(flags["nproc-per-node"])
    timeout = {one["name"]: int(one["value"]) for one in ranks["env"]}["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert 300 <= timeout < pod["terminationGracePeriodSeconds"]  # torchrun's own is 30
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    assert pod["restartPolicy"] == "Never"  # else the policy is refused
    (doctor,) = pod["initContainers"]
    assert doctor["command"][-2:] == ["-m", "fmegatron.doctor"] and doctor["resources"] == ranks["resources"]
    mounts = {mount["name"] for mount in ranks["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]} and flags["run.folder"].startswith("/runs")
    assert (ROOT / next(arg for arg in ranks["args"] if arg.endswith(".py"))).exists()


def directives(path):
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", path.read_text(), re.M))


SRUN = """#!/bin/bash
echo "srun $*"
while [[ $1 == --* ]]; do shift; done
case "$*" in
  *doctor*) exit "${DOCTOR:-0}" ;;
  *) kill -USR1 $PPID; for _ in {1..100}; do [ -e "$SLURM_SUBMIT_DIR/.stop-12345" ] && break; sleep 0.1; done
     [ -e "$SLURM_SUBMIT_DIR/.stop-12345" ] && echo stopped ;;
esac
exit "${RUN:-0}"
"""


@pytest.fixture
def batch(tmp_path):
    """Runs a script with stand-ins for Slurm's commands: (status, lines), of what a shell makes of it."""
    for name, text in (
        ("srun", SRUN),
        ("scontrol", '#!/bin/bash\n[ $1 = show ] && echo node07 || echo "scontrol $*"\n'),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[07-08]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "12345"}
    slurm |= {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_CPUS_PER_TASK": "12",
    }

    def run(script, **environment):
        env = {**os.environ, **slurm, **environment}
        done = subprocess.run(["bash", script, "x.py", "--a=b c"], env=env, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout.splitlines()

    return run


@pytest.mark.parametrize("name", ["slurm", "slurm_torchrun"])
def test_the_batch_scripts_are_shell_and_agree_with_themselves(tmp_path, batch, name):
    script = CLUSTER / f"{name}.sbatch"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    found = directives(script)
    assert found["signal"] == "B:USR1@600" and "requeue" in found and "/" not in found["output"]  # no folder to be made
    status, lines = batch(script)
    doctor, ranks, stopped, requeued = lines
    assert status == 0 and (stopped, requeued) == ("stopped", "scontrol requeue 12345")  # at the time limit
    for line in (doctor, ranks):
        assert line.startswith("srun --kill-on-bad-exit=1 --label --cpus-per-task=12 .venv/bin/")
    assert doctor.endswith("-m fmegatron.doctor")
    assert ranks.endswith(f" x.py --a=b c --run.until.file={tmp_path}/.stop-12345 --run.faults.restart.most=3")
    if name == "slurm":
        assert found["ntasks-per-node"] == found["gpus-per-node"]
    else:
        assert "--nnodes=2 --nproc-per-node=8 " in ranks and "--rdzv-endpoint=node07:22345 " in ranks
        assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=590" in script.read_text() and "--max-restarts=100 " in ranks
    status, lines = batch(script, RUN="3")  # a run that fails is not requeued by the script
    assert status == 3 and "scontrol requeue 12345" not in lines and not (tmp_path / ".stop-12345").exists()
    status, lines = batch(script, DOCTOR="1")
    assert status == 1 and len(lines) == 1


def test_the_flags_of_the_templates_are_flags():
    """Of torchrun, by its own parser, and of the experiments."""
    from torch.distributed.run import get_args_parser

    from fmegatron.loop import Options
    from fmegatron.loop.flags import parse

    @dataclasses.dataclass(frozen=True)
    class Config:
        run: Options = Options()

    for name in ("slurm_torchrun.sbatch", "kubernetes.yaml"):
        text = (CLUSTER / name).read_text()
        flags = [flag for flag in re.findall(r"--[a-z][\w-]+(?=[= ])", text) if flag[2:] in TORCHRUN_FLAGS]
        assert len(set(flags)) >= 5
        got = get_args_parser().parse_args([*(f"{flag}=1" for flag in set(flags)), "x.py"])
        assert got.training_script == "x.py"
        own = re.findall(r"--run\.[\w.]+(?==)", text)
        values = {"--run.until.file": "/tmp/x", "--run.folder": "/runs/x"}
        assert (
            parse(["x.py", *(f"{flag}={values.get(flag, 3)}" for flag in set(own))], Config()).run.faults.restart.most
            == 3
        )

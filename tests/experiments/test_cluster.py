"""Launching on clusters: the templates are what the programs take, and ranks of two torchrun agents are one job."""

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
    mounts = {mount["name"] for mount in ranks["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]} and flags["run.folder"].startswith("/runs")
    assert (ROOT / next(arg for arg in ranks["args"] if arg.endswith(".py"))).exists()


def directives(path):
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", path.read_text(), re.M))


def test_the_batch_scripts_are_shell_and_agree_with_themselves(tmp_path):
    scripts = sorted(CLUSTER.glob("*.sbatch"))
    assert len(scripts) == 2
    for script in scripts:
        assert subprocess.run(["bash", "-n", script]).returncode == 0
        found = directives(script)
        assert found["signal"] == "TERM@600" and "requeue" in found
    assert directives(scripts[0])["ntasks-per-node"] == directives(scripts[0])["gpus-per-node"]
    # Run with stand-ins for Slurm's commands: what is started is what a shell makes of the script.
    for name, text in (("srun", 'echo "$@"'), ("scontrol", "echo node07; echo node08")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[07-08]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "12345"}
    env = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    said = [
        subprocess.run(["bash", script, "x.py", "--a=b c"], env=env, capture_output=True, text=True, check=True).stdout
        for script in scripts
    ]
    assert said[0] == "--kill-on-bad-exit=1 --label .venv/bin/python x.py --a=b c\n"
    assert "--nnodes=2 --nproc-per-node=8" in said[1] and "--rdzv-endpoint=node07:22345 x.py --a=b c" in said[1]

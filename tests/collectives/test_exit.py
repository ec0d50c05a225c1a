"""A script that ends while a collective's last reference is still in gloo's hands ends well."""

import os
import sys

from tests.house import ROOT

SCRIPT = """
import torch
import torch.distributed as dist
from fmegatron.collectives import connect
from fmegatron.layout import Mesh

world = connect(Mesh(dp=2), device="cpu")
for _ in range(20):
    dist.all_reduce(torch.ones(2_000_000), async_op=True)  # neither waited for nor kept
print("at the end", flush=True)
"""


def test_a_script_that_does_not_close_its_world_ends_well(tmp_path, python):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = python.run(command, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("at the end") == 2

"""The calls of the first hour on a GPU, tried on a CPU, so that none of them is broken on the day."""

import os
import subprocess
import sys

import pytest

from tests.house import ROOT

SCRIPT = ROOT / "experiments" / "benchmarks" / "first_hour.sh"


def called(*numbers, device="cpu"):
    """What the script says of these calls -> (exit status, lines)."""
    environment = {**os.environ, "DEVICE": device, "PY": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(["bash", str(SCRIPT), *numbers], cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", "12456789")  # 3 is 2 of another model, which a CPU does not have
def test_a_call_runs_on_a_cpu(number):
    status, said = called(number)
    if number == "1":  # the doctor may find something to fix on the machine that tests
        status = 0
    assert status == 0 and "WRONG " not in said.replace("0 WRONG", ""), said[-3000:]
    assert f"call {number}: 0 WRONG" in said and (number == "4" or "\nok " in said)  # a profile is measured alone


@pytest.mark.slow
def test_without_a_gpu_it_says_so():
    status, said = called("8", device="cuda")
    assert status == 1 and "got no CUDA device, wanted one; DEVICE=cpu tries the program on a CPU" in said

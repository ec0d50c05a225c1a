"""Kernels of Triton compute what the walk over tiles does: in triton's interpreter, without a GPU."""

import json
import os
import subprocess
import sys

import pytest

from tests.house import ROOT


@pytest.mark.slow
def test_every_mask_cap_and_dropout():
    """fp32 against fp64: output, log-sum-exp, gradients; the same rows see nothing."""
    pytest.importorskip("triton", reason="make check-cuda installs it (700 MB)")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.nn.tiled_interpreted"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len(found) == 7
    wrong = {name: of for name, of in found.items() if not max(of.values()) < 5e-6}
    assert not wrong

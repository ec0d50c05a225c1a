"""Programs of the peers' environment, `make bench-peers-env`, which has megatron-core: tests that need it are skipped
where there is none."""

import subprocess
from pathlib import Path

import pytest

from tests.house import ROOT

PEER_PYTHON = ROOT / ".venv-peers/bin/python"


def run(program: Path, *arguments: object) -> None:
    """Run it to its end; a failure shows what it wrote."""
    if not PEER_PYTHON.exists():
        pytest.skip("no .venv-peers with megatron-core: `make bench-peers-env` builds it")
    done = subprocess.run(
        [PEER_PYTHON, "-W", "ignore", program, *map(str, arguments)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]

"""A save takes at most 5% of the state beside it, a restore at most 5% beside its result, for leaves of all kinds."""

import json
import os
import pathlib
import sys

import pytest

from tests.pairs import few

ROOT = pathlib.Path(__file__).parents[2]
# For each of many leaves: its plan, its JSON, its row of the manifest, its target. 6 KiB alone, to 10 under load.
LEAF_BYTES = 12 << 10


def check(python, kind, ranks, folder):
    """256 MiB for each rank, measured in processes of their own."""
    command = [sys.executable, "-m", "tests.checkpoint.peak_memory", kind, str(ranks), str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = python.run(command, cwd=ROOT, env=env, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    for size, saved, restored in zip(found["size"], found["save"], found["restore"], strict=True):
        assert size > 255 << 20
        assert saved < 0.05 * size + LEAF_BYTES * found["leaves"] * (kind == "small"), found
        assert restored < 0.05 * size + LEAF_BYTES * found["leaves"] * (kind == "small"), found


@pytest.mark.long
@pytest.mark.parametrize("kind", few(1, [("small",), ("transposed",)]))
def test_one_rank(tmp_path, python, kind):
    check(python, kind, 1, tmp_path)


@pytest.mark.long
def test_two_ranks(tmp_path, python):
    check(python, "grid", 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["grid", "columns", "small", "pieces", "transposed", "strided"])
def test_all_kinds(tmp_path, python, kind, ranks):
    check(python, kind, ranks, tmp_path)

"""A save takes at most 5% of the state beside it, a restore at most 5% beside its result, for leaves of all kinds."""

import json
import os
import pathlib
import sys

import pytest
import torch

from fmegatron import checkpoint, step, tree
from fmegatron.layout import Layout, Mesh
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


@pytest.mark.medium
@pytest.mark.parametrize("kind", few(1, [("small",), ("transposed",)]))
def test_one_rank(tmp_path, python, kind):
    check(python, kind, 1, tmp_path)


@pytest.mark.slow
@pytest.mark.long
def test_two_ranks(tmp_path, python):
    check(python, "grid", 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["grid", "columns", "small", "pieces", "transposed", "strided"])
def test_all_kinds(tmp_path, python, kind, ranks):
    check(python, kind, ranks, tmp_path)


@pytest.mark.parametrize("how", ["save", "save_async", "restored", "restored into"])
def test_a_donated_step_writes_into_the_memory_that_a_save_has_read(tmp_path, how):
    """And not into a copy of it: what saves and restores look at is no memory that somebody else has."""
    double = step.jit(lambda s: tree.map(lambda x: x * 2, s), donate=0, backend="eager")
    state = {
        "large": torch.ones(512, 256),
        "turned": torch.empty_strided((512, 256), (1, 512)).fill_(1),
        "small": torch.ones(7),
        "b": torch.ones((), dtype=torch.bfloat16),
    }
    where = {k: x.data_ptr() for k, x in state.items()}
    if how == "save_async":
        checkpoint.save_async(tmp_path / "step", state).result()
    else:
        checkpoint.save(tmp_path / "step", state)
    if how == "restored":
        state = checkpoint.restore(tmp_path / "step", tree.map(lambda x: Layout(x.shape, x.dtype, Mesh()), state))
        where = {k: x.data_ptr() for k, x in state.items()}
    elif how == "restored into":
        checkpoint.restore(tmp_path / "step", into=state)
    state = double(state)
    assert {k: x.data_ptr() for k, x in state.items()} == where
    assert all((x == 2).all() for x in state.values())

"""Runs that commit e37e37b began, with its own code, go on today to the bits that it reached itself.

Renames since then were of Python names: paths of leaves, metadata, metrics and events are what they were.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fmegatron import checkpoint, tree
from tests.house import ROOT

COMMIT = "e37e37b"
STATES = ["dense", "experts", "averaged", "loss_scale", "muon", "int8"]


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """The tree of the older commit."""
    if subprocess.run(["git", "cat-file", "-e", f"{COMMIT}^{{commit}}"], cwd=ROOT, capture_output=True).returncode:
        pytest.fail(f"this checkout does not have commit {COMMIT}: clone all of the history")
    path = tmp_path_factory.mktemp("older") / "tree"
    path.mkdir()
    files = subprocess.run(["git", "archive", COMMIT, "fmegatron"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", path], input=files, check=True)
    return path


def run(path, script, *flags):
    """On two ranks, with the package that lies at a path."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = Path(__file__).parent / "older" / script
    done = subprocess.run(
        [*command, str(script), *flags],
        env={**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"},
        cwd=path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def lines(path):
    """Of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(folder):
    """(step, loss, norm) of each update."""
    return [(x["step"], x["loss"], x["grad_norm"]) for x in lines(folder / "metrics.jsonl") if "loss" in x]


def words(folder):
    """What a run wrote, by the names of it: of its metrics, its events, the metadata of its last checkpoint."""
    metrics = set(itertools.chain.from_iterable(lines(folder / "metrics.jsonl")))
    events = {(x["event"], name) for x in lines(folder / "events.jsonl") for name in x}
    return metrics, events, set(checkpoint.metadata(folder / "checkpoints/step_00000006"))


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_an_older_run_goes_on_to_the_same_bits(older, tmp_path, state):
    there, here = tmp_path / "there", tmp_path / "here"
    run(older, "of_e37e37b.py", f"--config_run={there}", f"--config_state={state}")
    shutil.copytree(there, here, symlinks=True)
    shutil.rmtree(here / "checkpoints/step_00000006")
    assert [step for step, *_ in numbers(there)] == [1, 2, 3, 4, 5, 6]
    run(ROOT, "of_today.py", f"--run.folder={here}", f"--state={state}")

    resumed = [x["run"] for x in lines(here / "metrics.jsonl") if x["step"] > 3]
    assert set(resumed) == {1}  # from step 3, by the code of today
    assert numbers(here) == numbers(there)
    was, now = (checkpoint.restore(folder / "checkpoints/step_00000006") for folder in (there, here))
    assert tree.paths(was) == tree.paths(now)
    for path, x, y in zip(tree.paths(was), tree.leaves(was), tree.leaves(now), strict=True):
        assert x.dtype == y.dtype, path
        assert torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)), path
    for old, new in zip(words(there), words(here), strict=True):
        assert old <= new, old - new

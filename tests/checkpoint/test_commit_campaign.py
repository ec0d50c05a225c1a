"""The campaigns of commit_campaign.py at full size, on three kinds of file systems, and the mutants that they see."""

import json
import os
import sys

import pytest

from tests.house import ROOT

NOTHING_LOST = [
    ("kills", 500, "posix"),
    ("kills", 500, "copies"),
    ("kills", 100, "bare"),
    ("cuts", 1500, "posix"),
    ("aimed", 600, "posix"),
    ("sleepers", 200, "posix"),
    ("sleepers", 60, "copies"),
    ("jobs", 10000, "posix"),
    ("jobs", 3000, "copies"),
]
A_FEW = [("kills", 10, "copies"), ("cuts", 30, "posix"), ("aimed", 30, "posix"), ("sleepers", 12, "posix")]
MUTANTS = [  # a campaign that finds nothing of its own says nothing: (mutant, campaign, most cases, on)
    ("unsynced deletion", "aimed", 600, "posix"),
    ("unsynced names", "cuts", 600, "posix"),
    ("drafts do not count", "kills", 400, "copies"),
    ("gone is published", "sleepers", 400, "posix"),
    ("old look at the pointer", "jobs", 3000, "posix"),
]


def campaign(python, kind, cases, on, *more, seconds=7200):
    """(the object that it prints, what it said)."""
    command = [sys.executable, "-m", "tests.checkpoint.commit_campaign", kind, "--cases", str(cases), "--on", on, *more]
    done = python.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=seconds)
    assert done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr[-3000:]


SLOW, MEDIUM = pytest.mark.slow, pytest.mark.medium
SIZES = [
    *(pytest.param(*row, marks=SLOW) for row in NOTHING_LOST),
    *(pytest.param(*row, marks=MEDIUM) for row in A_FEW),
]


@pytest.mark.parametrize("kind, cases, on", SIZES)
def test_nothing_is_lost(python, kind, cases, on):
    found, said = campaign(python, kind, cases, on)
    assert found["failed"] == 0 and found["cases"] >= cases, said


@pytest.mark.parametrize(
    "mutant, kind, cases, on", [pytest.param(*m, marks=SLOW if i else MEDIUM) for i, m in enumerate(MUTANTS)]
)
def test_a_mutant_is_found(python, mutant, kind, cases, on):
    found, said = campaign(python, kind, cases, on, "--mutant", mutant, seconds=480)
    assert found["failed"] == 1, (found, said)

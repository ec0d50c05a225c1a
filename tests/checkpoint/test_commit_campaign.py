"""The campaigns of commit_campaign.py at full size, on two kinds of file systems; each sees a line that is missing."""

import json
import os
import sys

import pytest

from tests.house import ROOT

pytestmark = pytest.mark.slow
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
SEEN = [
    ("aimed", 300, "posix", "unsynced deletion"),
    ("cuts", 300, "posix", "unsynced names"),
    ("kills", 100, "copies", "drafts do not count"),
    ("sleepers", 60, "posix", "gone is published"),
    ("jobs", 1000, "posix", "no look for drafts"),
]


def campaign(python, kind, cases, on, *more):
    """(exit status, the object that it prints)."""
    command = [sys.executable, "-m", "tests.checkpoint.commit_campaign", kind, "--cases", str(cases), "--on", on, *more]
    done = python.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=7200)
    assert done.stdout, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["cases"] >= cases
    return found, done.stderr[-3000:]


@pytest.mark.parametrize("kind, cases, on", NOTHING_LOST)
def test_nothing_is_lost(python, kind, cases, on):
    found, said = campaign(python, kind, cases, on)
    assert found["failed"] == 0, said


@pytest.mark.parametrize("kind, cases, on, mutant", SEEN)
def test_a_line_that_is_missing_is_seen(python, kind, cases, on, mutant):
    found, _ = campaign(python, kind, cases, on, "--mutant", mutant)
    assert found["failed"] > 0

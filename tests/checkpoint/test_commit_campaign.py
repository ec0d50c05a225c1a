"""The campaigns of commit_campaign.py at full size, on three kinds of file systems."""

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

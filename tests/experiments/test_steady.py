"""A steady step waits for nothing, long runs do not grow, and restarts by torchrun leave nothing behind."""

import json
import os
import re

import pytest

from tests.experiments.jobs import assert_nothing_works_in, torchrun
from tests.experiments.leaks import counted_run, long_run

LOG_EVERY, STEPS = 10, 40


def test_a_steady_step_waits_for_no_rank_and_no_device(ranks, tmp_path):
    """Of a run with everything that is on by default: one question to the others a step, whose answer is read a step
    later, and nothing is done with the metrics between log points."""
    for calls, touched in ranks.run(counted_run, f"{tmp_path / 'run'}", 2, STEPS, LOG_EVERY, ranks=2):
        assert touched == {}
        steady = [n for n in range(3, STEPS) if n % LOG_EVERY and (n - 1) % LOG_EVERY]
        assert len(steady) > STEPS // 2
        for number in steady:
            assert calls[number] == [("wait", number - 1), ("all_reduce", False)], (number, calls[number])
        # At a log point the times of all ranks are asked for, and those of the log point before are read.
        later = [n for n in range(2 * LOG_EVERY, STEPS, LOG_EVERY)]
        for number in later:
            assert ("all_gather", False) in calls[number] and not any(wait is True for _, wait in calls[number])
            assert [asked for name, asked in calls[number] if name == "wait"] == [number - 1, number - LOG_EVERY]


LONG = [(1, 400), pytest.param(1, 2000, marks=pytest.mark.slow), pytest.param(2, 2000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("size, steps", LONG)
def test_a_long_run_does_not_grow(ranks, tmp_path, size, steps):
    """From the middle to the end nothing more is held: descriptors, threads, processes, memory, Python objects."""
    marks = [steps // 2 + 20, steps - 20]  # behind a save, not at one
    for seen in ranks.run(long_run, f"{tmp_path / 'run'}", size, steps, marks, 10, ranks=size):
        middle, end = (seen[mark] for mark in marks)
        assert end["fds"] <= middle["fds"] and end["children"] <= middle["children"], seen
        assert end["threads"] <= middle["threads"], seen
        # tensorstore's come and go: of its pools one for each core works or has just worked, four at least.
        assert end["all_threads"] <= middle["all_threads"] + max(4, os.cpu_count() or 1), seen
        assert end["objects"] - middle["objects"] < 60, seen
        assert end["kb"] - middle["kb"] < (700 if steps >= 2000 else 4000), seen  # few steps: buffers of threads


@pytest.mark.slow
def test_restarts_by_torchrun_leave_nothing_behind(python, tmp_path):
    """Ten of them, each rank killed five times: what a rank holds, and torchrun, is the same in the last attempt."""
    faults = "+".join(f"kill:rank={n % 2},step={n}" for n in range(2, 12))
    done = torchrun(python, tmp_path, f"--inject={faults}", "--steps=14", "--save_every=1", ranks=2, restarts=10)
    assert done.status == 0 and len(re.findall(r"injected kill", done.err)) == 10, done.err
    for rank in (0, 1):
        seen = [json.loads(line) for line in (tmp_path / f"run-held-{rank}").read_text().splitlines()]
        assert len(seen) == 11
        for what in seen[0]:
            values = [one[what] for one in seen]
            assert max(values[-3:]) <= max(values[:4]) + 1, (what, values)
    assert_nothing_works_in(tmp_path)

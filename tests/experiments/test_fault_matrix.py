"""Faults by `--inject` in real jobs of four ranks under torchrun: outcome, status, message and lost updates.

{exception, exit, kill, stop, hang, nan, diskfull, slow} x {rank 0, another, all} x {set-up, step, an asynchronous save
in flight, a synchronous save, evaluation}, as docs/running.md has it. Each job has one fault in, or behind, update 4;
torchrun starts it again where it ends, and whatever happened its last state is, to the bit, that of ranks that update
by hand. One case runs by default; the rest of the product is slow.
"""

import os
import re

import pytest

from fmegatron import checkpoint, loop
from tests import pairs
from tests.experiments.jobs import LIMIT_S, assert_nothing_works_in, torchrun, train_without_loop

KINDS = ("exception", "exit", "kill", "stop", "hang", "nan", "diskfull", "slow")
RANKS = ("0", "2", "all")
PLACES = ("setup", "step", "flight", "save", "evaluation")
STEPS = 8

POSSIBLE = [case for case in pairs.mixed(KINDS, RANKS, PLACES) if case[::2] != ("nan", "setup")]  # no state yet
DEFAULT = ("kill", "2", "flight")  # what most often happens to real jobs
CASES = [pytest.param(*case, id="-".join(case), marks=() if case == DEFAULT else pytest.mark.slow) for case in POSSIBLE]

# Updates that are done again where all ranks come to the same place, with a save every 2 updates.
LOST = {"setup": 0, "step": 1, "save": 2, "evaluation": 0}
# A full disk is noticed by the next save. A number that is not finite reaches the loss in the second update behind it,
# and all ranks know one later.
LOST_LATER = {
    "diskfull": {"setup": (2, 2), "step": (2, 2), "save": (2, 2), "evaluation": (2, 2)},
    "nan": {"step": (2, 4), "save": (3, 5), "evaluation": (1, 3)},
}


def lost(kind, rank, place):
    """(least, most) updates that are done again."""
    if kind == "slow" or (kind, rank) == ("stop", "all"):
        return 0, 0
    if place == "flight":  # an asynchronous save may not be done yet, and the one before it may have been the first
        return 0, STEPS
    return LOST_LATER[kind][place] if kind in LOST_LATER else (LOST[place], LOST[place])


@pytest.fixture(scope="session")
def unharmed(ranks):
    """The hash of the last state of rank 0, without faults."""
    return ranks.run(train_without_loop, 4, STEPS, "float64")[0]


@pytest.mark.long
@pytest.mark.parametrize("kind, rank, place", CASES)
def test_every_fault_everywhere(python, tmp_path, unharmed, kind, rank, place):
    seconds = {"diskfull": ",seconds=3", "slow": ",seconds=0.1"}.get(kind, "")
    if (kind, rank) == ("stop", "all"):  # nobody is left to see it; they are sent SIGCONT
        seconds = ",seconds=1.5"
    flags = [f"--inject={kind}:rank={rank},step=4,at={place}{seconds}"]
    flags += ["--async_save"] if place == "flight" else []
    if kind in ("hang", "stop"):
        flags += [f"--limit_s={LIMIT_S}", "--save_limit_s=10", f"--setup_s={12 if place == 'setup' else 60}"]
        flags.append("--pause_s=0.2")  # one that is stopped is judged by the section that it was last seen in
    else:
        flags.append("--limit_s=60")
    # One rank of all may be ended by another's fault before its own, which then comes after the restart.
    done = torchrun(python, tmp_path, *flags, restarts=4 if rank == "all" else 1)
    assert done.status == 0, done.err
    assert done.end() == unharmed, done.err
    _assert_said(kind, rank, place, done)
    least, most = lost(kind, rank, place)
    most *= max(1, done.err.count("failed (exitcode"))
    again = {r: n - STEPS for r, n in done.updates().items()}
    assert sorted(again) == [0, 1, 2, 3] and max(again.values()) <= most, again
    first = again[0 if rank == "all" else int(rank)]
    assert first >= least, again
    _assert_left(done.run)
    assert_nothing_works_in(tmp_path)


def _assert_said(kind, rank, place, done):
    """The first message is that of the fault, by its rank; the exit status is that of docs/running.md's table."""
    who = r"\d" if rank == "all" else rank
    failed = re.findall(r"failed \(exitcode: (-?\d+)\) local_rank: (\d)", done.err)
    if kind == "slow" or (kind, rank) == ("stop", "all"):
        assert not failed and "failed" not in done.err, done.err
        warned = [(a, b) for a, b in re.findall(r"step (\d+): rank (\d) \(.+\) works", done.err)]
        assert rank == "all" or kind != "slow" or {b for _, b in warned} == {rank}, done.err
        return
    if kind == "diskfull" and place == "flight":  # a warning, and the next save tries again; the last one must not fail
        assert re.search("No space left on device|File too large", done.err), done.err
        return
    said, status = {
        "exception": (rf"rank {who} of 4 failed: ValueError: injected: got exception", {"1"}),
        "exit": (rf"rank {who} of 4 failed: SystemExit: 3", {"3", "1"}),
        "kill": (rf"exitcode: -9\) local_rank: {who}", {"-9", "1"}),
        "stop": (rf"hang: rank \d .*behind: rank {who} .*(its process does not run|gave no sign)", {"75", "-9"}),
        "hang": (r"hang: rank \d", {"75", "-9"}),
        "nan": (r"rank \d of 4 failed: NonFiniteError: step [4-6]: (loss|norm) is nan", {"1"}),
        "diskfull": (r"No space left on device", {"1"}),
    }[kind]
    assert re.search(said, done.err), done.err
    assert failed and {code for code, _ in failed} <= status, (failed, done.err)
    if kind in ("stop", "hang"):
        texts = [path.read_text() for path in (done.run / "stacks").glob("rank-*.txt")]
        assert len([text for text in texts if text.startswith("hang:")]) == (3 if kind == "stop" else 4), texts
        where = [text for text in texts if re.search(r'File ".*inject\.py", line \d+ in _happen', text)]
        assert len(where) == (0 if kind == "stop" else 4 if rank == "all" else 1)


def _assert_left(run):
    """Every update has one record, nothing is left of saves that did not end, and the newest checkpoint restores."""
    seen = [record["step"] for record in loop.read_metrics(run / "metrics.jsonl") if "loss" in record]
    assert seen == list(range(1, STEPS + 1))
    manager = checkpoint.Manager(run / "checkpoints")
    assert manager.latest() == STEPS and manager.finite(STEPS)
    state = manager.restore(STEPS, rank=0)[0]
    assert all(x.isfinite().all() for x in state.values())
    hidden = [name for name in os.listdir(run / "checkpoints") if name.startswith(".") and ".aside-" not in name]
    assert not hidden, hidden  # what a run has gone back from is set aside, and stays

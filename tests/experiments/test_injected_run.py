"""Real jobs under torchrun with faults on request: how soon a hang is over, restarts in the process, reruns."""

import re
import time

import pytest

from fmegatron import loop
from tests.experiments.jobs import LIMIT_S, torchrun, train_without_loop


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["hang", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_hang_is_over_soon(python, tmp_path, kind):
    """Beyond its limit at most 1.5 s to the stacks of all ranks that can write, and 5 s to the end of the job.

    Of these 5 torchrun sees the end of the ranks after 0.3; the rest is the end of its own interpreter, which a busy
    machine makes slow (LOG.md): more is granted here.
    """
    flags = f"--inject={kind}:rank=1,step=5", f"--limit_s={LIMIT_S}"
    done = torchrun(python, tmp_path, *flags, restarts=0, ranks=2)
    ended = time.time()
    where = r"behind: rank 1 \(" if kind == "stop" else r"rank 1 \(.*\) at [^;]*inject.py:\d+ in _happen"
    assert done.status == 1 and "hang: rank" in done.err and re.search(where, done.err), done.err
    last = float((tmp_path / "run-times").read_text().splitlines()[-1].split()[1])  # the end of update 4
    stacks = sorted((done.run / "stacks").glob("rank-*.txt"))
    written = [path for path in stacks if path.read_text().startswith("hang:")]
    assert len(written) == (2 if kind == "hang" else 1)
    late = max(path.stat().st_mtime for path in written) - last - LIMIT_S
    print(f"{kind}: stacks {late:.2f} s beyond the limit, the end {ended - last - LIMIT_S:.2f}")
    assert late <= 1.5
    assert ended - last - LIMIT_S <= 12
    assert ("in _happen" in written[-1].read_text()) == (kind == "hang")


@pytest.mark.slow
@pytest.mark.long
def test_restarts_in_the_process(python, ranks, tmp_path):
    """An exception on one rank while the other waits for it: both go on from local replicas."""
    flags = ("--inject=exception:rank=1,step=6", "--restarts=1", "--near", "--save_every=8")
    done = torchrun(python, tmp_path, *flags, restarts=0, ranks=2)
    assert done.status == 0, done.err
    assert done.end() == ranks.run(train_without_loop, 2, 8, "float64", ranks=2)[0]
    assert "restart 1 in the process, after 5 updates" in done.err and "rank 1: ValueError: injected" in done.err
    steps = [int(line.split()[0]) for line in (tmp_path / "run-times").read_text().splitlines()]
    assert steps[:5] == [1, 2, 3, 4, 5] and steps[-3:] == [6, 7, 8]
    assert len(steps) <= 8 + 3  # replicas count some steps after they were begun; there is no checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("rank, verdict", [(1, "persistent"), (-1, "transient")])
def test_rerun_on_another_rank(python, tmp_path, rank, verdict):
    flags = ["--on_nonfinite=rerun", f"--faulty_rank={rank}"]
    flags += [] if rank >= 0 else ["--inject=nan:rank=1,step=4"]
    done = torchrun(python, tmp_path, *flags, restarts=0, ranks=2)
    assert done.status == 1 and f": {verdict}: " in done.err, done.err
    assert re.search(f"exitcode *: {loop.rerun.STATUS[verdict]}", done.err)

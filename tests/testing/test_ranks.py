"""The pool of real ranks: results, sub-pools, a rank that raises, hangs or dies."""

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from fmegatron.testing.ranks import RankError, RankPool


def total(rank, x):
    value = torch.full((2,), float(rank)) + x
    dist.all_reduce(value)
    return value, dist.get_world_size()


def raise_on(rank, who):
    if rank == who:
        raise ValueError(f"rank {rank} cannot")
    dist.all_reduce(torch.ones(1))


def hang_on(rank, who):
    if rank == who:
        time.sleep(600)
    return rank


def die_on(rank, who):
    if rank == who:
        os._exit(3)
    dist.all_reduce(torch.ones(1))


def test_ranks_of_4_2_and_1(ranks):
    for n in (4, 2, 1):
        wanted = torch.full((2,), sum(range(n)) + 0.5 * n)
        for value, size in ranks.run(total, 0.5, ranks=n):
            assert torch.equal(value, wanted) and size == n


def process_of(rank):
    return os.getpid()


def test_calls_start_no_processes(ranks):
    pids = ranks.run(process_of)
    assert ranks.run(process_of) == pids and ranks.run(process_of, ranks=2) == pids[:2]


def test_the_traceback_of_the_rank_that_raised(ranks):
    with pytest.raises(RankError, match=r"(?s)raise_on: failed on rank 2 of 4:.*ValueError: rank 2 cannot") as caught:
        ranks.run(raise_on, 2)
    assert caught.value.rank == 2
    assert len(ranks.run(total, 0.0)) == 4


@pytest.mark.medium
def test_hanging_and_dying_ranks(ranks):
    """The pool ends what does not answer, and starts that process again at the next call."""
    with pytest.raises(TimeoutError, match="hang_on: no answer from rank (0, )?1 of 2"):
        ranks.run(hang_on, 1, ranks=2, timeout_s=1)
    with pytest.raises(RankError, match="die_on: failed on rank 1 of 2:\nits process ended with exit code 3"):
        ranks.run(die_on, 1, ranks=2)
    assert len(ranks.run(total, 0.0)) == 4


def test_bad_sizes(ranks):
    with pytest.raises(ValueError, match="got ranks=5, wanted 1 to 4"):
        ranks.run(total, 0.0, ranks=5)
    with pytest.raises(ValueError, match="at least 1"):
        RankPool(0)


SCRIPT = """
from fmegatron.testing.ranks import RankPool

def ten_times(rank):
    return rank * 10

if __name__ == "__main__":
    with RankPool(2) as pool:
        print(pool.run(ten_times), pool._server.forks)
"""


@pytest.mark.slow
def test_functions_of_a_script(tmp_path, python):
    """A rank looks the function up in the script without running it as a script: that would start a pool in each rank,
    and a pool in each of theirs. They are forks: neither torch nor the rooms start a thread on import."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {"PYTHONPATH": os.getcwd()}
    done = python.run([sys.executable, script], env=environment, timeout=600)
    assert done.stdout.strip() == "[0, 10] True", done.stderr

"""Who holds the others up: by rank and machine, asked at one log point, read at the next."""

import json
import time
import warnings

import pytest
import torch

from fmegatron.loop.stragglers import Stragglers


class Ranks:
    """Rank 0 of three; the others are like it, but for what `others` adds. Notes when an answer is read."""

    rank, size = 0, 3

    def __init__(self, *others):
        self.others, self.read = others, 0

    def gather_rows(self, row):
        return torch.stack([row] * self.size)

    def gather_later(self, row):
        def answer():
            self.read += 1
            return torch.stack([row, *(row + torch.tensor(other) for other in self.others)])

        return answer


def test_the_slow_rank_is_named(tmp_path):
    world = Ranks((0, 0, 0), (300_000_000, -5, 0))
    times = Stragglers(world, tmp_path / "ranks.jsonl")
    step = times.timed(lambda state, batch: (time.sleep(0.01), state)[1])
    for n in range(3):
        assert step(n, n) == n
    times.log(3)
    assert world.read == 0 and not (tmp_path / "ranks.jsonl").exists()
    with pytest.warns(
        RuntimeWarning, match=r"step 3: rank 2 \(.+\) works 0.3.* s a step, the median is .*the others wait"
    ):
        times.log(6)
    record = json.loads((tmp_path / "ranks.jsonl").read_text())
    assert record["step"] == 3 and len(record["hosts"]) == 3 and record["wait"][0] > 0.008 > record["work"][0]
    assert world.read == 1


def test_equal_ranks_are_not_warned_of(tmp_path):
    times = Stragglers(Ranks((900_000, 0, 0), (0, 0, 1_000_000)), tmp_path / "ranks.jsonl")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(3):
            times.log(n)


@pytest.mark.parametrize("size", [65, 4096, 16384])
def test_a_record_does_not_grow_with_the_ranks(tmp_path, size):
    """At most 8 KiB a log point (1.1 MB for 16,384 ranks before); the slow rank and the median of all are there."""
    world = Ranks()
    world.size = size
    world.gather_later = lambda row: lambda: _slow(size)
    times = Stragglers(world, tmp_path / "ranks.jsonl")
    times.log(1)
    with pytest.warns(RuntimeWarning, match=f"rank {size - 2} "):
        times.log(2)
    times.close()
    lines = (tmp_path / "ranks.jsonl").read_text().splitlines()
    record = json.loads(lines[0])
    assert len(lines[0]) < 8192 and len(record["ranks"]) == 64 and size - 2 in record["ranks"]
    assert record["of"] == size and record["median"] == {"work": 0.001, "wait": 0.0, "data": 0.0}


def _slow(size):
    rows = torch.zeros(size, 3, dtype=torch.int64)
    rows[:, 0] = 1_000_000
    rows[size - 2, 0] = 3_000_000_000
    return rows

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

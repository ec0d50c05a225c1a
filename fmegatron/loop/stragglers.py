"""Stragglers: how long each rank works, waits and reads data, at log points, by rank and machine.

A slow rank makes all others wait inside of their collectives, so the time of a step is the same on all. What differs
is the processor time of the thread that trains (on CPUs), in a step: a rank that works long lets others wait; and the
time that it waits for a batch.
"""

import json
import socket
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fmegatron.loop.json_lines import Lines
from fmegatron.loop.onlookers import Onlooker

_LEAST = 10e-3  # seconds that a rank must be slower by
_HOST = 64  # bytes of a machine's name
MOST_RANKS = 64  # in a record: it does not grow beyond, however many there are


class Stragglers:
    """The times of this rank since the last log point, and of all ranks at the one before.

    ratio: a rank that works, or reads, `ratio` times as long as the median is reported (RuntimeWarning, rank 0). path:
    of a file of JSON lines: {"step", "hosts", "work", "wait", "data"}, seconds per step of every rank; of more than
    MOST_RANKS those that hold the others up most, with their numbers as "ranks", how many there are as "of", and the
    medians of all as "median". On CUDA `work` and `wait` are of the host's thread only.
    """

    def __init__(self, world: Any, path: Path, ratio: float = 1.5):
        self.world, self.ratio = world, ratio
        self._lines, self._onlooker = Lines(path), Onlooker(f"times of ranks in {path}")
        name = socket.gethostname().encode()[:_HOST].ljust(_HOST, b"\0")
        rows = world.gather_rows(torch.frombuffer(bytearray(name), dtype=torch.int64))
        self.hosts = [bytes(row.view(torch.uint8).tolist()).rstrip(b"\0").decode() for row in rows]
        self._asked: tuple[int, Callable] | None = None
        self.forget()

    def forget(self) -> None:
        """Begin anew: what was before is not counted."""
        self._work, self._wait, self._steps = 0.0, 0.0, 0

    def close(self) -> None:
        """Close the file, if it was opened."""
        self._onlooker(self._lines.close)
        self._onlooker.summary()

    def timed(self, step: Callable) -> Callable:
        """The same step, which notes its times."""

        def timed_step(state, batch):
            wall, own = time.perf_counter(), time.thread_time()
            out = step(state, batch)
            own = time.thread_time() - own
            self._wait += max(0.0, time.perf_counter() - wall - own)
            self._work += own
            self._steps += 1
            return out

        return timed_step

    def log(self, step: int, waited: float = 0.0) -> None:
        """At a log point, on all ranks: write what was asked at the one before, and ask again. Waits for no rank.

        waited: seconds per step that this rank waited for its batches (`StepInfo.waited`).
        """
        if self._asked is not None:
            at, answer = self._asked
            self._write(at, answer())
        times = [self._work, self._wait, waited * self._steps]
        row = torch.tensor([round(1e9 * seconds / max(1, self._steps)) for seconds in times], dtype=torch.int64)
        self._asked = step, self.world.gather_later(row)
        self.forget()

    def _write(self, step: int, rows: torch.Tensor) -> None:
        if self.world.rank != 0:
            return
        work, wait, data = (rows[:, i].double() * 1e-9 for i in range(3))
        times, record = {"work": work, "wait": wait, "data": data}, {"step": step}
        ranks = list(range(len(self.hosts)))
        if len(ranks) > MOST_RANKS:
            ranks = sorted((work + data).argsort(descending=True, stable=True)[:MOST_RANKS].tolist())
            medians = {name: round(float(y.quantile(0.5, interpolation="lower")), 9) for name, y in times.items()}
            record |= {"of": len(self.hosts), "ranks": ranks, "median": medians}
        record |= {"hosts": [self.hosts[rank] for rank in ranks]}
        record |= {name: [round(x, 9) for x in y[ranks].tolist()] for name, y in times.items()}
        self._onlooker(self._lines.append, json.dumps(record))
        for name, seconds in (("works", work), ("waits for its data", data)):
            usual, rank = float(seconds.quantile(0.5, interpolation="lower")), int(seconds.argmax())
            if seconds[rank] > max(self.ratio * usual, usual + _LEAST):
                warnings.warn(
                    f"step {step}: rank {rank} ({self.hosts[rank]}) {name} {seconds[rank]:.3g} s a step, the median is "
                    f"{usual:.3g} s: the others wait for it",
                    RuntimeWarning,
                    stacklevel=2,
                )

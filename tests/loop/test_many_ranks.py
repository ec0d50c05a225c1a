"""What thousands of ranks ask of the store of a job, counted: Worlds without processes, by a clock of the test."""

import json
import threading
import time

import pytest

from fmegatron.loop.faults import hang, notice
from fmegatron.loop.faults.hang import _Watch
from fmegatron.loop.faults.notice import Faults, Place
from fmegatron.loop.faults.pulse import Now, Patience, Pulse


class Counted:
    """A store of the job: what it is asked, and the bytes that go there and back."""

    def __init__(self):
        self.values, self.requests, self.bytes = {}, 0, 0

    def _count(self, *texts):
        self.requests += 1
        self.bytes += sum(map(len, texts))

    def set(self, key, value):
        self._count(key, value)
        self.values[key] = value

    def check(self, keys):
        self._count(*keys)
        return all(key in self.values for key in keys)

    def get(self, key):
        self._count(key, self.values[key])
        return self.values[key].encode()

    def multi_get(self, keys):
        found = [self.values[key] for key in keys]
        self._count(*keys, *found)
        return [text.encode() for text in found]

    def compare_set(self, key, expected, desired):
        held = self.values.get(key, "")
        if held == expected:
            held = self.values[key] = desired
        self._count(key, expected, desired, held)
        return held.encode()

    def add(self, key, n):
        self._count(key, "8 bytes")
        self.values[key] = self.values.get(key, 0) + n
        return self.values[key]


class Job:
    """The watching threads of a job's ranks, each in `count` sections since the clock's 0, with a limit of 100 s."""

    def __init__(self, monkeypatch, tmp_path, counts, silent=()):
        self.now, self.store, self.ended, self.silent = 0.0, Counted(), {}, set(silent)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.watches = []
        for rank, count in enumerate(counts):
            pulse = Pulse(Patience(), rank)
            pulse.now = Now(count, "step", count, 0.0, 100.0)
            watch = _Watch(pulse, len(counts), tmp_path, threading.Event())
            watch.board = watch.base = self.store
            watch.address = ("nowhere", 0)
            watch._end = lambda text, rank=rank: self.ended.setdefault(rank, text)
            self.watches.append(watch)

    def look(self):
        """Every rank that has not ended looks once; then its pause goes by."""
        for rank, watch in enumerate(self.watches):
            if rank not in self.ended and rank not in self.silent:
                watch._look()
        self.now += self.watches[0].pause

    def until_ended(self, looks):
        for _ in range(looks):
            self.look()
            if len(self.ended) == len(self.watches) - len(self.silent):
                return self.now
        raise AssertionError(f"{len(self.ended)} of {len(self.watches)} have ended at {self.now}")


@pytest.mark.parametrize("size", [8, 512, pytest.param(4096, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["behind", "all", "stopped"])
def test_a_hang_of_many_ranks(monkeypatch, tmp_path, size, kind):
    """Each look of a rank is some requests and 1.5 kB, whatever the size: before, every late rank read the words of
    all, 4 GB a look for 4,096 ranks, 63 GB for 16,384. What is declared names the ranks that are behind."""
    slow = size // 2 + 1
    counts = [6 - (rank == slow and kind != "all") for rank in range(size)]
    job = Job(monkeypatch, tmp_path, counts)
    job.look()
    if kind == "stopped":
        job.silent.add(slow)
    looks, job.now = 1, 100.0 - 5 * job.watches[0].pause
    job.store.bytes = job.store.requests = 0
    at = job.until_ended(40)
    looks = round((at - 100.0) / job.watches[0].pause) + 5
    (text,) = set(job.ended.values())
    assert f"behind: rank {slow} " in text if kind != "all" else "all ranks are in it" in text
    assert ("does not run" in text) == (kind == "stopped")
    assert looks <= 5 + (3 if kind != "stopped" else 10), looks
    assert job.store.requests < 8 * looks * size and job.store.bytes < (1500 + 20_000 / size) * looks * size


def test_a_judge_that_stops_is_followed(monkeypatch, tmp_path):
    """Its office lasts for some pauses; and one that is late no more gives it back at once."""
    job = Job(monkeypatch, tmp_path, [6, 6, 5, 6])
    job.look()
    job.now = 100.0 - 3.5 * job.watches[0].pause
    job.watches[0]._look()
    assert job.store.values["judge"].startswith("0 ")
    job.silent.add(0)
    job.until_ended(20)
    assert {text.partition("(")[0] for text in job.ended.values()} == {"hang: rank 2 "}
    job = Job(monkeypatch, tmp_path, [6, 6, 6, 6])
    job.look()
    job.now = 100.0 - 3.5 * job.watches[0].pause
    job.look()
    assert job.store.values["judge"].startswith("0 ")
    for watch in job.watches:  # all come through
        watch.pulse.now = Now(7, "step", 7, job.now, 100.0)
    job.look()
    assert job.store.values["judge"] == "" and not job.ended
    # Rank 3 is late in the next section, with the others ahead of it: what was told of the section before is not true.
    for watch in job.watches[:3]:
        watch.pulse.now = Now(8, "step", 8, job.now, 1e9)
        watch._look()
    job.now += 101.0
    job.watches[3]._look()
    assert set(job.ended) == {3} and "behind: rank 3" in job.ended[3]


@pytest.mark.parametrize("size", [2, 4096, 16384])
def test_looks_at_the_store_do_not_grow_with_the_ranks(monkeypatch, tmp_path, size):
    """At most 1,000 looks a second of all ranks together at the notice board, and as many of the watch."""
    pulse = Pulse(Patience(), 0)
    assert size / _Watch(pulse, size, tmp_path, threading.Event()).pause <= hang.LOOKS_A_SECOND
    assert size / Faults(Place(0, size), "nowhere", 0).pause <= notice.LOOKS_A_SECOND


@pytest.mark.parametrize("size", [2, 64])
def test_the_end_of_all_is_counted_not_listed(monkeypatch, size):
    """One number in the place of a key for each rank, of which each rank asked for all of them 100 times: 430 GB for
    16,384 ranks."""
    store, all_faults = Counted(), []
    for rank in range(size):
        faults = Faults(Place(rank, size), "nowhere", 0)
        faults._board = store
        faults._open.set()
        all_faults.append(faults)
    monkeypatch.setattr(notice, "TOLD_SECONDS", 0.0)
    monkeypatch.setattr(notice, "FIRST_SECONDS", 0.0)
    for faults in all_faults:
        faults.leave("ended")
        faults.all_told(first=True)
        faults.all_told(first=False)  # a rank counts once
    assert store.values["told"] == size and store.requests <= 5 * size and store.bytes < 100 * 5 * size
    assert json.dumps(store.values["told"]) == str(size)

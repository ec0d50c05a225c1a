"""Read-ahead: the batches of the plain call in its order; what goes wrong in the thread comes up at its step, soon."""

import ctypes
import threading
import time

import numpy as np
import pytest
import torch

from fmegatron import loop
from fmegatron.data import Batches, source
from fmegatron.data.reader import ahead
from tests.data.test_batches import COUNTING


def test_the_same_batches_in_any_order_of_numbers():
    batches = Batches(COUNTING, 4, 16, seed=1)
    numbers = [0, 1, 2, 3, 7, 8, 8, 2, 3, 100, 4, 5]
    for depth in (1, 2, 5):
        with ahead(batches, depth) as batch_at:
            for n in numbers:
                assert torch.equal(batch_at(n)["tokens"], batches.at(n)["tokens"])


def test_the_next_ones_are_made_while_one_is_used():
    made, go = [], threading.Event()

    @source
    def batch_at(n):
        made.append(n)
        if n == 5:
            go.set()
        return n

    with ahead(batch_at, depth=3) as reader:
        assert reader(2) == 2 and go.wait(5) and made == [2, 3, 4, 5]
        time.sleep(0.05)
        assert made == [2, 3, 4, 5]  # no further than depth
        before = reader.waited
        assert [reader(3), reader(4), reader(5)] == [3, 4, 5] and reader.waited - before < 1


def test_an_error_comes_up_at_the_step_that_needs_the_batch():
    @source
    def batch_at(n):
        if n == 3:
            raise OSError("the disk is gone")
        return n

    with ahead(batch_at, depth=4) as reader:
        assert [reader(n) for n in range(3)] == [0, 1, 2]
        with pytest.raises(OSError, match="the disk is gone"):
            reader(3)
        assert reader(4) == 4
        with pytest.raises(OSError, match="the disk is gone"):
            reader(3)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # that is the point
@pytest.mark.parametrize("busy", [False, True], ids=["waiting", "reading"])
def test_a_killed_thread_is_an_error_within_seconds(busy):
    reading = threading.Event()

    @source
    def batch_at(n):
        if busy and n == 3:
            reading.set()
            while True:
                time.sleep(0.01)
        return n

    with ahead(batch_at, depth=2) as reader:
        assert reader(0) == 0 and reader(1) == 1
        assert not busy or reading.wait(5)
        kill = ctypes.pythonapi.PyThreadState_SetAsyncExc
        assert kill(ctypes.c_ulong(reader._thread.ident), ctypes.py_object(SystemExit)) == 1
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="the thread that reads has ended before batch"):
            for n in range(2, 20):
                reader(n)
        assert time.monotonic() - began < 5


def test_it_ends():
    with ahead(source(lambda n: n)) as reader:
        assert reader(0) == 0
    reader._thread.join(5)
    assert not reader._thread.is_alive()
    with pytest.raises(RuntimeError, match="batch 1 was asked for after close"):
        reader(1)
    numbers = source(lambda n: n)
    for wrong, message in (
        ((3,), "ahead: got 3"),
        ((lambda n: n,), r"wanted a data.Source; give data.source\(function\)"),
        ((numbers, 0), "depth: got 0"),
        ((numbers, 1.5), "depth"),
    ):
        with pytest.raises(ValueError, match=message), ahead(*wrong):
            pass


def test_the_loop_reads_ahead_and_states_how_long_it_waited():
    class Slow:
        def __len__(self):
            return len(COUNTING)

        def __getitem__(self, index):
            time.sleep(0.002)
            return COUNTING[index]

    seen = []

    def step(state, batch):
        seen.append(batch["tokens"])
        time.sleep(0.02)
        return state, {"loss": torch.tensor(1.0)}

    batches = Batches(Slow(), 2, 8, seed=3)
    infos = list(loop.train(step, {"w": torch.zeros(1)}, batches, steps=12, start=2, log_every=4))
    assert all(torch.equal(x, batches.at(n)["tokens"]) for n, x in enumerate(seen, 2)) and len(seen) == 10
    records = [info.record() for info in infos if info.metrics]
    assert [info.step for info in infos if info.metrics] == [3, 4, 8, 12]
    assert all(record["time_data"] < 0.02 for record in records[1:]) and records[0]["time_data"] > 0
    own = [info.record() for info in loop.train(step, {"w": torch.zeros(1)}, source(batches.at), steps=1)]
    assert own[0]["time_data"] > 0  # a function of one's own is read ahead as well
    assert not [t for t in threading.enumerate() if t.name == "fmegatron-data-ahead" and t.is_alive() and t.join(2)]
    assert np.isfinite(records[-1]["seconds"])

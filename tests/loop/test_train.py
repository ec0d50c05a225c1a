"""The loop: positions, log points, one transfer per log point, stopping by agreement."""

import itertools
import time

import numpy as np
import pytest
import torch

from fmegatron.data import source
from fmegatron.loop import evaluate, train
from fmegatron.loop.losses import BadLoss
from fmegatron.loop.metrics import fetch, mean
from fmegatron.loop.signals import Stop


def count(state, batch):
    """A step whose state is the sum of the positions it read."""
    return state + batch, {"loss": (state + batch).double(), "position": batch}


def run(**settings):
    return list(train(count, torch.tensor(0), source(torch.tensor), **settings))


def test_positions_continue_after_a_resume():
    whole = run(steps=6)
    first = run(steps=3)
    second = list(train(count, first[-1].state, source(torch.tensor), steps=6, start=3))
    assert [int(info.state) for info in whole] == [int(info.state) for info in first + second] == [0, 1, 3, 6, 10, 15]
    assert [info.step for info in second] == [4, 5, 6]
    assert run(steps=3, start=3) == []
    with pytest.warns(RuntimeWarning, match="got steps=3, but 5 steps are done: nothing is trained"):
        assert run(steps=3, start=5) == []


def test_log_points():
    infos = run(steps=25, log_every=10, tokens_per_step=100)
    logged = [info.step for info in infos if info.metrics]
    assert logged == [1, 10, 20, 25]
    assert infos[9].metrics == {"loss": 45.0, "position": 9.0}
    assert infos[9].tokens_per_second == pytest.approx(100 / infos[9].seconds)
    assert set(infos[9].record()) == {"loss", "position", "seconds", "time_data", "tokens_per_second"}
    assert [info.last for info in infos] == [False] * 24 + [True]


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"log_every": 0}, "log_every: got 0, wanted a whole number of at least 1"),
        ({"log_every": 2.5}, "log_every: got 2.5"),
        ({"steps": "10"}, "steps: got '10'"),
        ({"start": -1}, "start: got -1"),
    ],
)
def test_settings_are_checked_before_the_first_step(wrong, words):
    with pytest.raises(ValueError, match=words):
        train(count, torch.tensor(0), source(torch.tensor), **{"steps": 1, **wrong})


def test_what_follows_on_a_bad_loss_is_checked_when_it_is_said():
    with pytest.raises(ValueError, match="nonfinite: got 'stop', wanted one of warn, skip, roll back, rerun, raise"):
        BadLoss("stop")


def test_whole_numbers_of_any_library():
    infos = run(steps=np.int64(5), start=np.int32(1), log_every=np.uint8(2))
    assert [(info.step, type(info.step)) for info in infos] == [(step, int) for step in (2, 3, 4, 5)]
    assert [info.step for info in infos if info.metrics] == [2, 4, 5]


@pytest.mark.parametrize(
    "metrics, words",
    [
        (None, r"metrics: got None \(NoneType\), wanted a dict of numbers by name; a step returns \(state, metrics\)"),
        (torch.tensor(1.0), r"metrics: got tensor\(1.\) \(Tensor\), wanted a dict"),
        ({"loss": None}, r"metric 'loss': got None \(NoneType\), wanted one number; leave it out"),
        ({"loss": torch.tensor(1.0), "kind": "fast"}, r"metric 'kind': got 'fast' \(str\), wanted one number"),
    ],
)
def test_metrics_that_are_no_numbers(metrics, words):
    with pytest.raises(ValueError, match=words):
        list(train(lambda state, batch: (state, metrics), None, source(int), steps=1))


def test_the_time_of_the_caller_is_not_counted(monkeypatch):
    clock = itertools.count()  # a second for every look at it
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    seconds = []
    for info in train(count, torch.tensor(0), source(torch.tensor), steps=3, log_every=1):
        seconds.append(info.seconds)
        time.perf_counter()
    assert seconds == [3.0] * 3  # of them two by the reader of the batches


def test_no_host_synchronisation_between_log_points():
    """Reading any metric between log points would call .item() or .tolist() on it."""
    read = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__float__, torch.Tensor.__bool__):
                read.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    def step(state, batch):
        return state, {"a": torch.tensor(1.0).as_subclass(Watched), "b": torch.tensor(2.0).as_subclass(Watched)}

    infos = train(step, None, source(lambda position: None), steps=20, log_every=10)
    for info in infos:
        assert len(read) == {True: 1, False: 0}[bool(info.metrics)], info.step
        read.clear()


class Ranks:
    """Rank 0 of a world of two; `other` are the answers of rank 1 to one question after another. Notes what happens."""

    rank, size = 0, 2

    def __init__(self, *other):
        self.other, self.noted = list(other), []

    def ask(self, *flags):
        number = sum(event.startswith("asks") for event in self.noted) + 1
        self.noted.append(f"asks {number}")
        others = self.other[number - 1] if number <= len(self.other) else ()
        others = (*others, *[False] * (len(flags) - len(others)))

        def answer():
            self.noted.append(f"reads {number}")
            return tuple(a or b for a, b in zip(flags, others, strict=True))

        return answer

    def minimum(self, row):
        self.noted.append("minimum")
        return row


def test_stops_when_another_rank_was_asked():
    world, stop = Ranks((False,) * 3, (False,) * 3, (True, False, False)), Stop()
    infos = run(steps=10, stop=stop, world=world)
    assert [info.step for info in infos] == [1, 2, 3, 4]
    assert infos[-1].stopping and infos[-1].last and infos[-1].metrics and not stop.interrupted
    assert run(steps=10, stop=Stop(signal="SIGTERM"))[-1].step == 1  # alone there is nobody to wait for


def test_the_question_of_a_step_is_answered_a_step_later():
    """So a rank never waits for one that is slower by less than a step; at the last step all know the same."""
    world = Ranks()
    step = lambda state, batch: (world.noted.append(f"step {batch}"), {})  # noqa: E731
    for info in train(step, None, source(int), steps=4, world=world):
        assert world.noted[-1] == f"asks {info.step}" if not info.last else world.noted[-1] == "reads 4"
    assert world.noted == [
        *("step 0", "asks 1", "step 1", "reads 1", "asks 2", "step 2", "reads 2", "asks 3"),
        *("step 3", "reads 3", "asks 4", "reads 4"),
    ]


def test_a_loop_that_is_left_waits_for_nobody():
    world = Ranks()
    infos = train(count, torch.tensor(0), source(torch.tensor), steps=9, world=world)
    assert next(infos).step == 1
    infos.close()
    assert world.noted == ["asks 1"]

    @source
    def batch_at(position):
        if position == 2:
            raise ValueError("no such batch")
        return torch.tensor(position)

    world = Ranks()
    with pytest.raises(ValueError, match="no such batch"):
        list(train(count, torch.tensor(0), batch_at, steps=9, world=world))
    assert world.noted == ["asks 1", "reads 1", "asks 2"]


def test_the_kind_of_signal_is_agreed_too():
    stop = Stop(signal="SIGTERM")
    assert stop.ask(Ranks((True, True)))() == (True,) and stop.interrupted
    stop = Stop(signal="SIGINT")
    assert stop.ask()() == (True,) and stop.interrupted
    assert Stop().ask(None, True, False)() == (False, True, False)


def test_evaluate():
    def metrics_of(params, batch):
        return {"loss": params * batch}

    assert evaluate(metrics_of, torch.tensor(2.0), source(torch.tensor), 4) == {"loss": 3.0}

    def counted(params, batch):
        return {**metrics_of(params, batch), "loss/count": (batch == 3).double()}

    assert evaluate(counted, torch.tensor(2.0), source(torch.tensor), 4) == {"loss": 6.0, "loss/count": 1.0}
    with pytest.raises(ValueError, match="got 0 batches"):
        evaluate(metrics_of, None, source(int), 0)


def test_metrics():
    assert fetch({"a": torch.tensor([3]), "b": 2}) == {"a": 3.0, "b": 2.0}
    assert fetch({}) == {}
    assert fetch(mean([{"a": torch.tensor(1.0)}, {"a": torch.tensor(2.0)}])) == {"a": 1.5}
    with pytest.raises(ValueError, match=r"metric 'a': got shape \(2,\)"):
        fetch({"a": torch.zeros(2)})
    with pytest.raises(ValueError, match="no metrics"):
        mean([])

"""The loop: positions, log points, one transfer per log point, stopping by agreement."""

import time

import pytest
import torch

from fmegatron.loop import Stop, evaluate, fetch, mean, train


def count(state, batch):
    """A step whose state is the sum of the positions it read."""
    return state + batch, {"loss": (state + batch).double(), "position": batch}


def run(**settings):
    return list(train(count, torch.tensor(0), torch.tensor, **settings))


def test_positions_continue_after_a_resume():
    whole = run(steps=6)
    first = run(steps=3)
    second = list(train(count, first[-1].state, torch.tensor, steps=6, start=3))
    assert [int(info.state) for info in whole] == [int(info.state) for info in first + second] == [0, 1, 3, 6, 10, 15]
    assert [info.step for info in second] == [4, 5, 6]
    assert run(steps=3, start=3) == []


def test_log_points():
    infos = run(steps=25, log_every=10, tokens_per_step=100)
    logged = [info.step for info in infos if info.metrics]
    assert logged == [1, 10, 20, 25]
    assert infos[9].metrics == {"loss": 45.0, "position": 9.0}
    assert infos[9].tokens_per_second == pytest.approx(100 / infos[9].seconds)
    assert set(infos[9].record()) == {"loss", "position", "seconds", "tokens_per_second"}
    assert [info.last for info in infos] == [False] * 24 + [True]
    with pytest.raises(ValueError, match="log_every: got 0"):
        run(steps=1, log_every=0)


def test_the_time_of_the_caller_is_not_counted():
    counted = 0.0
    for info in train(count, torch.tensor(0), torch.tensor, steps=3, log_every=1):
        counted += info.seconds
        time.sleep(0.05)
    assert counted < 0.05


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

    infos = train(step, None, lambda position: None, steps=20, log_every=10)
    for info in infos:
        assert len(read) == {True: 1, False: 0}[bool(info.metrics)], info.step
        read.clear()


class Ranks:
    """A world of two ranks, the other of which got a signal at its third step."""

    size = 2

    def __init__(self, other):
        self.other, self.asked = iter(other), []

    def any(self, flag):
        self.asked.append(flag)
        return flag or next(self.other)


def test_stops_when_another_rank_was_asked():
    world = Ranks([False, False, True, False])
    infos = run(steps=10, stop=Stop(), world=world)
    assert [info.step for info in infos] == [1, 2, 3]
    assert infos[-1].stopping and infos[-1].last and infos[-1].metrics
    assert world.asked == [False] * 4  # the fourth question: was it a Ctrl-C?


def test_the_kind_of_signal_is_agreed_too():
    stop = Stop(signal="SIGTERM")
    assert stop.agreed(Ranks([True])) and stop.interrupted
    stop = Stop(signal="SIGINT")
    assert stop.agreed() and stop.interrupted
    assert not Stop().agreed()


def test_evaluate():
    def metrics_of(params, batch):
        return {"loss": params * batch}

    assert evaluate(metrics_of, torch.tensor(2.0), torch.tensor, 4) == {"loss": 3.0}
    weighted = evaluate(metrics_of, torch.tensor(2.0), torch.tensor, 4, lambda index: float(index == 3))
    assert weighted == {k: float(v) for k, v in metrics_of(torch.tensor(2.0), torch.tensor(3)).items()}
    with pytest.raises(ValueError, match="got 0 batches"):
        evaluate(metrics_of, None, None, 0)


def test_metrics():
    assert fetch({"a": torch.tensor([3]), "b": 2}) == {"a": 3.0, "b": 2.0}
    assert fetch({}) == {}
    assert fetch(mean([{"a": torch.tensor(1.0)}, {"a": torch.tensor(2.0)}])) == {"a": 1.5}
    with pytest.raises(ValueError, match=r"metric 'a': got shape \(2,\)"):
        fetch({"a": torch.zeros(2)})
    with pytest.raises(ValueError, match="no metrics"):
        mean([])

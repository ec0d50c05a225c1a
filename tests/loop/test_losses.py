"""Bad losses: what counts as one, on which update, what follows, and that all ranks do the same."""

import math
import random
import statistics
import warnings

import pytest
import torch

from fmegatron import step
from fmegatron.data import source
from fmegatron.loop import train
from fmegatron.loop.losses import BadLoss, BadLossError, LossSpike, LossStuck, LossWatch, RollBack, RunAgain
from tests.loop.test_train import Ranks


def losses(values, spike=None, **settings):
    """Train with these losses; the state counts updates."""
    settings |= {"steps": len(values), "bad": BadLoss(spike=spike)}
    return train(lambda s, b: (s + 1, {"loss": values[b]}), torch.tensor(0), source(int), **settings)


def test_a_spike_is_found_at_its_update_and_the_median_does_not_follow_it():
    values = [2.0 + 0.01 * (n % 7) for n in range(40)]
    values[22] = values[23] = 7.0
    watch = LossWatch(LossSpike(3.0, window=16, warmup=8))
    found = [watch.see(n + 1, value) for n, value in enumerate(values)]
    assert [f.step for f in found if f] == [23, 24]
    assert "loss is 7, 3.4" in found[22].text and "16 before it (a spike from 3 on)" in found[22].text


def test_no_spike_where_there_is_none():
    """A loss that falls by half, noise, the first ones, and what is not finite."""
    draw = random.Random(0)
    for _ in range(20):
        values = [5 * math.exp(-n / 60) + draw.gauss(0, 0.2) + 1 for n in range(200)]
        watch = LossWatch(LossSpike(3.0))
        assert not any(watch.see(n, value) for n, value in enumerate(values))
    watch = LossWatch(LossSpike(3.0, warmup=16))
    assert not any(watch.see(n, value) for n, value in enumerate([1.0] * 8 + [9.0] + [math.nan, math.inf]))


def test_a_loss_that_does_not_move():
    draw = random.Random(1)
    still = [11.0 + draw.gauss(0, 1e-5) for _ in range(200)]
    watch = LossWatch(stuck=LossStuck(100, 1e-4))
    found = [watch.see(n + 1, value) for n, value in enumerate(still)]
    assert [f.step for f in found if f] == [100, 200] and "does not move: 11 and 11 are the medians" in found[99].text
    falls = [11.0 - 1e-4 * n for n in range(400)]
    watch = LossWatch(stuck=LossStuck(100, 1e-4))
    assert not any(watch.see(n, value) for n, value in enumerate(falls))
    assert abs(statistics.median(falls[:50]) - statistics.median(falls[50:100])) / 11 > 1e-4


@pytest.mark.parametrize("then, error", [("raise", BadLossError), ("roll back", RollBack), ("rerun", RunAgain)])
@pytest.mark.parametrize("log_every", [1, 10])
def test_what_follows_on_a_spike(then, error, log_every):
    values = [1.0] * 30
    values[24] = 9.0
    seen = []
    with pytest.raises(error, match="step 25: loss is 9, 9 times the median 1") as raised:
        for info in losses(values, spike=LossSpike(then=then), log_every=log_every):
            seen.append(info.step)
    assert raised.value.first == 25 and seen[-1] == (24 if log_every == 1 else 29)
    if then == "rerun":
        assert int(raised.value.state) == raised.value.last == seen[-1] + 1


def test_to_go_on_warns_once_a_log_interval():
    values = [1.0] * 30
    values[24] = values[26] = 9.0
    with pytest.warns(RuntimeWarning, match="step 25: loss is 9.*; training goes on") as warned:
        assert len(list(losses(values, spike=LossSpike(then="warn"), log_every=10))) == 30
    assert len(warned) == 1


def test_ranks_that_see_it_a_step_apart_do_the_same():
    """Another rank has seen a spike at its log point; this one learns of it by the question of that step."""
    world = Ranks((False,) * 4, (False, False, False, True))
    world.minimum = lambda row: (world.noted.append("minimum"), torch.tensor([2, -4]))[1]  # theirs: step 2, "raise"
    with pytest.raises(BadLossError, match="step 2: another rank has found a bad loss"):
        list(losses([1.0] * 9, spike=LossSpike(then="raise"), world=world))
    assert world.noted[-3:] == ["reads 2", "asks 3", "minimum"]


def test_skip_takes_the_update_back_and_only_that():
    def update(state, batch):
        value = math.nan if batch == 3 else 1.0
        return state + value, {"loss": state.sum() * 0 + value}

    with pytest.warns(RuntimeWarning, match="step 4: loss is nan; its update is skipped") as warned:
        infos = list(train(update, torch.zeros(2), source(int), steps=6, bad=BadLoss("skip")))
    assert len(warned) == 1 and [int(info.state[0]) for info in infos] == [1, 2, 3, 3, 4, 5]
    values = [1.0] * 20 + [50.0] + [1.0] * 3
    with pytest.warns(RuntimeWarning, match="step 21: loss is 50, .* its update is skipped"):
        infos = list(losses(values, spike=LossSpike(then="skip")))
    assert int(infos[-1].state) == 23


def test_skip_needs_the_state_of_before():
    update = step.jit(lambda s, b: ({"w": s["w"] * 2}, {"loss": s["w"].sum()}), donate=0, backend="eager")
    with pytest.raises(ValueError, match=r"skip: got a step that donates 'w', wanted one .*optim.skip_nonfinite"):
        list(train(update, {"w": torch.ones(3)}, source(lambda p: torch.ones(1)), steps=3, bad=BadLoss("skip")))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: LossSpike(0.5), "wanted factor > 1"),
        (
            lambda: LossSpike(then="stop"),
            "LossSpike: then: got 'stop', wanted one of warn, skip, roll back, rerun, raise",
        ),
        (lambda: LossStuck(then="skip"), "another action than 'skip'"),
        (lambda: BadLoss("stop"), "nonfinite: got 'stop'"),
    ],
)
def test_values_are_checked(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_sound_run_asks_once_a_step():
    """With all of it switched on: no agreement beside the question of each step, and nothing is fetched in between."""
    world, read = Ranks(), []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__float__, torch.Tensor.__bool__):
                read.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    def update(state, batch):
        return state, {"loss": torch.tensor(3.0 / (1 + batch)).as_subclass(Watched)}

    settings = {"bad": BadLoss("roll back", LossSpike(then="roll back"), LossStuck(10))}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for info in train(update, torch.zeros(1), source(int), steps=40, log_every=20, world=world, **settings):
            assert len(read) == {True: 1, False: 0}[bool(info.metrics)], info.step
            read.clear()
    assert len(world.noted) == 2 * 40

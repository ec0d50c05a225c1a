"""Schedules against their formulas written out, on ints and on tensors, and their errors."""

import math

import pytest
import torch

from fmegatron.optim import constant, cosine, linear, wsd
from fmegatron.optim.schedule import Schedule


def warm(count, warmup):
    return min(1.0, (count + 1) / warmup) if warmup else 1.0


CASES = {
    "constant": (constant(3e-4), lambda c: 3e-4),
    "constant-warm": (constant(3e-4, warmup=7), lambda c: 3e-4 * warm(c, 7)),
    "linear": (linear(1.0, 50, end=0.2), lambda c: 0.2 + 0.8 * (1 - min(c, 50) / 50)),
    "linear-warm": (linear(2.0, 60, 10), lambda c: 2 * warm(c, 10) * (1 - min(max(c - 10, 0), 50) / 50)),
    "cosine-warm": (
        cosine(1e-3, 60, 10, 1e-4),
        lambda c: warm(c, 10) * (1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * min(max(c - 10, 0), 50) / 50))),
    ),
    "wsd": (
        wsd(1.0, 100, 20, 5, 0.1),
        lambda c: warm(c, 5) * (0.1 + 0.9 * (1 - math.sqrt(min(max(c - 80, 0), 20) / 20))),
    ),
    "wsd-linear": (wsd(1.0, 100, 20, shape="linear"), lambda c: 1 - min(max(c - 80, 0), 20) / 20),
    "wsd-all-decay": (wsd(1.0, 20, 20, shape="linear"), lambda c: 1 - min(c, 20) / 20),
}


@pytest.mark.parametrize("schedule, formula", CASES.values(), ids=CASES)
def test_formula(schedule, formula):
    for count in (*range(0, 110), 1000, 10**9):
        assert schedule(count) == pytest.approx(formula(count), rel=1e-12, abs=1e-15)
        on_device = schedule(torch.tensor(count))
        assert on_device.shape == () and on_device.dtype == torch.float64
        assert on_device.item() == schedule(count)


def test_a_schedule_is_a_value():
    assert cosine(1e-3, 10) == cosine(1e-3, 10) and hash(cosine(1e-3, 10)) == hash(cosine(1e-3, 10))
    assert isinstance(linear(1.0, 5), Schedule) and "cosine" in repr(cosine(1e-3, 10))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: constant(-1.0), "peak: got -1.0"),
        (lambda: constant(float("inf")), "peak: got inf"),
        (lambda: constant(1.0, warmup=-1), "warmup: got -1"),
        (lambda: cosine(1.0, total=10, warmup=10), "warmup=10, start of the decay=10, total=10"),
        (lambda: linear(1.0, 10, end=-0.1), "end: got -0.1"),
        (lambda: wsd(1.0, total=10, decay=8, warmup=4), "warmup=4, start of the decay=2, total=10"),
        (lambda: wsd(1.0, total=10, decay=0), "at least one update of decay"),
        (lambda: wsd(1.0, 10, 5, shape="exp"), "shape: got 'exp', wanted one of linear, cosine, sqrt"),
        (lambda: Schedule(1.0, total=10), "wanted both or none"),
    ],
)
def test_errors_for_people(make, message):
    with pytest.raises(ValueError, match=message):
        make()

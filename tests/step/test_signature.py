"""What makes two calls run the same graph, and what is said when they do not."""

import dataclasses
import functools
import gc
import re

import numpy as np
import pytest
import torch

from fmegatron.step import jit

X = torch.ones(2)


def scaled(x, c):
    return x * c


class Config:
    """A constant that can change."""

    def __init__(self, k):
        self.k, self.more = k, {"list": [k], "itself": self}


class Slots:
    __slots__ = ("k",)

    def __init__(self, k):
        self.k = k


@dataclasses.dataclass(frozen=True)
class Frozen:
    k: float


def bits(x):
    return [int(b) for b in x.view(torch.int32)]


@pytest.mark.filterwarnings("ignore:scaled is compiled again")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (1, True),
        (1, 1.0),
        (np.float32(0.0), np.float32(-0.0)),
        (Frozen(0.0), Frozen(-0.0)),
    ],
    ids=repr,
)
def test_constants_that_are_equal_and_not_the_same(one, other):
    step = jit(lambda x, c: (x * getattr(c, "k", c)).real, backend="eager")
    step.name = "scaled"
    for c in (one, other, one):
        assert bits(step(X, c)) == bits((X * getattr(c, "k", c)).real)
    assert len(step.cache) == 2


def test_constants_that_are_the_same():
    """Also those that do not equal themselves, or are made anew for each call."""
    for make in (
        lambda: float("nan"),
        lambda: np.float64("nan"),
        lambda: Frozen(2.0),
        lambda: "text",
        lambda: torch.float64,
        lambda: functools.partial(torch.mul, other=2.0),
        lambda: Config(3).__init__,
    ):
        step = jit(lambda x, c: x + 1, backend="eager")
        step(X, make()), step(X, make())
        assert len(step.cache) == 1
    step, config = jit(lambda x, c: x * c.k, backend="eager"), Config(3)
    assert step(X, config).tolist() == step(X, config).tolist() == [3, 3] and len(step.cache) == 1


@pytest.mark.parametrize("kind", [Config, Slots])
def test_a_constant_that_changes(kind):
    """It gave old results."""
    step, c = jit(lambda x, c: x * c.k, backend="eager"), kind(1)
    assert step(X, c).tolist() == [1, 1]
    c.k = 2
    with pytest.warns(UserWarning, match=r"compiled again \(reported once\): '1', .*, holds other values than before"):
        assert step(X, c).tolist() == [2, 2]
    c.k = 1
    assert step(X, c).tolist() == [1, 1] and len(step.cache) == 2


def test_what_a_constant_holds_changes():
    config = Config(1)
    step = jit(lambda x, c: x * c.more["list"][0], backend="eager")
    step(X, config)
    config.more["list"][0] = 5
    with pytest.warns(UserWarning, match="holds other values"):
        assert step(X, config).tolist() == [5, 5]


SECONDS = {
    "a number": (
        (X, 0.5),
        (X, 0.25),
        r"'1' is 0.25, was 0.5 \(each value of a number is a graph of its own: make it a",
    ),
    "text": ((X, "a"), (X, "b"), r"'1' is 'b', was 'a'$"),
    "shape": (({"x": X},), ({"x": torch.ones(3)},), r"'0/x' is float32\[3\] on cpu, was float32\[2\] on cpu$"),
    "dtype": ((X,), (X.double(),), r"'0' is float64\[2\] on cpu, was float32\[2\] on cpu$"),
    "strides": (
        (torch.ones(2, 3),),
        (torch.ones(3, 2).t(),),
        r"'0' is float32\[2, 3\] on cpu with strides \(1, 2\), was strides \(3, 1\)$",
    ),
    "one more": (({"x": X},), ({"x": X, "y": X},), "'0/y' is new$"),
    "one less": (({"x": X, "y": X},), ({"x": X},), "'0/y' is missing$"),
    "containers": (([X, X],), ((X, X),), "containers"),
    "tensor or number": ((X, 1), (X, torch.ones(())), r"'1' is float32\[\] on cpu, was 1$"),
    "many": (([1, 2, 3, 4, 5],), ([6, 7, 8, 9, 10],), "; and 2 more$"),
}


@pytest.mark.parametrize(("first", "second", "said"), SECONDS.values(), ids=SECONDS)
def test_a_second_signature_is_said_once(first, second, said, recwarn):
    step = jit(lambda *args: torch.zeros(2), backend="eager")
    step(*first), step(*first)
    assert not recwarn.list
    step(*second)
    (warning,) = recwarn.list
    assert (
        str(warning.message).startswith("<lambda> is compiled again (reported once): ") and warning.filename == __file__
    )
    assert re.search(said, str(warning.message))
    step(torch.ones(7), 3)
    assert len(recwarn.list) == 1 and len(step.cache) == 3


@pytest.mark.parametrize("donate", [True, False, "0", 0.0, [0, True]], ids=repr)
def test_what_donate_may_be(donate):
    with pytest.raises(ValueError, match="jit: got donate=.*, wanted the position of an argument"):
        jit(lambda x: x, donate=donate)


# ---- what jits leave behind ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_jit_that_is_gone_leaves_no_graph_behind(backend):
    """Through Dynamo each one left 6 MiB and 25,000 objects, for as long as the process lived."""
    jit(lambda x: (x * 2, x + 1), backend=backend)(X)
    gc.collect()
    gc.freeze()  # what is here need not be walked again: only new objects are seen below
    for _ in range(3):
        jit(lambda x: (x * 2, x + 1), backend=backend)(X)
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is torch.fx.Node]

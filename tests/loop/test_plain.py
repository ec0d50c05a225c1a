"""Values of a Config as JSON: what differs is a change, and a value whose change could not be seen is refused."""

import dataclasses
import datetime
import fractions
import functools
import json
import math
import pathlib
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fmegatron.loop import Settings, field
from fmegatron.loop.plain import plain


@dataclass(frozen=True)
class Part:
    width: int = 8


def changes(now, before):
    return Settings(now).changes(Settings(before).metadata(0))


@pytest.mark.parametrize(
    "value, text",
    [
        (math.sqrt, "math.sqrt"),
        (torch.nn.functional.relu, "torch.nn.functional.relu"),
        (torch.nn.functional.max_pool2d, "torch.nn.functional.max_pool2d"),
        (torch.tanh, "torch.tanh"),
        (torch.ops.aten.relu.default, "aten.relu.default"),
        (torch.nn.GELU, "torch.nn.modules.activation.GELU"),
        (torch.nn.GELU(), "GELU(approximate='none')"),
        (np.sqrt, "numpy.sqrt"),
        (np.float32, "numpy.float32"),
        (list[int], "list[int]"),
        (Part.__init__, "tests.loop.test_plain.Part.__init__"),
        (fractions.Fraction.from_float, "<bound method Fraction.from_float of <class 'fractions.Fraction'>>"),
        (fractions.Fraction(1, 3), "1/3"),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (pathlib.PurePosixPath("a/b"), "a/b"),
        (torch.device("cuda:1"), "cuda:1"),
    ],
)
def test_functions_and_objects_have_a_name_or_a_text(value, text):
    assert plain(value) == text == plain(value, exact=False)


def square(x):
    return x * x


def scaled(by):
    def scale(x):
        return by * x

    return scale


class Silent:
    """An object with the repr that Python gives all."""

    def __init__(self, held):
        self.held = held


@functools.wraps(square)
def looks_like_square(x):
    return x


@pytest.mark.parametrize(
    "value",
    [
        lambda x: x,
        scaled(2),
        looks_like_square,
        Silent(1),
        Silent(1).__init__,
        functools.partial(scaled(2), 3),
        [1, {"deep": Silent(1)}],
        {Silent(1): 2},
        frozenset({scaled(3)}),
        type("Local", (), {}),
        torch.nn.Linear(2, 2),
        torch.Generator(),
        np.random.default_rng(0),
    ],
)
def test_a_value_whose_change_could_not_be_seen_is_refused(value):
    """Where it counts: declared free it is taken, as are the others of its kind."""

    @dataclass(frozen=True)
    class Counts:
        kind: object = None

    @dataclass(frozen=True)
    class Free:
        kind: object = field(None, resume="free")
        heads: int = 2

    wanted = r"Counts\.kind.*: got .*no text distinguishes.*; make it a function or class of a module .*resume='free'"
    with pytest.raises(ValueError, match=wanted):
        Settings(Counts(value))
    with pytest.raises(ValueError, match="table.*: got .*no text distinguishes"):
        Settings(Counts(), table=value)
    metadata = Settings(Free(value)).metadata(0)
    assert json.loads(json.dumps(metadata)) == metadata and " at 0x" not in json.dumps(metadata)
    assert not Settings(Free(Silent(2))).changes(metadata).refused
    assert Settings(Free(value, heads=3)).changes(metadata).refused == ("heads 2 -> 3",)


def test_a_part_declares_for_itself():
    @dataclass(frozen=True)
    class Inner:
        hook: object = field(None, resume="free")
        act: object = None

    @dataclass(frozen=True)
    class Outer:
        parts: tuple = ()
        counts: Inner = Inner()
        free: Inner = field(Inner(), resume="free")

    hooked = Inner(hook=lambda: 0)
    Settings(Outer((hooked,), hooked, Inner(act=lambda x: x)))
    with pytest.raises(ValueError, match=r"Outer\.parts\[1\]\.act: got <function"):
        Settings(Outer((hooked, Inner(act=lambda x: x))))
    with pytest.raises(ValueError, match=r"Outer\.counts\.act: got <function"):
        Settings(Outer(counts=Inner(act=lambda x: x)))


@dataclass(frozen=True)
class Relu:
    pass


@dataclass(frozen=True)
class Gelu:
    pass


@pytest.mark.parametrize(
    "before, now",
    [
        (1, True),
        ([0, 1], [0, True]),
        ({"a.b": 3}, {"a": {"b": 3}}),
        ({1: 2}, {"1": 2}),
        ({1: 2, "1": 3}, {1: 3, "1": 3}),
        ({1}, {"1"}),
        (Relu(), Gelu()),
        ({"x": 2, "y": 3}, {"x": 2}),
        ({"x": 2}, {}),
        ({}, {"x": 2}),
        ({"x": 2}, None),
        (Part(), None),
        (None, Part()),
        (math.sqrt, math.cos),
        (square, torch.square),
        (functools.partial(square, 1), functools.partial(square, 2)),
        (functools.partial(square, 1), functools.partial(math.sqrt, 1)),
    ],
)
@pytest.mark.parametrize("default", [None, "before", "now"])
def test_values_that_differ_are_a_change(before, now, default):
    """Whichever of them is the field's default."""
    given = {None: None, "before": before, "now": now}[default]

    @dataclass(frozen=True)
    class Any:
        kind: object = dataclasses.field(default_factory=lambda: given)

    for a, b in ((before, now), (now, before)):
        found = Settings(Any(b)).changes(json.loads(json.dumps(Settings(Any(a)).metadata(0))))
        assert len(found.refused) >= 1 and not (found.named or found.free or found.allowed)
        assert not str(Settings(Any(a)).changes(Settings(Any(a)).metadata(0)))
        names = {text.partition(" ")[0] for text in found.refused}
        assert not Settings(Any(b), allow=names).changes(Settings(Any(a)).metadata(0)).refused
        assert Settings(Any(), fact=b).changes(Settings(Any(), fact=a).metadata(0)).refused


def test_of_a_dict_the_entries_that_differ_are_shown():
    @dataclass(frozen=True)
    class Sized:
        sizes: dict = dataclasses.field(default_factory=dict)

    found = changes(Sized({"a": 1, "b": 3, "c": 4}), Sized({"a": 1, "b": 2}))
    assert found.refused == ('sizes {"b": 2} -> {"b": 3, "c": 4}',)


def test_one_number_is_one_number():
    """1 where 1.0 stood, and a list where a tuple or an array did."""

    @dataclass(frozen=True)
    class Number:
        rate: float = 1.0
        sizes: tuple = (1, 2)

    for same in (Number(1), Number(np.float32(1)), Number(1.0, [1, 2]), Number(1.0, np.array([1, 2]))):
        assert not str(changes(same, Number())) and not str(changes(Number(), same))


@pytest.mark.parametrize("of", [np.array, torch.tensor, lambda x: torch.tensor(x, dtype=torch.bfloat16)])
@pytest.mark.parametrize("length", [3, 5000])
def test_one_element_of_an_array_is_a_change(of, length):
    """(The text of a long array leaves out its middle.)"""

    @dataclass(frozen=True)
    class Weighted:
        weights: object = field(None)

    before, now = of([1.0] * length), of([1.0] * length)
    assert not changes(Weighted(now), Weighted(before)).refused
    now[length // 2] = -7
    assert changes(Weighted(now), Weighted(before)).refused
    metadata = Settings(Weighted(now), table=before).metadata(0)
    assert json.loads(json.dumps(metadata)) == metadata and len(json.dumps(metadata)) < 200
    assert Settings(Weighted(now), table=now).changes(metadata).refused


def test_elements_that_json_has_not():
    assert plain(np.array([1.5, math.nan])) == [1.5, "nan"] and plain(torch.tensor(3)) == 3
    assert plain(np.array([None, math.sqrt] * 40))[:2] == [None, "math.sqrt"]

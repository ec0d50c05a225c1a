"""What torch or Python refuses inside a step is said with the user's line and the leaves that it met."""

import dataclasses
import functools
import re

import pytest
import torch
import torch.nn.functional as F

from fmegatron import nn
from fmegatron.layout import Mesh
from fmegatron.step import jit, trace, value_and_grad
from fmegatron.testing import simulate
from tests.step.tiny import line_of

STATE = {"w": torch.ones(4, 3), "b": torch.zeros(3)}
BATCH = {"x": torch.ones(8, 4), "ids": torch.zeros(8, dtype=torch.int64)}


def mixed(p, b):
    return (b["x"].double() @ p["w"]).sum()  # HERE mixed


def mixed_in_linear(p, b):
    return F.linear(b["x"], p["w"].t().double()).sum()  # HERE mixed_in_linear


def mixed_in_library(p, b):
    return nn.matmul(b["x"].double(), p["w"]).sum()  # HERE mixed_in_library


def einsum(p, b):
    return torch.einsum("bd,df->bf", b["x"], p["w"].double()).sum()  # HERE einsum


def beyond(p, b):
    return (b["x"] @ p["w"])[:, 3].sum()  # HERE beyond


def no_dim(p, b):
    return (b["x"] @ p["w"]).sum(5)  # HERE no_dim


def missing(p, b):
    return (b["y"] @ p["w"]).sum()  # HERE missing


def missing_parameter(p, b):
    return (b["x"] @ p["v"]).sum()  # HERE missing_parameter


def of_a_shape(p, b):
    return b["x"].shape[2] * p["w"].sum()  # HERE of_a_shape


def no_method(p, b):
    return p["w"].sum().detatch()  # HERE no_method


def none(p, b):
    return (b["x"] @ p["w"]).sum() + None  # HERE none


CASES = {
    mixed: "'1/x'|'0/w'",
    mixed_in_linear: "got f.*f.*'1/x'",
    mixed_in_library: "'0/w'",
    einsum: "bmm got f32.*f64.*'1/x'",
    beyond: "index 3|out of bounds",
    no_dim: "Dimension out of range",
    missing: "KeyError: 'y'.*'1/ids', '1/x'",
    missing_parameter: "KeyError: 'v'.*'0/b', '0/w'",
    of_a_shape: "out of range",
    no_method: "detatch",
    none: "NoneType",
}


@pytest.mark.parametrize("loss", CASES, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("way", ["jit", "of a gradient", "simulated"])
def test_the_line_and_the_leaves(loss, way):
    calls = {
        "jit": lambda: jit(loss, backend="eager")(STATE, BATCH),
        "of a gradient": lambda: jit(value_and_grad(lambda p, b: (loss(p, b), {})), backend="eager")(STATE, BATCH),
        "simulated": lambda: simulate(loss, Mesh(dp=2), STATE, BATCH),
    }
    with pytest.raises(ValueError) as caught:
        calls[way]()
    text = str(caught.value)
    assert line_of(__file__, loss.__name__) in text
    assert re.search(CASES[loss], text), text


@pytest.mark.parametrize("name", ["<stdin>", "<string>", "<ipython-input-7-0a1b>", "<python-input-3>"])
@pytest.mark.parametrize("line, words", [("b['y']", "KeyError: 'y'"), ("h.double() @ p['w'].t()", "'0/w'")])
def test_code_that_is_in_no_file(name, line, words):
    """What is typed into a terminal, and what `python -c` runs."""
    typed = {}
    exec(compile(f"def f(p, b):\n    h = b['x'] @ p['w']\n    return h * {line}\n", name, "exec"), typed)
    with pytest.raises(ValueError, match=f"{re.escape(name)}:3.*{re.escape(words)}"):
        jit(typed["f"], backend="eager")(STATE, BATCH)


@dataclasses.dataclass
class Made:
    x: torch.Tensor = dataclasses.field(default_factory=functools.partial(torch.ones, 2))


def with_a_dataclass(x):
    return x + Made().x  # HERE with_a_dataclass


def test_the_code_of_a_dataclass_is_not_the_users():
    graph = trace(with_a_dataclass, (torch.ones(2),)).graph_module.graph
    (made,) = graph.find_nodes(op="call_function", target=torch.ops.aten.ones.default)
    assert made.meta["at"] == line_of(__file__, "with_a_dataclass")


class Mine(RuntimeError):
    pass


@pytest.mark.parametrize("error", [KeyError("mine"), RuntimeError("mine"), IndexError("mine"), Mine("mine")], ids=repr)
def test_what_the_step_raises_stays_as_it_is(error):
    def f(x):
        raise error

    with pytest.raises(type(error), match="mine") as caught:
        jit(f, backend="eager")(torch.ones(2))
    assert caught.value is error


def test_a_call_with_other_arguments_is_pythons_error():
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        jit(mixed, backend="eager")(STATE)

"""Tensors in what is no tree never come back as fakes: a step that returns them is refused when it is traced."""

import dataclasses

import pytest
import torch

from fmegatron import step


@dataclasses.dataclass
class Held:
    w: object


class Bag:
    def __init__(self, x):
        self.items = [{"x": x}]


HIDDEN = {
    "a set": lambda x: {x + 1},
    "a dataclass": lambda x: {"state": Held(x + 1)},
    "an object": lambda x: Bag(x + 1),
    "a generator": lambda x: (x * i for i in range(3)),
    "a map": lambda x: (x, map(torch.sin, [x])),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_result_that_hides_tensors_is_refused(name):
    with pytest.raises(ValueError, match="its result.*: got .*, wanted tensors in dicts"):
        step.jit(HIDDEN[name], backend="eager")(torch.ones(2))


def test_constants_beside_tensors_come_back():
    held = Held(3)
    result = step.jit(lambda x: (x + 1, "name", None, 2.5, held, frozenset({1, 2}), torch.sin), backend="eager")(
        torch.ones(2)
    )
    assert result[1:] == ("name", None, 2.5, held, frozenset({1, 2}), torch.sin)

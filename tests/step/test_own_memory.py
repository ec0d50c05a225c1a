"""Leaves that share memory cannot be donated, whichever call they come in."""

import pytest
import torch

from fmegatron.step import jit


def test_a_later_call_with_one_tensor_in_two_places():
    step = jit(lambda p: {"a": p["a"] + 1, "b": p["b"] + p["a"].sum()}, donate=0, backend="eager")
    assert step({"a": torch.ones(2), "b": torch.ones(2)})["b"].tolist() == [3, 3]
    same = torch.ones(2)
    with pytest.raises(ValueError, match="'0/a' and '0/b': got shared memory of which one is donated"):
        step({"a": same, "b": same})
    assert same.tolist() == [1, 1]
    assert step({"a": torch.ones(2), "b": torch.ones(2)})["b"].tolist() == [3, 3]

"""assert_pure catches every way of changing an argument."""

import pytest
import torch

from fmegatron.testing import assert_pure


def params():
    return {"a": torch.ones(3), "b": [torch.zeros(2), float("nan") * torch.ones(1)], "n": 3}


def test_pure_functions_pass():
    p = params()
    assert assert_pure(lambda p, x: {**p, "a": p["a"] + x}, p, torch.ones(3))["a"].sum() == 6


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda p: p["a"].add_(1), "in place: 0/a"),
        (lambda p: p["a"].copy_(torch.ones(3)), "in place: 0/a"),  # the same values, written all the same
        (lambda p: p["b"][0].data.fill_(2), "in place: 0/b/0"),
        (lambda p: p["a"].resize_(4), "in place: 0/a"),
        (lambda p: p.update(n=4), "in place: 0/n"),
        (lambda p: p.update(a=torch.ones(3)), "in place: 0/a"),
        (lambda p: p.pop("a"), r"structure .*\['0/a'\]"),
        (lambda p: p["b"].append(1), r"structure .*\['0/b/2'\]"),
    ],
)
def test_changes_are_found(change, says):
    with pytest.raises(AssertionError, match=says):
        assert_pure(change, params())

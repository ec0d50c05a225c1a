"""Sums of ppermutes: those of all turns of a ring are a psum, others are not."""

import pytest
import torch

from fmegatron import step
from fmegatron.collectives import Axes, ppermute
from fmegatron.layout import Layout, Mesh
from fmegatron.testing import parity

F64 = torch.float64


def judged(times, mesh, factor=1, share=True, behind=True, in_place=False):
    """(report, whether it equals one rank) of a product over a split dim that so many turns make whole."""
    layouts = {"w": Layout((12, 5), F64, mesh, ("tp", None))}, {"x": Layout((4, 12), F64, mesh, (None, "tp"))}

    def make(m):
        axis = Axes(m)["tp"]

        def loss(p, b):
            own = came = total = b["x"] @ p["w"]
            own = own if factor == 1 else own * factor
            for _ in range(times(axis.size)):
                if in_place:  # what was sent is a copy
                    came = ppermute(came, axis, 1)
                    total += came
                else:
                    total = ppermute(total, axis, 1) + (own if behind else total)
            return total.square().sum() / (axis.size if share else 1), {}

        return lambda s, b: ({"w": s["w"] - 0.1 * step.value_and_grad(loss)(s, b)[1]["w"]}, {})

    g = torch.Generator().manual_seed(0)
    given = {"w": torch.randn(12, 5, generator=g, dtype=F64)}, {"x": torch.randn(4, 12, generator=g, dtype=F64)}
    return step.check(make(mesh), *layouts), parity(make, mesh, *given, layouts=layouts).ok


@pytest.mark.parametrize("in_place", [False, True])
def test_all_turns_are_a_sum(in_place):
    report, same = judged(lambda n: n - 1, Mesh(tp=2), in_place=in_place)
    assert same and report.ok, str(report)


@pytest.mark.slow
def test_of_three_each_adds_in_another_order():
    report, same = judged(lambda n: n - 1, Mesh(tp=3))
    assert same and not report.ok and not report.findings, str(report)


WRONG = {
    "one too few": (Mesh(tp=3), lambda n: n - 2, {}), "one too many": (Mesh(tp=2), lambda n: n, {}),
    "another factor": (Mesh(tp=2), lambda n: n - 1, {"factor": 2}),
    "no share of the loss": (Mesh(tp=2), lambda n: n - 1, {"share": False}),
    "twice": (Mesh(tp=2), lambda n: 2 * (n - 1), {"behind": False}),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "one too many" else pytest.mark.slow) for n in WRONG]
)
def test_others_are_none(name):
    mesh, times, how = WRONG[name]
    report, same = judged(times, mesh, **how)
    assert not same and not report.ok, str(report)

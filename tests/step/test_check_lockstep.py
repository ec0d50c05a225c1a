"""One element stands for all of a dim that nothing moves, and not where a value meets itself along another dim."""

import pytest
import torch

from fmegatron import step
from fmegatron.collectives import Axes, all_gather, axis_index
from fmegatron.layout import Layout, Mesh
from tests.step.test_check_positions import judged

F64, MESH = torch.float64, Mesh(cp=2)


def own(x, cp):
    """Another one on each rank."""
    return x * axis_index(cp, like=x)


WRONG = {
    "pairs": lambda s, cp: {**s, "w": own(s["v"], cp)[:, None] - own(s["v"], cp)[None]},
    "turned": lambda s, cp: {**s, "w": own(s["w"], cp) - own(s["w"], cp).T},
    "products": lambda s, cp: {**s, "w": (own(s["w"], cp) @ s["w"].T - s["w"] @ own(s["w"], cp)) * 1.0},
    "turned twice": lambda s, cp: {**s, "w": (own(s["w"], cp) - own(s["w"], cp).T).mT},
}


@pytest.mark.parametrize("size", [4, 4000])
@pytest.mark.parametrize("name", WRONG)
def test_what_only_a_diagonal_shares_is_not_proven(name, size):
    cp = Axes(MESH)["cp"]
    state = {name: Layout(shape, like, MESH) for name, (shape, like) in shapes(size).items()}
    report = step.check(lambda s, b: (WRONG[name](s, cp), {}), state, {"x": Layout((8, 4), F64, MESH, ("cp",))})
    assert not report.ok, str(report)


def shapes(size):
    return {"w": ((size, size), F64), "v": ((size,), F64)}


def scanned(who):
    """A scan that goes on with the sums of the ranks before, each times 0 or 1, as one product."""

    def loss(p, x, axis):
        every = all_gather(x.sum(1)[None], axis, 0)
        before = (torch.arange(axis.size) < axis_index(axis) + who).double()
        carried = torch.einsum("r,rbd->bd", before, every)
        return ((x.cumsum(1) + carried[:, None]) * (1 + x)).square().sum() + 0 * p["w"].sum()

    return loss


def test_a_carry_by_a_product():
    for mesh in (Mesh(cp=2), Mesh(cp=3)):
        report, same = judged(scanned(0), mesh)
        assert same and report.ok, str(report)
    report, same = judged(scanned(1), Mesh(cp=3))
    assert not same and not report.ok, str(report)

"""A rank's own rows divided, or multiplied, by the number of ranks: as wrong as their sum is, and made good like it."""

import pytest

from fmegatron import optim, step
from fmegatron.collectives import Axes
from fmegatron.layout import Mesh
from tests.step.guests.frame import rows_of, specs_of

WRONG = {
    "twice": lambda e, n: (e / n).sum() / (e.shape[0] * n),
    "thrice": lambda e, n: (e / n).mean() / n,
    "in a mean": lambda e, n: step.mean((e / n).sum(), e.shape[0]),
    "times, in a mean": lambda e, n: step.mean((e * n).sum(), e.shape[0]),
}
RIGHT = {"once": lambda e, n: (e / n).sum() / e.shape[0], "and back": lambda e, n: step.mean((e / n * n).sum(), len(e))}


def checked(f, mesh):
    def loss_fn(w, b):
        return f(((b["x"] @ w["a"]) @ w["b"]).square().mean(1), axes[axes.data].size)

    axes = Axes(mesh)
    return step.check(step.build(loss_fn, optim.sgd(0.1), specs_of(mesh), rows_of(mesh)))


@pytest.mark.parametrize("mesh", [Mesh(dp=2), Mesh(fsdp=2)], ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_is_not_proven(name, mesh):
    assert not checked(WRONG[name], mesh).ok


@pytest.mark.parametrize("mesh", [Mesh(dp=2), Mesh(fsdp=2)], ids=str)
@pytest.mark.parametrize("name", RIGHT)
def test_is_proven(name, mesh):
    report = checked(RIGHT[name], mesh)
    assert report.ok, report

"""A rank's own rows, or their count, over or times the number of ranks: as wrong as their sum, made good like it.

`n` is the number as axes have it, or as the mesh does: `mesh["dp"]`, `mesh.size` and `mesh.extent(...)` know it, too.
"""

import pytest
import torch

from fmegatron import optim, step, tree
from fmegatron.collectives import Axes
from fmegatron.layout import Mesh
from fmegatron.testing import parity
from tests.pairs import few
from tests.step.guests.frame import batch_of, rows_of, specs_of

WRONG = {
    "twice": lambda e, n: (e / n).sum() / (e.shape[0] * n),
    "thrice": lambda e, n: (e / n).mean() / n,
    "in a mean": lambda e, n: step.mean((e / n).sum(), e.shape[0]),
    "times, in a mean": lambda e, n: step.mean((e * n).sum(), e.shape[0]),
    "a sum": lambda e, n: e.sum() / n,
    "a count of all": lambda e, n: step.mean(e.sum(), e.shape[0] * n),
    "a count of all, plainly": lambda e, n: step.mean(e.sum(), len(e) * n),
    "a count of all, a tensor": lambda e, n: step.mean(e.sum(), torch.tensor(e.shape[0] * n)),
    "a count of all weights": lambda e, n: step.mean((e * e.detach()).sum(), e.detach().sum() * n),
    "their number as count": lambda e, n: step.mean(e.sum(), n),
    "a metric": lambda e, n: (step.mean(e.sum(), len(e)), {"m": step.mean(e.detach().sum(), e.shape[0] * n)}),
    "twice as many, if two": lambda e, n: e.sum() / (e.shape[0] * 2),
}
RIGHT = {
    "once": lambda e, n: (e / n).sum() / e.shape[0],
    "and back": lambda e, n: step.mean((e / n * n).sum(), len(e)),
    "a mean": lambda e, n: e.mean() / n,
    "by all rows": lambda e, n: e.sum() / (e.shape[0] * n),
    "by all rows, plainly": lambda e, n: e.sum() / (n * len(e)),
    "a count of each": lambda e, n: step.mean(e.sum(), e.shape[0] * 2),
    "by a number": lambda e, n: e.sum() / 2,
}
NUMBERS = {
    "axes": lambda axes: axes[axes.data].size,
    "mesh": lambda axes: axes.mesh["dp"] * axes.mesh["fsdp"],
    "extent": lambda axes: axes.mesh.extent(axes.data),
    "size": lambda axes: axes.mesh.size,
}
CASES = [
    (f"{name}-{of}-{mesh}", how[name], of, mesh)
    for how in (WRONG, RIGHT)
    for name in how
    for of in NUMBERS
    for mesh in (Mesh(dp=2), Mesh(fsdp=2))
]


def described(f, mesh, of="axes"):
    def loss_fn(w, b):
        return f(((b["x"] @ w["a"]) @ w["b"]).square().mean(1), n)

    axes = Axes(mesh)
    n = NUMBERS[of](axes)
    return step.build(loss_fn, optim.sgd(0.1), specs_of(mesh), rows_of(mesh))


def checked(f, mesh, of):
    return step.check(described(f, mesh, of))


@pytest.mark.parametrize("f, of, mesh", few(14, [case[1:] for case in CASES], [case[0] for case in CASES]))
def test_what_is_right_is_proven_alone(f, of, mesh):
    report = checked(f, mesh, of)
    assert report.ok == (f in RIGHT.values()), report


@pytest.mark.slow
@pytest.mark.parametrize("name, f", [*WRONG.items(), *RIGHT.items()], ids=str)
def test_they_are_what_they_say(name, f):
    one, here = described(f, Mesh(dp=1)), described(f, Mesh(dp=2))
    layouts = tree.layouts(here.state), tree.layouts(here.batch)
    state = tree.init(one.state, key=3, rank=0)
    same = parity(lambda mesh: described(f, mesh), Mesh(dp=2), state, batch_of(), layouts=layouts, fp64=True).ok
    assert same == (name in RIGHT)

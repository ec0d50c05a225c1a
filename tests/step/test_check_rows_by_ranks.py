"""A rank's own rows, or their count, over or times the number of ranks: as wrong as their sum, made good like it. And
sums with a rank's own rows (`rows - 1`), which on one rank are no multiple of that.

`n` is the number as axes have it, or as the mesh does: `mesh["dp"]`, `mesh.size` and `mesh.extent(...)` know it, too.
"""

import pytest
import torch

from fmegatron import optim, step, tree
from fmegatron.collectives import Axes, all_gather
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
# (of this rank's errors, their number, the number of ranks, and all errors sorted)
SUMS = {
    "unbiased": lambda e, n, ranks, every: (every - every.mean()).square().sum() / (n - 1) / ranks**2,
    "pairs": lambda e, n, ranks, every: e.sum() / (n * (n - 1) * ranks),
    "more": lambda e, n, ranks, every: every.mean() * ((12 + n) / n) / ranks,
    "a rest": lambda e, n, ranks, every: e.sum() / (n * ranks) * (n // 3),
    "a power of a sum": lambda e, n, ranks, every: every.mean() * (n + 1) ** -0.5 / ranks,
    "an index": lambda e, n, ranks, every: every[n // 2 - 1] / ranks,
    "a bound": lambda e, n, ranks, every: every[: n - 1].sum() / ranks,
    "places to roll": lambda e, n, ranks, every: (every.roll(n - 1, 0) * every).mean() / ranks,
    "a tensor": lambda e, n, ranks, every: every.sum() / torch.tensor(n - 1.0) / ranks,
    "a full one": lambda e, n, ranks, every: every.sum() / torch.full((), n - 1.0) / ranks,
    "a count": lambda e, n, ranks, every: step.mean(e.sum(), n - 1),
}
SUMS_OF_ALL = {
    "unbiased": lambda e, n, ranks, every: (every - every.mean()).square().sum() / (n * ranks - 1) / ranks,
    "pairs": lambda e, n, ranks, every: e.sum() / (n * ranks * (n * ranks - 1)),
    "an index": lambda e, n, ranks, every: e.sum() / (n * ranks) * every.detach()[n * ranks // 2 - 1],
    "taken out": lambda e, n, ranks, every: e.sum() * ((n - 1) / (n - 1)) / (n * ranks),
    "halves": lambda e, n, ranks, every: e.sum() / (n // 2 * 4 * ranks),
    "two of rows": lambda e, n, ranks, every: (e + e).sum() / ((n + n) * ranks),
    "of a whole dim": lambda e, n, ranks, every: e.sum() / (n * ranks) * (every.shape[0] - 1),
    "a shape": lambda e, n, ranks, every: e.sum() / (n * ranks) + 0 * torch.zeros(n - 1).sum(),
    "all, counted alike": lambda e, n, ranks, every: step.mean(every.cumsum(0).sum(), every.shape[0]),
}
_BOTH = {"wrong": SUMS, "right": SUMS_OF_ALL}
OF_SUMS = [(kind, name) for kind, of in _BOTH.items() for name in of]
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


def of_sums(f, mesh):
    def loss_fn(w, b):
        e = ((b["x"] @ w["a"]) @ w["b"]).square().mean(1)
        every = all_gather(e, axes[axes.data], 0)
        return f(e, e.shape[0], axes[axes.data].size, every.sort().values)

    axes = Axes(mesh)
    return step.build(loss_fn, optim.sgd(0.1), specs_of(mesh), rows_of(mesh))


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("kind, name", few(6, OF_SUMS))
def test_sums_with_own_rows_are_not_proven_and_those_of_all_rows_are(kind, name):
    report = step.check(of_sums(_BOTH[kind][name], Mesh(fsdp=2)))
    assert report.ok == (kind == "right"), report


@pytest.mark.slow
@pytest.mark.parametrize("kind, name", OF_SUMS)
def test_sums_are_what_they_say(kind, name):
    f = _BOTH[kind][name]
    one, here = of_sums(f, Mesh(dp=1)), of_sums(f, Mesh(dp=2))
    layouts = tree.layouts(here.state), tree.layouts(here.batch)
    state = tree.init(one.state, key=3, rank=0)
    same = parity(lambda mesh: of_sums(f, mesh), Mesh(dp=2), state, batch_of(), layouts=layouts, fp64=True).ok
    assert same == (kind == "right")

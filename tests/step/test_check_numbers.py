"""Numbers in the shape of a value are a part where it is one: their sum is a count of all rows, or of what all have."""

import pytest
import torch

from fmegatron import step, testing
from fmegatron.collectives import Axes, all_gather, psum
from fmegatron.layout import Layout, Mesh
from tests.pairs import few

F64, MESH = torch.float64, Mesh(dp=2, tp=3)
STATE = {
    "c": Layout((5,), F64, MESH), "d": Layout((1,), F64, MESH), "one": Layout((2,), F64, MESH, ("dp",)),
    "own": Layout((12,), F64, MESH, ("dp",)),
}  # fmt: skip
BATCH = {"x": Layout((8, 5), F64, MESH, ("dp",))}
MADE = {
    "ones": torch.ones_like,
    "zeros and one": lambda x: torch.zeros_like(x) + 1,
    "three": lambda x: torch.full_like(x, 3.0),
    "times zero": lambda x: x * 0 + 1,
    "filled": lambda x: x.clone().fill_(2.0),
    "a function of zeros": lambda x: torch.zeros_like(x).exp(),
    "truth": lambda x: torch.ones_like(x, dtype=torch.bool).double(),
    "of a shape": lambda x: torch.ones(x.shape, dtype=x.dtype),
    "new, of a shape": lambda x: x.new_full(x.size(), 2.0),
    "finite": lambda x: torch.zeros_like(x).isfinite().double(),
}
SUMS = {
    "sum": lambda n, dp: n.sum(),
    "sum over ranks": lambda n, dp: psum(n.sum(), dp),
    "of squares": lambda n, dp: psum((n * n).sum(), dp),
    "summed, then over elements": lambda n, dp: psum(n, dp).sum(),
    "gathered": lambda n, dp: all_gather(n, dp, 0).sum(),
    "mean": lambda n, dp: n.mean(),
}
WHOLE = ("sum", "mean")  # right of what all ranks have
RIGHT = {name: WHOLE for name in ("c", "d")} | {
    name: ("sum over ranks", "of squares", "summed, then over elements", "gathered", "mean")
    for name in ("x", "own", "one")
}
ALL = [(made, name, how) for made in MADE for name in RIGHT for how in SUMS]


def make(made, name, how):
    def fn(mesh, axes=None):
        return lambda s, b: (s, {"n": SUMS[how](MADE[made]({**s, **b}[name]), Axes(mesh)["dp"])})

    return fn


@pytest.mark.long
@pytest.mark.parametrize("made, name, how", few(40, ALL))
def test_numbers(made, name, how):
    report = step.check(make(made, name, how)(MESH), STATE, BATCH)
    if how in RIGHT[name]:
        assert report.ok, report
    else:
        assert not report.ok, report


def sums(x):
    return x.square().sum()


# Of a sum over the rows of a rank, of all rows, of what all ranks have: by sizes of a rank's rows.
BY_SIZES = {
    "a mean of means": lambda s, b, dp: psum(sums(b["x"]) / b["x"].shape[0], dp) / dp.size,
    "by all rows": lambda s, b, dp: psum(sums(b["x"]), dp) / (b["x"].shape[0] * dp.size),
    "by all elements": lambda s, b, dp: psum(sums(b["x"]) / (b["x"].numel() * dp.size), dp),
    "a term of each row": lambda s, b, dp: psum(sums(b["x"]) + b["x"].shape[0] * sums(s["c"]), dp),
    "by a width": lambda s, b, dp: psum(sums(b["x"]), dp) * b["x"].shape[1] ** -0.5,
    "by a count, summed": lambda s, b, dp: psum(sums(b["x"]), dp) / psum(torch.full((), b["x"].shape[0]), dp),
}
BY_SIZES_WRONG = {
    "a mean of means, not divided": lambda s, b, dp: psum(sums(b["x"]) / b["x"].shape[0], dp),
    "by own rows": lambda s, b, dp: psum(sums(b["x"]), dp) / b["x"].shape[0],
    "by own rows, a plain number": lambda s, b, dp: psum(sums(b["x"]), dp) / len(b["x"]),
    "by own rows, a tensor": lambda s, b, dp: psum(sums(b["x"]), dp) / torch.tensor(float(b["x"].shape[0])),
    "by own rows, a size": lambda s, b, dp: psum(sums(b["x"]), dp) / torch.full((), b["x"].shape[0]),
    "by own elements": lambda s, b, dp: psum(sums(b["x"]), dp) / b["x"].numel(),
    "by all rows, again": lambda s, b, dp: psum(sums(b["x"]) / (b["x"].shape[0] * dp.size), dp) / dp.size,
    "of what all have": lambda s, b, dp: sums(s["c"]) / b["x"].shape[0],
    "of a part, by a root": lambda s, b, dp: psum(sums(s["own"] * s["own"].shape[0] ** -0.5), dp),
    "of each row, not summed": lambda s, b, dp: b["x"].shape[0] * sums(s["c"]),
    "a term of each row, of all": lambda s, b, dp: psum(sums(b["x"]), dp) + b["x"].shape[0] * sums(s["c"]),
}
SIZED = [(name, how) for how in (BY_SIZES, BY_SIZES_WRONG) for name in how]


def sized(how, name):
    return lambda mesh, axes=None: lambda s, b: (s, {"n": how[name](s, b, Axes(mesh)["dp"])})


@pytest.mark.long
@pytest.mark.parametrize("name, how", SIZED)
def test_sizes_of_a_rank(name, how):
    report = step.check(sized(how, name)(MESH), STATE, BATCH)
    assert report.ok == (how is BY_SIZES), report


@pytest.mark.slow
@pytest.mark.parametrize("name, how", SIZED)
def test_sizes_are_what_they_say(name, how):
    g = torch.Generator().manual_seed(0)
    given = [{n: torch.randn(x.shape, generator=g, dtype=F64) for n, x in part.items()} for part in (STATE, BATCH)]
    assert testing.parity(sized(how, name), MESH, *given, layouts=(STATE, BATCH)).ok == (how is BY_SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("made, name, how", ALL)
def test_they_are_what_they_say(made, name, how):
    g = torch.Generator().manual_seed(0)
    given = [{n: torch.randn(x.shape, generator=g, dtype=F64) for n, x in part.items()} for part in (STATE, BATCH)]
    try:
        ok = testing.parity(make(made, name, how), MESH, *given, layouts=(STATE, BATCH)).ok
    except ValueError:  # what one rank has and what they have differ in shape
        ok = False
    assert ok == (how in RIGHT[name])

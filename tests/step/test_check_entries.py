"""A rank's own entry of what has one for each rank, and gradients of which parts are complete: which dim, which sum."""

import pytest
import torch

from fmegatron import step, testing
from fmegatron.collectives import Axes, all_gather, axis_index, enter, psum
from fmegatron.layout import Layout, Mesh

F64, MESH = torch.float64, Mesh(dp=2)
STATE = {
    "rows": Layout((4, 4), F64, MESH, ("dp",)),
    "columns": Layout((4, 4), F64, MESH, (None, "dp")),
    "c": Layout((4,), F64, MESH),
}
BATCH = {"x": Layout((8, 4), F64, MESH, ("dp",))}


def own(entries, dp, dim=0):
    return entries.index_select(dim, axis_index(dp).view(1)).select(dim, 0)


def chunked(of, dim, to):
    """A part by chunks along a dim is added to a parameter."""

    def fn(dp, s, b):
        whole = all_gather(s[of], dp, 0 if of == "rows" else 1).tanh()
        part = own(torch.stack(whole.chunk(dp.size, dim)).exp(), dp)
        return {**s, to: s[to] + part.reshape(s[to].shape)}, {}

    return fn


def viewed(dp, s, b):
    whole = all_gather(s["rows"], dp, 0).tanh()
    return {**s, "rows": s["rows"] + own(whole.view(dp.size, -1, 4).exp(), dp)}, {}


def every_second(dp, s, b):
    whole = all_gather(s["rows"], dp, 0).tanh()
    return {**s, "rows": s["rows"] + own(whole.view(-1, dp.size, 4), dp, 1)}, {}


def trained(loss):
    def fn(dp, s, b):
        (_, _), grads = step.value_and_grad(lambda c: (loss(dp, c, b["x"]), {}))(s["c"])
        return {**s, "c": s["c"] - 0.1 * psum(grads, dp)}, {}

    return fn


def variance(dp, c, x, enters=enter):
    """The mean counts beside the variance that is made of it, so its gradient has two parts."""
    z, n = (x * c).tanh(), 8
    mean = enters(psum(z.sum(0), dp), dp) / n
    var = enter(psum((z - mean).square().sum(0), dp), dp) / n
    return (var / (1 + mean.square())).sum() / dp.size


def whitened(dp, c, x, enters=enter):
    z = (x * c).tanh()
    cov = enters(psum(z.T @ z, dp), dp) + torch.eye(4, dtype=F64)
    return torch.linalg.solve_triangular(torch.linalg.cholesky(cov), z.T, upper=False).square().mul(z.T).sum()


RIGHT = {
    "rows by chunks": chunked("rows", 0, "rows"),
    "columns by chunks": chunked("columns", 1, "columns"),
    "rows by a view": viewed,
    "variance": trained(variance),
    "whitened": trained(whitened),
}
WRONG = {
    "rows by chunks of columns": chunked("rows", 1, "rows"),
    "columns by chunks of rows": chunked("columns", 0, "columns"),
    "every second row": every_second,
    "variance without enter": trained(lambda dp, c, x: variance(dp, c, x, lambda m, _: m)),
    "whitened without enter": trained(lambda dp, c, x: whitened(dp, c, x, lambda m, _: m)),
}
ALL = [("right", name) for name in RIGHT] + [("wrong", name) for name in WRONG]


def make(fn):
    return lambda mesh, axes=None: lambda s, b: fn(Axes(mesh)["dp"], s, b)


@pytest.mark.long
@pytest.mark.parametrize("kind, name", ALL)
def test_entries(kind, name):
    report = step.check(make((RIGHT if kind == "right" else WRONG)[name])(MESH), STATE, BATCH)
    assert report.ok == (kind == "right"), report
    assert kind == "wrong" or not report.findings, report


@pytest.mark.slow
@pytest.mark.parametrize("kind, name", ALL)
def test_they_are_what_they_say(kind, name):
    g = torch.Generator().manual_seed(0)
    given = [{n: torch.randn(x.shape, generator=g, dtype=F64) for n, x in part.items()} for part in (STATE, BATCH)]
    fn = (RIGHT if kind == "right" else WRONG)[name]
    assert testing.parity(make(fn), MESH, *given, layouts=(STATE, BATCH)).ok == (kind == "right")

"""Shares of what all ranks have: what is divided by their number is summed over them, and so are gradients of a sum."""

import pytest
import torch

from fmegatron import step, testing
from fmegatron.collectives import Axes, enter, psum
from fmegatron.layout import Layout, Mesh

F64, MESH = torch.float64, Mesh(dp=2, tp=3)
STATE = {"c": Layout((5,), F64, MESH), "d": Layout((5,), F64, MESH), "own": Layout((12,), F64, MESH, ("dp",))}
BATCH = {"x": Layout((8, 5), F64, MESH, ("dp",))}


def rows(p, b):
    return (b["x"] * p["c"]).square().sum()


def trained(loss, summed, after=lambda dp, g: g):
    """A step on loss(dp, p, b), in which the gradients of these parameters are summed."""

    def fn(dp, s, b):
        (_, _), grads = step.value_and_grad(lambda p: (loss(dp, p, b), {}))(s)
        return {n: s[n] - 0.1 * after(dp, psum(g, dp) if n in summed.split() else g) for n, g in grads.items()}, {}

    return fn


def reported(of):
    return lambda dp, s, b: (s, {"m": of(dp, s, b)})


def mean_by(dp, b):
    return b["x"].sum() / len(b["x"]) / dp.size


def beside(dp, p, b):
    return rows(p, b) + p["d"].square().sum() / dp.size + p["own"].square().sum()


def by_hyperbolic(dp, p, b):
    return rows(p, b) + torch.cosh(p["d"].diagflat().diagonal().relu()).sum() * (1 / dp.size)


def of_mean(dp, p, b):
    return (b["x"] * p["c"]).square().mean() / dp.size + p["d"].square().sum() / dp.size


def of_all_shards(dp, p, b):
    return rows(p, b) + enter(psum(p["own"].square().sum(), dp), dp).sqrt() / dp.size


def of_chosen(enters):
    """Shares of what is chosen, which have no gradient, times what was given to it (the balance of experts)."""

    def loss(dp, p, b):
        scores = b["x"] * p["c"]
        chosen = psum((scores.argmax(-1) == torch.arange(5)[:, None]).to(F64).sum(-1), dp)
        given = psum(scores.softmax(-1).sum(0), dp)
        return (chosen * (enter(given, dp) if enters else given)).sum() / dp.size + p["own"].square().sum()

    return trained(loss, "c")


def of_active(enters):
    def loss(dp, p, b):
        scores = b["x"] * p["c"]
        total = psum(scores.relu().sum(), dp)
        mean = (enter(total, dp) if enters else total) / psum((scores > 0).sum(), dp)
        return mean.square() / dp.size + p["own"].square().sum()

    return trained(loss, "c")


def alike(dp, p, b):
    return (p["c"] * p["d"]).square().sum() / dp.size


def adapted(dp, s, b):
    """Adam's forms of a gradient of which no sum was made."""
    (_, _), grads = step.value_and_grad(lambda p: (beside(dp, p, b), {}))(s)
    g = {**grads, "c": psum(grads["c"], dp)}
    return {n: s[n] - 0.1 * g[n] / (g[n].square().sqrt() + 1) for n in s}, {}


def of_all(over):
    """A loss that is a term of a sum, over(dp, x) of its own terms, beside what all ranks compute alike."""

    def loss(dp, p, b):
        pooled = enter(psum((b["x"] * p["c"]).sum(0), dp), dp)
        return over(dp, rows(p, b), b["x"]) + over(dp, pooled.square().sum() / dp.size, b["x"])

    return trained(loss, "c")


def averaged(loss):
    """Gradients that are summed and divided by the number of ranks."""
    return trained(lambda dp, p, b: loss(p, b) + p["own"].square().sum() * 0, "c d", lambda dp, g: g / dp.size)


RIGHT = {
    "a penalty beside, summed": trained(beside, "c d"),
    "a penalty of both": trained(lambda dp, p, b: beside(dp, p, b) + p["c"].norm() / dp.size, "c d"),
    "by a view and a function": trained(lambda dp, p, b: by_hyperbolic(dp, p, b) + p["own"].square().sum(), "c d"),
    "beside a mean": trained(lambda dp, p, b: of_mean(dp, p, b) + p["own"].square().sum(), "c d"),
    "of all shards, by enter": trained(of_all_shards, "c"),
    "times what is chosen of all": of_chosen(True),
    "over how many are active of all": of_active(True),
    "alike on all ranks, summed": trained(lambda dp, p, b: alike(dp, p, b) + p["own"].square().sum(), "c d"),
    "a share, summed": reported(lambda dp, s, b: psum(s["c"].sum() / dp.size, dp)),
    "a share of a share of all rows": reported(lambda dp, s, b: psum(0.1 * (s["c"].sum() / dp.size) * 2, dp)),
    "a mean of means": reported(lambda dp, s, b: psum(b["x"].mean(), dp) / dp.size),
    "a mean of means, by ones": reported(lambda dp, s, b: psum(b["x"].mean(), dp) / psum(torch.ones(()), dp)),
    "a mean of sums by rows": reported(lambda dp, s, b: psum(b["x"].sum() / len(b["x"]), dp) / dp.size),
    "by ranks, then by rows": reported(lambda dp, s, b: (psum(b["x"].sum(0) / dp.size, dp) / len(b["x"])).tanh().sum()),
    "by rows of a sum, by ranks": reported(
        lambda dp, s, b: (psum(b["x"].sum(0), dp) / len(b["x"]) / dp.size).tanh().sum()
    ),
    "a mean's terms by ranks, and back": reported(lambda dp, s, b: psum(mean_by(dp, b) * dp.size, dp) / dp.size),
    "terms of a sum, alike": of_all(lambda dp, x, of: x),
    "terms of a mean, by rows and ranks": of_all(lambda dp, x, of: x / (len(of) * dp.size)),
    "a share of a sum, summed": reported(lambda dp, s, b: psum(psum(b["x"].sum(), dp) / dp.size, dp)),
    "gradients of means, averaged": averaged(lambda p, b: rows(p, b) / len(b["x"])),
    "a half": reported(lambda dp, s, b: s["c"].sum() / 2),
    "a half of three": reported(lambda dp, s, b: (s["c"].sum() + s["d"].sum()) / 3),
    "a penalty for each row": trained(
        lambda dp, p, b: rows(p, b) + len(b["x"]) * p["d"].logsumexp(0) + p["own"].square().sum(), "c d"
    ),
    "a number times rows, by all rows": reported(
        lambda dp, s, b: psum(len(b["x"]) * s["c"].sum(), dp) / (len(b["x"]) * dp.size)
    ),
}
WRONG = {
    "a mean and a sum": trained(lambda dp, p, b: 0.3 * (b["x"] * p["c"]).mean() + rows(p, b), "c"),
    "a penalty beside, not summed": trained(beside, "c"),
    "a number as large as the ranks": trained(lambda dp, p, b: rows(p, b) + p["d"].square().sum() / 2, "c d"),
    "by a view and a function": trained(by_hyperbolic, "c"),
    "beside a mean": trained(of_mean, "c"),
    "times what is chosen of all, no enter": of_chosen(False),
    "over how many are active of all, no enter": of_active(False),
    "alike on all ranks, not summed": trained(alike, "c"),
    "of all shards, no enter": trained(lambda dp, p, b: psum(p["own"].square().sum(), dp) / dp.size, ""),
    "adapted": adapted,
    "decayed, then summed": trained(beside, "c d", lambda dp, g: psum(g, dp)),
    "a share": reported(lambda dp, s, b: s["c"].sum() / dp.size),
    "a share and all": reported(lambda dp, s, b: s["c"].sum() / dp.size + s["d"].sum()),
    "means by a number": reported(lambda dp, s, b: psum(b["x"].mean(), dp) / 2),
    "a sum, averaged": reported(lambda dp, s, b: psum(b["x"].sum(), dp) / dp.size),
    "a sum over a count, averaged": reported(
        lambda dp, s, b: psum(b["x"].sum(), dp) / psum((b["x"] > 0).sum(), dp) / dp.size
    ),
    "a mean of sums inside a function": reported(lambda dp, s, b: (psum(b["x"].sum(0), dp) / dp.size).tanh().sum()),
    "terms divided by the ranks": reported(lambda dp, s, b: psum(b["x"].sum() / dp.size, dp)),
    "a mean of means, divided again": reported(
        lambda dp, s, b: psum(b["x"].sum() / len(b["x"]), dp) / dp.size / dp.size
    ),
    "a mean's terms by ranks, twice": reported(lambda dp, s, b: psum(mean_by(dp, b), dp) / dp.size),
    "a mean's terms by ranks, twice, and a number": reported(lambda dp, s, b: psum(mean_by(dp, b) / 3 / dp.size, dp)),
    "gradients of a sum, averaged": averaged(rows),
    "gradients of a sum, averaged before": trained(
        lambda dp, p, b: rows(p, b) / dp.size + p["own"].square().sum() + p["d"].sum() / dp.size, "c d"
    ),
    "a total beside a share": reported(lambda dp, s, b: psum(b["x"].sum(), dp) + s["c"].sum() / dp.size),
    "batchmean": reported(
        lambda dp, s, b: psum(torch.nn.functional.kl_div(b["x"], b["x"].exp(), reduction="batchmean"), dp)
    ),
}
ALL = [("right", name) for name in RIGHT] + [("wrong", name) for name in WRONG]


def make(fn):
    return lambda mesh, axes=None: lambda s, b: fn(Axes(mesh)["dp"], s, b)


@pytest.mark.long
@pytest.mark.parametrize("kind, name", ALL)
def test_shares(kind, name):
    report = step.check(make((RIGHT if kind == "right" else WRONG)[name])(MESH), STATE, BATCH)
    assert report.ok == (kind == "right"), report
    assert kind == "wrong" or not report.findings, report


def test_a_whole_number_that_is_written_may_be_of_each_row():
    wrong = trained(lambda dp, p, b: rows(p, b) + 2 * p["d"].square().sum() + p["own"].square().sum(), "c d")
    report = step.check(make(wrong)(MESH), STATE, BATCH)
    assert not report.findings and not report.ok, report


@pytest.mark.slow
@pytest.mark.parametrize("kind, name", ALL)
def test_they_are_what_they_say(kind, name):
    g = torch.Generator().manual_seed(0)
    given = [{n: torch.randn(x.shape, generator=g, dtype=F64) for n, x in part.items()} for part in (STATE, BATCH)]
    fn = (RIGHT if kind == "right" else WRONG)[name]
    assert testing.parity(make(fn), MESH, *given, layouts=(STATE, BATCH)).ok == (kind == "right")

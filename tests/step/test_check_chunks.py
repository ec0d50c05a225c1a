"""Chunks of a rank's rows are other rows on one rank: sums over them, made alike and added up, are proven, no others.

Where the layout of the batch assigns rows to the chunks (`microbatches=`), whatever is made of them is."""

import pytest
import torch

from fmegatron import nn, optim, step, tree
from fmegatron.layout import DataParallel, Mesh
from fmegatron.testing import parity
from tests.pairs import few
from tests.step.guests.frame import batch_of, specs_of

SGD = optim.sgd(0.1)
NAMES = ("x", "y", "r")


def error(w, b):
    return ((b["x"] @ w["a"]).relu() @ w["b"] - b["y"]).square().mean(1)


def cut(b, n=2):
    return [{name: b[name].chunk(n)[i] for name in NAMES} for i in range(n)]


def average(w, b):
    return step.mean(error(w, b).sum(), b["x"].shape[0])


def weighed(w, b):
    return step.mean((error(w, b) * b["r"]).sum(), b["r"].sum())


def total(w, b):
    return error(w, b).sum() / 100


def reduced(loss, p, b):
    (value, _), g = step.value_and_grad(lambda p: loss(nn.gather_tree(p), b))(p)
    return value, step.reduce_gradients(g)


def descent(p, g, rate=0.1):
    return {n: tree.place(x - rate * g[n], tree.layout_of(x)) for n, x in p.items()}


def added(loss, n=2, by=(1, 1)):
    """The gradients of chunks, reduced each and added with these weights."""

    def run(p, b):
        found = [reduced(loss, p, one)[1] for one in cut(b, n)]
        return descent(p, {k: sum(f * g[k] for f, g in zip(by * n, found, strict=False)) / n for k in p})

    return run


def trained(loss):
    """On one loss of the whole batch."""
    return lambda p, b: descent(p, reduced(loss, p, b)[1])


def clipped(p, b):
    found = [reduced(total, p, one)[1] for one in cut(b)]
    found = [optim.clip(g, optim.global_norm(g), 0.01) for g in found]
    return descent(p, {k: found[0][k] + found[1][k] for k in p})


def updated_twice(p, b):
    for one in cut(b):
        p = descent(p, reduced(total, p, one)[1])
    return p


def averaged_on_the_way(p, b):
    g = {k: torch.zeros_like(x) for k, x in p.items()}
    for one in cut(b, 4):
        new = reduced(total, p, one)[1]
        g = {k: 0.5 * g[k] + new[k] for k in p}
    return descent(p, g)


def in_place(p, b):
    g = {k: torch.zeros_like(x) for k, x in p.items()}
    for one in cut(b, 4):
        for k, x in reduced(total, p, one)[1].items():
            g[k] += x
    return descent(p, g)


def crossed(p, b):
    first, second = cut(b)
    return descent(p, reduced(total, p, {"x": first["x"], "y": second["y"]})[1])


RIGHT = {
    "each an average": added(average),
    "four, each a sum": added(total, 4),
    "in place": in_place,
    "losses, added": trained(lambda w, b: sum(total(w, one) for one in cut(b, 4))),
    "a term each": trained(lambda w, b: sum((total(w, one) + 0.1 * (one["x"] @ w["g"]).sum() for one in cut(b)), 0.0)),
    "put together again": trained(lambda w, b: torch.cat([error(w, one) for one in cut(b)]).sum() / 8),
    "in one mean": trained(lambda w, b: step.mean(sum(error(w, one).sum() for one in cut(b)), b["r"].sum())),
}
WRONG = {
    "each by its own weights": added(weighed),
    "not alike": added(average, by=(0.3, 0.7)),
    "of one chunk twice": added(total, 4, by=(2, 1, 1, 0)),
    "clipped each": clipped,
    "an update each": updated_twice,
    "the last counts most": averaged_on_the_way,
    "other rows of another leaf": crossed,
    "pairs": trained(lambda w, b: (error(w, cut(b)[0]) * error(w, cut(b)[1])).sum()),
    "differences": trained(lambda w, b: ((cut(b)[0]["x"] - cut(b)[1]["x"]) @ w["a"]).square().sum()),
    "put together in another order": trained(
        lambda w, b: (torch.cat([error(w, one) for one in cut(b)[::-1]]) * b["r"]).sum()
    ),
}
FOUR = ("of one chunk twice", "the last counts most")  # chunks of two parts
CASES = [
    (f"{name}-{mesh}", how[name], mesh)
    for how in (RIGHT, WRONG)
    for name in how
    for mesh in (Mesh(dp=2), Mesh(fsdp=2), Mesh(dp=2, fsdp=2))
]


def rows(mesh, microbatches):
    by = DataParallel.hsdp()
    given = {name: x.repeat(2, *[1] * (x.dim() - 1)) for name, x in batch_of().items() if name in NAMES}
    given["y"][8:] += 1
    return given, {
        k: by.batch_layout(tuple(x.shape), x.dtype, mesh, microbatches=microbatches) for k, x in given.items()
    }


def described(f, mesh, microbatches=1):
    def run(state, b):
        return step.State(state.step + 1, f(state.params, b), state.opt), {}

    return step.Description(run, step.state_specs(specs_of(mesh), SGD), rows(mesh, microbatches)[1])


@pytest.mark.long
@pytest.mark.parametrize("f, mesh", few(12, [case[1:] for case in CASES], [case[0] for case in CASES]))
def test_sums_alone_are_proven(f, mesh):
    report = step.check(described(f, mesh))
    assert not report.findings and report.ok == (f in RIGHT.values()), report


@pytest.mark.long
@pytest.mark.parametrize("f, mesh", few(2, [case[1:] for case in CASES], [case[0] for case in CASES]))
def test_whatever_is_made_of_parts_that_a_layout_assigns_is_proven(f, mesh):
    report = step.check(described(f, mesh, 2))
    assert report.ok == (f not in [WRONG[name] for name in FOUR]), report


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name, f", [*RIGHT.items(), *WRONG.items()], ids=str)
def test_they_are_what_they_say(name, f, microbatches):
    mesh = Mesh(dp=2)
    one, here = described(f, Mesh(dp=1)), described(f, mesh, microbatches)
    layouts, state = (tree.layouts(here.state), tree.layouts(here.batch)), tree.init(one.state, key=3, rank=0)
    given = rows(mesh, 1)[0]
    same = parity(lambda m: described(f, m, microbatches), mesh, state, given, layouts=layouts, fp64=True).ok
    assert same == (name in RIGHT or (microbatches == 2 and name not in FOUR))

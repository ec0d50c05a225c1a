"""check on values that are each rank's own: right borders have no finding, wrong ones do; rows sorted on every rank."""

import pytest
import torch

from fmegatron.collectives import Axes, enter, ppermute, psum, shard
from fmegatron.collectives.ops import declare
from fmegatron.layout import Layout, Mesh
from fmegatron.step import check
from fmegatron.testing import parity
from tests.step.test_check_coalesced import gradient, report

MESH = Mesh(dp=2, fsdp=2, tp=2)
A = Axes(MESH)
DP, FSDP, BOTH = A["dp"], A["fsdp"], A["dp", "fsdp"]


def lay(shape, *spec, **other):
    return Layout(shape, torch.float32, MESH, spec, **other)


ROWS, BY_BOTH, PLAIN = lay((8, 6), "dp"), lay((8, 6), ("dp", "fsdp")), lay((8, 6))
MATRIX = lay((6, 6), unreduced=("dp",))


def in_order(x, axis, into="own", out=("sharded", 0)):
    """The rows of a rank in the order of their first column, and back."""
    x = declare(x, axis, into, 0)
    order = x[:, 0].argsort()
    y = x[order].cumsum(0)
    return declare(y[order.argsort()], axis, out)


RIGHT = {
    "rows in another order": (lambda xs: [in_order(xs[0], DP)], (ROWS,), (ROWS,)),
    "over joint axes": (lambda xs: [in_order(xs[0], BOTH)], (BY_BOTH,), (BY_BOTH,)),
    "its gradient": (gradient(lambda xs: [in_order(xs[0], DP)], (ROWS,)), (ROWS, ROWS), (ROWS,)),
    "its gradient, over joint axes": (
        gradient(lambda xs: [in_order(xs[0], BOTH)], (BY_BOTH,)), (BY_BOTH, BY_BOTH), (BY_BOTH,)
    ),
    "round a ring": (
        gradient(lambda xs: [declare(ppermute(declare(xs[0], DP, "own", 0), DP, 1), DP, ("sharded", 0))], (ROWS,)),
        (ROWS, ROWS), (ROWS,),
    ),
    "what is sharded besides": (
        lambda xs: [declare(declare(xs[0], DP, "own", 0).flip(0), DP, ("sharded", 0))],
        (lay((8, 6), "dp", "tp"),), (lay((8, 6), "dp", "tp"),),
    ),
    "rows counted": (
        lambda xs: [psum(declare((declare(xs[0], DP, "own", 0) > 0).sum(), DP, "partial"), DP)], (ROWS,), (lay(()),)
    ),
    "zeros": (lambda xs: [xs[0] + declare(torch.zeros_like(xs[0]), DP, "own", 0)], (ROWS,), (ROWS,)),
}  # fmt: skip
WRONG = {
    "over another axis": (lambda xs: [in_order(xs[0], FSDP)], (ROWS,), (ROWS,)),
    "over an axis more": (lambda xs: [in_order(xs[0], BOTH)], (ROWS,), (ROWS,)),
    "of what all ranks have": (lambda xs: [in_order(xs[0], DP)], (PLAIN,), (PLAIN,)),
    "of a pending sum": (lambda xs: [in_order(xs[0], DP)], (lay((8, 6), unreduced=("dp",)),), (ROWS,)),
    "back on another dim": (lambda xs: [in_order(xs[0], DP, out=("sharded", 1))], (ROWS,), (ROWS,)),
    "back over another axis": (
        lambda xs: [declare(declare(xs[0], DP, "own", 0), FSDP, ("sharded", 0))], (ROWS,), (ROWS,)
    ),
    "the gradient on another dim": (
        gradient(lambda xs: [declare(declare(xs[0], DP, "own", 1).cumsum(0), DP, ("sharded", 0))], (ROWS,)),
        (ROWS, ROWS), (ROWS,),
    ),
    "returned as the same everywhere": (lambda xs: [declare(xs[0], DP, "own", 0).sum()], (ROWS,), (lay(()),)),
    "terms that are not summed": (
        lambda xs: [declare(declare(xs[0], DP, "own", 0).sum(), DP, "partial")], (ROWS,), (lay(()),)
    ),
    "terms that are summed twice": (
        lambda xs: [psum(psum(declare(declare(xs[0], DP, "own", 0).sum(), DP, "partial"), DP), DP)],
        (ROWS,), (lay(()),),
    ),
}  # fmt: skip
WRONG["summed, and declared sharded"] = (
    lambda xs: [declare(psum(declare(xs[0], DP, "own", 0), DP) * 2, DP, ("sharded", 0))], (ROWS,), (ROWS,)
)  # fmt: skip
WRONG["declared partial, though sharded"] = (
    lambda xs: [psum(declare(xs[0], DP, "partial"), DP)], (ROWS,), (lay((4, 6)),)
)  # fmt: skip
RIGHT["summed, and each rank's part taken"] = (
    lambda xs: [declare(shard(psum(declare(xs[0], DP, "own", 0), DP), DP, 0), DP, ("sharded", 0))],
    (ROWS,), (lay((4, 6), "dp"),),
)  # fmt: skip
OPEN = {
    "not declared again": (lambda xs: [declare(xs[0], DP, "own", 0).cumsum(0)], (ROWS,), (ROWS,)),
    "summed without a word": (lambda xs: [psum(declare(xs[0], DP, "own", 0).sum(), DP)], (ROWS,), (lay(()),)),
    "exchanged without a word": (lambda xs: [ppermute(declare(xs[0], DP, "own", 0), DP, 1)], (ROWS,), (ROWS,)),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    found = report(*RIGHT[name])
    assert found.ok, str(found)


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    assert report(*WRONG[name]).findings


@pytest.mark.parametrize("name", OPEN)
def test_open(name):
    found = report(*OPEN[name])
    assert found.unproven and not found.findings and "declare(x, axis, forward=" in str(found)


def make_step(mesh, dim=0, data=("dp", "fsdp")):
    """Least squares on rows that each rank treats in its own order."""
    axes = Axes(mesh)
    rows = axes[data]

    def step(w, x):
        with torch.enable_grad():
            leaf = w.detach().requires_grad_()
            own = declare(x @ enter(leaf, rows), rows, "own", dim)
            order = own[:, 0].argsort()
            y = declare(torch.zeros_like(own).index_add(0, order, own[order].tanh()), rows, ("sharded", 0))
            loss = y.square().sum()
        (grad,) = torch.autograd.grad(loss, leaf)
        return w - 0.1 * grad, {"loss": psum(loss.detach(), rows)}

    return step


def test_equal_to_one_rank():
    mesh = Mesh(dp=2, fsdp=2)
    at = Layout((6, 6), torch.float64, mesh), Layout((16, 6), torch.float64, mesh, (("dp", "fsdp"),))
    assert check(make_step(mesh), *at).ok
    g = torch.Generator().manual_seed(0)
    w, x = (torch.randn(layout.shape, generator=g, dtype=torch.float64) for layout in at)
    assert parity(make_step, mesh, w, x, layouts=at, steps=2).ok

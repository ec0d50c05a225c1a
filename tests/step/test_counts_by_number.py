"""Counts that a loss gives as numbers, in a parity: those of a rank's rows, or of a term that all ranks have."""

import itertools

import pytest
import torch

from fmegatron import nn, optim, step, tree
from fmegatron.collectives import Axes, enter, psum
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.testing import parity
from tests.pairs import few

F64 = torch.float64


def right_numbers(w, x):
    """On 4 ranks and with 4 microbatches "row" counts 1 row: with the penalty's rule it would be another number."""
    return {
        "lm": step.mean(x.square().sum(), x.numel()), "row": step.mean(x.square().mean(1).sum(), len(x)),
        "local": step.mean(x.square().mean(), 1), "l2": 0.01 * step.mean(w.square().sum(), 1),
        "half": 0.01 * step.mean(w.square().sum(), 0.5),
    }  # fmt: skip


def all_rows(w, x):
    return {"lm": step.mean(x.square().sum(), 16 * 4)}


def of_the_mesh(w, x):
    """No mean is wrong: nothing is divided."""
    return {"lm": step.mean(x.square().sum(), x.numel()), "l2": step.mean(0 * w.sum(), 1 + len(x))}


def a_tensor(w, x):
    return {"l2": step.mean(w.square().sum(), torch.ones((), dtype=F64))}


def parity_of(parts, mesh, n):
    def make(m):
        def loss_fn(params, batch):
            w = nn.gather_tree(params)["w"]
            return parts(w, batch["x"] @ w)

        specs = tree.specs({"w": (3, 4)}, m, init=1.0, dtype=F64, strategy=DataParallel.zero1())
        return step.build(loss_fn, optim.sgd(0.1), specs, {"x": ((16, 3), F64)}, microbatches=n)

    of, state = make(mesh), tree.init(make(Mesh()).state, key=0, rank=0)
    batch = {"x": torch.arange(48.0, dtype=F64).view(16, 3)}
    return parity(make, mesh, state, batch, layouts=(tree.layouts(of.state), tree.layouts(of.batch)))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("mesh", "n"), few(2, itertools.product([Mesh(dp=4), Mesh(fsdp=2), Mesh(dp=2, fsdp=2)], [4, 1, 2]))
)
def test_parity_of_counts_that_are_numbers(mesh, n):
    result = parity_of(right_numbers, mesh, n)
    assert result.ok and {"1/l2/count", "1/row/count"} <= set(result.sharded.paths), str(result)


def test_parity_of_a_count_of_whole_rows_on_a_mesh_that_splits_sequences():
    """All ranks of cp have the same rows: the number that is shown is that of one rank, as often as they are."""

    def make(m):
        axes = Axes(m)

        def loss_fn(params, batch):
            rows = enter(psum((batch["x"] @ nn.gather_tree(params)["w"]).sum(1), axes["cp"]), axes["cp"])
            return step.mean(rows.square().sum(), len(rows))

        specs = tree.specs({"w": (3, 4)}, m, init=1.0, dtype=F64, strategy=DataParallel.zero1())
        rows = Layout((8, 6, 3), F64, m, ("dp", "cp", None))
        return step.build(loss_fn, optim.sgd(0.1), specs, {"x": rows})

    mesh = Mesh(dp=2, cp=2)
    of, state = make(mesh), tree.init(make(Mesh(dp=1, cp=1)).state, key=0, rank=0)
    batch = {"x": torch.arange(144.0, dtype=F64).view(8, 6, 3) / 100}
    result = parity(make, mesh, state, batch, layouts=(tree.layouts(of.state), tree.layouts(of.batch)))
    assert result.ok and "1/loss/count" in result.sharded.paths, str(result)


@pytest.mark.long
@pytest.mark.parametrize(
    ("parts", "wrong"), [(all_rows, "1/lm"), (of_the_mesh, "1/l2/count"), (a_tensor, "1/l2/count")]
)
def test_parity_of_a_count_that_is_wrong(parts, wrong):
    """The number of all rows; one that is of neither kind, of which no mean tells; a tensor, which is of rows."""
    result = parity_of(parts, Mesh(fsdp=2), 2)
    assert wrong in dict(result.differences), str(result)

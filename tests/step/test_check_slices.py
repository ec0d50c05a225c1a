"""Slices inside of layers: the compiler's index with a mask, and its transpose, are proven where they are right."""

import pytest
import torch
import torch.nn.functional as F

from fmegatron import nn, optim, step, tree
from fmegatron.collectives import Axes, psum
from fmegatron.layout import DataParallel, Mesh
from fmegatron.testing import assert_parity

MESH = Mesh(fsdp=2, tp=2)
RIGHT = {
    "the last but one": lambda h: F.pad(h[..., :-1, :], (0, 0, 1, 0)),
    "every second": lambda h: h[:, ::2].repeat_interleave(2, 1),
    "halves swapped": lambda h: torch.cat([h[:, 3:], h[:, :3]], 1),
    "a step back": lambda h: h - F.pad(h, (0, 0, 1, 0))[:, :-1],
}


def make(mesh, cut, forget=False):
    """(train_step, specs of its state, layouts of its batch): two layers with a cut between their products."""
    axes = Axes(mesh)
    tp, ranks = axes["tp"], axes[axes.data]
    rules = [("w_in", (None, "fsdp", "tp")), ("w_out", (None, "tp", "fsdp"))]
    shapes = {"blocks": {"w_in": (2, 8, 12), "w_out": (2, 12, 8)}}
    specs = tree.specs(shapes, mesh, rules, tree.Normal(0.3), torch.float64)
    layouts, optimizer = tree.layouts(specs), optim.sgd(0.1)

    def block(x_BSD, w):
        h_BSF = cut(torch.tanh(nn.column_parallel(x_BSD, w["w_in"], tp)))
        return x_BSD + torch.tanh(h_BSF @ w["w_out"] if forget else nn.row_parallel(h_BSF, w["w_out"], tp))

    def loss_fn(params, batch):
        x_BSD = step.layers(block, params["blocks"], layouts["blocks"], axes)(batch["x"])
        loss = (x_BSD * batch["y"]).sum() / 24  # of all ranks: a part of the mean
        return loss, {"loss": psum(loss.detach(), ranks)}

    rows = DataParallel().batch_layout((4, 6, 8), torch.float64, mesh)
    train_step = step.build_train_step(loss_fn, optimizer, layouts, axes)
    return train_step, step.state_specs(specs, optimizer), {"x": rows, "y": rows}


@pytest.mark.medium
@pytest.mark.parametrize("cut", RIGHT)
def test_right_slices_are_proven_and_right(cut):
    train_step, specs, rows = make(MESH, RIGHT[cut])
    report = step.check(train_step, specs, rows)
    assert report.ok and not report.unproven and not report.findings, report
    state, drawn = tree.init(make(Mesh(), RIGHT[cut])[1], 0, 0), torch.Generator().manual_seed(1)
    batch = {name: torch.randn(4, 6, 8, generator=drawn, dtype=torch.float64) for name in ("x", "y")}
    layouts = tree.layouts(specs)
    how = {"layouts": (layouts, rows), "out_layouts": (layouts, None)}
    assert_parity(lambda mesh: make(mesh, RIGHT[cut])[0], MESH, state, batch, **how)


@pytest.mark.long
@pytest.mark.parametrize("cut", RIGHT)
def test_a_forgotten_sum_behind_a_slice_is_found(cut):
    train_step, specs, rows = make(MESH, RIGHT[cut], forget=True)
    report = step.check(train_step, specs, rows)
    assert report.findings and "test_check_slices.py" in str(report)


def test_a_slice_of_a_dim_that_ranks_share_is_not_proven():
    """Each rank would drop the last of its own columns."""
    train_step, specs, rows = make(MESH, lambda h: F.pad(h[..., :-1], (1, 0)))
    assert not step.check(train_step, specs, rows).ok

"""The check of flattened layouts: right reshards of arrays of which a rank has one row are proven, wrong ones found."""

import pytest
import torch

from fmegatron import optim, tree
from fmegatron.collectives import Axes, all_gather, psum, reshard
from fmegatron.layout import DataParallel, Layout, Mesh, Split
from fmegatron.step import build_train_step, check, state_specs
from fmegatron.testing import assert_parity
from fmegatron.tree import ArraySpec, Normal

MESH, F64 = Mesh(fsdp=2, cp=2, tp=2), torch.float64


def flat(shape, *spec):
    return Layout(shape, F64, MESH, spec, flat=("cp",))


LAYOUTS = {
    "one row": flat((2, 32), "fsdp"),
    "two rows": flat((4, 32), "fsdp"),
    "one of the second dim": flat((2, 2, 16), None, "fsdp"),
    "one row of three dims": flat((2, 2, 16), "fsdp"),
    "one row of interleaved parts": flat((2, 32), "fsdp", Split("tp", (16, 8, 8))),
    "one row, split twice": flat((2, 32), "fsdp", "tp"),
}


def step_of(layout, there=reshard):
    """New states of an array in this layout and of one that is not flat."""
    axes = Axes(MESH)
    plain = layout.replace(flat=(), spec=tuple(None if s == "fsdp" else s for s in layout.spec))

    def step(state, batch):
        back = reshard(state["plain"], plain, layout, axes)
        return {"flat": back * state["flat"], "plain": there(state["flat"], layout, plain, axes).sin()}, {}

    return step, {"flat": layout, "plain": plain}, {"x": Layout((2,), F64, MESH)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_right(name):
    report = check(*step_of(LAYOUTS[name]))
    assert report.ok and not report.unproven, str(report)


def test_a_row_that_is_gathered_on_another_dim():
    """The shard of one element may be on dim 0 or 1, and is not on dim 2."""
    layout = LAYOUTS["one row of three dims"]

    def wrong(x, src, dst, axes):
        x = all_gather(x, axes["cp"], 0).view(1, 2, 16)
        return all_gather(x, axes["fsdp"], 2).view(2, 2, 16)

    report = check(*step_of(layout, wrong))
    assert [(f.axis, "sharded on one of the dims" in f.what) for f in report.findings] == [("fsdp", True)], str(report)


def test_parity_of_a_state_that_a_strategy_flattens():
    """One rank flattens nothing: its state lies as its own step declares it."""
    strategy = DataParallel(("fsdp",), optim=("fsdp", "cp"))
    optimizer = optim.adamw(0.1)

    def specs(mesh):
        return {"b": ArraySpec(Layout((2, 12), F64, mesh, (None, Split("tp", (4, 4, 4)))), Normal())}

    def make(mesh):
        axes = Axes(mesh, data=strategy.tokens)

        def loss(params, batch):
            y = psum(params["b"].square().sum(), axes["tp"]) * batch["x"].sum() / 8
            return y, {"loss": psum(y.detach(), axes[axes.data])}

        return build_train_step(loss, optimizer, tree.layouts(specs(mesh)), axes, strategy=strategy)

    placed, batch = state_specs(specs(MESH), optimizer, strategy), {"x": torch.rand(4, 2, dtype=F64)}
    assert any(layout.flat == ("cp",) for layout in tree.leaves(tree.layouts(placed.opt)))
    rows = {"x": strategy.batch_layout((4, 2), F64, MESH)}
    state = tree.init(state_specs(specs(Mesh()), optimizer), 0, 0)
    assert_parity(make, MESH, state, batch, layouts=(tree.layouts(placed), rows), steps=2)

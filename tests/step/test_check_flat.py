"""The check of flattened layouts: right reshards of arrays of which a rank has one row are proven, wrong ones found."""

import pytest
import torch

from fmegatron.collectives import Axes, all_gather, reshard
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.step import check

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
    report = check(*step_of(LAYOUTS[name]), MESH)
    assert report.ok and not report.unproven, str(report)


def test_a_row_that_is_gathered_on_another_dim():
    """The shard of one element may be on dim 0 or 1, and is not on dim 2."""
    layout = LAYOUTS["one row of three dims"]

    def wrong(x, src, dst, axes):
        x = all_gather(x, axes["cp"], 0).view(1, 2, 16)
        return all_gather(x, axes["fsdp"], 2).view(2, 2, 16)

    report = check(*step_of(layout, wrong), MESH)
    assert [(f.axis, "sharded on one of the dims" in f.what) for f in report.findings] == [("fsdp", True)], str(report)

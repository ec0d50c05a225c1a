"""Which reductions travel together, and that nothing else changes; one process."""

import pytest
import torch

from fmegatron.collectives import Axes, psum
from fmegatron.layout import Mesh
from fmegatron.step.jitted import Compiled
from fmegatron.step.overlap.gathers import separate_groups
from fmegatron.step.overlap.schedule import overlapped
from fmegatron.step.passes import Target
from fmegatron.step.timelines.planned import PaperWorld, launches
from tests.step.overlap.decoder import FSDP, free, lowered

MESH = Mesh(dp=2, tp=2)
AXES = Axes(MESH)


def ordered(fn, *args, overlap=free()):  # noqa: B008  a frozen value
    """The graph of a function of symbolic axes after the passes."""
    return Compiled(fn, args, (), Target(PaperWorld(MESH), "eager", overlap=overlap)).stages["overlap"].graph


def reductions(fn, *args, overlap=free()):  # noqa: B008
    """Number of elements of each all-reduce, in order."""
    return [n.meta["val"].numel() for n in ordered(fn, *args, overlap=overlap).nodes if "all_reduce" in n.name]


def three(x, y, z):
    """Three independent sums over dp."""
    return tuple(psum(t, AXES["dp"]) for t in (x, y, z))


def numbers(*sizes, dtype=torch.float32):
    return [torch.ones(n, dtype=dtype) for n in sizes]


@pytest.mark.parametrize(
    ("limit", "found"),
    [(1 << 22, [2 + 3 + 4]), (4 * 9, [2 + 3 + 4]), (4 * 8, [2 + 3, 4]), (4 * 3, [2, 3, 4]), (0, [2, 3, 4])],
)
def test_up_to_a_number_of_bytes(limit, found):
    assert sorted(reductions(three, *numbers(2, 3, 4), overlap=free(bucket_bytes=limit))) == sorted(found)


def test_large_arrays_travel_alone():
    assert sorted(reductions(three, *numbers(2, 500, 4), overlap=free(bucket_bytes=400))) == [6, 500]


def test_other_dtypes_groups_and_maxima_travel_alone():
    def f(x, y, z):
        return psum(x, AXES["dp"]), psum(y, AXES["dp"]), psum(z, AXES["tp"]), psum(x + 1, AXES["dp"])

    x, z = numbers(2, 3)
    assert sorted(reductions(f, x, numbers(4, dtype=torch.float64)[0], z)) == [3, 4, 4]


def test_sums_that_need_each_other_stay_apart():
    def f(x, y):
        total = psum(x, AXES["dp"])
        return psum(total.sum() * y, AXES["dp"]), psum(x * 2, AXES["dp"])

    assert reductions(f, *numbers(2, 3)) == [4, 3]


def test_values_and_shapes():
    """Run on one process: what was merged comes back as it was, 0-d and empty arrays included."""
    graph = ordered(three, torch.tensor(3.0), torch.arange(6.0).view(2, 3), torch.ones(0))
    shapes = [tuple(n.meta["val"].shape) for n in graph.output_node().args[0]]
    assert shapes == [(), (2, 3), (0,)]
    assert sum("all_reduce" in n.name for n in graph.nodes) == 1


# ---- groups ----------------------------------------------------------------------------------------------------------
def test_gathers_have_groups_of_their_own():
    graph = overlapped(lowered(), free(separate_groups=True), PaperWorld(FSDP)).graph
    starts = [n for n in graph.nodes if getattr(n.target, "namespace", "") == "_c10d_functional"]
    found = {n.args[-1] for n in starts if "wait" not in n.name and "gather" in n.name}
    others = {n.args[-1] for n in starts if "wait" not in n.name and "gather" not in n.name}
    assert found == {"fmegatron:fsdp#gather"} and others == {"fmegatron:fsdp"}
    names = launches(graph)
    separate_groups(graph, PaperWorld(FSDP))  # once more: nothing to do
    assert launches(graph) == names and {n.args[-1] for n in starts if "gather" in n.name} == found

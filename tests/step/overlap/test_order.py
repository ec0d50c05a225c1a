"""The order in which collectives start and are waited for is the one that was designed; one process, nothing runs."""

import functools

import pytest
import torch

from fmegatron.collectives import Axes, all_gather, psum
from fmegatron.layout import Mesh
from fmegatron.step import Overlap, jit
from fmegatron.step.graph.nodes import entry_of
from fmegatron.step.jitted import Compiled
from fmegatron.step.overlap.schedule import overlapped
from fmegatron.step.passes import Target
from fmegatron.step.timelines.planned import PaperWorld, launches
from tests.fresh_state import fresh_state
from tests.step import tiny
from tests.step.overlap.decoder import compiled, free

PLAIN = free(depth=0, late_reductions=False, bucket_bytes=0, join_ends=False)
LATE = free(depth=0, late_reductions=True, join_ends=False)
JOINED = free(depth=0, late_reductions=False)

# E: the embedding's gather is G0; the head's comes after the last layer. Forward 0 1 2, backward 2 1 0.
ORDERS = {
    PLAIN: "G0 w:G0 G1 w:G1 F0 G2 w:G2 F1 G3 w:G3 F2 G4 w:G4 R0 w:R0 "
    "G5 w:G5 B0 R1 w:R1 G6 w:G6 B1 R2 w:R2 G7 w:G7 B2 R3 w:R3 R4 w:R4 A0 w:A0 A1 w:A1 A2 w:A2",
    LATE: "G0 w:G0 G1 w:G1 F0 G2 w:G2 F1 G3 w:G3 F2 G4 w:G4 R0 "
    "G5 w:G5 B0 w:R0 R1 G6 w:G6 B1 w:R1 R2 G7 w:G7 B2 w:R2 R3 w:R3 R4 w:R4 A0 w:A0",
    JOINED: "G0 w:G0 F0 G1 w:G1 F1 G2 w:G2 F2 G3 w:G3 R0 w:R0 "
    "G4 w:G4 B0 R1 w:R1 G5 w:G5 B1 R2 w:R2 G6 w:G6 B2 R3 w:R3 A0 w:A0",
    free(): "G0 w:G0 G1 F0 w:G1 G2 F1 w:G2 G3 F2 w:G3 G4 R0 "
    "w:G4 G5 B0 w:R0 R1 w:G5 G6 B1 w:R1 R2 w:G6 B2 w:R2 R3 w:R3 A0 w:A0",
    free(depth=2): "G0 G1 w:G0 G2 F0 w:G1 G3 F1 w:G2 G4 F2 w:G3 G5 R0 "
    "w:G4 G6 B0 w:R0 R1 w:G5 B1 w:R1 R2 w:G6 B2 w:R2 R3 w:R3 A0 w:A0",
    free(keep_last=True): "G0 w:G0 G1 F0 w:G1 G2 F1 w:G2 G3 F2 w:G3 G4 R0 "
    "B0 w:R0 R1 w:G4 G5 B1 w:R1 R2 w:G5 B2 w:R2 R3 w:R3 A0 w:A0",
    free(late_reductions=False, join_ends=False): "G0 G1 w:G0 w:G1 G2 F0 w:G2 G3 F1 w:G3 G4 F2 w:G4 G5 R0 w:R0 "
    "w:G5 G6 B0 R1 w:R1 w:G6 G7 B1 R2 w:R2 w:G7 B2 R3 w:R3 R4 w:R4 A0 w:A0",
}


@pytest.fixture(scope="module")
def stages():
    """Of the step with overlap."""
    return compiled(free()).stages


@pytest.fixture(scope="module")
def order(stages):
    """setting -> the launches of the step under it."""
    return lambda setting: launches(overlapped(stages["lower"], setting).graph)


@pytest.mark.medium
@pytest.mark.parametrize("setting", ORDERS, ids=lambda s: repr(s)[8:-1])
def test_order(order, setting):
    assert order(setting) == ORDERS[setting]


def test_nothing_is_changed_without_overlap(stages):
    lower = stages["lower"]
    assert overlapped(lower, None) is lower
    assert str(overlapped(lower, PLAIN).graph) == str(lower.graph)


def test_the_stages_of_a_step(stages):
    assert list(stages) == ["trace", "lower", "overlap", "stream", "donate", "exchange"]
    orders = {name: launches(stages[name].graph) for name in ("lower", "overlap", "donate")}
    assert orders["lower"] == ORDERS[PLAIN] and orders["overlap"] == orders["donate"] == ORDERS[free()]


def test_bytes_ahead_limit_how_many_gathers_travel(order):
    """A layer has 15,360 bytes, so that no second one starts while the first is on its way."""
    at_the_start = "G0 w:G0 G1 F0", "G0 G1 w:G0 F0"  # where two start together, whatever their size
    assert order(free(depth=2, ahead_bytes=16_000)) == ORDERS[free()].replace(*at_the_start)


def test_gathers_over_two_axes_start_stage_by_stage():
    """Where a second gather needs the first, it starts when that has arrived, one layer before its use."""
    axes = Axes(Mesh(dp=2, fsdp=2))

    def f(x, shards):
        for w in shards:
            x = x @ all_gather(all_gather(w, axes["fsdp"], 0), axes["dp"], 0)
        return x

    args = torch.ones(4, 4), [torch.ones(1, 4)] * 3
    graph = lowered(f, *args, mesh=axes.mesh, overlap=free(depth=2))
    assert launches(graph) == "G0 w:G0 G1 G2 w:G1 w:G2 G3 G4 w:G3 w:G4 G5 w:G5"
    products = [n for n in graph.nodes if n.target is torch.ops.aten.mm.default]
    waits = [n for n in graph.nodes if "wait" in n.name]
    assert [sum(w < p for w in waits) for p in products] == [3, 5, 6]


@pytest.mark.medium
def test_microbatches_are_ordered_inside_of_their_node():
    step = compiled(free(), microbatches=2)
    outer = step.stages["overlap"].graph
    inner = {entry_of(n) for n in outer.nodes if entry_of(n) is not None}
    assert len(inner) == 1 and launches(outer).startswith("C0 C1 ")
    wanted = ORDERS[free()].removesuffix(" A0 w:A0")  # the totals of all microbatches are summed behind the last one
    assert launches(inner.pop().graph_module.graph) == wanted


# ---- what may not move -----------------------------------------------------------------------------------------------
def lowered(fn, *args, mesh=Mesh(dp=2), overlap=free()):  # noqa: B008 (both are constants)
    """The ordered graph of a function of symbolic axes."""
    return Compiled(fn, args, (), Target(PaperWorld(mesh), "eager", overlap=overlap)).stages["overlap"].graph


def test_what_a_collective_reads_is_not_written_before_its_wait():
    axis = Axes(Mesh(dp=2))["dp"]

    def f(x):
        y = x * 2
        total = psum(y, axis)
        product = x @ x
        y.add_(1)
        return total + 1, y.sum() + product

    names = [n.name.split(".")[0] for n in lowered(f, torch.ones(3, 3)).nodes]
    assert names.index("all_reduce") < names.index("mm") < names.index("wait_tensor") < names.index("add_")


def test_what_is_written_between_two_gathers_is_gathered_twice():
    """keep_last, which joins equal gathers, sees that the memory of a view changes."""
    axis = Axes(Mesh(dp=2))["dp"]

    def f(x, w, changes):
        y = w * 3
        rows = y.view(2, 4)
        x = x @ all_gather(rows, axis, 0)
        if changes:
            y.mul_(2)
        return x @ all_gather(rows, axis, 0)

    def order(changes):
        step = functools.partial(f, changes=changes)
        return launches(lowered(step, torch.ones(4, 4), torch.ones(8), overlap=free(keep_last=True)))

    assert order(False) == "G0 w:G0" and order(True) == "G0 w:G0 G1 w:G1"


def test_a_limit_that_nothing_keeps_leaves_the_order_of_the_graph(stages):
    lower = stages["lower"]
    assert overlapped(lower, free(peak=0.0)) is lower


def test_negative_settings_are_refused():
    with pytest.raises(ValueError, match="got depth=-1, wanted 0 or more"):
        Overlap(depth=-1)


def test_graph_names_the_stages():
    step = jit(tiny.mlp_step(), backend="eager")
    step(fresh_state(tiny.mlp_params(), tiny.OPTIMIZER), tiny.mlp_batch())
    with pytest.raises(ValueError, match="wanted one of trace, lower, overlap, stream, donate, exchange"):
        step.graph("schedule")

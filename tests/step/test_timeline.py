"""Timelines: what is planned follows from the order, and the text and the trace say it."""

import json

import pytest
import torch

from fmegatron import tree
from fmegatron.layout import Mesh
from fmegatron.step import jit, timeline
from fmegatron.step.overlap.schedule import overlapped
from fmegatron.step.timelines.events import Event, Timeline
from fmegatron.step.timelines.planned import PaperWorld, Rates, planned
from tests.fresh_state import fresh_state
from tests.step import tiny
from tests.step.overlap.decoder import FSDP, LAYERS, config, free, lowered, train_step

PLAIN = free(depth=0, late_reductions=False, join_ends=False)


@pytest.fixture(scope="module")
def plan():
    """(setting, rates) -> the plan of a small step."""
    step = lowered()
    return lambda setting, rates=None: planned(overlapped(step, setting, PaperWorld(FSDP)).graph, rates)


@pytest.mark.medium
def test_units(plan):
    """Forward 1, backward 2, a collective 1: without overlap all of them one after another; with it they hide."""
    without, with_overlap = plan(PLAIN), plan(free())
    assert without.busy("compute") == with_overlap.busy("compute") == 3 * LAYERS
    gathers, scatters = 2 * LAYERS + 2, LAYERS + 2
    assert without.busy("gather fsdp") == gathers and without.busy("reduce fsdp") == scatters + 1
    assert without.waiting == gathers + scatters + 1 and without.duration == without.waiting + 3 * LAYERS
    # What nothing hides: the first gather; the head's and, as the head takes no time here, the next layer's; the last
    # reduce-scatter and the norm.
    assert with_overlap.waiting == 4 and with_overlap.duration == 3 * LAYERS + 4


@pytest.mark.medium
def test_nothing_waits_that_could_be_hidden():
    """Where a layer computes for longer than its weights travel: only for the first gather, the last reduce-scatter and
    the norm. The second block's weights travel while the first computes; what does not travel with the embedding
    follows it at once."""
    of = config(LAYERS, dim=64, heads=4, kv_heads=2, ffn_dim=176, max_seq=64, vocab_size=512)
    step, rates = lowered(of), Rates(flops=1e9, memory=1e9, network=1e9, latency=1e-6)
    joined, apart = (planned(overlapped(step, free(join_ends=join)).graph, rates) for join in (True, False))
    assert [e.name for e in joined.events if e.waits] == ["G0", f"R{LAYERS}", "A0"]
    at = {e.name: e for e in joined.events if not e.waits}
    assert at["F0"].start <= at["G1"].start < at["G1"].end < at["F0"].end
    at = {e.name: e for e in apart.events if not e.waits}
    assert at["G0"].end == at["G1"].start < at["F0"].start <= at["G2"].start < at["G2"].end < at["F0"].end


def test_groups_of_their_own_work_side_by_side(plan):
    at = {e.name: e.start for e in plan(free(separate_groups=True)).events}
    queued = {e.name: e.start for e in plan(free()).events}
    assert at["R0"] < queued["R0"]


def test_rates_give_seconds(plan):
    rates = Rates(flops=1e9, memory=1e9, network=1e6, latency=0.5)
    estimated = plan(free(), rates)
    assert estimated.unit == "s"
    first = next(e for e in estimated.events if e.name == "G1")
    assert first.duration == pytest.approx(0.5 + 15_360 / 1e6)
    assert estimated.duration > plan(free(), Rates(flops=1e9, memory=1e9, network=1e9, latency=0.5)).duration


def test_picture():
    events = (
        Event("G0", "gather fsdp", 0.0, 1.0),
        Event("G0", "compute", 0.0, 1.0, waits=True),
        Event("F0", "compute", 1.0, 3.0),
        Event("a long name", "compute", 3.0, 3.01),
        Event("R0", "reduce fsdp", 3.0, 4.0),
    )
    text = str(Timeline(events, "a step")).splitlines()
    assert text[0] == "a step: 4e+03 ms, 1e+03 ms of them waiting for communication (25%)"
    assert [line[:12].strip() for line in text[1:4]] == ["compute", "gather fsdp", "reduce fsdp"]
    compute = text[1][13:]
    assert compute.startswith("." * 24 + "[F0=") and compute.endswith("=]|") and len(text[1]) <= 110
    assert text[2][13:].startswith("[G0") and text[3][13:].index("[R0") == compute.index("|")


def test_names_of_lanes_are_not_cut():
    """Groups of joint axes have long ones; two lanes must not look alike."""
    lanes = ["exchange dp+fsdp", "exchange dp+fsdp+ep"]
    text = str(Timeline(tuple(Event("X0", lane, 0.0, 1.0) for lane in lanes), "a step")).splitlines()
    assert [line.partition("[")[0].strip() for line in text[1:3]] == lanes
    assert text[1].index("[") == text[2].index("[") == len(lanes[1]) + 1 and max(map(len, text[1:3])) <= 110


def test_chrome_trace(plan, tmp_path):
    made = plan(free())
    trace = json.loads(made.chrome_trace(tmp_path / "step.json").read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in trace if e["ph"] == "M"}
    events = [e for e in trace if e["ph"] == "X"]
    assert list(lanes.values()) == ["compute", "gather fsdp", "reduce fsdp"]
    assert len(events) == len(made.events)
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(made.duration * 1e3)
    assert sum(e["name"].startswith("wait for") for e in events) == sum(e.waits for e in made.events) > 0


def test_of_a_compiled_step_and_of_a_call():
    step = jit(tiny.mlp_step("inputs"), donate=0, backend="eager")
    with pytest.raises(ValueError, match="got a jit that has compiled nothing"):
        timeline(step)
    state, batch = fresh_state(tiny.mlp_params(), tiny.OPTIMIZER), tiny.mlp_batch()
    before = tiny.copied(state)
    called = timeline(step, state, batch)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(state), tree.leaves(before), strict=True))
    assert [e.name for e in called.events if e.name[0] in "FB"] == ["F0", "F1", "B0", "B1"]
    assert called.waiting == 0 < called.duration and "measured" in str(called)
    planned = timeline(step)
    assert [e.name for e in planned.events] == ["F0", "F1", "B0", "B1"] and planned.duration == 6


def test_a_function_that_is_not_compiled_needs_a_mesh():
    with pytest.raises(ValueError, match="which is no jit, wanted one; pass step.jit"):
        timeline(tiny.mlp_step())


@pytest.mark.slow
@pytest.mark.long
def test_more_ranks_than_there_are_processes():
    mesh, of = Mesh(fsdp=8), config(1)
    args = (tiny.decoder_state(of, mesh), tiny.decoder_batch(of, rows=8, mesh=mesh))
    assert "planned on fsdp8" in str(timeline(train_step(of, mesh), *args, mesh=mesh))

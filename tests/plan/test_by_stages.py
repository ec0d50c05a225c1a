"""Plans of pipelines by formulas: time by the clock of the table, memory by what it holds, a search over pp."""

import math

import pytest

from fmegatron import model, optim, plan, step
from fmegatron.layout import Mesh
from fmegatron.plan.from_formulas import quick_of
from fmegatron.plan.setting import setting_of
from fmegatron.step.timelines.planned import Rates

RATES = Rates(1e12, 1e11, 1e9, 1e-6)
FAST = Rates(1e12, 1e11, 1e13, 1e-9)  # whose messages take no time
B, S, D = 16, 64, 64


def described(mesh: Mesh, schedule: str = "1f1b", m: int = 8, **changes) -> step.Description:
    decoder = model.llama(**{"vocab_size": 256, "dim": D, "layers": 8, "heads": 4, "kv_heads": 4, "ffn_dim": 192} |
                          {"max_seq": S} | changes)  # fmt: skip
    parts = step.Pipelining(schedule).of(m)
    return model.build(decoder, optim.adamw(1e-3), mesh, (B, S), strategy="zero3", microbatches=parts)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v"])
def test_the_seconds_are_those_of_the_clock(schedule):
    """Of any rank: what it does and waits for in the table, and what is around it."""
    of = described(Mesh(pp=4), schedule)
    for rank in range(4):
        one = quick_of(setting_of(of), rank)
        parts, on_clock = one.step_seconds(RATES), one.stages.pipeline.clock(one.stages.costs(RATES))
        sent = sum(m.source == rank for m in one.stages.pipeline.messages)
        assert one.calls["pp"] == sent + 2 and one.stages.message == B // 8 * S * D * 4
        around = parts["optimizer"] + parts["sent over pp"]  # what actions send over pp is beside them
        assert math.isclose(parts["total"], on_clock.duration + around, rel_tol=1e-9)
        assert parts["idle in the pipeline"] == on_clock.idle[rank] >= 0


def test_a_mesh_without_pp_is_planned_as_before():
    assert plan.quick(described(Mesh(fsdp=2))).stages is None
    whole, setting = plan.quick(described(Mesh())).model_flops, setting_of(described(Mesh(pp=2)))
    by_rank = [quick_of(setting, rank).model_flops for rank in range(2)]
    assert math.isclose(sum(by_rank), whole, rel_tol=1e-9) and by_rank[0] < by_rank[1]  # which has the head


def test_schedules_as_they_are():
    """1F1B holds p microbatches and GPipe all; ZB-H1 and ZB-V stand idle for less."""
    names = ("gpipe", "1f1b", "zb_h1", "zb_v")
    plans = {name: plan.quick(described(Mesh(pp=4), name, vocab_size=8)) for name in names}
    assert plans["gpipe"].transient > 1.3 * plans["1f1b"].transient
    seconds = {name: one.step_seconds(FAST)["total"] for name, one in plans.items()}
    assert seconds["zb_v"] < seconds["zb_h1"] < seconds["1f1b"] <= seconds["gpipe"] * 1.001
    assert "F of the table" in str(plans["gpipe"])


@pytest.mark.slow
def test_a_search_over_pp():
    found = plan.search(described, plan.meshes_of(8, ("pp", "fsdp", "tp")), 1 << 30, rates=RATES)
    meshes = [one.mesh for one in found.found]
    assert Mesh(pp=8) in meshes and Mesh(pp=2, fsdp=2, tp=2) in meshes
    assert [one.seconds for one in found.found] == sorted(one.seconds for one in found.found)
    failed = dict(plan.search(described, [Mesh(pp=16)], 1 << 30).failed)
    assert "8 blocks and 16 stages" in failed[Mesh(pp=16)]


@pytest.mark.slow
@pytest.mark.parametrize("schedule, rank", [("1f1b", 0), ("zb_h1", 1), ("zb_v", 0)])
def test_memory_is_about_that_of_the_exact_plan(schedule, rank):
    of = described(Mesh(pp=2), schedule, 4, dim=256, ffn_dim=768, layers=4)
    by_formula, counted = quick_of(setting_of(of), rank), plan.exact(of, rank=rank)
    assert 0.9 < by_formula.peak / counted.peak < 1.2

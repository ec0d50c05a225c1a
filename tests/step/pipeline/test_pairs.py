"""Pairs of a table as one graph: each half computes while the other communicates; numbers are those of one rank."""

import pytest
import torch

from fmegatron import model, nn, optim
from fmegatron.layout import Mesh
from fmegatron.step import Pipeline
from fmegatron.step.durations import Rates
from fmegatron.step.graph.nodes import opaque_entries
from fmegatron.step.jitted import Compiled
from fmegatron.step.overlap.schedule import Overlap
from fmegatron.step.passes import Target
from fmegatron.step.pipeline import schedules
from fmegatron.step.pipeline.pairs import faces
from fmegatron.step.timelines.measured import _on_paper
from fmegatron.step.timelines.planned import PaperWorld, planned
from fmegatron.step.timelines.stages import graph_of, pipelines_of
from tests.step.pipeline import test_cover
from tests.step.pipeline.hand import worst
from tests.step.pipeline.test_cover import Case
from tests.step.pipeline.test_cover_on_ranks import require_one_ranks_update
from tests.step.pipeline.test_gathers import plan_of

TABLE, STAGES = schedules.dualpipe_v(2, 4), (1, 1, 1, 1)
EXPERTS = {"ep": ("fsdp",), **test_cover.ROUTER}
CASES = {
    "layers, experts over ep": Case(
        "dualpipe_v", STAGES, {"fsdp": 2}, "zero3", {"experts": EXPERTS}, {"save": "mincut"}, True
    ),
    "uneven, layers, tp, sp": Case(
        "dualpipe_v", (1, 2, 1, 2), {"tp": 2}, "replicated", {"layers": 6, **test_cover.SP}, {"save": "mincut"}
    ),
    "experts over ep": Case("dualpipe_v", STAGES, {"fsdp": 2}, "zero2", {"experts": EXPERTS}),
}


def halves(plan, rank):
    """The pairs of a rank: (forward, backward, weight gradients), by part and stage."""
    return list(dict.fromkeys(steps for unit in plan.runs(rank) for steps in unit if len(steps) > 1))


def test_what_a_pair_takes_and_gives():
    """All of what its parts take from others, inputs that are equal once; not what B gives for its W alone."""
    plan = plan_of(TABLE, STAGES)
    assert plan is not None
    for steps in halves(plan, 0) + halves(plan, 1):
        (f, b, w), (takes, gives) = [plan.parts.of[step] for step in steps], faces(plan.parts, steps)
        assert [kind for kind, _ in steps] == ["F", "B", "W"] and steps[1][1] == steps[2][1] == 3 - steps[0][1]
        assert {name for _, name in takes} == {*f.takes, *b.takes, *w.takes} - {*b.gives}
        assert {name for kind, name in gives if kind == "F"} == {*f.gives}
        assert {name for kind, name in gives if kind == "W"} == {*w.gives}
        sent = plan.parts.backward[steps[1][1]]
        assert [name for kind, name in gives if kind == "B"] == ([] if sent is None else [sent[0]])
        assert len(plan.of_steps(steps).fakes) == len(takes)
    single = faces(plan.parts, (("B", 2),))
    assert single == tuple(
        [("B", name) for name in names] for names in (plan.parts.of["B", 2].takes, plan.parts.of["B", 2].gives)
    )


def bound_to_paper(save, layers, **how):
    """The pipeline of a decoder with experts, as rank 0 runs it, on a mesh on paper."""
    experts = model.MoE(nn.Router(8, 2), how["ffn_dim"], ep=("fsdp",))
    decoder = model.llama(256, layers=layers, heads=4, kv_heads=4, mlp=experts, **how)
    mesh, pipeline = Mesh(pp=2, fsdp=4), Pipeline(TABLE, tuple(layers // 4 for _ in STAGES))
    rows = (16, how["max_seq"])
    value = model.build(decoder, optim.adamw(1e-3), mesh, rows, strategy="zero1", microbatches=pipeline, save=save)
    world = PaperWorld(mesh)
    compiled = Compiled(value.function, _on_paper(value), (), Target(world, overlap=Overlap()))
    (bound,) = pipelines_of(compiled.stages["overlap"].graph)
    return bound


LARGE = {"dim": 2048, "ffn_dim": 1024, "max_seq": 4096, "compute_dtype": torch.bfloat16}
SMALL = {"dim": 16, "ffn_dim": 24, "max_seq": 8}


@pytest.mark.medium
@pytest.mark.parametrize("save", [pytest.param(None, marks=pytest.mark.slow), "mincut"])
def test_what_travels_is_hidden_behind_the_other_half(save):
    """By the planned timeline: of exchanges of experts, all of which are waited for in actions alone, less than a third
    is left; the table is as much shorter."""
    bound = bound_to_paper(save, 4, **LARGE)
    for steps in halves(bound.plan, 0):
        each = [steps, *((step,) for step in steps)]
        found, *parts = [planned(graph_of(bound, of), Rates(network=1e11)) for of in each]
        alone = sum(part.waiting for part in parts)
        sent = [sum(e.duration for e in of.events if e.lane.startswith("exchange")) for of in (found, *parts)]
        assert sent[0] == pytest.approx(sum(sent[1:])) and alone > 0.9 * sent[0]
        assert found.waiting < alone / 3
        assert found.duration == pytest.approx(sum(part.duration for part in parts) - alone + found.waiting, rel=1e-3)


@pytest.mark.medium
def test_layers_of_a_pair_are_compiled_once_for_all_stages():
    """Two blocks a stage and two pairs a rank: one layer of a pair, in which products are made while rows travel."""
    plan = bound_to_paper("mincut", 8, **SMALL).plan
    found = [plan.of_steps(steps) for rank in range(2) for steps in halves(plan, rank)]
    joined = {entry for of in found for entry in opaque_entries(of.graph_module.graph)}
    assert len(found) == 4 and len(joined) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_update(name):
    found, report = test_cover.updated(CASES[name], True)
    error, path = worst(test_cover.updated(CASES[name], False)[0], found)
    assert error <= 1e-10, path
    assert report.ok, report


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_on_four_ranks(ranks, name):
    require_one_ranks_update(ranks, CASES[name])

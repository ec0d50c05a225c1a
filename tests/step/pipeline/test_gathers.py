"""Gathers and reductions as actions of their own, once a step or for each run of a stage's actions."""

import dataclasses

import pytest
import torch

from fmegatron import model, nn, optim, plan, step, tree
from fmegatron.layout import Layout, Mesh
from fmegatron.step import Pipeline
from fmegatron.step.graph.nodes import opaque_entries
from fmegatron.step.pipeline import run, schedules
from fmegatron.step.pipeline.cut import cut
from fmegatron.step.pipeline.entry import PipelineEntry
from fmegatron.step.pipeline.pictures import picture
from fmegatron.step.pipeline.table import gathering, problems
from fmegatron.step.pipeline.torch_tables import read_torch
from fmegatron.testing import simulate
from tests.step.pipeline import test_cover
from tests.step.pipeline.hand import worst
from tests.step.pipeline.test_torch_tables import COMMS

TABLES = {
    "1f1b": schedules.one_f_one_b(3, 4),
    "around": schedules.interleaved(2, 4, 2),
    "V": schedules.zb_v(2, 4),
    "pairs": schedules.dualpipe_v(2, 4),
}


@pytest.mark.parametrize("often", ["use", "burst", "step"])
@pytest.mark.parametrize("name", TABLES)
def test_tables(name, often):
    table = TABLES[name]
    found = gathering(table, often)
    assert not problems(found)
    assert tuple(tuple(a for a in row if a.kind not in "GR") for row in found.rows) == table.rows
    for rank, row in enumerate(found.rows):
        pairs = [of.pairs[rank] if of.pairs else () for of in (found, table)]
        for at, before in zip(*pairs, strict=True):
            assert row[at : at + 2] == table.rows[rank][before : before + 2]
        for stage in table.held(rank):
            counts = [sum(a.kind == kind and a.stage == stage for a in row) for kind in "GR"]
            assert {"use": counts == [0, 0], "step": counts == [1, 1], "burst": min(counts) >= 1}[often]
    assert often == "use" or "G gathers, R reductions" in picture(found)


def test_one_stage_a_rank_has_one_run_of_actions():
    table = TABLES["1f1b"]
    assert gathering(table, "burst") == gathering(table, "step")
    with pytest.raises(ValueError, match="pipeline.gather: got 'often', wanted one of use, burst, step"):
        step.Pipelining(gather="often")
    options = step.Pipelining("zb_v", gather="step")
    assert options.table((0, 1, 1, 0), 4) == gathering(TABLES["V"], "step")


def test_formulas_know_them():
    """Weights and gradients of ZeRO-3 travel once a step, and stay with a rank from G to R."""

    def planned(often):
        decoder, parts = model.llama(64, 64, 2, 2, 2, 64, 32), step.Pipelining(gather=often).of(4)
        how = {"strategy": "zero3", "microbatches": parts}
        return plan.quick(model.build(decoder, optim.adamw(1e-3), Mesh(pp=2, fsdp=2), (16, 32), **how))

    use, once = planned("use"), planned("step")
    assert once.sent["fsdp"] * 4 <= use.sent["fsdp"] and once.sent["pp"] == use.sent["pp"]
    assert once.moments["B of the table"] > use.moments["B of the table"]


def of_product(w, batch):
    """What the last stage gives are products with a gathered weight themselves, in F and in B."""
    w = {name: nn.gather_tree(x) for name, x in w.items()}
    x = batch["x"] @ w["first"]
    for n, one in enumerate(w["blocks"]):
        x = step.stage(x, n)
        x = x + (x @ one).tanh()
    return step.mean((x * w["gain"] @ w["head"]).logsumexp(-1).sum(), float(len(x)))


def plan_of(table, blocks):
    """How `of_product` is computed by a table, of so many blocks in each stage."""
    mesh, fsdp = Mesh(pp=2, fsdp=2), (None, "fsdp")
    layouts = {
        "first": Layout((3, 4), torch.float64, mesh, fsdp),
        "blocks": [Layout((4, 4), torch.float64, mesh, fsdp) for _ in range(sum(blocks))],
        "gain": Layout((4,), torch.float64, mesh),
        "head": Layout((4, 6), torch.float64, mesh, fsdp),
    }
    rows = {"x": Layout((8, 3), torch.float64, mesh, ("fsdp", None))}
    f = step.pipelined(of_product, Pipeline(table, blocks))
    empty = tree.map(lambda of: torch.empty(of.local_shape(0), dtype=of.dtype, device="meta"), (layouts, rows))
    graph = step.trace(f, tuple(tree.place(x, of) for x, of in zip(empty, (layouts, rows), strict=True)))
    (entry,) = [e for e in opaque_entries(graph.graph_module.graph) if isinstance(e, PipelineEntry)]
    return entry.plan


def moved(plan, rank):
    """How often a rank gathers, and reduces, in a step."""
    pairs = zip(plan.table.rows[rank], plan.table.parts(rank), strict=True)
    names = [str(n.target) for action, kinds in pairs for kind in kinds
             for n in plan.parts.of[kind, action.stage].graph.nodes]  # fmt: skip
    return [sum(kind in name for name in names) for kind in ("all_gather", "reduce_scatter")]


def test_what_a_part_gives_is_made_of_gathered_weights():
    plan = plan_of(gathering(schedules.one_f_one_b(2, 2), "step"), (1, 1))
    counts = {key: sum("all_gather" in str(n.target) for n in part.graph.nodes) for key, part in plan.parts.of.items()}
    assert all((counts[kind, stage] > 0) == (kind[0] == "G") for kind, stage in counts if kind != "R"), counts


@pytest.mark.long
@pytest.mark.parametrize("name", ["around", "V"])
def test_runs_of_actions_move_no_more_than_each_action_does(name):
    """What forwards alone read (the first weight) is not gathered for backwards, and for weight gradients nothing."""
    use, burst = [plan_of(gathering(TABLES[name], often), (1, 1, 1, 1)) for often in ("use", "burst")]
    for rank in range(2):
        assert all(a <= b for a, b in zip(moved(burst, rank), moved(use, rank), strict=True))
    kinds = {kind for kind, _ in burst.parts.of if kind[0] == "G"}
    assert kinds >= ({"GF", "GBW"} if name == "around" else {"GF"})
    first = [part for (kind, stage), part in burst.parts.of.items() if stage == 0 and kind in ("GBW", "GB", "GW")]
    assert first and not any("0/first" in part.takes for part in first)


def normed(w, batch):
    """Blocks whose backward gives the gradients of input, weight and bias at once, in B."""
    x = batch["x"] * w["scale"]
    for n, one in enumerate(w["blocks"]):
        x = step.stage(x, n)
        x = x + torch.nn.functional.layer_norm(x, (4,), one["weight"], one["bias"]).tanh()
    return {"of rows": step.mean(x.square().sum(), float(len(x)))}


def after_an_update(mesh, pipelining, microbatches):
    shapes = {"scale": (4,), "blocks": {"weight": (2, 4), "bias": (2, 4)}}
    stacked = [("blocks", pipelining and pipelining.split(mesh, 2))]
    how = {"init": [(".*", tree.Normal(0.4))], "stacked": stacked, "dtype": torch.float64}
    specs, optimizer = tree.specs(shapes, mesh, strategy="zero3", **how), optim.sgd(0.1)
    rows, parts = {"x": ((8, 4), torch.float64)}, pipelining.of(microbatches) if pipelining else microbatches
    value = step.build(normed, optimizer, specs, rows, microbatches=parts)
    params = tree.init(tree.specs(shapes, Mesh(), **how | {"stacked": [("blocks", None)]}), 7, 0)
    state = step.State(torch.zeros((), dtype=torch.int64), params, optimizer.init(params))
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    layouts = tree.layouts((value.state, value.batch))
    return simulate(value.function, mesh, state, {"x": x}, layouts=layouts).globals()[0].params


def test_sums_over_microbatches_are_no_values_of_one():
    found = after_an_update(Mesh(pp=2, fsdp=2), step.Pipelining(gather="step"), 2)
    assert worst(after_an_update(Mesh(), None, 2), found)[0] < 1e-12


class Case(test_cover.Case):
    often = "step"

    @property
    def pipeline(self) -> Pipeline:
        found = super().pipeline
        return Pipeline(gathering(found.table, self.often), found.stages)


class Bursts(Case):
    often = "burst"


class OfTorch(test_cover.Case):
    """A table that torch has written, whose gathers and reductions are its own."""

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(dataclasses.replace(read_torch(COMMS), name="of torch"), self.stages)


SMALL = {"layers": 2, "tied": True, "sequence_parallel": True}
CASES = {
    "once, tied, tp, sp, min-cut": Case(
        "one_f_one_b", (1, 1), {"fsdp": 2, "tp": 2}, "zero3", SMALL, {"save": "mincut"}, True
    ),
    "runs of a V, experts over ep": Bursts(
        "zb_v", (1, 1, 1, 1), {"fsdp": 2}, "zero3", {"experts": {"ep": ("fsdp",), **test_cover.ROUTER}}
    ),
    "runs around, ZeRO-1": Bursts("interleaved", (1, 1, 1, 1), {"dp": 2}, "zero1", {"z_loss": 1e-2}),
    "pairs": Case("dualpipe_v", (1, 1, 1, 1), {"fsdp": 2}, "zero3", {"dropout": 0.1}),
    "of torch": OfTorch("one_f_one_b", (1, 1), {"fsdp": 2}, "zero3", {"layers": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_update(name, monkeypatch):
    seen, microbatches = [], 2 if name == "of torch" else test_cover.M
    monkeypatch.setattr(test_cover, "M", microbatches)
    monkeypatch.setattr("fmegatron.step.pipeline.pipeline.cut", lambda *args: seen.append(cut(*args)) or seen[-1])
    found, report = test_cover.updated(CASES[name], True)
    error, path = worst(test_cover.updated(CASES[name], False)[0], found)
    assert error <= 1e-10, path
    assert report.ok, report
    sums = {kind: 0 for kind in "FBWGR"}
    for parts in seen:
        for (kind, _), part in parts.of.items():
            sums[kind[0]] += sum("reduce_scatter" in str(n.target) for n in part.graph.nodes)
    data = "fsdp" in CASES[name].mesh and "tp" not in CASES[name].mesh
    assert not data or (sums["W"] == 0 and sums["R"] > 0), sums


@pytest.mark.slow
def test_a_sum_that_is_reduced_without_one_microbatch_is_another(monkeypatch):
    plus, calls = run.Held.do, []

    def forgetful(held, action):
        if action.kind in ("W", "BW") and action.microbatch == 1:
            calls.append(action)
            kept = {stage: dict(of) for stage, of in held.reduced.items()}
            held.plus, of = (lambda total, value: total if total is not None else value), held.plus
            plus(held, action)
            held.plus = of
            assert kept
            return None
        return plus(held, action)

    wanted = test_cover.updated(CASES["once, tied, tp, sp, min-cut"], False)[0]
    monkeypatch.setattr(run.Held, "do", forgetful)
    found, _ = test_cover.updated(CASES["once, tied, tp, sp, min-cut"], True)
    assert calls and worst(wanted, found)[0] > 1e-6

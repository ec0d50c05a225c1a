"""The step by stages that is written out: it is proven, means the same on every mesh, and goes on on another one."""

import dataclasses

import pytest
import torch

from experiments.stages import Config, describe, experiment
from fmegatron import loop, tree
from fmegatron.layout import Mesh
from fmegatron.step import Pipelining
from tests.experiments.given import made
from tests.pairs import few
from tests.step.proven import proven_and_equal

CASES = [(Mesh(pp=2), "zb_h1"), (Mesh(pp=2, dp=2), "1f1b"), (Mesh(pp=4), "gpipe")]


@pytest.mark.parametrize(("mesh", "schedule"), few(1, CASES))
def test_simulated_ranks_compute_what_one_computes(mesh, schedule):
    config = Config(mesh, Pipelining(schedule), batch_size=8, dtype="float64")
    _, specs, rows = describe(config)
    state = tree.init(describe(dataclasses.replace(config, mesh=Mesh())).state, key=0, rank=0)
    draw = torch.Generator().manual_seed(0)
    batch = tree.map(lambda layout: torch.randint(0, 256, layout.shape, generator=draw), rows)
    layouts = tree.layouts(specs)
    proven_and_equal(
        lambda m: describe(dataclasses.replace(config, mesh=m)), mesh, state, batch,
        layouts=(layouts, rows), out_layouts=(layouts, None), steps=2,
    )  # fmt: skip


def on_rank(rank, config):
    experiment(config)


@pytest.mark.slow
def test_it_goes_on_from_two_stages(tmp_path, ranks):
    def config(run, steps, **changes):
        return made(Config, run=str(tmp_path / run), steps=steps, every=2, backend="eager", **changes)

    experiment(config("one", 6))
    ranks.run(on_rank, config("two", 4, mesh=Mesh(pp=2)), ranks=2)
    experiment(config("two", 6))
    one, two = (
        {r["step"]: r["loss"] for r in loop.read_metrics(tmp_path / run / "metrics.jsonl") if "loss" in r}
        for run in ("one", "two")
    )
    assert one.keys() <= two.keys() and all(two[n] == pytest.approx(one[n], abs=1e-4) for n in one)

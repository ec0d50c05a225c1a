"""The step that is written out: it learns, is proven, means the same on every mesh, and goes on on another one."""

import dataclasses

import pytest
import torch

from experiments.by_hand import Config, describe, main
from fmegatron import checkpoint, tree
from fmegatron.layout import Mesh
from tests.code_lines import code_lines
from tests.house import ROOT
from tests.step.proven import proven_and_equal

MESHES = [Mesh(dp=2), Mesh(fsdp=2), Mesh(dp=2, fsdp=2)]
SMALL = {"steps": 12, "dtype": "float64", "backend": "eager"}


@pytest.mark.medium
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_simulated_ranks_compute_what_one_computes(mesh):
    config = Config(mesh, dtype="float64")
    _, specs, rows = describe(config)
    state = tree.init(describe(dataclasses.replace(config, mesh=Mesh())).state, key=0, rank=0)
    draw = torch.Generator().manual_seed(0)
    batch = tree.map(lambda layout: torch.randint(0, 256, layout.shape, generator=draw), rows)
    layouts = tree.layouts(specs)
    proven_and_equal(
        lambda m: describe(Config(m, dtype="float64")), mesh, state, batch,
        layouts=(layouts, rows), out_layouts=(layouts, None), steps=3,
    )  # fmt: skip


def on_rank(rank, config):
    return main(config)


@pytest.mark.slow
@pytest.mark.long
def test_it_learns_and_goes_on_from_two_ranks(tmp_path, ranks):
    first = main(Config(folder=str(tmp_path / "one"), **{**SMALL, "steps": 1}))
    alone = main(Config(folder=str(tmp_path / "one"), **SMALL))
    assert alone["loss"] < first["loss"] - 1
    ranks.run(on_rank, Config(Mesh(fsdp=2), str(tmp_path / "two"), **{**SMALL, "steps": 7}), ranks=2)
    assert checkpoint.Manager(tmp_path / "two").latest() == 7
    assert main(Config(folder=str(tmp_path / "two"), **SMALL)) == pytest.approx(alone, abs=1e-9)


def test_it_is_small():
    assert code_lines(ROOT / "experiments/by_hand.py") <= 60

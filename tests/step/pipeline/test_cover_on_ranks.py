"""Twelve cases of the cover on four gloo ranks, every action compiled by Inductor: the update is that of one rank."""

import dataclasses

import pytest
import torch

from fmegatron import step, tree
from fmegatron.collectives import connect
from fmegatron.step import Pipeline
from fmegatron.step.pipeline.torch_tables import read_torch
from fmegatron.testing import split
from tests.step.pipeline import test_cover, test_gathers
from tests.step.pipeline.hand import worst
from tests.step.pipeline.test_cover import Case
from tests.step.pipeline.test_torch_tables import ZBV


class OfTorch(Case):
    """ZB-V as torch has written it."""

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(dataclasses.replace(read_torch(ZBV), name="of torch"), self.stages)


def smaller(case: Case, mesh: dict, **changes) -> Case:
    """A case of eight ranks without one of its axes; sequence parallel where tp is left."""
    decoder = {**case.decoder, "sequence_parallel": "tp" in mesh}
    return dataclasses.replace(case, mesh=mesh, decoder=decoder, **changes)


SIMULATED = test_cover.CASES
CASES = {
    "uneven, ZeRO-3, tied, mask, remat": SIMULATED["uneven, ZeRO-3, tied, mask, remat"],
    "tp, sp, dropout, MTP": smaller(SIMULATED["tp, sp, ZeRO-1, dropout, MTP"], {"tp": 2}, strategy="replicated"),
    "V of torch, ZeRO-2, z-loss, mask": OfTorch(
        "zb_v", (1, 1, 1, 1), {"fsdp": 2}, "zero2", {"z_loss": 1e-2}, mask=True
    ),
    "V, cp": Case("zb_v", (1, 1, 1, 1), {"cp": 2}),
    "pairs, uneven V, ep, ZeRO-3, router losses": SIMULATED["pairs, uneven V, ep, ZeRO-3, router losses"],
    "around, ZeRO-1, experts, remat, mask": SIMULATED["around, ZeRO-1, experts, remat, mask"],
    "around, uneven, tied, MTP, z-loss": SIMULATED["around, uneven, tied, MTP, z-loss"],
    "pairs, ZeRO-1, dropout, offload, mask": SIMULATED["pairs, ZeRO-1, dropout, offload, mask"],
    "G and R once, tied, min-cut": smaller(test_gathers.CASES["once, tied, tp, sp, min-cut"], {"fsdp": 2}),
    "G and R once, pairs, dropout": test_gathers.CASES["pairs"],
    "G and R by runs of a V, experts over ep": test_gathers.CASES["runs of a V, experts over ep"],
    "G and R by runs around, uneven, ZeRO-3, tied": test_gathers.Bursts(
        "interleaved", (2, 1, 1, 1), {"fsdp": 2}, "zero3", {"layers": 5, "tied": True}, mask=True
    ),
}  # fmt: skip


SCALAR = {"cpp.simdlen": 1}  # kernels without vector instructions: g++ takes a third of its time


def on_ranks(rank: int, case: Case, backend: str):
    """(state and metrics of this rank behind a step, whether the check found nothing)."""
    fn, mesh, layouts, args = test_cover.made(case, True)
    world = connect(mesh)
    state, batch = [
        tree.place(tree.map(torch.clone, split(given, of, mesh)[rank]), of)
        for given, of in zip(args, layouts, strict=True)
    ]
    patches = SCALAR if backend == "inductor" else None
    jitted = step.jit(fn, donate=0, world=world, backend=backend, patches=patches)
    found, metrics = jitted(state, batch)
    (compiled,) = jitted.cache.values()
    return tree.map(torch.clone, (found, metrics)), compiled.report.ok


def require_one_ranks_update(ranks, case: Case, backend: str = "inductor"):
    """Of four ranks that run a case."""
    found = ranks.run(on_ranks, case, backend, ranks=4, timeout_s=3600)  # each compiles all its parts
    state, metrics = test_cover.updated(case, False)[0]
    _, mesh, (layouts, _), _ = test_cover.made(case, True)
    for rank, (of_rank, ok) in enumerate(found):
        error, path = worst((split(state, layouts, mesh)[rank], metrics), of_rank)
        assert ok and error <= 1e-10, (rank, path, error)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_update(ranks, name):
    require_one_ranks_update(ranks, CASES[name])

"""Schedules, placements and what a stage may have inside, in pairs: the update is that of one rank."""

import dataclasses
import functools
from typing import Any

import pytest
import torch

from fmegatron import model, nn, optim, step, tree
from fmegatron.layout import DataParallel, Mesh
from fmegatron.step import Pipeline
from fmegatron.step.pipeline import schedules
from fmegatron.testing import simulate
from tests.step.pipeline.hand import worst

F64, M, ROWS = torch.float64, 4, 8
OPTIMIZER = optim.sgd(1e-2, momentum=0.9)


def llama(layers: int = 4, dropout: float = 0.0, mtp: bool = False, experts: Any = None, **changes: Any):
    how = {"vocab_size": 60, "dim": 16, "heads": 4, "kv_heads": 2, "ffn_dim": 24, "max_seq": 8, "vocab_multiple": 8}
    how |= {"param_dtype": F64, "compute_dtype": F64}
    if experts is not None:
        how["mlp"] = model.MoE(nn.Router(4, 2), 24, **experts)
    decoder = model.llama(layers=layers, **how, **changes)
    if dropout:
        blocks = tuple(tuple(dataclasses.replace(part, dropout=dropout) for part in block) for block in decoder.blocks)
        decoder = dataclasses.replace(decoder, blocks=blocks)
    return dataclasses.replace(decoder, mtp=model.MTP(decoder.blocks[0], 1, 0.1)) if mtp else decoder


@dataclasses.dataclass(frozen=True)
class Case:
    """decoder: of `llama`. mesh: without pp. loss: arguments of `model.loss`. mask: some labels count nothing."""

    schedule: str
    stages: tuple[int, ...]
    mesh: dict
    strategy: str = "replicated"
    decoder: dict = dataclasses.field(default_factory=dict)
    loss: dict = dataclasses.field(default_factory=dict)
    mask: bool = False

    @property
    def pipeline(self) -> Pipeline:
        ranks = 2
        if self.schedule == "interleaved":
            return Pipeline(schedules.interleaved(ranks, M, 2), self.stages)
        return Pipeline(getattr(schedules, self.schedule)(ranks, M), self.stages)


SP, ROUTER = {"sequence_parallel": True}, {"z_loss": 1e-2, "sequence_balance": 1e-2}
CASES = {
    "uneven, ZeRO-3, tied, mask, remat": Case(
        "one_f_one_b", (3, 1), {"fsdp": 2}, "zero3", {"tied": True}, {"save": "mincut"}, True
    ),
    "tp, sp, ZeRO-1, dropout, MTP": Case(
        "zb_h1", (2, 2), {"dp": 2, "tp": 2}, "zero1", {"dropout": 0.2, "mtp": True, **SP}
    ),
    "V, cp, ZeRO-2, z-loss, mask": Case(
        "zb_v", (1, 1, 1, 1), {"fsdp": 2, "cp": 2}, "zero2", {"z_loss": 1e-2}, mask=True
    ),
    "pairs, uneven V, ep, ZeRO-3, router losses": Case(
        "dualpipe_v", (1, 2, 1, 1), {"fsdp": 2}, "zero3", {"layers": 5, "experts": {"ep": ("fsdp",), **ROUTER}}
    ),
    "around, ZeRO-1, experts, remat, mask": Case(
        "interleaved", (1, 1, 1, 1), {"dp": 2}, "zero1", {"experts": ROUTER}, {"save": "mincut"}, True
    ),
    "uneven, cp, tp, sp, tied, dropout, remat": Case(
        "gpipe", (3, 1), {"cp": 2, "tp": 2}, "replicated", {"tied": True, "dropout": 0.2, **SP}, {"save": "mincut"}
    ),
    "uneven V, tp, sp, ZeRO-2, MTP, z-loss": Case(
        "zb_v", (2, 1, 1, 1), {"fsdp": 2, "tp": 2}, "zero2", {"layers": 5, "mtp": True, "z_loss": 1e-2, **SP}
    ),
    "pairs, ZeRO-1, dropout, offload, mask": Case(
        "dualpipe_v", (1, 1, 1, 1), {"dp": 2}, "zero1", {"dropout": 0.2}, {"save": "mincut", "offload": 1}, True
    ),
    "uneven, cp, ZeRO-3, experts": Case(
        "zb_h1", (3, 1), {"cp": 2, "fsdp": 2}, "zero3", {"experts": {"z_loss": 1e-2}}
    ),
    "ep, tp, MTP, dropout": Case(
        "one_f_one_b",
        (2, 2),
        {"fsdp": 2, "tp": 2},
        "zero3",
        {"experts": {"ep": ("fsdp",)}, "mtp": True, "dropout": 0.1, **SP},
    ),
    "around, uneven, tied, MTP, z-loss": Case(
        "interleaved",
        (2, 1, 1, 1),
        {"tp": 2},
        "replicated",
        {"layers": 5, "tied": True, "mtp": True, "z_loss": 1e-2, **SP},
    ),
    "all forwards first, ep, ZeRO-3, offload": Case(
        "gpipe", (2, 2), {"fsdp": 2}, "zero3", {"experts": {"ep": ("fsdp",)}}, {"save": "mincut", "offload": 1}
    ),
}  # fmt: skip


def made(case: Case, by_stages: bool):
    """(a step, its mesh, layouts of its state and batch, a whole state and batch)."""
    decoder = llama(**case.decoder)
    mesh = Mesh(pp=2, **case.mesh) if by_stages else Mesh()
    strategy = DataParallel.named(case.strategy) if by_stages else DataParallel.replicated()
    pipeline = case.pipeline if by_stages else None
    specs = model.specs(decoder, mesh, strategy=strategy, pipeline=pipeline)
    dropout = bool(case.decoder.get("dropout"))

    def loss_fn(params, batch, samples=None):
        return model.loss(params, batch, decoder=decoder, samples=samples, **{"save": None, **case.loss})

    without = functools.partial(loss_fn, samples=None)
    how = {"strategy": strategy, "microbatches": pipeline or M, "with_sample_ids": dropout}
    fn = step.build_train_step(loss_fn if dropout else without, OPTIMIZER, specs, **how)
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, decoder.vocab_size, (ROWS, decoder.max_seq + 1), generator=g)
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    if case.mask:
        batch["labels"][torch.rand(batch["labels"].shape, generator=g) < 0.3] = -1
    if case.decoder.get("mtp") and case.mesh.get("cp"):
        batch = model.ahead(batch, 1)  # of whole rows
    rows = {name: strategy.batch_layout(tuple(x.shape), x.dtype, mesh, M) for name, x in batch.items()}
    params = tree.init(model.specs(decoder, Mesh()), 7, 0)
    state = step.State(torch.zeros((), dtype=torch.int64), params, OPTIMIZER.init(params))
    return fn, mesh, (tree.layouts(step.state_specs(specs, OPTIMIZER, strategy)), rows), (state, batch)


def updated(case: Case, by_stages: bool):
    """((state, metrics) behind a step on simulated ranks, what the check says)."""
    fn, mesh, layouts, args = made(case, by_stages)
    return simulate(fn, mesh, *args, layouts=layouts).globals(), step.check(fn, *layouts)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_update(name):
    found, report = updated(CASES[name], True)
    error, path = worst(updated(CASES[name], False)[0], found)
    assert error <= 1e-10, path
    assert report.ok, report

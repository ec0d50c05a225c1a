"""Losses of sums and counts on a small model, their definition on one rank, and how a step of each compares with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fmegatron import nn, optim, step, tree
from fmegatron.collectives import Axes, psum
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.step.checker.entrypoints import check_call
from fmegatron.testing import simulate
from fmegatron.testing.compare_ranks import relative_error
from tests.definition import loss_of, mean_of
from tests.fresh_state import fresh_state

B, S, V, D = 48, 4, 12, 6
F64 = torch.float64
SHAPES = {"table": (V, D), "head": (D, V)}
MESHES = {
    "one": Mesh(), "dp2": Mesh(dp=2), "fsdp2": Mesh(fsdp=2), "dp3": Mesh(dp=3), "cp2": Mesh(cp=2),
    "dp2 fsdp2": Mesh(dp=2, fsdp=2), "fsdp2 cp2": Mesh(fsdp=2, cp=2),
}  # fmt: skip


# ---- batches ---------------------------------------------------------------------------------------------------------
def batch_of(kind: str) -> dict[str, Tensor]:
    """48 rows; where some do not count, none of rows 12 to 23 does: of 4 microbatches the second is empty, and of 2 the
    first on one of two ranks."""
    g = torch.Generator().manual_seed(3)
    batch = {name: torch.randint(0, V, (B, S), generator=g) for name in ("tokens", "labels")}
    rows = torch.arange(B)[:, None]
    some = (rows < 12) | (rows > 23)
    if kind == "small":
        batch["mask"] = torch.full((B, S), 0.01, dtype=F64)
    if kind == "weights":
        batch["mask"] = torch.tensor([0.02, 0.5, 1.3], dtype=F64)[torch.randint(0, 3, (B, S), generator=g)] * some
    if kind == "01":
        batch["mask"] = (torch.rand(B, S, generator=g) < 0.9 - 0.015 * rows) & some
    if kind == "ignored":
        batch["labels"] = torch.where((torch.rand(B, S, generator=g) < 0.7) & some, batch["labels"], -100)
    if kind == "rows":
        batch["weight"] = torch.rand(B, generator=g, dtype=F64) * some[:, 0]
    return batch


# ---- losses ----------------------------------------------------------------------------------------------------------
class Given(NamedTuple):
    nll: Tensor  # [B, S]
    lse: Tensor
    probs: Tensor  # [B, S, V]
    batch: dict
    axes: Axes


def lm(of: Given):
    counts = of.batch["labels"] >= 0
    learned = of.batch["mask"].to(F64) * counts if "mask" in of.batch else counts.to(F64)
    return step.mean((of.nll * learned).sum(), learned.sum())


def lm_and_z(of: Given):
    w = of.batch["mask"].to(F64)
    return {"lm": lm(of), "z": 0.1 * step.mean((of.lse.square() * w).sum(), w.sum())}


def counted_by_numbers(of: Given):
    """Two parts of other counts, none of which is a tensor."""
    every = {"lm": step.mean(of.nll.sum(), of.nll.numel()), "rows": 0.5 * step.mean(of.lse[:, 0].sum(), len(of.nll))}
    return every, {
        "nll": step.mean(of.nll.sum(), of.nll.numel()),
        "largest": step.mean(of.nll.amax(1).sum(), len(of.nll)),
    }


def with_metrics(of: Given):
    """Means among the metrics, a count that no loss has, and a number of the batch."""
    mask = of.batch["mask"]
    right = (of.nll < 2.5) & mask
    metrics = {"share": step.mean(right.sum().to(F64), mask.sum()), "small": step.mean(of.lse.sum(), right.sum())}
    return {"lm": lm(of)}, metrics


def balance(of: Given):
    """Switch: a mean times a mean of the whole batch, which no gradient reaches and which depends on parameters."""
    chosen = F.one_hot(of.probs.argmax(-1), V).to(F64).sum((0, 1))
    tokens = of.nll.numel()
    return {"lm": lm(of), "balance": V * (step.mean(of.probs.sum((0, 1)), tokens) * step.mean(chosen, tokens))}


def whole_rows(of: Given):
    """A loss of full rows (a preference): equal on the ranks of cp, so to be summed over those of the rows alone."""
    logp = psum(-of.nll.sum(1), of.axes.sequence)
    rows = tuple(name for name in of.axes.data if name not in of.axes.sequence.names)
    w = of.batch["weight"]
    right = step.mean(((logp > -10).to(F64) * w).sum(), w.sum(), over=rows)
    return {"dpo": step.mean(-(F.logsigmoid(logp / 4) * w).sum(), w.sum(), over=rows)}, {"accuracy": right}


class Case(NamedTuple):
    loss: Callable[[Given], Any]
    batch: str
    how: dict = {}  # noqa: RUF012  (never changed)
    cp: bool = True


CASES = {
    "weights of 0.01": Case(lm, "small"),
    "labels of -100": Case(lm, "ignored"),
    "mask": Case(lm, "01"),
    "lm and z, weights": Case(lm_and_z, "weights"),
    "numbers as counts": Case(counted_by_numbers, "plain", cp=False),
    "metrics": Case(with_metrics, "01"),
    "balance of the batch": Case(balance, "01", {"twice": True}),
    "whole rows": Case(whole_rows, "rows"),
}


def loss_fn_of(loss: Callable, axes: Axes, layouts: dict | None):
    """loss_fn(params, batch) of a loss of the token losses."""

    def loss_fn(params, batch):
        w = params if layouts is None else nn.gather_tree(params, layouts, axes[axes.data])
        logits = torch.tanh(w["table"][batch["tokens"]]) @ w["head"]
        lse = logits.logsumexp(-1)
        nll = lse - logits.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
        return loss(Given(nll, lse, logits.softmax(-1), batch, axes))

    return loss_fn


def params_of() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=g, dtype=F64) for name, shape in SHAPES.items()}


# ---- the definition --------------------------------------------------------------------------------------------------
class Wanted(NamedTuple):
    loss: Tensor
    means: dict[str, Tensor]
    grads: dict[str, Tensor]


@functools.cache
def by_definition(name: str) -> Wanted:
    """Plain autograd on the full batch: the sum of weight * total / count, nothing else."""
    case = CASES[name]
    params = {k: x.requires_grad_() for k, x in params_of().items()}
    out = loss_fn_of(case.loss, Axes(Mesh()), None)(params, batch_of(case.batch))
    parts, metrics = out if isinstance(out, tuple) else (out, {})
    parts = {"loss": parts} if isinstance(parts, step.Part) else parts
    means, loss = {k: mean_of(p).detach() for k, p in (parts | metrics).items()}, loss_of(parts)
    grads = torch.autograd.grad(loss, list(params.values()))
    return Wanted(loss.detach(), means, dict(zip(params, grads, strict=True)))


# ---- a step ----------------------------------------------------------------------------------------------------------
def layouts_of(mesh: Mesh, kind: str = "zero3") -> dict[str, Layout]:
    split = ("fsdp",) if kind == "zero3" and "fsdp" in mesh else (None,)
    return {name: Layout(shape, F64, mesh, split) for name, shape in SHAPES.items()}


def step_of(loss: Callable, mesh: Mesh, n: int, strategy: DataParallel | None = None, optimizer=None, **how):
    """(train_step, layouts of its state, its strategy)."""
    strategy = strategy or DataParallel.zero3()
    layouts, axes = layouts_of(mesh), Axes(mesh, data=mesh.axes(strategy.tokens))
    optimizer = optimizer or optim.sgd(1.0)
    how = {"clip_norm": None, **how}
    train = step.build_train_step(
        loss_fn_of(loss, axes, layouts), optimizer, layouts, axes, strategy=strategy, microbatches=n, **how
    )
    specs = tree.map(lambda layout: tree.ArraySpec(layout, 0), layouts)
    return train, tree.layouts(step.state_specs(specs, optimizer, strategy)), strategy


def rows_of(batch: dict, mesh: Mesh, n: int, strategy: DataParallel) -> dict[str, Layout]:
    return {k: strategy.batch_layout(tuple(x.shape), x.dtype, mesh, n) for k, x in batch.items()}


def run(loss: Callable, kind: str, mesh: Mesh, n: int, **how):
    """The simulation of one SGD step of the definition's state."""
    train, layouts, strategy = step_of(loss, mesh, n, **how)
    batch, state = batch_of(kind), fresh_state(params_of(), how.get("optimizer") or optim.sgd(1.0))
    return simulate(train, mesh, state, batch, layouts=(layouts, rows_of(batch, mesh, n, strategy)))


def compared(name: str, mesh: Mesh, n: int, **how) -> tuple[float, Any]:
    """(largest relative error of gradients, loss and means against the definition, the report of the check)."""
    case, wanted = CASES[name], by_definition(name)
    sim = run(case.loss, case.batch, mesh, n, **(case.how if n > 1 else {}), **how)
    report = check_call(sim.traced, mesh, (), "train_step", {}, speak=False)
    after, metrics = sim.globals()
    found = [relative_error(metrics["loss"], wanted.loss)]
    found += [relative_error(metrics[k], value) for k, value in wanted.means.items()]
    before = params_of()
    for k, g in wanted.grads.items():
        found.append(float(((before[k] - after.params[k]) - g).abs().max() / g.abs().max()))
    return max(found), report

"""A decoder by hand, with marks: its step by stages and with microbatches on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fmegatron import optim, step, tree
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.layout.data_parallel import shared_over
from fmegatron.step import stage
from fmegatron.step.layer import unstack
from fmegatron.testing import simulate
from fmegatron.testing.compare_ranks import relative_error
from fmegatron.tree import structure

F64 = torch.float64
V, D, H, S = 11, 6, 8, 3
OPTIMIZER = optim.adamw(1e-2)


def params_of(layers: int, tied: bool = False) -> dict:
    g = torch.Generator().manual_seed(0)

    def some(*shape):
        return torch.randn(*shape, generator=g, dtype=F64) * 0.3

    params = {
        "embed": some(V, D),
        "blocks": {
            "up": some(layers, D, H),
            "down": some(layers, H, D),
            "scale": some(layers, D) + 1,
            "b": some(layers, D),
            "c": some(layers, D),
        },
        "head": {"norm": some(D) + 1, "w": some(D, V)},
    }
    if tied:
        del params["head"]["w"]
    return params


def batch_of(rows: int) -> dict:
    g = torch.Generator().manual_seed(1)
    batch = {name: torch.randint(0, V, (rows, S), generator=g) for name in ("tokens", "labels")}
    batch["mask"] = (torch.rand(rows, S, generator=g) < 0.8).to(F64)
    return batch


def block(x, w):
    y = F.layer_norm(x, (D,), w["scale"])
    return x + torch.tanh(y @ w["up"]) @ w["down"] + (w["b"] + w["c"])  # of one gradient


def loss_fn(params, batch):
    x = F.embedding(batch["tokens"], params["embed"])
    for n, w in enumerate(unstack(params["blocks"])):
        x = block(stage(x, n), w)
    x = F.rms_norm(x, (D,), params["head"]["norm"])
    logits = x @ (params["head"]["w"] if "w" in params["head"] else params["embed"].T)
    nll = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none").view(-1, S)
    mask = batch["mask"]
    z = logits.logsumexp(-1).square()
    parts = {"lm": step.mean((nll * mask).sum(), mask.sum()), "z": 1e-2 * step.mean((z * mask).sum(), mask.sum())}
    return parts, {"x": step.mean(x.square().sum().detach(), float(x.numel()))}


def foreign_loss(params, batch):
    """No stack, three inputs, a scalar: from each block a share of it goes to the loss past all other blocks."""
    x = F.embedding(batch["tokens"], params["embed"]) * batch["mask"][..., None]
    beside = x.new_zeros(())
    for n, w in enumerate(params["layers"].values()):
        x = block(stage(x, n), w)
        beside = beside + w["scale"].square().mean() * x.square().mean()
    logits = x * params["norm"] @ params["head"]
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    return loss + 0.1 * beside, {"beside": beside, "largest": x.max(), "rows": x.sum((1, 2)), "right": (x > 0).sum()}


def foreign_params(layers: int) -> dict:
    whole = params_of(layers)
    each = {str(n): {name: w[n].clone() for name, w in whole["blocks"].items()} for n in range(layers)}
    return {"embed": whole["embed"], "layers": each, "norm": whole["head"]["norm"], "head": whole["head"]["w"]}


def layouts_of(params, mesh: Mesh, split: str | Split | None = "pp", ends: bool = False) -> dict:
    """Stacks split over pp, the rest on all its ranks, or shared by them (ends)."""

    def one(path, x):
        stack = path.startswith("blocks")
        layout = Layout(tuple(x.shape), x.dtype, mesh, (split,) if stack else (), padded=True)
        return layout if stack or not ends else shared_over(layout, "pp")

    return structure.map_with_path(one, params)


def train_step_of(grad_fn: Callable) -> Callable:
    def train_step(state, batch):
        (loss, aux), grads = grad_fn(state.params, batch)
        norm = optim.global_norm(grads)
        grads = optim.clip(grads, norm, 1.0)
        params, opt = OPTIMIZER.update(grads, state.opt, state.params)
        return step.State(state.step + 1, params, opt), {"loss": loss, "norm": norm, **aux}

    return train_step


def state_layouts(layouts: dict) -> step.State:
    specs = tree.map(lambda layout: tree.ArraySpec(layout, 0), layouts)
    return tree.layouts(step.state_specs(specs, OPTIMIZER))


def whole_state(params: dict) -> step.State:
    return step.State(torch.zeros((), dtype=torch.int64), params, OPTIMIZER.init(params))


def steps(grad_fn: Callable, params: dict, layouts: dict, batch: dict, count: int = 2) -> tuple:
    """(state, metrics of each step) of simulated ranks, as global arrays."""
    mesh = tree.leaves(layouts)[0].mesh
    given = (state_layouts(layouts), tree.map(lambda x: Layout(tuple(x.shape), x.dtype, mesh), batch))
    state, found = whole_state(params), []
    for _ in range(count):
        sim = simulate(train_step_of(grad_fn), mesh, state, batch, layouts=given)
        state, metrics = sim.globals()
        found.append(metrics)
    return state, found


def worst(one: Any, other: Any) -> tuple[float, str]:
    """The largest relative error among the leaves of two trees, and its path."""
    pairs = zip(tree.paths(one), tree.leaves(one), tree.leaves(other), strict=True)
    return max((relative_error(x, y), path) for path, x, y in pairs)

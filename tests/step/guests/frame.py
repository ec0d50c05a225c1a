"""A guest: a loss or a step on one small set of arrays, and how it is described on a mesh."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from fmegatron import nn, optim, step, tree
from fmegatron.collectives import Axes
from fmegatron.layout import DataParallel, Mesh

SHAPES = {"a": (6, 10), "b": (10, 6), "e": (12, 6), "g": (6,), "f": (10,)}
DATA = (Mesh(dp=2), Mesh(fsdp=2))
REPLICAS = (Mesh(dp=2), Mesh(dp=2, fsdp=2))  # for what is right where nothing is replicated
SHARDS = (Mesh(fsdp=2), Mesh(dp=2, fsdp=2))
SPLIT = (Mesh(tp=2), Mesh(fsdp=2, tp=2))
SEQUENCE = (Mesh(cp=2), Mesh(dp=2, cp=2))
BY_TP = [("a", (None, "tp")), ("b", ("tp", None)), ("f", ("tp",)), ("e", ("tp", None))]


class Guest(NamedTuple):
    """name, whether it is right, how a mesh describes it, and the meshes it is judged on."""

    name: str
    right: bool
    describe: Callable[[Mesh], step.Description]
    meshes: tuple[Mesh, ...]


GUESTS: list[Guest] = []


def batch_of() -> dict[str, torch.Tensor]:
    """All ranks' rows: 8 of them, sequences of 14, ids below 12, masks of unequal weight."""
    draw = torch.Generator().manual_seed(5)
    lengths = torch.tensor([14, 3, 9, 12, 1, 14, 2, 5])
    seen = torch.arange(14) < lengths[:, None]
    return {
        "x": torch.randn(8, 6, generator=draw),
        "y": torch.randn(8, 6, generator=draw),
        "s": torch.randn(8, 14, 6, generator=draw),
        "t": torch.randint(12, (8, 14), generator=draw),
        "l": torch.randint(12, (8, 14), generator=draw).masked_fill(~seen, -1),
        "m": seen.float(),
        "r": torch.rand(8, generator=draw) + torch.tensor([2.0, 0, 0, 1, 0, 0, 3, 0]),
        "k": torch.tensor([0, 1, 0, 2, 1, 1, 1, 0]),
    }


def rows_of(mesh: Mesh) -> dict:
    """Their layouts."""
    by = DataParallel.hsdp()
    return {name: by.batch_layout(tuple(x.shape), x.dtype, mesh) for name, x in batch_of().items()}


def specs_of(mesh: Mesh, rules=()):
    """The parameters of all guests."""
    return tree.specs(SHAPES, mesh, rules, tree.Normal(0.4), strategy=DataParallel.hsdp())


def loss(right: bool, meshes=DATA, rules=()):
    """Decorator of `fn(w, b, axes)`, a loss of whole weights."""

    def add(fn):
        def describe(mesh):
            axes = Axes(mesh)
            return step.build(lambda w, b: fn(w, b, axes), optim.sgd(0.1), specs_of(mesh, rules), rows_of(mesh))

        GUESTS.append(Guest(fn.__name__, right, describe, meshes))
        return fn

    return add


def whole(right: bool, meshes=DATA, optimizer=None):
    """Decorator of `fn(state, b, axes, gradients)`, a step of one's own: `gradients(params, b)` are not yet summed."""

    def add(fn):
        def describe(mesh):
            axes, opt = Axes(mesh), optimizer or optim.adamw(1e-2)

            def of_rows(params, b):
                w = nn.gather_tree(params)
                y = torch.tanh(b["x"] @ w["a"] + w["f"]) @ w["b"] * w["g"] - b["y"]
                return step.mean((y.square().sum(-1) * b["r"]).sum(), b["r"].sum())

            def run(state, b):
                return fn(state, b, axes, step.value_and_grad(of_rows), opt)

            return step.Description(run, step.state_specs(specs_of(mesh), opt), rows_of(mesh))

        GUESTS.append(Guest(fn.__name__, right, describe, meshes))
        return fn

    return add

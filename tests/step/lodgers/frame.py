"""A lodger: a step as somebody writes it who comes from elsewhere: a builder that is given axes and returns a function.

Plain numbers that the builder takes from the axes (a world size, a part of a vocabulary) are known when it is built."""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import torch

from fmegatron import nn, optim, step, tree
from fmegatron.collectives import Axes
from fmegatron.layout import DataParallel, Mesh

SHAPES = {
    **{"emb": (12, 6), "up": (6, 8), "fb": (8,), "down": (8, 6), "gain": (6,), "out": (6, 12), "pos": (18, 6)},
    **{"conv": (3, 6), "square": (6, 6), "gate": (6, 4), "temp": (1,)},
}
RULES = [("up|out", (None, "tp")), ("fb", ("tp",)), ("down|emb", ("tp", None))]


class Lodger(NamedTuple):
    """name, whether it is right, how a mesh describes it, and the meshes it is judged on."""

    name: str
    right: bool
    describe: Callable[[Mesh], step.Description]
    meshes: tuple[Mesh, ...]


LODGERS: list[Lodger] = []


def batch_of() -> dict[str, torch.Tensor]:
    """All ranks' rows: 12 of them, sequences of 18, classes below 12 and some of -1, weights of which many are 0."""
    draw = torch.Generator().manual_seed(23)
    lengths = torch.tensor([18, 3, 1, 12, 18, 7, 9, 18, 2, 15, 5, 18])
    seen = torch.arange(18) < lengths[:, None]
    return {
        "x": torch.randn(12, 6, generator=draw),
        "y": torch.randn(12, 6, generator=draw),
        "c": torch.tensor([3, 0, -1, 11, 5, 2, -1, -1, 2, -1, -1, 9]),
        "wt": torch.rand(12, generator=draw) + torch.tensor([2.0, 0, 0, 0, 3, 0, 1, 0, 0, 0, 5, 0]),
        "grp": torch.tensor([0, 0, 1, 2, 0, 0, 1, 0, 0, 0, 2, 1]),
        "id": torch.arange(12),
        "seq": torch.randn(12, 18, 6, generator=draw),
        "tok": torch.randint(12, (12, 18), generator=draw),
        "lab": torch.randint(12, (12, 18), generator=draw).masked_fill(~seen, -1),
        "mask": seen.float(),
    }


def mesh_of(text: str) -> Mesh:
    """ "dp2·tp2" as a mesh."""
    return Mesh(**{name: int(size) for name, size in re.findall(r"([a-z]+)(\d+)", text)})


def _add(make, describe, meshes: str, right: str, wrong: str) -> None:
    """One lodger for each word, on the meshes behind its @; else a right one on all, a wrong one on one, in turn."""
    every = meshes.split()
    for is_right, words in ((True, right), (False, wrong)):
        for turn, word in enumerate(words.split()):
            how, _, own = word.partition("@")
            given = own.split(",") if own else every if is_right else [every[turn % len(every)]]
            on = tuple(mesh_of(text) for text in given)
            LODGERS.append(Lodger(f"{make.__name__}.{how}", is_right, functools.partial(describe, how=how), on))


def _specs(mesh: Mesh, use: str):
    shapes = {name: SHAPES[name] for name in use.split()}
    return tree.specs(shapes, mesh, RULES, tree.Normal(0.5), strategy=DataParallel.hsdp())


def _rows(mesh: Mesh) -> dict:
    by = DataParallel.hsdp()
    return {name: by.batch_layout(tuple(x.shape), x.dtype, mesh) for name, x in batch_of().items()}


def loss(meshes: str, use: str, right: str = "", wrong: str = "", *, samples: bool = False):
    """Decorator of `make(axes, how)`, which returns loss(w, b), or loss(w, b, samples), of weights whole over data."""

    def add(make):
        def describe(mesh, how):
            specs, axes = _specs(mesh, use), Axes(mesh, data=mesh.axes(DataParallel.hsdp().tokens))
            inner = make(axes, how)

            def loss_fn(params, b, *more):
                return inner(nn.gather_tree(params, axis=axes["dp", "fsdp"]), b, *more)

            told = {"with_sample_ids": samples, "clip_norm": None, "strategy": DataParallel.hsdp()}
            train_step = step.build_train_step(loss_fn, optim.sgd(0.1), specs, axes, **told)
            return step.Description(train_step, step.state_specs(specs, optim.sgd(0.1)), _rows(mesh))

        _add(make, describe, meshes, right, wrong)
        return make

    return add


def whole(meshes: str, use: str, right: str = "", wrong: str = "", *, more: dict | None = None):
    """Decorator of `make(axes, how)`, which returns train_step(params, b); with `more`, params has these arrays too."""

    def add(make):
        def describe(mesh, how):
            specs = _specs(mesh, use)
            if more is not None:
                specs = {"net": specs, "more": tree.specs(more, mesh, (), tree.Normal(0.5))}
            return step.Description(make(Axes(mesh), how), specs, _rows(mesh))

        _add(make, describe, meshes, right, wrong)
        return make

    return add


def tower(w, x):
    """[N, 6] -> [N, 6]."""
    return torch.tanh(x @ w["up"] + w["fb"]) @ w["down"] * w["gain"]

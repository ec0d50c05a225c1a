"""An arrival: a step of somebody who is new here. A builder is given axes and a word, and returns a step or a loss."""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import torch

from fmegatron import nn, optim, step, tree
from fmegatron.collectives import Axes, psum
from fmegatron.layout import DataParallel, Layout, Mesh

ROWS, TIMES, WIDTH, HIDDEN, VOCAB = 12, 12, 8, 12, 24
NET = {"up": "8,12", "bias": "12", "down": "12,8"}
SEQUENCES = ("seq", "tok", "tgt", "mask", "seg", "adv", "logp")


class Arrival(NamedTuple):
    """name, whether it is right, how a mesh describes it, and the meshes it is judged on."""

    name: str
    right: bool
    describe: Callable[[Mesh], step.Description]
    meshes: tuple[Mesh, ...]


ARRIVALS: list[Arrival] = []


def batch_of() -> dict[str, torch.Tensor]:
    """All ranks' rows: 12 of them, sequences of 12; weights and lengths that no two ranks have alike."""
    draw = torch.Generator().manual_seed(47)
    lengths = torch.tensor([4, 12, 7, 3, 12, 10, 1, 8, 12, 5, 2, 9])
    seen = torch.arange(12) < lengths[:, None]
    ends = torch.rand(12, 12, generator=draw) < 0.25
    return {
        **{name: torch.randn(12, 8, generator=draw) for name in ("x", "x2", "y")},
        "k": torch.tensor([3, 0, 3, 11, 1, 0, 5, 5, 3, 2, 7, 1]),
        "wt": torch.tensor([0.5, 0, 1, 3, 0.2, 1, 0, 0, 0.7, 2, 0, 0.4]),
        "rew": torch.randn(12, generator=draw) + torch.arange(12) / 3,
        "old": torch.randn(12, generator=draw) / 3,
        "ref": torch.randn(12, generator=draw) / 3,
        "grp": torch.tensor([0, 1, 2, 2, 1, 0, 3, 2, 0, 2, 1, 3]),
        "id": torch.arange(12),
        "seq": torch.randn(12, 12, 8, generator=draw),
        "tok": torch.randint(24, (12, 12), generator=draw),
        "tgt": torch.randint(22, (12, 12), generator=draw),
        "mask": seen.float(),
        "seg": ends.long().cumsum(1),
        "adv": torch.randn(12, 12, generator=draw),
        "logp": torch.randn(12, 12, generator=draw) / 3 - 2,
    }


def mesh_of(text: str) -> Mesh:
    """ "dp2·tp2" as a mesh."""
    return Mesh(**{name: int(size) for name, size in re.findall(r"([a-z]+)(\d+)", text)})


def step_of(meshes: str, arrays: dict, right: str, wrong: str):
    """Decorator of `make(axes, how)`, which returns train_step(w, b) -> (w, metrics).

    arrays: tree of texts, "8,12@tp" is [8, 12] whose dim 1 is split over tp; with " +" behind it all are positive.
    right, wrong: words that `make` is given, each on all meshes (a wrong one on one of them, in turn), or on those
    that stand behind its @.
    """

    def add(make):
        def describe(mesh, how):
            return step.Description(make(Axes(mesh), how), _specs(mesh, arrays, None), _rows(mesh))

        _add(make, describe, meshes, right, wrong)
        return make

    return add


def loss_of(meshes: str, arrays: dict, right: str, wrong: str, *, samples: bool = False, strategy: str = "hsdp"):
    """Decorator of `make(axes, how)`, which returns loss(w, b), or loss(w, b, samples), of weights whole over data."""

    def add(make):
        def describe(mesh, how):
            by = _strategy(strategy)
            specs, axes = _specs(mesh, arrays, by), Axes(mesh, data=mesh.axes(by.tokens))
            inner = make(axes, how)

            def loss_fn(params, b, *more):
                return inner(nn.gather_tree(params, axis=axes["dp", "fsdp"]), b, *more)

            told = {"with_sample_ids": samples, "clip_norm": None}
            train_step = step.build_train_step(loss_fn, optim.sgd(0.1), specs, axes, **told)
            return step.Description(train_step, step.state_specs(specs, optim.sgd(0.1)), _rows(mesh))

        _add(make, describe, meshes, right, wrong)
        return make

    return add


def _add(make, describe, meshes: str, right: str, wrong: str) -> None:
    every = meshes.split()
    for is_right, words in ((True, right), (False, wrong)):
        for turn, word in enumerate(words.split()):
            how, _, own = word.partition("@")
            given = own.split(",") if own else every if is_right else [every[turn % len(every)]]
            on = tuple(mesh_of(text) for text in given)
            ARRIVALS.append(Arrival(f"{make.__name__}.{how}", is_right, functools.partial(describe, how=how), on))


def _strategy(name: str) -> DataParallel:
    found = DataParallel.named(name)
    return DataParallel(("dp", "fsdp"), found.params, found.grads, found.optim)


def _rows(mesh: Mesh) -> dict[str, Layout]:
    rows, along = mesh.axes(("dp", "fsdp")), mesh.axes(("cp",))
    return {
        name: Layout(tuple(x.shape), x.dtype, mesh, (rows, along) if name in SEQUENCES else (rows,))
        for name, x in batch_of().items()
    }


def _specs(mesh: Mesh, arrays: dict, strategy: DataParallel | None):
    texts = dict(zip(tree.paths(arrays), tree.leaves(arrays), strict=True))
    dims = {path: [one.partition("@") for one in text.rstrip(" +").split(",") if one] for path, text in texts.items()}
    rules = [(re.escape(path), tuple(axis or None for _, _, axis in of)) for path, of in dims.items()]
    shapes = tree.map(
        lambda text: tuple(int(one.partition("@")[0]) for one in text.rstrip(" +").split(",") if one), arrays
    )
    positive = [(re.escape(path), tree.Uniform(0.5, 1.5)) for path, text in texts.items() if text.endswith("+")]
    return tree.specs(shapes, mesh, rules, [*positive, (".*", tree.Normal(0.5))], strategy=strategy)


def mlp(w, x):
    """[..., 8] -> [..., 8] of whole weights."""
    return torch.tanh(x @ w["up"] + w["bias"]) @ w["down"]


def sgd(w, grads, rate: float = 0.1):
    """w - rate * grads."""
    return tree.map(lambda p, g: p - rate * g, w, grads)


def summed(grads, axis):
    """A psum of each."""
    return tree.map(lambda g: psum(g, axis), grads)


def descend(part, w, b, axis, rate: float = 0.1):
    """An update by a loss whose parts of ranks add up to it, and the loss."""
    (value, _), grads = step.value_and_grad(part)(w, b)
    return sgd(w, summed(grads, axis), rate), {"loss": psum(value, axis)}

"""A newcomer: a step as somebody writes it in the first week: a builder that is given axes and returns a function."""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import torch

from fmegatron import nn, optim, step, tree
from fmegatron.collectives import Axes
from fmegatron.layout import DataParallel, Layout, Mesh

ROWS, TIMES, WIDTH, VOCAB, EXPERTS = 12, 12, 6, 24, 12
SHAPES = {
    **{
        "up": (6, 12),
        "gate": (6, 12),
        "fb": (12,),
        "down": (12, 6),
        "gain": (6,),
        "shift": (6,),
        "head": (6, 12),
        "temp": (1,),
    },
    **{"emb": (24, 6), "out": (6, 24), "wq": (6, 24), "wk": (6, 24), "wv": (6, 24), "wo": (24, 6), "k1": (6, 2)},
    **{"v1": (6, 2), "conv": (6, 3, 3, 3), "square": (6, 6), "other": (6, 6), "pos": (12, 6), "taps": (3, 6)},
    **{"router": (6, 12), "w1": (12, 6, 4), "w2": (12, 4, 6), "a": (12,), "book": (8, 6), "scale": ()},
}
RULES = [
    *[("up|gate|head|out|wq|wk|wv", (None, "tp")), ("fb|a", ("tp",)), ("down|emb|wo", ("tp", None))],
    ("w1|w2", ("ep", None, None)),
]
SEQUENCES = ("seq", "tok", "lab", "mask", "doc", "adv", "logp")


class Newcomer(NamedTuple):
    """name, whether it is right, how a mesh describes it, and the meshes it is judged on."""

    name: str
    right: bool
    describe: Callable[[Mesh], step.Description]
    meshes: tuple[Mesh, ...]


NEWCOMERS: list[Newcomer] = []


def batch_of() -> dict[str, torch.Tensor]:
    """All ranks' rows: 12 of them, sequences of 12, lengths, labels, weights that no two ranks have alike."""
    draw = torch.Generator().manual_seed(31)
    lengths = torch.tensor([12, 5, 9, 12, 2, 7, 1, 12, 3, 4, 8, 6])
    seen = torch.arange(12) < lengths[:, None]
    ends = torch.rand(12, 12, generator=draw) < 0.3
    floats = {name: torch.randn(12, 6, generator=draw) for name in ("x", "x2", "y", "eps")}
    return {
        **floats,
        "img": torch.randn(12, 3, 4, 4, generator=draw),
        "k": torch.tensor([3, 0, 3, 7, 1, 0, 5, 5, 3, 2, 7, 1]),
        "c": torch.tensor([1, 4, -1, 7, 0, 10, 3, -1, -1, -1, 6, -1]),
        "wt": torch.tensor([0, 2.5, 0.3, 1, 0, 4, 0.2, 0, 0, 0.7, 0, 0.1]),
        "rew": torch.randn(12, generator=draw) + torch.arange(12) / 4,
        "old": torch.randn(12, generator=draw) / 3,
        "ref": torch.randn(12, generator=draw) / 3,
        "grp": torch.tensor([0, 1, 2, 3, 1, 0, 3, 2, 0, 2, 1, 3]),
        "t": torch.tensor([1, 7, 3, 0, 9, 2, 5, 8, 8, 4, 6, 1]),
        "nbr": torch.randint(12, (12, 3), generator=draw),
        "id": torch.arange(12),
        "seq": torch.randn(12, 12, 6, generator=draw),
        "tok": torch.randint(24, (12, 12), generator=draw),
        "lab": torch.randint(24, (12, 12), generator=draw).masked_fill(~seen, -1),
        "mask": seen.float(),
        "doc": ends.long().cumsum(1),
        "adv": torch.randn(12, 12, generator=draw),
        "logp": torch.randn(12, 12, generator=draw) / 3 - 2,
    }


def mesh_of(text: str) -> Mesh:
    """ "dp2·tp2" as a mesh."""
    return Mesh(**{name: int(size) for name, size in re.findall(r"([a-z]+)(\d+)", text)})


def _add(make, describe, meshes: str, right: str, wrong: str) -> None:
    """One newcomer for each word, on the meshes behind its @; else a right one on all, a wrong one on one, in turn."""
    every = meshes.split()
    for is_right, words in ((True, right), (False, wrong)):
        for turn, word in enumerate(words.split()):
            how, _, own = word.partition("@")
            given = own.split(",") if own else every if is_right else [every[turn % len(every)]]
            on = tuple(mesh_of(text) for text in given)
            NEWCOMERS.append(Newcomer(f"{make.__name__}.{how}", is_right, functools.partial(describe, how=how), on))


def _strategy(name: str) -> DataParallel:
    found = DataParallel.named(name)
    return DataParallel(("dp", "fsdp", "ep"), found.params, found.grads, found.optim)


def _rows(mesh: Mesh) -> dict[str, Layout]:
    rows, along = mesh.axes(("dp", "fsdp", "ep")), mesh.axes(("cp",))
    return {
        name: Layout(tuple(x.shape), x.dtype, mesh, (rows, along) if name in SEQUENCES else (rows,))
        for name, x in batch_of().items()
    }


def _specs(mesh: Mesh, use: str, strategy: str | None, rules=()):
    shapes, by = {name: SHAPES[name] for name in use.split()}, strategy and _strategy(strategy)
    return tree.specs(shapes, mesh, [*rules, *RULES], tree.Normal(0.5), strategy=by)


def loss(meshes: str, use: str, right: str = "", wrong: str = "", *, samples: bool = False, strategy: str = "hsdp"):
    """Decorator of `make(axes, how)`, which returns loss(w, b), or loss(w, b, samples), of weights whole over data."""

    def add(make):
        def describe(mesh, how):
            specs = _specs(mesh, use, strategy)
            axes = Axes(mesh, data=mesh.axes(_strategy(strategy).tokens))
            inner = make(axes, how)

            def loss_fn(params, b, *more):
                return inner(nn.gather_tree(params, axis=axes["dp", "fsdp"]), b, *more)

            told = {"with_sample_ids": samples, "clip_norm": None}
            train_step = step.build_train_step(loss_fn, optim.sgd(0.1), specs, axes, **told)
            return step.Description(train_step, step.state_specs(specs, optim.sgd(0.1)), _rows(mesh))

        _add(make, describe, meshes, right, wrong)
        return make

    return add


def whole(meshes: str, use: str, right: str = "", wrong: str = "", *, rules=(), more: dict | None = None):
    """Decorator of `make(axes, how)`, which returns train_step(w, b) -> (w, metrics).

    rules: how data axes split the weights; none: they are replicated. more: shapes of replicated arrays beside them,
    or (shape, spec); the weights then are {"net": w, "more": more}.
    """

    def add(make):
        def describe(mesh, how):
            specs = _specs(mesh, use, None, rules)
            if more is not None:
                shapes = {name: one[0] if _is_placed(one) else one for name, one in more.items()}
                where = [(name, one[1]) for name, one in more.items() if _is_placed(one)]
                specs = {"net": specs, "more": tree.specs(shapes, mesh, where, tree.Normal(0.5))}
            return step.Description(make(Axes(mesh), how), specs, _rows(mesh))

        _add(make, describe, meshes, right, wrong)
        return make

    return add


def _is_placed(one: tuple) -> bool:
    return bool(one) and isinstance(one[0], tuple)


def mlp(w, x):
    """[..., 6] -> [..., 6] of whole weights."""
    return torch.tanh(x @ w["up"] + w["fb"]) @ w["down"] * w["gain"]


def sgd(w, grads, rate: float = 0.1):
    """w - rate * grads."""
    return tree.map(lambda p, g: p - rate * g, w, grads)

"""A caller: a loss or a step in somebody's own words, of one small set of arrays; and how it is described on a mesh."""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import torch

from fmegatron import nn, optim, step, tree
from fmegatron.collectives import Axes
from fmegatron.layout import DataParallel, Mesh

SHAPES = {
    **{"emb": (12, 6), "up": (6, 12), "fb": (12,), "down": (12, 6), "gain": (6,), "out": (6, 12)},
    **{"qkv": (6, 3, 6), "fused": (6, 36), "glu": (6, 2, 12), "pos": (12, 6), "la": (6, 2), "lb": (2, 12)},
    **{"gate": (6, 4), "e_in": (4, 6, 6), "e_out": (4, 6, 6), "temp": (1,), "square": (6, 6), "conv": (3, 6)},
}
RULES = [
    *[("up|out|lb|fused", (None, "tp")), ("fb", ("tp",)), ("down|emb", ("tp", None)), ("qkv|glu", (None, None, "tp"))],
    ("e_in|e_out", ("ep", None, None)),
]


class Caller(NamedTuple):
    """name, whether it is right, how a mesh describes it, and the meshes it is judged on."""

    name: str
    right: bool
    describe: Callable[[Mesh], step.Description]
    meshes: tuple[Mesh, ...]


CALLERS: list[Caller] = []


def batch_of() -> dict[str, torch.Tensor]:
    """All ranks' rows: 12 of them, sequences of 12, ids below 12, masks and weights that are unequal everywhere."""
    draw = torch.Generator().manual_seed(11)
    lengths = torch.tensor([12, 2, 7, 10, 1, 6, 12, 12, 3, 9, 11, 4])
    seen = torch.arange(12) < lengths[:, None]
    return {
        "x": torch.randn(12, 6, generator=draw),
        "y": torch.randn(12, 6, generator=draw),
        "c": torch.randint(12, (12,), generator=draw),
        "wt": torch.rand(12, generator=draw) + torch.tensor([3.0, 0, 0, 2, 0, 1, 0, 0, 4, 0, 0, 0.5]),
        "grp": torch.tensor([0, 1, 0, 2, 0, 1, 1, 1, 2, 0, 1, 1]),
        "id": torch.arange(12),
        "seq": torch.randn(12, 12, 6, generator=draw),
        "tok": torch.randint(12, (12, 12), generator=draw),
        "lab": torch.randint(12, (12, 12), generator=draw).masked_fill(~seen, -1),
        "mask": seen.float(),
    }


def mesh_of(text: str) -> Mesh:
    """ "dp2·tp2" as a mesh."""
    return Mesh(**{name: int(size) for name, size in re.findall(r"([a-z]+)(\d+)", text)})


def specs_of(mesh: Mesh, use: str, by: DataParallel | None, rules=None):
    """The parameters that a caller uses."""
    shapes = {name: SHAPES[name] for name in use.split()}
    return tree.specs(shapes, mesh, RULES if rules is None else rules, tree.Normal(0.4), strategy=by)


def _register(fn, describe: Callable, meshes: str, right: str, wrong: str) -> None:
    """One caller for each word: what fn does, behind an @ the meshes that are its own: "word@dp2,tp2". Else a right one
    is judged on all of `meshes`, a wrong one on one of them, in turn."""
    for is_right, words in ((True, right), (False, wrong)):
        for turn, word in enumerate(words.split()):
            (how, _, own), every = word.partition("@"), meshes.split()
            given = own.split(",") if own else every if is_right else [every[turn % len(every)]]
            on = tuple(mesh_of(text) for text in given)
            CALLERS.append(Caller(f"{fn.__name__}.{how}", is_right, functools.partial(describe, how=how), on))


def _rows(mesh: Mesh, by: DataParallel) -> dict:
    return {name: by.batch_layout(tuple(x.shape), x.dtype, mesh) for name, x in batch_of().items()}


def loss(meshes: str, use: str, right: str = "", wrong: str = "", *, rules=None, by=None, samples: bool = False):
    """Decorator of `fn(w, b, axes, how)`, a loss of whole weights; with samples their numbers are a fifth argument."""
    at_rest, by = None if by else DataParallel.hsdp(), by or DataParallel.hsdp()  # by: how rows are split, and no more

    def add(fn):
        def describe(mesh, how):
            axes = Axes(mesh, data=mesh.axes(by.tokens))
            specs = specs_of(mesh, use, at_rest, rules)

            def of_rows(params, b, *more):
                return fn(nn.gather_tree(params, axis=axes["dp", "fsdp"]), b, axes, how, *more)

            # A clipped norm would hide a factor.
            told = {"strategy": at_rest, "with_sample_ids": samples, "clip_norm": None}
            train_step = step.build_train_step(of_rows, optim.sgd(0.1), specs, axes, **told)
            return step.Description(train_step, step.state_specs(specs, optim.sgd(0.1)), _rows(mesh, by))

        _register(fn, describe, meshes, right, wrong)
        return fn

    return add


def whole(meshes: str, use: str, right: str = "", wrong: str = "", *, rules=None, optimizer=None, more=None):
    """Decorator of `fn(state, b, axes, opt, how)`, a step of one's own. more: shapes of what else the state has, as
    `state["more"]`, whose `state["run"]` then is the `step.State`."""
    by, opt = DataParallel.hsdp(), optimizer or optim.sgd(0.1)

    def add(fn):
        def describe(mesh, how):
            axes = Axes(mesh)
            specs = step.state_specs(specs_of(mesh, use, by, rules), opt)
            if more is not None:
                specs = {"run": specs, "more": tree.specs(more, mesh, (), tree.Normal(0.4))}

            def train_step(state, b):
                return fn(state, b, axes, opt, how)

            return step.Description(train_step, specs, _rows(mesh, by))

        _register(fn, describe, meshes, right, wrong)
        return fn

    return add


def net(w, x):
    """A small tower: [N, 6] -> [N, 6]."""
    return torch.tanh(x @ w["up"] + w["fb"]) @ w["down"] * w["gain"]

"""Steps of one's own whose weights are large enough to be gathered one by one, their gathers written in several ways.

A tower of blocks `x + tanh(gain · x A) B + b`: of each block A and B have 4 MiB, gain and bias are small.
"""

import torch
from torch import nn as modules
from torch.func import functional_call

from fmegatron import nn, optim, step, tree
from fmegatron.collectives import Axes
from fmegatron.layout import DataParallel, Mesh

WAYS = ("a module", "a loop, all at the start", "a loop, each leaf at the start", "a loop, each layer", "plain layers")

WHOLE = ("whole, a module", "whole, a stack", "whole, a stack that is compiled once")


class Block(modules.Module):
    """One block as a module."""

    def __init__(self, dim: int, width: int):
        super().__init__()
        self.gain = modules.Parameter(torch.ones(dim))
        self.a, self.b = modules.Linear(dim, width, bias=False), modules.Linear(width, dim)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(self.gain * x)))


def block(x, w):
    """The same as a function of a dict."""
    return x + torch.tanh((w["gain"] * x) @ w["a"].mT) @ w["b"].mT + w["bias"]


def described(
    mesh,
    way="a module",
    strategy="zero3",
    blocks=3,
    dim=512,
    width=1024,
    rows=8,
    dtype=torch.float64,
    keep=False,
    **how,
):
    """`step.build` of a tower. keep: what is gathered stays until the backward."""
    strategy, axes = DataParallel.named(strategy) if isinstance(strategy, str) else strategy, Axes(mesh)
    tower = modules.Sequential(*[Block(dim, width) for _ in range(blocks)])
    one = {"gain": (dim,), "a": (width, dim), "b": (dim, width), "bias": (dim,)}
    shapes, stacked = {f"{i}.{name}": shape for i in range(blocks) for name, shape in one.items()}, None
    if "a module" in way:
        shapes = {name: tuple(p.shape) for name, p in tower.named_parameters()}
    elif way == "plain layers" or "stack" in way:
        shapes, stacked = {name: (blocks, *shape) for name, shape in one.items()}, ".*"
    specs = tree.specs(shapes, mesh, [], tree.Normal(0.05), dtype, strategy=strategy, stacked=stacked)
    layouts, data = tree.layouts(specs), axes[axes.data]

    def gathered(shards, of):
        return nn.gather_tree(shards, of, data, reshard_after_forward=not keep)

    def loss_fn(params, batch):
        x = batch["x"]
        if way == WHOLE[0]:
            x = functional_call(tower, params, (x,))
        elif way == WHOLE[1]:
            for w in params:
                x = block(x, w)
        elif way == WHOLE[2]:
            x = params.run(block, x)
        elif way == "a module":
            x = functional_call(tower, gathered(params, layouts), (x,))
        elif way == "plain layers":
            x = step.layers(block, params, layouts, axes, None, reshard_after_forward=not keep)(x)
        else:
            w = params
            if "all" in way:
                w = gathered(params, layouts)
            elif "leaf" in way:
                w = {name: gathered({name: params[name]}, {name: layouts[name]})[name] for name in params}
            for i in range(blocks):
                mine = {name: w[f"{i}.{name}"] for name in one}
                if "each layer" in way:
                    mine = gathered(mine, {name: layouts[f"{i}.{name}"] for name in one})
                x = block(x, mine)
        return step.mean((x - batch["y"]).square().sum(), x.numel())

    batch = {name: ((rows, dim), dtype) for name in ("x", "y")}
    return step.build(loss_fn, optim.adamw(1e-2), specs, batch, shards=way not in WHOLE, **how)


def start(**how):
    """A state of one rank, and a batch."""
    one = described(Mesh(), **how)
    state = tree.init(one.state, key=0, rank=0)
    draw = torch.Generator().manual_seed(0)
    batch = {n: torch.randn(of.shape, dtype=of.dtype, generator=draw) for n, of in one.batch.items()}
    return state, batch

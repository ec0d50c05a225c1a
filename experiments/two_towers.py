"""Two towers that learn which image belongs to which text: a softmax over all ranks' batch, microbatches, and Muon.

Claim    The loss, which couples all rows of a microbatch, means the same on every mesh.
Command  torchrun --nproc-per-node=4 experiments/two_towers.py --mesh=dp=2,fsdp=2
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fmegatron import data, loop, nn, optim, step, tree
from fmegatron.collectives import Axes, all_gather, axis_index
from fmegatron.layout import Mesh


@dataclass(frozen=True)
class Config:
    """What this experiment varies."""

    mesh: Mesh = Mesh()  # axes dp and fsdp
    run: loop.Options = loop.Options("runs/two_towers", steps=500)
    hidden: int = 16  # numbers that an image and its text have in common
    image: int = 96  # numbers of an image
    text: int = 64  # numbers of a text
    dim: int = 128
    layers: int = 2
    out: int = 32  # numbers that both towers end in
    batch_size: int = 64
    microbatches: int = 2
    lr: float = loop.field(3e-3, resume="named", above=0)


def block(x_BD, w):
    """A residual MLP."""
    return x_BD + F.gelu(nn.rms_norm(x_BD, w["norm"]) @ w["up"]) @ w["down"]


def model(config: Config):
    """(specs, loss_fn) of both towers on the mesh of the config."""
    D, L, axes = config.dim, config.layers, Axes(config.mesh)

    def tower(width):
        blocks = {"norm": (L, D), "up": (L, D, 4 * D), "down": (L, 4 * D, D)}
        return {"first": (width, D), "blocks": blocks, "last": (D, config.out)}

    shapes = {"image": tower(config.image), "text": tower(config.text), "scale": ()}
    init = [("norm", 1.0), ("scale", 2.0), (".*", tree.Normal(0.1))]
    # "hsdp": parameters are sharded over fsdp, and replicated over dp
    specs = tree.specs(shapes, config.mesh, init=init, strategy="hsdp", stacked="blocks")
    data = axes[axes.data]

    def encode(w, x_BD):
        return F.normalize(w["blocks"].run(block, x_BD @ w["first"]) @ w["last"], dim=-1)

    def loss_fn(params, batch):
        images, texts = (encode(params[name], batch[name]) for name in ("image", "text"))
        rows = len(images)
        own = axis_index(data, like=images) * rows + torch.arange(rows, device=images.device)
        loss = 0
        for mine, others in ((images, texts), (texts, images)):
            scores = params["scale"].exp() * mine @ all_gather(others, data, 0).mT
            loss = loss + F.cross_entropy(scores, own, reduction="sum") / 2
        return step.mean(loss, rows)

    return specs, loss_fn


def pairs(config: Config, position: int) -> dict:
    """The batch of a step: images and texts, row by row two views of one hidden vector."""
    draw = torch.Generator().manual_seed(0)
    views = {name: torch.randn(config.hidden, getattr(config, name), generator=draw) for name in ("image", "text")}
    hidden = torch.randn(config.batch_size, config.hidden, generator=draw.manual_seed(1 + position))
    return {name: (hidden @ view * config.hidden**-0.5).tanh() for name, view in views.items()}


def describe(config: Config):
    """The step, the specs of its state, the layouts of its batch."""
    specs, loss_fn = model(config)
    optimizer = optim.muon(config.lr)
    return step.build(loss_fn, optimizer, specs, pairs(config, 0), microbatches=config.microbatches)


def read(config: Config):
    """The pairs, position by position."""
    return data.source(functools.partial(pairs, config))


experiment = loop.Experiment(Config, describe, read)

if __name__ == "__main__":
    loop.launch(experiment)

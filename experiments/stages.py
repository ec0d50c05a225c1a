"""A step by stages in sight: the loss says where blocks begin, a table says who computes what; all else is as without.

Command  python experiments/stages.py
         torchrun --nproc-per-node=2 experiments/stages.py --mesh=pp=2 --pipeline.schedule=zb_h1     goes on from there
Expect   2.5 nats per byte at step 100, on any mesh of pp and dp; seconds on one core.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

from fmegatron import data, loop, nn, optim, step, tree
from fmegatron.layout import Mesh

TEXT = Path(__file__).parents[1] / "data" / "tinyshakespeare.txt"


@dataclass(frozen=True)
class Config:
    """What this experiment varies."""

    mesh: Mesh = Mesh()  # axes pp and dp
    pipeline: step.Pipelining = step.Pipelining()
    microbatches: int = loop.field(4, resume="named", least=1)
    run: loop.Options = loop.Options("runs/stages", steps=500)
    layers: int = 4
    batch_size: int = 16  # rows of a step, all ranks together
    dtype: Literal["float32", "float64"] = "float32"


def describe(config):
    """The step, specs of its state, layouts of its batch."""
    L = config.layers
    blocks = {"norm": (L, 64), "up": (L, 64, 256), "down": (L, 256, 64)}
    shapes = {"letters": (256, 16), "first": (8 * 16, 64), "blocks": blocks, "head": (64, 256)}
    init = [("blocks/norm", 1.0), (".*", tree.Normal(0.1))]
    stacked = [("blocks", config.pipeline.split(config.mesh, L))]  # over pp, with their stages
    specs = tree.specs(shapes, config.mesh, init=init, dtype=getattr(torch, config.dtype), stacked=stacked)
    optimizer, pipeline = optim.adamw(3e-3), config.pipeline.of(config.microbatches)

    def loss_fn(params, batch):
        seen = params["letters"][batch["tokens"]].unfold(1, 8, 1).flatten(2)  # the eight letters up to each position
        x = seen @ params["first"]
        layers = zip(*(params["blocks"][name].unbind() for name in ("norm", "up", "down")), strict=True)
        for n, (norm, up, down) in enumerate(layers):
            x = step.stage(x, n)  # block n begins here, and with it perhaps a stage
            x = x + F.gelu(nn.rms_norm(x, norm) @ up) @ down
        labels = batch["labels"][:, 7:].flatten()
        loss = F.cross_entropy((x @ params["head"]).flatten(0, 1), labels, reduction="sum")
        return step.mean(loss, labels.numel())

    def train_step(state, batch):
        (loss, _), grads = step.pipelined(loss_fn, pipeline)(state.params, batch)  # where pp is 1: step.accumulate
        grads = step.reduce_gradients(grads)
        norm = optim.global_norm(grads)
        grads = optim.clip(grads, norm, 1.0)
        params, opt = optimizer.update(grads, state.opt, state.params)
        return step.State(state.step + 1, params, opt), {"loss": loss, "grad_norm": norm}

    rows = {"tokens": (config.batch_size, 64), "labels": (config.batch_size, 64)}
    state = step.state_specs(specs, optimizer)
    return step.Description(train_step, state, rows, config.microbatches, pipeline=pipeline)


def read(config):
    """The text as bytes."""
    ids = data.ByteTokenizer().encode(TEXT.read_text())
    return data.Batches(ids, config.batch_size, 64, config.run.seed)


experiment = loop.Experiment(Config, describe, read)

if __name__ == "__main__":
    loop.launch(experiment)

"""A source of one's own, whose batches no position determines, and a module of one's own."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.func import functional_call

from fmegatron import data, loop, optim, step, tree
from fmegatron.layout import Mesh


@dataclass(frozen=True)
class Config:
    mesh: Mesh = Mesh()
    run: loop.Options = loop.Options("runs/own_data", steps=20)
    dim: int = 16
    batch_size: int = 16


class Noisy(data.Source):
    """Readings of a sensor that goes on where it was: a stream with a state."""

    def __init__(self, config):
        self.config, self.given = config, 0

    def at(self, position):
        self.given += 1
        draw = torch.Generator().manual_seed(self.given)
        x = torch.randn(self.config.batch_size, 8, generator=draw)
        return {"x": x, "y": x.square().sum(-1)}

    def describe(self):
        return {"kind": "noisy", "rows": self.config.batch_size}

    def state(self):
        return {"given": self.given}

    def restore(self, state):
        self.given = state["given"]


def describe(config):
    net = torch.nn.Sequential(torch.nn.Linear(8, config.dim), torch.nn.GELU(), torch.nn.Linear(config.dim, 1))
    shapes = {name: tuple(p.shape) for name, p in net.named_parameters()}
    specs = tree.specs(shapes, config.mesh, init=tree.Normal(0.3), strategy="zero3")

    def loss_fn(w, batch):
        error = functional_call(net, w, (batch["x"],))[:, 0] - batch["y"]
        return step.mean(F.huber_loss(error, torch.zeros_like(error), reduction="sum"), len(error))

    f32, B = torch.float32, config.batch_size
    return step.build(loss_fn, optim.adamw(1e-2), specs, {"x": ((B, 8), f32), "y": ((B,), f32)})


experiment = loop.Experiment(Config, describe, Noisy)

if __name__ == "__main__":
    loop.launch(experiment)

"""A step by hand: a student predicts what a teacher, its running average, makes of what is hidden from it (JEPA)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.func import functional_call

from fmegatron import data, loop, nn, optim, step, tree
from fmegatron.layout import Mesh

PATCHES, PIXELS = 16, 16


@dataclass(frozen=True)
class Config:
    mesh: Mesh = Mesh()
    run: loop.Options = loop.Options("runs/jepa", steps=40)
    dim: int = 32
    batch_size: int = 32
    ema: float = 0.98
    lr: float = 1e-3


class State(NamedTuple):
    step: Any
    params: Any
    teacher: Any
    opt: Any


def net(D, ins, outs):
    return torch.nn.Sequential(torch.nn.Linear(ins, 2 * D), torch.nn.GELU(), torch.nn.Linear(2 * D, outs))


def describe(config):
    D = config.dim
    nets = {"encoder": net(D, PIXELS, D), "predictor": net(D, D, D)}
    shapes = {name: {k: tuple(p.shape) for k, p in n.named_parameters()} for name, n in nets.items()}
    init = [(".*bias", 0.0), (".*", tree.Normal(0.1))]
    specs = tree.named(tree.specs(shapes, config.mesh, init=init, strategy="zero3"))
    optimizer = optim.adamw(config.lr)

    def loss_fn(params, batch, teacher):
        w, frozen = nn.gather_tree(params), nn.gather_tree(teacher)
        seen, hidden = batch["patches"], batch["hidden"][..., None]
        wanted = functional_call(nets["encoder"], frozen, (seen,)).detach()
        found = functional_call(nets["encoder"], w["encoder"], (seen * (1 - hidden),))
        found = functional_call(nets["predictor"], w["predictor"], (found,))
        each = (found - F.layer_norm(wanted, (D,))).square().mean(-1, keepdim=True) * hidden
        return step.mean(each.sum(), hidden.sum())

    def train_step(state, batch):
        (loss, _), grads = step.value_and_grad(loss_fn)(state.params, batch, state.teacher)
        grads = step.reduce_gradients(grads)
        norm = optim.global_norm(grads)
        params, opt = optimizer.update(optim.clip(grads, norm, 1.0), state.opt, state.params)
        teacher = tree.map(lambda t, p: config.ema * t + (1 - config.ema) * p, state.teacher, params["encoder"])
        return State(state.step + 1, params, teacher, opt), {"loss": loss, "grad_norm": norm}

    made = step.state_specs(specs, optimizer)
    state = State(made.step, made.params, tree.copies(specs["encoder"]), made.opt)
    B, f32 = config.batch_size, torch.float32
    rows = {"patches": ((B, PATCHES, PIXELS), f32), "hidden": ((B, PATCHES), f32)}
    return step.Description(train_step, state, rows)


def read(config):
    @data.source
    def images(position):
        draw = torch.Generator().manual_seed(position)
        phase = torch.rand(config.batch_size, 1, 1, generator=draw) * 6
        t = torch.arange(PATCHES * PIXELS).view(1, PATCHES, PIXELS) * 0.05
        hidden = (torch.rand(config.batch_size, PATCHES, generator=draw) < 0.5).float()
        return {"patches": torch.sin(t * (1 + phase) + phase), "hidden": hidden}

    return images


experiment = loop.Experiment(Config, describe, read)

if __name__ == "__main__":
    loop.launch(experiment)

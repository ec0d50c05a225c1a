"""Steps to be planned, as `describe(config)` would give them: a decoder under a strategy, a plain tower of layers."""

import functools

import torch

from fmegatron import model, optim, step, tree
from fmegatron.collectives import Axes
from fmegatron.layout import DataParallel, Layout, Mesh

SIZES = {"vocab_size": 64, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "max_seq": 16}


def decoder(mesh=Mesh(), strategy=None, save="mincut", microbatches=1, batch=8, of=lambda decoder: decoder, **changes):  # noqa: B008
    """The step, the specs of its state, the layouts of its batch. of: what becomes of the decoder."""
    config = of(model.llama(**SIZES | changes))
    strategy = strategy or DataParallel.hsdp()
    specs, axes, optimizer = model.specs(config, mesh, strategy=strategy), Axes(mesh), optim.adamw(1e-3)
    layouts = tree.layouts(specs)
    loss = functools.partial(model.loss, decoder=config, axes=axes, save=save)
    how = {"strategy": strategy, "microbatches": microbatches, "precision": config.precision}
    update = step.build_train_step(loss, optimizer, layouts, axes, **how)
    rows = strategy.batch_layout((batch, config.max_seq), torch.int64, mesh, microbatches)
    state = step.state_specs(specs, optimizer, strategy)
    return step.Description(update, state, {"tokens": rows, "labels": rows}, microbatches, config, save)


def tower(depth=2, width=64, rows=96, save="inputs"):
    """A plain function of one's own: a stack of square layers, compiled once, plain SGD, no strategy declared."""
    mesh = Mesh()
    layouts = {"w": Layout((depth, width, width), torch.float32, mesh)}

    def layer(x, w):
        return torch.tanh(x @ w["w"])

    def update(params, batch):
        def loss_fn(params, batch):
            run = step.layers(layer, params, layouts, Axes(mesh), save)
            return run(batch).square().mean(), {}

        (loss, _), grads = step.value_and_grad(loss_fn)(params, batch)
        return tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step.Description(update, layouts, Layout((rows, width), torch.float32, mesh))

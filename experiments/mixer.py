"""A causal MLP-Mixer as a language model, with an average of its weights, which is what is evaluated.

Claim    Positions mixed by learned lower triangular matrices, without attention, learn to predict the next byte, by the
         same losses on every mesh. What is evaluated is the average of the weights.
Command  torchrun --nproc-per-node=4 experiments/mixer.py --mesh=dp=2,fsdp=2
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from fmegatron import data, loop, nn, optim, step, tree
from fmegatron.collectives import Axes, connect
from fmegatron.layout import DataParallel, Mesh

TEXT = Path(__file__).parents[1] / "data" / "tinyshakespeare.txt"
STRATEGY = DataParallel.hsdp()  # parameters are sharded over fsdp, and replicated over dp


@dataclass(frozen=True)
class Config:
    """What this experiment varies."""

    mesh: Mesh = loop.field(Mesh(), resume="named")  # axes dp and fsdp
    run: loop.Options = loop.Options("runs/mixer", steps=1000)
    dim: int = 128
    layers: int = 4
    seq_len: int = 64
    batch_size: int = 32
    lr: float = loop.field(3e-3, resume="named", above=0)
    decay: float = 0.99  # of the average of the weights, for each step


def block(x_BSD, w):
    """Mix positions, each with those before it, then channels."""
    u_BSD = nn.rms_norm(x_BSD, w["position_norm"])
    x_BSD = x_BSD + w["last"].tril() @ F.gelu(w["first"].tril() @ u_BSD)
    return x_BSD + F.gelu(nn.rms_norm(x_BSD, w["channel_norm"]) @ w["up"]) @ w["down"]


def model(config: Config):
    """(specs, loss_fn) of the mixer on the mesh of the config."""
    D, L, S, axes = config.dim, config.layers, config.seq_len, Axes(config.mesh)
    blocks = {"position_norm": (L, D), "first": (L, S, S), "last": (L, S, S)}
    blocks |= {"channel_norm": (L, D), "up": (L, D, 4 * D), "down": (L, 4 * D, D)}
    shapes = {"embed": (256, D), "blocks": blocks, "final_norm": (D,), "head": (D, 256)}
    init = [(r"\w+_norm", tree.ones), (".*", tree.Normal(0.02))]
    specs = tree.specs(shapes, config.mesh, init=init, strategy=STRATEGY, stacked="blocks")
    layouts, data_axis = tree.layouts(specs), axes[axes.data]

    def loss_fn(params, batch):
        embed, norm, head = (nn.gather_tree(params[k], layouts[k], data_axis) for k in ("embed", "final_norm", "head"))
        x_BSD = step.layers(block, params["blocks"], layouts["blocks"], axes)(embed[batch["tokens"]])
        logits_BSV = nn.rms_norm(x_BSD, norm) @ head
        loss = F.cross_entropy(logits_BSV.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        return step.mean(loss, batch["labels"].numel())  # the step adds both up, and divides

    return specs, loss_fn


def describe(config: Config):
    """The step, the specs of its state, the layouts of its batch, for `main`, `check` and `parity`."""
    specs, loss_fn = model(config)
    rate = optim.cosine(config.lr, config.run.steps, warmup=config.run.steps // 10)
    optimizer = optim.averaged(optim.adamw(rate), config.decay)
    train_step = step.build_train_step(loss_fn, optimizer, tree.layouts(specs), Axes(config.mesh), strategy=STRATEGY)
    rows = STRATEGY.batch_layout((config.batch_size, config.seq_len), torch.int64, config.mesh)
    specs = step.state_specs(specs, optimizer, STRATEGY)
    return step.Description(train_step, specs, {"tokens": rows, "labels": rows})


def main(config: Config) -> dict[str, float]:
    """Train, or go on; returns the held-out loss of the average of the weights."""
    with loop.set_up():
        world = connect(config.mesh)
        ids = data.ByteTokenizer().encode(TEXT.read_text())
        train, held_out = data.train_and_held_out(ids)
        batches = data.Batches(ids, config.batch_size, config.seq_len, seed=config.run.seed, split=train)
        windows = data.EvaluationBatches(ids, config.batch_size, config.seq_len, held_out, config.batch_size * 4)
        (train_step, specs, _), (params, loss_fn), axes = describe(config), model(config), Axes(config.mesh)
        rows = loop.own_rows(windows, specs, world)

        def held_out_step(state, batch):
            average = step.averaged_params(state, tree.layouts(params), axes, STRATEGY)
            return step.means({"held_out_loss": loss_fn(average, batch)}, axes)

        jitted = {"world": world, "backend": config.run.backend}
        held_out_step = step.jit(held_out_step, **jitted)

        def evaluate(state):
            return loop.evaluate(held_out_step, state, rows, len(windows))

        train_step = step.jit(train_step, donate=0, **jitted)
        run = loop.Run(config.run.folder, train_step, specs, world=world, settings=config, evaluate=evaluate)
    for _ in run(batches, config.run.steps):
        pass
    return run.metrics


if __name__ == "__main__":
    loop.launch(main, Config)

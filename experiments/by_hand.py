"""A training step in sight: gradients, their sum over the ranks, norm, clip and update, on any mesh of dp and fsdp.

Command  python experiments/by_hand.py
         torchrun --nproc-per-node=2 experiments/by_hand.py --mesh=fsdp=2     goes on from there, on two ranks
Expect   2.41 nats per byte at step 100, 2.14 at 500; seconds on one core.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from fmegatron import checkpoint, data, loop, nn, optim, step, tree
from fmegatron.collectives import connect
from fmegatron.layout import Mesh

TEXT = Path(__file__).parents[1] / "data" / "tinyshakespeare.txt"


@dataclass(frozen=True)
class Config:
    """What this experiment varies."""

    mesh: Mesh = Mesh()
    folder: str = "runs/by_hand"
    steps: int = 500
    batch_size: int = 16  # rows of a step, all ranks together
    dtype: str = "float32"
    backend: str = "inductor"


def describe(config):
    """The step, specs of its state, layouts of its batch."""
    shapes = {"letters": (256, 16), "hidden": (8 * 16, 192), "head": (192, 256)}
    how = {"dtype": getattr(torch, config.dtype), "strategy": "hsdp"}  # over fsdp; copies over dp
    specs = tree.specs(shapes, config.mesh, [(".*", ("fsdp",))], tree.Normal(0.1), **how)
    optimizer = optim.adamw(3e-3)

    def loss_fn(params, batch):
        w = nn.gather_tree(params)
        seen = w["letters"][batch["tokens"]].unfold(1, 8, 1).flatten(2)  # the eight letters up to each position
        labels = batch["labels"][:, 7:].flatten()
        logits = torch.tanh(seen @ w["hidden"]) @ w["head"]
        loss = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
        return step.mean(loss, labels.numel())  # of these rows: totals and counts are added up over the ranks

    def train_step(state, batch):
        (loss, _), grads = step.value_and_grad(loss_fn)(state.params, batch)  # the loss of all ranks
        grads = step.reduce_gradients(grads)  # a psum over dp; over fsdp the gather's transpose was it
        norm = optim.global_norm(grads)
        grads = optim.clip(grads, norm, 1.0)
        params, opt = optimizer.update(grads, state.opt, state.params)
        return step.State(state.step + 1, params, opt), {"loss": loss, "grad_norm": norm}

    rows = (config.batch_size, 64)  # int64, split over the data axes as the strategy says
    return step.Description(train_step, step.state_specs(specs, optimizer), {"tokens": rows, "labels": rows})


def main(config):
    """Check, train or go on, and save every 100 steps; returns the metrics of the last one."""
    world, described = connect(config.mesh), describe(config)
    train_step, specs, rows = described
    print(step.check(train_step, specs, rows))
    train_step = step.jit(train_step, donate=0, world=world, backend=config.backend)
    tokens, metrics = data.ByteTokenizer().encode(TEXT.read_text()), {}
    batches = loop.own_rows(data.Batches(tokens, config.batch_size, 64, seed=0), described, world)
    with checkpoint.Manager(config.folder, keep=2, world=world) as manager:
        begin, state = 0, None
        if manager.steps():
            begin, state, _ = manager.restore_latest(tree.layouts(specs))
        state = state or tree.init(specs, 0, world.rank, world.device)
        for done in range(begin + 1, config.steps + 1):
            state, metrics = train_step(state, batches.at(done - 1))
            if done % 100 == 0 or done == config.steps:
                manager.save(done, state)
                print(done, {name: x.item() for name, x in metrics.items()} if world.rank == 0 else "")
    return {name: x.item() for name, x in metrics.items()}


if __name__ == "__main__":
    loop.launch(main, Config)

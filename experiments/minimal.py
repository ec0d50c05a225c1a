"""The smallest experiment: a character model that sees eight letters, plain SGD, no state but the parameters.

python experiments/minimal.py        about 2.2 nats per held-out character after 1,000 steps, some seconds on one core
"""

from pathlib import Path

import torch

from fmegatron import data, loop, step, tree
from fmegatron.layout import Layout, Mesh

TEXT = Path(__file__).parents[1] / "data" / "tinyshakespeare.txt"
SHAPES = {"letters": (65, 16), "hidden": (8 * 16, 192), "head": (192, 65)}


def loss_fn(params, batch):
    seen = params["letters"][batch["tokens"]].unfold(1, 8, 1).flatten(2)  # the eight letters up to each position
    logits = torch.tanh(seen @ params["hidden"]) @ params["head"]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 7:].flatten())


def train_step(params, batch):
    (loss, _), grads = step.value_and_grad(loss_fn)(params, batch)
    return tree.subtract(params, tree.scale(grads, 0.5)), {"loss": loss}


def main(steps=1000):
    tokens = data.CharTokenizer.from_text(TEXT.read_text()).encode(TEXT.read_text())
    train, held_out = data.train_and_held_out(tokens)
    specs = {k: tree.ArraySpec(Layout(s, torch.float32, Mesh()), tree.Normal(s[0] ** -0.5)) for k, s in SHAPES.items()}
    batches = data.Batches(tokens, batch_size=16, seq_len=64, seed=0, split=train)
    for info in loop.train(step.jit(train_step), tree.init(specs, key=0, rank=0), batches, steps=steps, log_every=100):
        print(f"step {info.step}: {info.metrics['loss']:.3f}") if info.metrics else None
    return loss_fn(info.state, data.EvaluationBatches(tokens, 256, 64, held_out, windows=256).at(0)).item()


if __name__ == "__main__":
    print(f"held out: {main():.3f} nats per character")

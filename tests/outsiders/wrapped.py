"""As a user of Megatron would: the standard step, wrapped to log more, as what `training_log` shows."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fmegatron import data, loop, model, optim
from fmegatron.layout import Mesh


@dataclass(frozen=True)
class Config:
    mesh: Mesh = Mesh()
    run: loop.Options = loop.Options("runs/wrapped", steps=10)
    text: str = "data/tinyshakespeare.txt"
    dim: int = 32
    layers: int = 2
    batch_size: int = 8
    seq_len: int = 32


def describe(config):
    sizes = {"dim": config.dim, "layers": config.layers, "heads": 2, "kv_heads": 2, "ffn_dim": 2 * config.dim}
    of = model.llama(256, **sizes, max_seq=config.seq_len)
    described = model.build(of, optim.adamw(1e-3), config.mesh, (config.batch_size, config.seq_len), strategy="zero1")

    def train_step(state, batch):
        new, metrics = described.function(state, batch)
        skipped = (~metrics["grad_norm"].isfinite()).to(torch.float32)
        return new, {**metrics, "params_norm": optim.global_norm(new.params), "skipped": skipped}

    return replace(described, function=train_step)


def read(config):
    tokens = data.ByteTokenizer().encode(Path(config.text).read_text())
    return data.Batches(tokens, config.batch_size, config.seq_len, config.run.seed)


experiment = loop.Experiment(Config, describe, read)

if __name__ == "__main__":
    loop.launch(experiment)

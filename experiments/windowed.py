"""A decoder with windowed attention, learned sinks and label smoothing, split over tp by heads, columns and vocabulary.

Claim    Attention over the last 16 positions, with a learned logit of each head that takes its share of the softmax,
         trains under tensor parallelism with the losses of one rank.
Command  torchrun --nproc-per-node=2 experiments/windowed.py --mesh=tp=2
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from fmegatron import data, loop, model, nn, optim, step
from fmegatron.collectives import Axes, psum
from fmegatron.layout import Mesh

TEXT = Path(__file__).parents[1] / "data" / "tinyshakespeare.txt"


@dataclass(frozen=True)
class Config:
    """What this experiment varies."""

    mesh: Mesh = Mesh()  # axes dp, fsdp and tp
    run: loop.Options = loop.Options("runs/windowed", steps=1000)
    dim: int = 128
    layers: int = 4
    heads: int = 4
    vocab_multiple: int = 64  # to which the 256 bytes are rounded up: 66 for tp=3
    seq_len: int = 64
    window: int = loop.field(16, least=1)  # positions that a head sees, its own included
    smoothing: float = loop.field(0.1, resume="named", least=0)  # share of the target that all bytes have in common
    batch_size: int = 32
    microbatches: int = loop.field(1, resume="named", least=1)
    pipeline: step.Pipelining = step.Pipelining()  # of stages over an axis pp of the mesh
    lr: float = loop.field(3e-3, resume="named", above=0)


def describe(config: Config):
    """The step, the specs of its state, the layouts of its batch."""
    sizes = {"dim": config.dim, "layers": config.layers, "heads": config.heads, "kv_heads": config.heads}
    mlp = model.MLP(4 * config.dim, "gelu", gated=False)
    of = model.llama(
        256,
        **sizes,
        ffn_dim=mlp.ffn_dim,
        max_seq=config.seq_len,
        window=config.window,
        sinks=True,
        mlp=mlp,
        vocab_multiple=config.vocab_multiple,
    )
    specs, axes = model.specs(of, config.mesh, strategy="hsdp"), Axes(config.mesh)
    tp = axes["tp"]

    def loss_fn(params, batch):
        logits_BSV = model.logits(params, batch["tokens"], of, axes, save="mincut")
        nll_BS, lse_BS = nn.cross_entropy(logits_BSV, batch["labels"], tp)
        bytes_BSV = torch.where(logits_BSV > -torch.inf, logits_BSV, 0.0)  # columns behind them are minus infinity
        even_BS = lse_BS - psum(bytes_BSV.sum(-1), tp) / 256  # the loss of a target that is all bytes
        loss_BS = (1 - config.smoothing) * nll_BS + config.smoothing * even_BS
        return step.mean(loss_BS.sum(), loss_BS.numel())

    shape = (config.batch_size, config.seq_len)
    optimizer = optim.adamw(optim.cosine(config.lr, config.run.steps, warmup=config.run.steps // 10))
    rows, parts = {"tokens": shape, "labels": shape}, config.pipeline.of(config.microbatches)
    return step.build(loss_fn, optimizer, specs, rows, microbatches=parts, shards=True)


def read(config: Config):
    """The text as bytes."""
    ids = data.ByteTokenizer().encode(TEXT.read_text())
    return data.Batches(ids, config.batch_size, config.seq_len, config.run.seed)


experiment = loop.Experiment(Config, describe, read)

if __name__ == "__main__":
    loop.launch(experiment)

"""A mixture of experts against a dense model of equal work per token, on Shakespeare; both curves in one picture.

Claim    With 8 experts of which a token uses 2, each half as wide as the dense model's MLP, a token needs the same
         multiply-adds (the router's besides), and the model has 3 times the parameters.
Command  python experiments/moe.py
         torchrun --nproc-per-node=2 experiments/moe.py --mesh=ep=2
Expect   runs/moe/loss.png: after 300 steps, in which an expert sees a quarter of 0.6 M characters, the mixture is still
         behind: 2.02 nats held out against 1.99. The metric "imbalance" is the largest load of an expert over the
         mean, which the router's loss keeps near 1 (1.3).
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fmegatron import data, loop, model, nn, optim, step
from fmegatron.collectives import connect
from fmegatron.layout import DataParallel, Mesh
from fmegatron.loop import field

TEXT = Path(__file__).parents[1] / "data" / "tinyshakespeare.txt"
STRATEGY = DataParallel(("dp", "fsdp", "ep"), ("fsdp",), ("fsdp",), ("fsdp",))
KINDS = ("dense", "mixture")


@dataclass(frozen=True)
class Config:
    """What this experiment varies."""

    mesh: Mesh = Mesh()  # axes dp, fsdp, ep, tp; their product is the number of ranks
    kind: Literal["mixture", "dense"] = field("mixture", resume="refused")  # `main` trains both
    run: loop.Options = loop.Options("runs/moe", 300, log=loop.Log(eval_every=50), save=loop.Save(every=50))
    dim: int = field(128, resume="refused")
    layers: int = field(4, resume="refused")
    heads: int = field(4, resume="refused")
    vocab_multiple: int = field(64, resume="refused", least=1)  # to which the vocabulary is rounded up: 66 for tp=3
    ffn_dim: int = field(384, resume="refused")  # of the dense model
    experts: int = field(8, resume="refused")
    top_k: int = field(2, resume="refused")  # experts of a token, each ffn_dim / top_k wide
    balance: float = field(0.01, resume="named", least=0)  # coefficient of the loss that balances experts
    chunks: int = field(1, resume="named", least=1)  # of a rank's tokens
    seq_len: int = field(128, resume="refused")
    batch_size: int = field(16, resume="refused", least=1)
    microbatches: int = field(1, resume="named", least=1)
    pipeline: step.Pipelining = step.Pipelining()  # of stages over an axis pp of the mesh
    lr: float = field(2e-3, resume="named", above=0)
    eval_windows: int = field(128, resume="named", least=1)

    def __post_init__(self):
        loop.check(self)
        decoder(self, "mixture", 1)


def decoder(config: Config, kind: str, vocab_size: int) -> model.Decoder:
    """The model of one kind; both need the same multiply-adds for a token, but for the router's."""
    if config.ffn_dim % config.top_k:
        raise ValueError(f"Config.ffn_dim: got {config.ffn_dim}, wanted a multiple of top_k={config.top_k}")
    router = nn.Router(config.experts, config.top_k, scale=config.top_k)
    moe = model.MoE(router, config.ffn_dim // config.top_k, balance=config.balance, chunks=config.chunks)
    mlp = None if kind == "dense" else moe
    return model.llama(
        vocab_size,
        dim=config.dim,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.heads,
        ffn_dim=config.ffn_dim,
        max_seq=config.seq_len,
        vocab_multiple=config.vocab_multiple,
        tied=True,
        mlp=mlp,
    )


def describe(config: Config):
    """The step, the specs of its state, the layouts of its batch."""
    of, shape = decoder(config, config.kind, corpus()[0].vocab_size), (config.batch_size, config.seq_len)
    optimizer = optim.adamw(optim.cosine(config.lr, config.run.steps))
    parts = config.pipeline.of(config.microbatches)
    return model.build(of, optimizer, config.mesh, shape, strategy=STRATEGY, microbatches=parts, save=None)


def corpus():
    """(tokenizer, the text as its tokens, the ranges that are trained on and held out)."""
    tokenizer = data.CharTokenizer.from_text(TEXT.read_text())
    ids = tokenizer.encode(TEXT.read_text())
    return tokenizer, ids, *data.train_and_held_out(ids)


def read(config: Config):
    """What is trained on."""
    _, ids, part, _ = corpus()
    return data.Batches(ids, config.batch_size, config.seq_len, config.run.seed, part)


def held_out(config: Config):
    """What is evaluated."""
    _, ids, _, part = corpus()
    return {"heldout": data.EvaluationBatches(ids, config.batch_size, config.seq_len, part, config.eval_windows)}


experiment = loop.Experiment(Config, describe, read, held_out)


def main(config: Config) -> dict[str, float]:
    """Train both kinds, each in a folder of its own, draw both curves; returns the last held-out losses."""
    world, folder, found = connect(config.mesh), config.run.folder, {}
    for kind in KINDS:
        own = replace(config, kind=kind, run=replace(config.run, folder=f"{folder}/{kind}"))
        found[kind] = experiment(own, world).metrics.get("heldout_loss", float("nan"))
    if world.rank == 0:
        runs = {kind: f"{folder}/{kind}/metrics.jsonl" for kind in KINDS}
        loop.plot_losses(runs, f"{folder}/loss.png", title="Dense and mixture of experts, equal work per token")
        print(f"held-out loss: {found}; {folder}/loss.png")
    return found


if __name__ == "__main__":
    loop.launch(main, Config)

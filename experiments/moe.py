"""A mixture of experts against a dense model of equal work per token, on Shakespeare; both curves in one picture.

Claim    With 8 experts of which a token uses 2, each half as wide as the dense model's MLP, a token needs the same
         multiply-adds (the router's besides), and the model has 3 times the parameters.
Command  python experiments/moe.py
         torchrun --nproc-per-node=2 experiments/moe.py --mesh=ep=2
Expect   runs/moe/loss.png: after 300 steps, in which an expert sees a quarter of 0.6 M characters, the mixture is still
         behind: 2.02 nats held out against 1.99. The metric "imbalance" is the largest load of an expert over the
         mean, which the router's loss keeps near 1 (1.3).
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from fmegatron import data, loop, model, nn, optim, step, tree
from fmegatron.collectives import Axes, connect
from fmegatron.layout import DataParallel, Mesh
from fmegatron.loop import field

TEXT = Path(__file__).parents[1] / "data" / "tinyshakespeare.txt"
DATA = ("dp", "fsdp", "ep")
STRATEGY = DataParallel(DATA, ("fsdp",), ("fsdp",), ("fsdp",))
KINDS = ("dense", "mixture")


@dataclass(frozen=True)
class Config:
    """What this experiment varies."""

    mesh: Mesh = field(Mesh(), resume="named")  # axes dp, fsdp, ep, tp; their product is the number of ranks
    run: loop.Options = loop.Options("runs/moe", 300, log=loop.Log(eval_every=50), save=loop.Save(every=50))
    dim: int = field(128, resume="refused")
    layers: int = field(4, resume="refused")
    heads: int = field(4, resume="refused")
    ffn_dim: int = field(384, resume="refused")  # of the dense model
    experts: int = field(8, resume="refused")
    top_k: int = field(2, resume="refused")  # experts of a token, each ffn_dim / top_k wide
    balance: float = field(0.01, resume="named", least=0)  # coefficient of the loss that balances experts
    chunks: int = field(1, resume="named", least=1)  # of a rank's tokens
    seq_len: int = field(128, resume="refused")
    batch_size: int = field(16, resume="refused", least=1)
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
        tied=True,
        mlp=mlp,
    )


def make_loss(config: Config, of: model.Decoder):
    """loss(params, batch) -> (parts of the loss, metrics), over the axes of the mesh."""
    layouts, axes = model.layouts(of, config.mesh, strategy=STRATEGY), Axes(config.mesh, data=DATA)
    return functools.partial(model.loss, decoder=of, layouts=layouts, axes=axes)


def describe(config: Config, kind: str = "mixture"):
    """The step, the specs of its state, the layouts of its batch, for `main` and for `python -m fmegatron.check`."""
    of = decoder(config, kind, data.CharTokenizer.from_text(TEXT.read_text()).vocab_size)
    specs, optimizer = (
        model.specs(of, config.mesh, strategy=STRATEGY),
        optim.adamw(optim.cosine(config.lr, config.run.steps)),
    )
    how = {"axes": Axes(config.mesh, data=DATA), "strategy": STRATEGY}
    train_step = step.build_train_step(make_loss(config, of), optimizer, tree.layouts(specs), **how)
    rows = STRATEGY.batch_layout((config.batch_size, config.seq_len), torch.int64, config.mesh)
    specs = step.state_specs(specs, optimizer, STRATEGY)
    return step.Description(train_step, specs, {"tokens": rows, "labels": rows}, decoder=of)


def train(config: Config, kind: str, world) -> dict[str, float]:
    """One of the two runs; its last held-out metrics."""
    tokenizer = data.CharTokenizer.from_text(TEXT.read_text())
    ids = tokenizer.encode(TEXT.read_text())
    train_range, heldout_range = data.train_and_held_out(ids)
    batches = data.Batches(ids, config.batch_size, config.seq_len, config.run.seed, train_range)
    heldout = data.EvaluationBatches(ids, config.batch_size, config.seq_len, heldout_range, config.eval_windows)
    of, (train_step, specs, _) = decoder(config, kind, tokenizer.vocab_size), describe(config, kind)
    loss_fn, axes = make_loss(config, of), Axes(config.mesh, data=DATA)

    @functools.partial(step.jit, world=world, backend=config.run.backend)
    def heldout_step(params, batch):
        return step.means({"heldout_loss": loss_fn(params, batch)[0]["lm"]}, axes)

    def evaluate(state):
        rows = loop.own_rows(heldout, specs, world)
        return loop.evaluate(heldout_step, state.params, rows, len(heldout))

    jitted = step.jit(train_step, donate=0, world=world, backend=config.run.backend)
    folder = f"{config.run.folder}/{kind}"
    run = loop.Run(folder, jitted, specs, world=world, settings=config, evaluate=evaluate)
    for _ in run(batches, config.run.steps):
        pass
    return run.metrics or evaluate(run.state)


def main(config: Config) -> dict[str, float]:
    """Train both, draw both curves; returns the last held-out losses."""
    world = connect(config.mesh)
    found = {kind: train(config, kind, world).get("heldout_loss", float("nan")) for kind in KINDS}
    if world.rank == 0:
        folder = config.run.folder
        runs = {kind: f"{folder}/{kind}/metrics.jsonl" for kind in KINDS}
        loop.plot_losses(runs, f"{folder}/loss.png", title="Dense and mixture of experts, equal work per token")
        print(f"held-out loss: {found}; {folder}/loss.png")
    return found


if __name__ == "__main__":
    loop.launch(main, Config)

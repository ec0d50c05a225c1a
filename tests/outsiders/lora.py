"""Low-rank adapters of the model of a run, written from docs/adapters.md and notebooks/own_experiment.md."""

from dataclasses import dataclass
from pathlib import Path

from fmegatron import data, loop, model, optim, step, tree
from fmegatron.layout import Mesh


@dataclass(frozen=True)
class Config:
    mesh: Mesh = Mesh()
    run: loop.Options = loop.Options("runs/lora", steps=20)
    beginning: str = "runs/shakespeare"
    text: str = "data/tinyshakespeare.txt"
    rank: int = 4
    batch_size: int = 8
    seq_len: int = 32
    lr: float = 1e-3


def describe(config):
    of = model.opened(config.beginning).decoder
    base = model.specs(of, config.mesh, strategy="zero3")
    specs = {"base": base, "lora": model.lora(of, base, match="wqkv|wo", rank=config.rank, alpha=8.0)}
    optimizer = optim.grouped(config.lr, [("base/.*", optim.Group(frozen=True))], adam=optim.scale_by_adam())

    def loss_fn(params, batch):
        return model.loss(model.adapted(params["base"], params["lora"]), batch, of, save="mincut")

    rows = (config.batch_size, config.seq_len)
    return step.build(loss_fn, optimizer, specs, {"tokens": rows, "labels": rows}, shards=True)


def read(config):
    tokens = model.opened(config.beginning).tokenizer.encode(Path(config.text).read_text())
    return data.Batches(tokens, config.batch_size, config.seq_len, config.run.seed)


def init(config, described, world):
    base = described.state.params["base"]
    start = model.opened(config.beginning, config.mesh, world=world, layouts=base).params
    return tree.init(described.state, config.run.seed, world.rank, world.device, given={"base": start})


experiment = loop.Experiment(Config, describe, read, init=init)

if __name__ == "__main__":
    loop.launch(experiment)

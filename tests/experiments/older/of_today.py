"""The six states of `tests/experiments/test_older_runs.py` as an experiment of today: `of_e37e37b.py` began them."""

from dataclasses import dataclass

import torch

from fmegatron import data, loop, model, nn, optim
from fmegatron.layout import Mesh
from fmegatron.loop import field
from fmegatron.optim import contrib


@dataclass(frozen=True)
class Config:
    """What the runs vary."""

    mesh: Mesh = field(Mesh(fsdp=2), resume="named")
    run: loop.Options = loop.Options("runs/older", 6, backend="eager", log=loop.Log(every=1), save=loop.Save(every=3))
    state: str = field("dense", resume="refused")

    __post_init__ = loop.check


def decoder(config: Config) -> model.Decoder:
    """Two layers; with experts where the state is of them."""
    moe = model.MoE(nn.Router(4, 2), 16, balance=0.01) if config.state == "experts" else None
    sizes = {"dim": 32, "layers": 2, "heads": 2, "kv_heads": 2, "ffn_dim": 64, "max_seq": 16}
    return model.llama(96, **sizes, tied=True, mlp=moe)


def optimizer(config: Config) -> optim.Optimizer:
    """Of a state."""
    adamw = optim.adamw(1e-2)
    if config.state == "averaged":
        return optim.averaged(adamw, 0.9)
    if config.state == "loss_scale":
        return optim.skip_nonfinite(adamw, loss_scale=optim.LossScale())
    if config.state == "muon":
        return optim.muon(1e-2, parts=())  # that commit took q, k, v and gate, up as one matrix each
    if config.state == "int8":
        rules = [("m", contrib.int8(block=8, smallest=0)), ("v", contrib.int8(block=8, smallest=0, root=True))]
        return contrib.compressed(adamw, rules)
    return adamw


def describe(config: Config):
    """The step, its state, its batch."""
    return model.build(decoder(config), optimizer(config), config.mesh, (4, 16), strategy="zero3")


def read(config: Config):
    """Noise."""
    text = torch.randint(96, (4000,), generator=torch.Generator().manual_seed(1)).numpy()
    return data.Batches(text, 4, 16, config.run.seed, None)


experiment = loop.Experiment(Config, describe, read)

if __name__ == "__main__":
    loop.launch(experiment)

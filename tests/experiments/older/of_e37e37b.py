"""The six states of `tests/experiments/test_older_runs.py` as an experiment of commit e37e37b, in its names."""

import functools
from dataclasses import dataclass

import torch

from fmegatron import data, loop, model, nn, optim, step, tree
from fmegatron.collectives import Axes, connect
from fmegatron.layout import DataParallel, Mesh
from fmegatron.loop import field

STRATEGY = DataParallel.zero3("fsdp")


@dataclass(frozen=True)
class Config:
    """What the runs vary."""

    mesh: Mesh = field(Mesh(fsdp=2), resume="named")
    run: str = field("runs/older", resume="free", least=1)
    state: str = field("dense", resume="refused")
    steps: int = field(6, resume="named", least=1)
    seed: int = field(0, resume="refused")
    save_every: int = field(3, resume="free", least=1)
    backend: str = field("eager", resume="named")
    allow: tuple[str, ...] = field((), resume="free")

    __post_init__ = loop.check


def decoder(config: Config) -> model.Decoder:
    """Two layers; with experts where the state is of them."""
    moe = model.MoE(nn.Router(4, 2), 16, balance=0.01) if config.state == "experts" else None
    sizes = {"dim": 32, "layers": 2, "heads": 2, "kv_heads": 2, "ffn_dim": 64, "max_seq": 16}
    return model.llama(96, **sizes, tied=True, mlp=moe)


def optimizer(config: Config, layouts, axes) -> optim.Optimizer:
    """Of a state."""
    adamw = optim.adamw(1e-2)
    if config.state == "averaged":
        return optim.averaged(adamw, 0.9)
    if config.state == "loss_scale":
        return optim.skip_nonfinite(adamw, loss_scale=optim.LossScale())
    if config.state == "muon":
        return optim.muon(1e-2, layouts, axes)
    if config.state == "int8":
        rules = [("m", optim.int8(block=8, smallest=0)), ("v", optim.int8(block=8, smallest=0, root=True))]
        return optim.compressed(adamw, rules, layouts, axes)
    return adamw


def main(config: Config) -> dict[str, float]:
    """Train, or go on."""
    with loop.set_up():
        world, of, axes = connect(config.mesh), decoder(config), Axes(config.mesh)
        text = torch.randint(96, (4000,), generator=torch.Generator().manual_seed(1)).numpy()
        batches = data.Batches(text, 4, 16, config.seed, None)
        specs = model.specs(of, config.mesh, strategy=STRATEGY)
        layouts = tree.layouts(specs)
        loss = functools.partial(model.loss, decoder=of, layouts=layouts, axes=axes, save="mincut")
        opt = optimizer(config, layouts, axes)
        train_step = step.build_train_step(loss, opt, layouts, axes, strategy=STRATEGY)
        run = loop.Run(
            config.run,
            step.jit(train_step, donate=0, world=world, backend=config.backend),
            step.state_specs(specs, opt, STRATEGY),
            world=world,
            settings=loop.Settings(config, allow=config.allow),
            key=config.seed,
            log_every=1,
            save_every=config.save_every,
        )
    for _ in run(batches, config.steps):
        pass
    return run.metrics


if __name__ == "__main__":
    loop.launch(main, Config)

"""A whole run around a step of a few lines: all of the loop, two seconds of imports. Run by tests under torchrun."""

from dataclasses import dataclass
from pathlib import Path

import torch

from fmegatron import checkpoint, data, loop, tree
from fmegatron.collectives import Axes, connect, psum
from fmegatron.layout import Layout, Mesh
from fmegatron.loop import Log, Options, Save, field
from fmegatron.loop.faults.inject import Injector
from fmegatron.loop.signals import catch


@dataclass(frozen=True)
class Config:
    mesh: Mesh = field(Mesh(fsdp=1), resume="named")
    run: Options = Options("runs/small", 12, log=Log(2), save=Save(3))
    width: int = field(8, resume="refused", least=2)
    timeout_s: float = field(1800.0, resume="free", above=0)

    __post_init__ = loop.check


def main(config):
    """Fit a matrix to noise, its rows split over fsdp; returns the last loss."""
    world, run = connect(config.mesh, timeout_s=config.timeout_s), Path(config.run.folder)
    axis = Axes(config.mesh, world if world.size > 1 else None)["fsdp"]
    layout = Layout((config.width, 4), torch.float32, config.mesh, ("fsdp",))
    specs = {"w": tree.ArraySpec(layout, tree.Normal(1.0))}

    def step(state, batch):
        error = state["w"] - batch
        return {"w": state["w"] - 0.01 * error}, {"loss": psum((error**2).sum(), axis)}

    @data.source
    def noise(position):
        return torch.randn(config.width, 4, generator=torch.Generator().manual_seed(position))

    rows = loop.own_rows(noise, specs, world)
    settings = loop.Settings(config, data="noise")
    manager, result = checkpoint.Manager(run / "checkpoints", keep=2, world=world), None
    with checkpoint.claim(run, world=world) as claim:
        begun = settings.begin(manager, specs, lambda: tree.init(specs, key=0, rank=world.rank))
        records = loop.JsonLines(run / "metrics.jsonl", after=begun.step)
        with loop.Loggers(records, active=world.rank == 0) as log, catch() as stop, manager:
            faults = Injector(config.run.faults.inject, world.rank, run / "injected")
            where = {"steps": config.run.steps, "start": begun.step, "log_every": config.run.log.every}
            for info in loop.train(step, begun.state, rows, **where, stop=stop, world=world, inject=faults):
                if info.metrics:
                    log(info.step, info.metrics)
                    result = info.metrics["loss"]
                if info.last or info.step % config.run.save.every == 0:
                    claim.check()
                    known = settings.metadata(config.width * info.step)
                    how = {"finite": info.finite(), "wait": info.last or not config.run.save.in_background}
                    manager.save(info.step, info.state, specs, known, **how)
                manager.poll()
                if info.stopping:
                    print(f"stopped after step {info.step}")
    return result


if __name__ == "__main__":
    loop.launch(main, Config)

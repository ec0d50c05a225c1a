"""A run by `loop.Run` around a step of a few lines, with faults on request. Run by tests under torchrun.

torchrun --nproc-per-node=2 tests/experiments/injected_run.py --mesh=fsdp=2 --inject=kill:rank=1,step=5
"""

import hashlib
import os
import time
from dataclasses import dataclass

import torch

from fmegatron import checkpoint, loop, tree
from fmegatron.collectives import Axes, connect, enter, psum
from fmegatron.layout import Layout, Mesh
from fmegatron.loop import LossSpike, Patience, Restart, Run, field
from fmegatron.step import jit


@dataclass(frozen=True)
class Config:
    mesh: Mesh = field(Mesh(fsdp=1), resume="named")
    run: str = field("runs/injected", resume="free")
    steps: int = field(8, resume="named", least=1)
    save_every: int = field(2, resume="free", least=1)
    async_save: bool = field(False, resume="free")
    backend: str = field("eager", resume="free")
    inject: str = field("", resume="free")
    limit_s: float = field(0.0, resume="free")  # of every section but set-up; 0: nothing is watched
    save_limit_s: float = field(0.0, resume="free")  # of saves; 0: limit_s
    setup_s: float = field(60.0, resume="free", above=0)
    restarts: int = field(-1, resume="free")  # -1: no restart in the process
    local: bool = field(False, resume="free")
    on_nonfinite: str = field("raise", resume="free")
    on_failed_save: str = field("raise", resume="free")
    spike: float = field(0.0, resume="free")
    hash_every: int = field(0, resume="free")
    faulty_rank: int = field(-1, resume="free")  # this process always computes update 4 wrongly

    __post_init__ = loop.check


def main(config):
    """Fit a matrix and a scale that all ranks hold to noise; returns the metrics."""
    world = connect(config.mesh, timeout_s=60)
    axis, process = Axes(config.mesh)["fsdp"], int(os.environ.get("RANK", "0"))
    layouts = {
        "w": Layout((8, 4), torch.float64, config.mesh, ("fsdp",)),
        "s": Layout((3,), torch.float64, config.mesh),
    }
    specs = {"s": tree.ArraySpec(layouts["s"], tree.ones), "w": tree.ArraySpec(layouts["w"], tree.Normal(1.0))}

    def update(state, batch):
        error = state["w"] - batch
        scale = enter(state["s"], axis)
        loss = psum((error**2).sum(), axis)
        return {"s": scale * 0.99 + 1e-3 * loss, "w": state["w"] - 0.01 * error * state["s"].sum()}, {"loss": loss}

    compiled = jit(update, world=world if world.size > 1 else None, donate=0, backend=config.backend, check=None)
    count = [0]

    def step(state, batch):
        state, metrics = compiled(state, batch)
        count[0] += 1
        if process == config.faulty_rank and float(batch.flatten()[0]) == bad_batch[0]:
            state["w"][0, 0] = float("nan")
        return state, metrics

    def rows(position):
        return torch.randn(8, 4, generator=torch.Generator().manual_seed(position), dtype=torch.float64)

    bad_batch = [float(part.flatten()[0]) for part in rows(3).chunk(world.size)][config.faulty_rank :][:1]

    def batch_at(position):
        return rows(position).chunk(world.size)[world.rank].clone()

    seconds = config.limit_s
    limits = ("compile", "step", "save", "evaluation", "caller", "restart", "end")
    run = Run(
        config.run,
        step,
        specs,
        world=world,
        settings=config,
        evaluate=lambda state: {"norm": float(psum((state["w"] ** 2).sum(), real)) if world.size > 1 else 0.0},
        log_every=1,
        eval_every=4,
        save_every=config.save_every,
        async_save=config.async_save,
        patience=Patience(
            setup=config.setup_s, factor=2, **{**dict.fromkeys(limits, seconds), "save": config.save_limit_s or seconds}
        )
        if seconds
        else None,
        restart=Restart(config.restarts, meet_s=20) if config.restarts >= 0 else None,
        local=checkpoint.LocalReplicas(f"{config.run}-local", "run", world, copies=1) if config.local else None,
        local_every=1,
        on_nonfinite=config.on_nonfinite,
        on_failed_save=config.on_failed_save,
        spike=LossSpike(config.spike, warmup=3) if config.spike else None,
        hash_every=config.hash_every or None,
        inject=config.inject,
    )
    real = Axes(config.mesh, world)["fsdp"] if world.size > 1 else None
    for info in run(batch_at, steps=config.steps):
        if world.rank == 0:
            with open(f"{config.run}-times", "a") as file:
                file.write(f"{info.step} {time.time()}\n")
    bits = b"".join(x.numpy().tobytes() for x in tree.leaves(run.state))
    print(f"end: {hashlib.sha256(bits).hexdigest()[:12]}, {count[0]} updates in this process", flush=True)
    return run.metrics


if __name__ == "__main__":
    loop.launch(main, Config)

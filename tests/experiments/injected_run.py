"""A run by `loop.Run` around a step of a few lines, with faults on request. Run by tests under torchrun.

torchrun --nproc-per-node=2 tests/experiments/injected_run.py --mesh=fsdp=2 --inject=kill:rank=1,step=5
"""

import contextlib
import hashlib
import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Literal

import torch

from fmegatron import data, loop, tree
from fmegatron.collectives import Axes, connect, enter, psum
from fmegatron.layout import Layout, Mesh
from fmegatron.loop import Faults, Log, Options, Restart, Run, Save, field
from fmegatron.loop.losses import LossSpike
from fmegatron.loop.options import Local
from fmegatron.step import jit
from tests import writers
from tests.fresh import Process, Twin


@dataclass(frozen=True)
class Config:
    mesh: Mesh = field(Mesh(fsdp=1), resume="named")
    folder: str = field("runs/injected", resume="free")
    steps: int = field(8, resume="named", least=1)
    save_every: int = field(2, resume="free", least=1)
    async_save: bool = field(False, resume="free")
    backend: str = field("eager", resume="free")
    dtype: Literal["float64", "float32"] = field("float64", resume="refused")
    inject: str = field("", resume="free")
    limit_s: float = field(
        0.0, resume="free"
    )  # of every section but set-up and the first update; 0: nothing is watched
    save_limit_s: float = field(0.0, resume="free")  # of saves; 0: limit_s
    setup_s: float = field(60.0, resume="free", above=0)
    pause_s: float = field(0.0, resume="free")  # behind each update, so that what a rank does is seen by the others
    restarts: int = field(0, resume="free")  # 0: no restart in the process
    near: bool = field(False, resume="free")
    on_nonfinite: str = field("raise", resume="free")
    on_failed_save: str = field("raise", resume="free")
    spike: float = field(0.0, resume="free")
    hash_every: int = field(0, resume="free")
    faulty_rank: int = field(-1, resume="free")  # this process always computes update 4 wrongly

    __post_init__ = loop.check


def layouts_of(mesh, dtype):
    """A matrix whose rows are split over fsdp, and a scale that all ranks hold."""
    return {"s": Layout((3,), dtype, mesh), "w": Layout((8, 4), dtype, mesh, ("fsdp",))}


def specs_of(layouts):
    """Their initial values."""
    return {"s": tree.ArraySpec(layouts["s"], 1.0), "w": tree.ArraySpec(layouts["w"], tree.Normal(1.0))}


def drawn(layouts, rank):
    """The initial state of a rank."""
    return tree.init(specs_of(layouts), 0, rank)


def updated(state, batch, axis, enter, psum):
    """(state, metrics) after one update that fits both to noise; what every rank computes depends on all."""
    error = state["w"] - batch
    scale = enter(state["s"], axis)
    loss = psum((error**2).sum(), axis)
    return {"s": scale * 0.99 + 1e-3 * loss, "w": state["w"] - 0.01 * error * state["s"].sum()}, {"loss": loss}


def rows(position, dtype=torch.float64):
    """The whole batch of an update."""
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(position), dtype=torch.float64).to(dtype)


def state_hash(state):
    """Of the bits of a rank's state."""
    return hashlib.sha256(b"".join(x.numpy().tobytes() for x in tree.leaves(state))).hexdigest()[:12]


def what_is_held():
    """Descriptors and threads of this process, its parent and theirs (torchrun, or what forks for it, and torchrun),
    and the processes that work in the folder of the job."""
    own, pid = {}, os.getpid()
    for name in ("", "parent_", "grandparent_"):
        own[f"{name}fds"], own[f"{name}threads"] = (
            len(os.listdir(f"/proc/{pid}/fd")),
            len(os.listdir(f"/proc/{pid}/task")),
        )
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    count = 0
    for other in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/{other}/cwd") == os.getcwd()
    return {**own, "processes": count}


def main(config):
    """Fit a matrix and a scale that all ranks hold to noise; returns the metrics."""
    world, dtype = connect(config.mesh, timeout_s=120), getattr(torch, config.dtype)
    axis, process = Axes(config.mesh)["fsdp"], int(os.environ.get("RANK", "0"))
    specs = specs_of(layouts_of(config.mesh, dtype))
    compiled = jit(
        lambda state, batch: updated(state, batch, axis, enter, psum),
        world=world if world.size > 1 else None,
        donate=0,
        backend=config.backend,
    )

    def step(state, batch):
        state, metrics = compiled(state, batch)
        with open(f"{config.folder}-updates-{process}", "a") as file:
            file.write(".")
        time.sleep(config.pause_s)
        if process == config.faulty_rank and float(batch.flatten()[0]) == bad_batch[0]:
            state["w"][0, 0] = float("nan")
        return state, metrics

    bad_batch = [float(part.flatten()[0]) for part in rows(3).chunk(world.size)][config.faulty_rank :][:1]

    @data.source
    def batches(position):
        return rows(position, dtype)

    seconds = config.limit_s
    limits = ("step", "save", "evaluation", "caller", *["restart"] * bool(config.restarts), "end")
    local = Local(f"{config.folder}-local", "run", every=1, copies=1) if config.near else Local()
    slow = {**dict.fromkeys(limits, seconds), "save": config.save_limit_s or seconds}
    patience = ",".join(f"{k}={v}" for k, v in {"setup": config.setup_s, "compile": 60, "factor": 2, **slow}.items())
    run = Run(
        config.folder,
        step,
        specs,
        world=world,
        settings=config,
        evaluate=lambda state: {"norm": float(psum((state["w"] ** 2).sum(), real)) if world.size > 1 else 0.0},
        options=Options(
            log=Log(every=1, eval_every=4),
            save=Save(
                config.save_every, in_background=config.async_save, on_failure=config.on_failed_save, local=local
            ),
            faults=Faults(
                patience=patience if seconds else "off",
                restart=Restart(config.restarts, meet_s=20) if config.restarts else Restart(0),
                nonfinite=config.on_nonfinite,
                spike=LossSpike(config.spike, warmup=3) if config.spike else LossSpike(0.0),
                hash_every=config.hash_every or None,
                inject=config.inject,
            ),
        ),
    )
    real = Axes(config.mesh, world)["fsdp"] if world.size > 1 else None
    for info in run(batches, steps=config.steps):
        if info.step == run.start + 1:
            with open(f"{config.folder}-held-{process}", "a") as file:
                file.write(json.dumps(what_is_held()) + "\n")
        if world.rank == 0:
            with open(f"{config.folder}-times", "a") as file:
                file.write(f"{info.step} {time.time()}\n")
    print(f"end: {state_hash(run.state)}", flush=True)
    return run.metrics


if __name__ == "__main__":
    if sys.argv[1:2] == ["--forked-writers"] and (server := Twin()).serves:  # before this process has threads
        del sys.argv[1]
        server.serve()
    elif sys.argv[1:2] == ["--forked-writers"]:
        del sys.argv[1]
        with writers.started_by(lambda command, **settings: Process(server, command, **settings)):
            loop.launch(main, Config)
    else:
        loop.launch(main, Config)

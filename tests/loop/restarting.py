"""A run of two ranks with an exception in every update but the first two, on one rank after the other. Run by tests.

python -m tests.loop.restarting FOLDER BACKEND STEPS: prints a line of JSON at the end: what it held after each update.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from fmegatron import checkpoint, data, tree
from fmegatron.collectives import Axes, World, connect, enter, psum
from fmegatron.layout import Layout, Mesh
from fmegatron.loop import Faults, Log, Options, Restart, Run, Save
from fmegatron.step import jit


def main(folder, backend, steps):
    """Train `steps` updates; one with few of them has as many restarts."""
    mesh = Mesh(fsdp=2)
    world = connect(mesh, timeout_s=60)
    axis = Axes(mesh)["fsdp"]

    def update(state, batch):
        error = torch.tanh(enter(state["s"], axis)) * state["w"] - batch
        return {"s": state["s"] * 0.99, "w": state["w"] - 0.1 * error}, {"loss": psum((error**2).sum(), axis)}

    layouts = {"s": Layout((4,), torch.float64, mesh), "w": Layout((8, 4), torch.float64, mesh, ("fsdp",))}
    specs = tree.map(lambda layout: tree.ArraySpec(layout, tree.Normal(1.0)), layouts)
    step = jit(update, world=world, donate=0, backend=backend)
    faults = "+".join(f"exception:rank={n % 2},step={n}" for n in range(3, steps))
    run = Run(
        folder,
        step,
        specs,
        world=world,
        options=Options(log=Log(every=100), save=Save(every=1), faults=Faults(restart=Restart(1), inject=faults)),
    )
    # Pools of threads grow as they are needed, up to a limit: they have it before anything is counted.
    many = {f"x{i}": torch.full((1 << 16,), float(i)) for i in range(256)}
    for n in range(4):
        checkpoint.save(f"{folder}-many-{world.rank}-{n}", many, world=World.alone("cpu"))
    held, times = {}, {}
    for info in run(data.source(lambda n: torch.full((8, 4), float(n), dtype=torch.float64)), steps=steps):
        children = sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children"))
        held[info.step] = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), children
        times[info.step] = time.time()
    compiled = {"graphs": len(step.cache), "inductor": counters["inductor"].get("fxgraph_cache_miss", 0)}
    bits = [x.sum().item() for x in tree.leaves(run.state)]
    print(json.dumps({"held": held, "times": times, "bits": bits, **compiled}), flush=True)
    world.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

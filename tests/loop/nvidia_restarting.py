"""A run of two ranks in nvidia-resiliency-ext's wrapper, with faults. Run by tests under torchrun.

nvidia_restarting.py FOLDER WHERE: an exception on rank 1 in its update 6 ("step"), or behind it, while rank 0 waits in
an agreement outside of the step ("barrier"); each time behind update 3 ("always"); the end of its process ("killed");
or "nowhere". Prints a line of JSON: attempts, graphs, updates, sums of the bits of the state.
"""

import functools
import json
import os
import sys
from datetime import timedelta
from types import MappingProxyType

import torch

from fmegatron import loop, tree
from fmegatron.collectives import Axes, enter, psum
from fmegatron.layout import Layout, Mesh
from fmegatron.step import jit

MESH = Mesh(fsdp=2)
STEPS, FAULT = 10, 6
KINDS = MappingProxyType({"step": "exception", "killed": "kill"})
SOON = MappingProxyType({"last_call_wait": timedelta(seconds=0.1)})


def main(folder, where):
    """Train, and print what it was."""
    axis, attempts, updates = Axes(MESH)["fsdp"], [], []

    def update(state, batch):
        error = torch.tanh(enter(state["s"], axis)) * state["w"] - batch
        return {"s": state["s"] * 0.99, "w": state["w"] - 0.1 * error}, {"loss": psum((error**2).sum(), axis)}

    layouts = {"s": Layout((4,), torch.float64, MESH), "w": Layout((8, 4), torch.float64, MESH, ("fsdp",))}
    specs = tree.map(lambda layout: tree.ArraySpec(layout, tree.Normal(1.0)), layouts)
    compiled = functools.cache(lambda world: jit(update, world=world, donate=0, backend="aot_eager"))

    def train(world, call):
        attempts.append(call.iteration)
        inject = f"{KINDS[where]}:rank=1,step={FAULT}" if where in KINDS else ""
        step = compiled(world)
        run = loop.Run(
            folder,
            step,
            specs,
            world=world,
            options=loop.Options(log=loop.Log(every=100), save=loop.Save(every=4), faults=loop.Faults(inject=inject)),
        )
        for info in run(
            lambda n: tree.place(torch.full((4, 4), float(n), dtype=torch.float64), layouts["w"]), steps=STEPS
        ):
            updates.append(info.step)
            if where == "always" and world.rank == 1 and info.step == 3:
                raise ValueError("rank 1 saw a bad thing")
            if where == "barrier" and info.step == FAULT and call.iteration == 0:
                if world.rank == 1:
                    raise ValueError("rank 1 saw a bad thing")
                world.barrier()
        return run.state, len(step.cache)

    state, graphs = loop.nvidia_restart(train, MESH, most=1, meet_s=20, leave_s=5, **SOON)
    bits = [x.view(torch.int64).sum().item() for x in tree.leaves(state)]
    found = {"rank": int(os.environ["RANK"]), "attempts": attempts, "graphs": graphs, "updates": updates, "bits": bits}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

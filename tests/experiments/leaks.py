"""What a process holds, and what its main thread calls of torch.distributed while a run takes steps. Used by tests."""

import gc
import os
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from fmegatron import data, tree
from fmegatron.collectives import connect
from fmegatron.collectives import world as world_module
from fmegatron.layout import Layout, Mesh
from fmegatron.loop import Faults, Log, Options, Run, Save

WAITS = (
    "barrier",
    "broadcast",
    "all_gather",
    "all_reduce",
    "isend",
    "irecv",
    "monitored_barrier",
    "broadcast_object_list",
)


def held():
    """Descriptors, threads of Python, all threads, live processes below this one, kilobytes in memory, objects that the
    collector knows. What deletes old checkpoints comes to its end first: how long it takes is the disk's affair."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint deletion":
            thread.join(60)
    gc.collect()
    status = Path("/proc/self/status").read_text()
    kilobytes = int(status.partition("VmRSS:")[2].split()[0])
    children = sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children"))
    count = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    return {
        "fds": count[0],
        "threads": threading.active_count(),
        "all_threads": count[1],
        "children": children,
        "kb": kilobytes,
        "objects": len(gc.get_objects()),
    }


def specs_on(mesh):
    """A state of one leaf on every rank."""
    return {"w": tree.ArraySpec(Layout((64, 64), torch.float32, mesh), 0.0)}


def long_run(rank, folder, size, steps, marks, log_every):
    """What this rank holds after each of `marks` updates of a run with logs, evaluations and saves."""
    mesh, seen = Mesh(dp=size), {}
    with connect(mesh) as world:
        run = Run(
            folder,
            lambda state, batch: ({"w": state["w"] + batch}, {"loss": (state["w"] ** 2).mean()}),
            specs_on(mesh),
            world=world,
            evaluate=lambda state: {"heldout_loss": 1.0},
            options=Options(log=Log(every=log_every, eval_every=steps // 4), save=Save(every=steps // 4)),
        )
        for info in run(data.source(lambda position: torch.ones(())), steps):
            if info.step in marks:
                seen[info.step] = held()
    return seen


class Untouched:
    """A metric that counts whatever is done with it; nothing may be done with that of a steady step."""

    def __init__(self):
        object.__setattr__(self, "touched", [])

    def __getattribute__(self, name):
        if name in ("touched", "__class__"):
            return object.__getattribute__(self, name)
        self.touched.append(name)
        raise AttributeError(name)

    def __float__(self):
        self.touched.append("float")
        return 0.0

    def __bool__(self):
        self.touched.append("bool")
        return True


def counted_run(rank, folder, size, steps, log_every):
    """(calls of the main thread by update, what was done with metrics of steady updates) of a run.

    A call is (name, whether it waits); an answer that is read is ("wait", number of the update that asked).
    """
    mesh, main = Mesh(dp=size), threading.get_ident()
    now, calls, metrics = [0], {}, {}

    def note(*call):
        if threading.get_ident() == main:
            calls.setdefault(now[0], []).append(call)

    class Noted:
        """torch.distributed, whose calls are noted."""

        def __getattr__(self, name):
            found = getattr(dist, name)
            if name not in WAITS:
                return found

            def call(*args, **settings):
                later = bool(settings.get("async_op")) or name in ("isend", "irecv")
                note(name, not later)
                work, asked = found(*args, **settings), now[0]
                return Work(work, asked) if later else work

            return call

    class Work:
        """A call that was begun."""

        def __init__(self, work, asked):
            self.work, self.asked = work, asked

        def wait(self):
            note("wait", self.asked)
            return self.work.wait()

        def is_completed(self):
            return self.work.is_completed()

    def step(state, batch):
        now[0] = number = int(batch)
        logs = number in (1, steps) or number % log_every == 0
        metrics[number] = torch.tensor(1.0 / number) if logs else Untouched()
        return {"w": state["w"] + 1}, {"loss": metrics[number]}

    with connect(mesh) as world:
        before, world_module.dist = world_module.dist, Noted()
        try:
            run = Run(
                folder,
                step,
                specs_on(mesh),
                world=world,
                options=Options(log=Log(every=log_every), save=Save(every=steps), faults=Faults(hash_every=None)),
            )
            for _ in run(data.source(lambda position: position + 1), steps):
                pass
        finally:
            world_module.dist = before
    touched = {n: x.touched for n, x in metrics.items() if isinstance(x, Untouched) and x.touched}
    return calls, touched

"""What a save or a restore needs beside the state: `python -m tests.checkpoint.peak_memory KIND RANKS DIRECTORY`.

A process of its own, because memory that others freed would hide what is taken. Prints one JSON object.
"""

import json
import sys

import torch

from fmegatron import checkpoint, tree
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.forked_ranks import run
from tests.checkpoint.memory import give_back_at_once, peak, reset_peak

MiB = 1 << 20


def layouts_of(kind, ranks):
    """About 256 MiB for each rank."""
    mesh, f32, n = Mesh(fsdp=ranks), torch.float32, ranks * 256 * MiB // 4
    if kind == "grid":
        return {f"w{i}": Layout((n // 4 // 4096, 4096), f32, mesh, ("fsdp",)) for i in range(4)}
    if kind == "columns":
        return {f"w{i}": Layout((4096, n // 4 // 4096), f32, mesh, (None, "fsdp")) for i in range(4)}
    if kind == "small":
        return {f"p{i}": Layout((12_288,), f32, mesh) for i in range(256 * MiB // 4 // 12_288)}
    if kind == "pieces":
        return {f"f{i}": Layout((n // 4 // 1001, 1001), f32, mesh, flat=("fsdp",)) for i in range(4)}
    assert kind in ("transposed", "strided")
    return {f"t{i}": Layout((ranks * 1024, 1024), f32, mesh, ("fsdp",)) for i in range(64)}


def tensor(kind, shape):
    if kind == "transposed":
        return torch.ones(*reversed(shape)).t()
    if kind == "strided":
        return torch.ones(*shape[:-1], 2 * shape[-1])[..., ::2]
    return torch.ones(shape)


def warm(world, path):
    """Threads, buffers of the allocator and modules are there before anything is measured."""
    torch.set_num_threads(1)
    give_back_at_once()
    small = {"x": Layout((world.size * 64, 1024), torch.float32, Mesh(fsdp=world.size), ("fsdp",))}
    checkpoint.save(f"{path}/warm", {"x": torch.ones(64, 1024)}, small, world)
    checkpoint.restore(f"{path}/warm", small, world=world)


def saving(kind, path):
    """A function of a rank: (bytes of its state, bytes that the save took beside it)."""

    def rank_main(world, calls):
        warm(world, path)
        layouts = layouts_of(kind, world.size)
        state = tree.map(lambda layout: tensor(kind, layout.local_shape(world.rank)), layouts)
        before = reset_peak()
        checkpoint.save(f"{path}/a", state, layouts, world)
        return sum(x.nbytes for x in tree.leaves(state)), peak() - before

    return rank_main


def restoring(kind, path):
    """The same of a restore."""

    def rank_main(world, calls):
        warm(world, path)
        layouts = layouts_of(kind, world.size)
        before = reset_peak()
        got = checkpoint.restore(f"{path}/a", layouts, world=world)
        size, extra = sum(x.nbytes for x in tree.leaves(got)), peak() - before
        if not all(bool((x == 1).all()) for x in tree.leaves(got)):
            raise AssertionError("other bits")
        return size, extra - size

    return rank_main


def main(kind, ranks, path):
    """Ranks that save, then others that restore: what one has freed is not there for the other."""
    rows = [run(ranks, work(kind, path)) for work in (saving, restoring)]
    found = {"leaves": len(layouts_of(kind, ranks)), "size": [size for size, _ in rows[0]]}
    print(json.dumps({**found, "save": [n for _, n in rows[0]], "restore": [n for _, n in rows[1]]}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])

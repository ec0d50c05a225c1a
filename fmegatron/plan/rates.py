"""Rates of a machine, measured: matrix products, copies of memory, collectives over all ranks, durable writes."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from fmegatron.collectives import World
from fmegatron.step import clock
from fmegatron.step.timelines import planned

__all__ = ["measured_rates", "measured_write"]


def measured_rates(
    world: World | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    size: int = 768,
    nbytes: int = 1 << 24,
) -> planned.Rates:
    """`Rates` of this machine as it is now, the best of a few rounds each.

    flops: FLOP/s of a square product of `size` in `dtype`. memory: bytes/s that a copy of `nbytes` reads and writes.
    network: bytes/s that each rank sends in an all-reduce of `nbytes` over all ranks of `world`, as all of them work
    at once. latency: seconds of an all-reduce of one number. Without a world (or with one rank) the last two are those
    of `Rates()`, an assumption. All ranks of the world call it together.
    """
    device = world.device if world is not None else torch.device(device)
    product = 2 * size**3 / min(clock.matmul_seconds(device, dtype, size))
    x = torch.ones(nbytes // 4, device=device)
    y = torch.empty_like(x)
    moved = 2 * nbytes / min(clock.seconds_of(lambda: y.copy_(x), device))
    plain = planned.Rates()
    if world is None or world.size == 1:
        return planned.Rates(product, moved, plain.network, plain.latency)
    group, one = world.group(world.mesh.names), torch.zeros(1, device=device)
    latency = min(clock.seconds_of(lambda: dist.all_reduce(one, group=group), device))
    whole = min(clock.seconds_of(lambda: dist.all_reduce(x, group=group), device))
    sent = 2 * (world.size - 1) / world.size * nbytes
    return planned.Rates(product, moved, sent / max(whole - latency, 1e-9), latency)


def measured_write(folder: str | Path, nbytes: int = 1 << 26) -> float:
    """Bytes/s of one process that writes a new file in a folder and waits until it is durable, the best of three; the
    file is removed."""

    def once() -> float:
        with tempfile.TemporaryFile(dir=folder) as file:
            data = os.urandom(1 << 20)
            start = time.perf_counter()
            for _ in range(nbytes >> 20):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            return time.perf_counter() - start

    return (nbytes >> 20 << 20) / min(once() for _ in range(3))

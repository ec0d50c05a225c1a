"""torch's process groups: how one is started, found by its name, and what travels over it as bytes."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from fmegatron.collectives.torch_private import group_named


def start(store: dist.Store | None, rank: int, size: int, backend: str, timeout_s: float) -> None:
    """Make the default process group."""
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)


def control_group(device: torch.device, timeout_s: float) -> dist.ProcessGroup | None:
    """The group of all ranks for agreements on the CPU."""
    if device.type == "cpu":
        return dist.group.WORLD
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))


def default_device(local_rank: int | str) -> str:
    """Where a rank computes unless it is stated."""
    return f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"


def known_group(name: str) -> dist.ProcessGroup | None:
    """The group that torch knows under a name."""
    try:
        return group_named(name)
    except RuntimeError:
        return None


def empty_bytes(count: int) -> torch.Tensor:
    """uint8 [count], not initialized."""
    return torch.empty(count, dtype=torch.uint8)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, in its memory."""
    return x.view(-1).view(torch.uint8)

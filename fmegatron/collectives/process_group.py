"""torch's process groups: how one is started, found by its name, and what travels over it as bytes."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import socket
from collections.abc import Iterator, Mapping

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
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup), "this rank is in the group of all"
    return group


def default_device(local_rank: int | str) -> str:
    """Where a rank computes unless it is stated."""
    if not torch.cuda.is_available():
        return "cpu"
    # A launcher may show each process its own device only (srun --gpus-per-task=1).
    return "cuda:0" if torch.cuda.device_count() == 1 else f"cuda:{local_rank}"


@contextlib.contextmanager
def noting_sockets(noted: dict[int, int]) -> Iterator[None]:
    """Note the sockets (descriptor -> inode) that are opened within this block: those of gloo, which cannot abort."""
    before = _sockets()
    yield
    noted.update(dict(_sockets().items() - before.items()))


def shut_down(noted: Mapping[int, int]) -> None:
    """Let what waits for bytes on these sockets fail, here and at their other ends; those of the store stay."""
    store, now = os.environ.get("MASTER_PORT", ""), _sockets()
    for descriptor, inode in noted.items():
        if now.get(descriptor) != inode:  # closed, and its number may be another file's
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            if store not in (str(one.getpeername()[1]), str(one.getsockname()[1])):
                one.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, int]:
    """Descriptor -> inode of the sockets of this process; none where the system does not list them."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{name}")):
                    found[int(name)] = int(match[1])
    return found


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

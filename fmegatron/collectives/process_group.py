"""torch's process groups: how one is started, found by its name, and what travels over it as bytes."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
import torch.distributed as dist

from fmegatron.collectives.torch_private import group_named

# What NCCL's groups read when they are made; what is set already stays. Its watchdog cleans up after an error and lets
# the process live (2, CleanUpOnly), so that a run can renew its world; the last collectives are recorded, and written
# to a file when one takes too long, under the name of torch since 2.9 and the one before.
OF_NCCL = MappingProxyType(
    {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    }
)


def start(store: dist.Store | None, rank: int, size: int, backend: str, timeout_s: float, device: torch.device) -> None:
    """Make the default process group. With NCCL it is told the device, on which it opens its communicator at once; and
    ValueError, before it does, where another rank has the same one."""
    timeout, of_nccl = datetime.timedelta(seconds=timeout_s), "nccl" in backend
    if of_nccl:
        for name, value in OF_NCCL.items():
            os.environ.setdefault(name, value)
        if store is not None:
            require_own_device(store, rank, str(torch.cuda.get_device_properties(device).uuid))
    own = device if of_nccl else None
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size, device_id=own)


def require_own_device(store: dist.Store, rank: int, uuid: str) -> None:
    """ValueError where another rank has come to this store with the same device before.

    store: of this start of the job, empty before. uuid: of the device, another one for each in all of the world.
    """
    first = store.compare_set(f"device/{uuid}", "", str(rank)).decode()
    if first != str(rank):
        raise ValueError(
            f"connect: ranks {first} and {rank}: got the GPU {uuid} for both, wanted one for each, as NCCL refuses "
            "two; start as many processes as there are GPUs, or give connect(..., backend='gloo'), slow, for a trial"
        )


def make_current(device: torch.device) -> torch.device:
    """A device as the current one of this process, with its number: what allocates without naming one is there too,
    and nothing of this process is opened on another GPU."""
    if device.type != "cuda":
        return device
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    torch.cuda.set_device(device)
    return device


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


def end_reading(noted: Mapping[int, int]) -> None:
    """Let what waits for bytes on these sockets fail here; those of the store stay. What their other ends send goes on
    to be taken: a socket that refuses it would be reset, and gloo wakes nobody whose send fails in its event loop."""
    store, now = os.environ.get("MASTER_PORT", ""), _sockets()
    for descriptor, inode in noted.items():
        if now.get(descriptor) != inode:  # closed, and its number may be another file's
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            if store not in (str(one.getpeername()[1]), str(one.getsockname()[1])):
                one.shutdown(socket.SHUT_RD)


@contextlib.contextmanager
def last_references(held: list, seconds: float) -> Iterator[None]:
    """Around what destroys groups: the last references to them go in a thread, as the threads of a group are joined
    then, and one of gloo may wait until its time is over for what never comes. Warns when it takes longer than
    `seconds`. held: the groups, and what holds them; emptied."""
    gone = threading.Event()

    def drop(held: list) -> None:
        gone.wait()
        held.clear()

    thread = threading.Thread(target=drop, args=(held,), name="groups-end", daemon=True)
    thread.start()
    del held
    try:
        yield
    finally:
        gone.set()
        thread.join(seconds)
        if thread.is_alive():
            text = (
                f"a thread of gloo did not end within {seconds:g} s: it is left behind until its collective times out"
            )
            warnings.warn(text, RuntimeWarning, stacklevel=4)


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

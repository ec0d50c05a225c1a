"""Processes of one job on one machine: which they are, and the end of those that do not end themselves."""

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

# What makes a process write its stacks, from C: also where a thread holds the GIL, so that no other runs.
STACKS = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
STACKS_SECONDS = 0.3  # between that and the end


def own_process(host: str) -> dict[str, Any]:
    """What identifies this process among all that have run on its machine: host, pid, pid of its parent, start time."""
    return {"host": host, "pid": os.getpid(), "parent": os.getppid(), "started": _started_at(os.getpid())}


def write_stacks_into(file: IO) -> None:
    """From now on `kill_siblings` of another process makes this one write the stacks of all its threads into a file
    first. Its description (`own_process`) then has "stacks": true."""
    faulthandler.register(STACKS, file=file, all_threads=True)


def leave_stacks() -> None:
    """The end of `write_stacks_into`, before its file is closed."""
    faulthandler.unregister(STACKS)


def kill_siblings(processes: Mapping[int, Mapping[str, Any]], host: str) -> list[int]:
    """SIGKILL for those of these processes (by rank; as `own_process` describes them) that run on this machine and that
    the parent of this process has started; torchrun alone would wait for 30 seconds for one that is stopped. Before it
    each writes its stacks (`write_stacks_into`), unless it is stopped.

    Returns their ranks. A number that another process has since got is not touched.
    """
    found = []
    for rank, process in processes.items():
        pid = process["pid"]
        if process["host"] != host or process["parent"] != os.getppid() or pid == os.getpid():
            continue
        if process["started"] is None or _started_at(pid) != process["started"]:
            continue
        found.append((rank, pid))
    written = [(rank, pid) for rank, pid in found if processes[rank].get("stacks")]
    if _signalled(written, STACKS):
        time.sleep(STACKS_SECONDS)
    return _signalled(found, signal.SIGKILL)


def _signalled(processes: Sequence[tuple[int, int]], number: int) -> list[int]:
    """The ranks of those (rank, pid) that could be sent a signal."""
    found = []
    for rank, pid in processes:
        with contextlib.suppress(OSError):
            os.kill(pid, number)
            found.append(rank)
    return found


def _started_at(pid: int) -> int | None:
    """Ticks since boot at which a process began; None where the system does not state it, or there is no such one."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return None

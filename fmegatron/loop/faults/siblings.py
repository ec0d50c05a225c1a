"""Processes of one job on one machine: which they are, and the end of those that do not end themselves."""

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def own_process(host: str) -> dict[str, Any]:
    """What identifies this process among all that have run on its machine: host, pid, pid of its parent, start time."""
    return {"host": host, "pid": os.getpid(), "parent": os.getppid(), "started": _started_at(os.getpid())}


def kill_siblings(processes: Mapping[int, Mapping[str, Any]], host: str) -> list[int]:
    """SIGKILL for those of these processes (by rank; as `own_process` describes them) that run on this machine and that
    the parent of this process has started; torchrun alone would wait for 30 seconds for one that is stopped.

    Returns their ranks. A number that another process has since got is not touched.
    """
    killed = []
    for rank, process in processes.items():
        pid = process["pid"]
        if process["host"] != host or process["parent"] != os.getppid() or pid == os.getpid():
            continue
        if process["started"] is None or _started_at(pid) != process["started"]:
            continue
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            killed.append(rank)
    return killed


def _started_at(pid: int) -> int | None:
    """Ticks since boot at which a process began; None where the system does not state it, or there is no such one."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return None

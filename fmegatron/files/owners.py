"""Owners: the process that a file belongs to, and whether it is alive, as far as this machine can determine."""

from __future__ import annotations

import os
import socket
from typing import Literal

import xxhash

Fate = Literal["lives", "gone", "unknown"]


def owner() -> str:
    """This process: where it runs, its number, and when it started, as "WHERE-PID-START".

    WHERE is a digest of boot, host name and process namespace: processes of one WHERE see each other. It is empty where
    the system does not report it; START is then, too.
    """
    return f"{_where()}-{os.getpid()}-{_start(os.getpid()) or ''}"


def fate(whose: str) -> Fate:
    """Whether the process that called `owner` lives; "unknown" for one of another machine or container.

    A number that was given to another process since does not count, nor does a dead process that no parent waited for.
    """
    where, _, process = whose.partition("-")
    pid, _, start = process.partition("-")
    if not where or where != _where() or not pid.isdecimal():
        return "unknown"
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return "gone"
    except OverflowError:
        return "unknown"
    except OSError:  # another user's process: it is there
        pass
    started = _start(int(pid))
    return "gone" if started == "" or (start and started and started != start) else "lives"


def host() -> str:
    """The name of this machine, for messages."""
    return socket.gethostname()


def _where() -> str:
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""  # a container that sees the processes of its host there: the numbers are not ours
        with open("/proc/sys/kernel/random/boot_id") as f:
            return xxhash.xxh3_64_hexdigest(f"{f.read()}{os.readlink('/proc/self/ns/pid')}{host()}".encode())
    except OSError:
        return ""


def _start(pid: int) -> str | None:
    """When a process started, in the system's count since it booted; "" for a dead one, None if it is unknown."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in "ZXx" else fields[19]

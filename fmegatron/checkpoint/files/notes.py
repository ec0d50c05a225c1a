"""Small files beside the checkpoints of a directory: whole or not there, whoever looks."""

from __future__ import annotations

import os
import secrets
import time

from fmegatron.checkpoint.files.commit import sync_directory
from fmegatron.checkpoint.files.format import digest_text

_BESIDE = ".new-"  # a file before it takes its name
_LEFT_BEHIND_S = 600.0


class Notes:
    """The small files of one directory, which several processes on several nodes leave each other."""

    def __init__(self, directory: str | os.PathLike):
        self.at = os.path.realpath(os.fspath(directory))

    def names(self) -> list[str]:
        """Names of everything in the directory, hidden ones too; [] if there is no directory."""
        try:
            return sorted(os.listdir(self.at))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, name: str, most: int = 1 << 20) -> bytes | None:
        """The content of a file, None where there is no such file; OSError if it cannot be read."""
        try:
            with open(os.path.join(self.at, name), "rb") as f:
                return f.read(most)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, data: bytes, durable: bool = False) -> None:
        """Put a file in place in one step, or replace it; durable: when this returns, a power cut does not lose it."""
        beside = os.path.join(self.at, f"{_BESIDE}{owner()}-{secrets.token_hex(4)}")
        try:
            with open(beside, "xb") as f:
                f.write(data)
                if durable:
                    f.flush()
                    os.fsync(f.fileno())
            os.replace(beside, os.path.join(self.at, name))
        except BaseException:
            self.remove(os.path.basename(beside))
            raise
        if durable:
            sync_directory(self.at)

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""
        try:
            os.remove(os.path.join(self.at, name))
        except FileNotFoundError:
            pass

    def clean(self) -> None:
        """Remove what writers that were killed left behind; what is young may be in use."""
        for name in self.names():
            if name.startswith(_BESIDE):
                whose = name.removeprefix(_BESIDE).rpartition("-")[0]
                try:
                    age = time.time() - os.stat(os.path.join(self.at, name)).st_mtime
                except FileNotFoundError:
                    continue
                if age > _LEFT_BEHIND_S or is_dead(whose):
                    self.remove(name)


def owner() -> str:
    """This process: where it runs (boot and container; "" where the system does not tell), and its number."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            where = digest_text((f.read() + os.readlink("/proc/self/ns/pid")).encode())
    except OSError:
        where = ""
    return f"{where}-{os.getpid()}"


def is_dead(whose: str) -> bool:
    """Whether the process that called `owner` is gone for certain; one of another node may be anything."""
    where, _, pid = whose.partition("-")
    if not where or where != owner().partition("-")[0] or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False

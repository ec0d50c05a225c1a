"""Small files beside the checkpoints of a directory, written atomically."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from fmegatron.files import disk, owners, whole

_LEFT_BEHIND_S = 600.0


class Notes:
    """The small files of one directory, which several processes on several nodes leave each other."""

    def __init__(self, directory: str | os.PathLike):
        self.at = os.path.realpath(os.fspath(directory))

    def names(self) -> list[str]:
        """Names of everything in the directory, hidden ones too; [] if there is no directory. Raises OSError."""
        return disk.names_in(self.at)

    def read(self, name: str, most: int = 1 << 20) -> bytes | None:
        """The content of a file, None where there is no such file; OSError if it cannot be read."""
        found = disk.look(lambda: self._open(name, most), None)
        return found and found[0]

    def stamp(self, name: str) -> bytes | None:
        """Bytes that differ after every `write` and `renew` of a note, None where there is no such note."""
        found = disk.look(lambda: self._open(name, 1 << 20), None)
        return found and found[0] + repr(found[1]).encode()

    def write(self, name: str, data: bytes, durable: bool = False) -> None:
        """Put a file in place in one step, or replace it; durable: when this returns, a power cut does not lose it."""
        whole.write_whole(os.path.join(self.at, name), data, durable)

    def renew(self, name: str, data: bytes) -> None:
        """`write`; where a disk is full, only the time of the note changes, which needs no room. Raises OSError."""
        try:
            self.write(name, data)
        except OSError:
            os.utime(os.path.join(self.at, name))

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""
        with suppress(FileNotFoundError):
            os.remove(os.path.join(self.at, name))

    def clean(self) -> None:
        """Remove what writers that were killed left behind; what is young may be in use."""
        for name in self.names():
            if self.is_left(name):
                self.remove(name)

    def is_left(self, name: str) -> bool:
        """Whether this is a file that a writer which was killed has not given its name. Raises OSError."""
        if not name.startswith(whole.BESIDE):
            return False
        state = owners.fate(name.removeprefix(whole.BESIDE).rpartition("-")[0])
        return state == "gone" or (state == "unknown" and self.age_s(name) > _LEFT_BEHIND_S)

    def age_s(self, name: str) -> float:
        """Seconds since a file changed, by the clock that gave it its time: that of the file system. Raises OSError."""
        changed = disk.look(lambda: os.lstat(os.path.join(self.at, name)).st_mtime, None)
        return 0.0 if changed is None else self.now() - changed

    def now(self) -> float:
        """The time by the clock of the file system, which may be another node's. Raises OSError if it is read-only."""
        probe = whole.new_beside(self.at)
        try:
            with open(probe, "xb") as f:
                f.write(b"\n")
                whole.sync_file(f)  # a network file system's clients show a time of their own until then
                return os.fstat(f.fileno()).st_mtime
        finally:
            self.remove(os.path.basename(probe))

    def _open(self, name: str, most: int) -> tuple[bytes, int]:
        """The content of a regular file, and the time of its last change."""
        fd = disk.open_safely(os.path.join(self.at, name))
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                return b"", found.st_mtime_ns
            with os.fdopen(fd, "rb", closefd=False) as f:
                return f.read(most), found.st_mtime_ns
        finally:
            os.close(fd)

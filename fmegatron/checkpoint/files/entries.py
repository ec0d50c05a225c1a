"""What is below a directory: names, kinds and sizes."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

UNKNOWN = -1  # size of a file in a store that does not report it


@dataclass(frozen=True)
class Entry:
    """A name below a directory, by its relative path. kind: "file", "directory", "link" or "special"."""

    name: str
    kind: str
    size: int
    changed: float  # seconds since 1970


def walk(root: str, fd: int | None = None) -> Iterator[Entry]:
    """Everything below a directory. What vanishes on the way (another process deletes) is left out.

    fd: of the directory held open; what is below it is listed, whatever has taken the name `root` since.
    """
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        try:
            found = _inside(os.path.join(root, folder)) if fd is None else _inside_held(fd, folder)
        except FileNotFoundError:
            continue
        for name, seen in sorted(found):
            name, kind = f"{folder}/{name}" if folder else name, _kind(seen.st_mode)
            yield Entry(name, kind, seen.st_size if kind == "file" else 0, seen.st_mtime)
            if kind == "directory":
                waiting.append(name)


def _inside(path: str | int) -> list[tuple[str, os.stat_result]]:
    found = []
    with os.scandir(path) as entries:
        for e in entries:
            with contextlib.suppress(FileNotFoundError):
                found.append((e.name, e.stat(follow_symlinks=False)))
    return found


def _inside_held(fd: int, folder: str) -> list[tuple[str, os.stat_result]]:
    below = os.open(folder or ".", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
    try:
        return _inside(below)
    finally:
        os.close(below)


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "directory"
    if stat.S_ISLNK(mode):
        return "link"
    return "file" if stat.S_ISREG(mode) else "special"

"""What lies in a directory: every entry with kind, size and time, without following a link."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

UNKNOWN = -1  # size of a file in a store that does not tell


@dataclass(frozen=True)
class Entry:
    """A name below a directory, by its relative path. kind: "file", "directory", "link" or "special"."""

    name: str
    kind: str
    size: int
    changed: float  # seconds since 1970


def walk(root: str) -> Iterator[Entry]:
    """Everything below a directory. What vanishes on the way (another process deletes) is left out."""
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(os.path.join(root, folder)) as found:
                entries = sorted(found, key=lambda e: e.name)
        except FileNotFoundError:
            continue
        for e in entries:
            name = f"{folder}/{e.name}" if folder else e.name
            try:
                seen = e.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            kind = _kind(seen.st_mode)
            yield Entry(name, kind, seen.st_size if kind == "file" else 0, seen.st_mtime)
            if kind == "directory":
                waiting.append(name)


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "directory"
    if stat.S_ISLNK(mode):
        return "link"
    return "file" if stat.S_ISREG(mode) else "special"

"""Checkpoints in directories of the local file system: plain files, positioned reads, one hidden directory per save."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fmegatron.checkpoint.files import commit
from fmegatron.checkpoint.files.format import MARKER
from fmegatron.checkpoint.files.notes import Notes

_FSYNCS = 8  # a disk takes many at a time
# Hold a directory: on Linux without reading it, which those who may only pass through it may, too.
_HOLD = getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW
_SAFE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # neither follow a link nor wait for a pipe


class Held:
    """A directory that is held open: its files are reached by it whatever has taken its name since.

    So what is read through it is of one save, never of two; files that are gone are errors.
    """

    def __init__(self, path: str):
        self._fd, self._error = None, None
        try:
            self._fd = os.open(path, _HOLD)
        except OSError as error:
            self._error = error

    @property
    def fd(self) -> int:
        """The descriptor. Raises OSError, the same as at the beginning, if the directory could not be opened then."""
        if self._fd is None:
            raise OSError(self._error.errno, self._error.strerror, self._error.filename)
        return self._fd

    def __del__(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


@dataclass(frozen=True)
class Folder:
    """Files below the directory `root`: a Storage. held: for reading what is complete; None for what is written."""

    root: str
    held: Held | None = field(default=None, compare=False, repr=False)
    writers = 4

    @property
    def readers(self) -> int:
        """Threads that read from a cache in memory are not more than the cores."""
        return min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)

    @property
    def text(self) -> str:
        """The path."""
        return self.root

    @property
    def fd(self) -> int | None:
        """The descriptor of the directory, where it is held open."""
        return self.held.fd if self.held is not None else None

    def at(self, name: str) -> str:
        """Path of a file."""
        return os.path.join(self.root, name)

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        """Bytes of a file."""
        with os.fdopen(self._open(name), "rb") as f:
            found = os.fstat(f.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "is no regular file")
            left = max(0, found.st_size - start)  # a size out of a damaged file takes no memory
            f.seek(start)
            return f.read(left if size is None else max(0, min(left, size)))

    @contextmanager
    def open(self, name: str, size: int, ranges: Sequence[tuple[int, int]] = ()) -> Iterator[_FileReader]:
        """A file for positioned reads."""
        fd = self._open(name)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != size:
                raise OSError(errno.EINVAL, f"has {found.st_size} bytes, wanted {size}")
            yield _FileReader(fd)
        finally:
            os.close(fd)

    def _open(self, name: str) -> int:
        return os.open(self.at(name), _SAFE) if self.held is None else os.open(name, _SAFE, dir_fd=self.fd)

    def identity(self) -> tuple[int, int]:
        """Device and number of the directory: no other has them while it is held."""
        found = os.fstat(self.fd) if self.held is not None else os.stat(self.root)
        return found.st_dev, found.st_ino

    def inside(self, name: str) -> bool:
        """Whether no part of the name is a link."""
        if self.held is None:
            return os.path.realpath(self.at(name)) == self.at(name)
        parts = name.split("/")
        with suppress(OSError):  # what is not there is said by who opens it
            for i in range(len(parts)):
                found = os.stat("/".join(parts[: i + 1]), dir_fd=self.fd, follow_symlinks=False)
                if stat.S_ISLNK(found.st_mode):
                    return False
        return True

    def write(self, name: str, blocks: Iterable[Any], durable: bool = True) -> None:
        """Write a new file, down to the disk if durable."""
        at, flags = self.at(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            fd = os.open(at, flags, 0o666)
        except FileNotFoundError:
            self._make_parents(name)
            fd = os.open(at, flags, 0o666)
        try:
            for block in blocks:
                view = memoryview(block).cast("B")
                while view.nbytes:
                    view = view[os.write(fd, view) :]
            if durable:
                os.fsync(fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, at) from None  # a descriptor has no name
        finally:
            os.close(fd)

    def _make_parents(self, name: str) -> None:
        """Make the directories above a file, but never the root: if that is gone, so is what was written before."""
        at = self.root
        for part in name.split("/")[:-1]:
            at = os.path.join(at, part)
            with suppress(FileExistsError):
                os.mkdir(at)

    def remove(self, name: str) -> None:
        """Remove a file."""
        os.remove(self.at(name))

    def names(self) -> list[str]:
        """All files, sorted."""
        walk = os.walk(self.root) if self.held is None else os.fwalk(".", dir_fd=self.fd)
        top = self.root if self.held is None else "."
        return sorted(os.path.relpath(os.path.join(at[0], f), top) for at in walk for f in at[2])

    def sync(self) -> None:
        """Make the names in all directories durable; the files are."""
        with ThreadPoolExecutor(_FSYNCS) as pool:
            list(pool.map(commit.sync_directory, [folder for folder, _, _ in os.walk(self.root)]))

    def delete(self) -> None:
        """Remove the directory, its marker first."""
        commit.remove(self.root)


@dataclass(frozen=True)
class _FileReader:
    fd: int

    def read_into(self, into: np.ndarray, offset: int) -> int:
        return os.preadv(self.fd, [into], offset)


@dataclass(frozen=True)
class FolderStore:
    """The place of a checkpoint in the file system, at an absolute path without links: a Store."""

    path: str

    @property
    def text(self) -> str:
        """The path."""
        return self.path

    def locate(self) -> Folder:
        """The directory of the complete checkpoint: of this name, or after a crash in `publish` a hidden one."""
        root = commit.resolve(self.path)
        return Folder(root, Held(root))

    def is_complete(self) -> bool:
        """Whether there is a marker."""
        return commit.is_complete(commit.resolve(self.path))

    def begin(self) -> Folder:
        """A new hidden directory."""
        return Folder(commit.begin(self.path))

    def draft(self, root: str) -> Folder:
        """The hidden directory `root`."""
        return Folder(root)

    def publish(self, storage: Folder, marker: bytes) -> None:
        """Write the marker, and give the hidden directory its name."""
        storage.write(MARKER, [marker])
        commit.sync_directory(storage.root)
        commit.publish(storage.root, self.path)

    def end(self, storage: Folder | None) -> None:
        """Remove the hidden directory if it is still there."""
        commit.end(self.path, storage.root if storage else None)

    def withdraw(self) -> Folder:
        """Hide the directory by a rename."""
        gone = Folder(commit.renamed_away(self.path))
        commit.sync_directory(os.path.dirname(self.path))
        return gone

    def child(self, name: str) -> FolderStore:
        """The place `name` in this directory."""
        return FolderStore(os.path.join(self.path, name))

    def children(self) -> list[str]:
        """Names of directories, and of such as a crash has left under a hidden name only."""
        names = os.listdir(self.path) if os.path.isdir(self.path) else []
        names = {re.sub(r"^\.(.+)\.old-[0-9a-f]+$", r"\1", name) for name in names}
        return sorted(name for name in names if not name.startswith("."))

    def clean(self, pattern: str, keep: Collection[str] = ()) -> None:
        """Remove hidden directories of such children; finish a re-save that was killed between its two renames."""
        for name in sorted(os.listdir(self.path)) if os.path.isdir(self.path) else []:
            if (m := re.fullmatch(r"\.(.+)\.(tmp|old|gone)-[0-9a-f]+", name)) and re.fullmatch(pattern, m[1]):
                if m[1] in keep:
                    continue
                path = os.path.join(self.path, m[1])
                if m[2] != "gone" and (found := commit.resolve(path)) != path:
                    os.rename(found, path)
                commit.remove(os.path.join(self.path, name))

    def above(self) -> FolderStore:
        """The directory that it is in."""
        return FolderStore(os.path.dirname(self.path))

    def notes(self) -> Notes:
        """Files in the directory itself."""
        return Notes(self.path)

    def to_json(self) -> dict[str, Any]:
        """The path."""
        return {"path": self.path}

"""Checkpoints in directories: plain files, positioned reads, small files that are renamed."""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fmegatron.checkpoint.files import siblings, trees
from fmegatron.checkpoint.files.commit import Store, Withdrawn, is_ours, parse_pointer, root_of
from fmegatron.checkpoint.files.entries import Entry, walk
from fmegatron.checkpoint.files.format import MANIFEST, MARKER
from fmegatron.checkpoint.files.held import Held
from fmegatron.checkpoint.files.leases import Lease, Watch
from fmegatron.checkpoint.files.notes import Notes
from fmegatron.checkpoint.files.probe import probe
from fmegatron.checkpoint.files.slots import FILE_BYTES
from fmegatron.files import disk, whole

_FSYNCS = 8  # a disk takes many at a time
_TRIES = 20  # to make a draft in a directory that others remove because it is empty
_LINK = "arrays"
_TAKEN = "got a path that exists and is no checkpoint, wanted a new one or a checkpoint; choose another, or remove it"


@dataclass(frozen=True)
class Folder:
    """Files below the directory `root`: a Storage.

    held: for reading what is complete; None for what is written.  lease: that of the save that writes it, where it was
    begun.  stated: the pointer that names it, where one was followed.
    """

    root: str
    held: Held | None = field(default=None, compare=False, repr=False)
    lease: Lease | None = field(default=None, compare=False, repr=False)
    stated: dict[str, Any] | None = field(default=None, compare=False, repr=False)
    writers = 4
    streams = stays_open = True

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
        return disk.read_part(lambda: self._open(name), start, size)

    @contextmanager
    def open(self, name: str, size: int, ranges: Sequence[tuple[int, int]] = ()) -> Iterator[_FileReader]:
        """A file for positioned reads."""
        fd = disk.look(lambda: self._open(name))
        try:
            found = disk.look(lambda: os.fstat(fd))
            if not stat.S_ISREG(found.st_mode) or found.st_size != size:
                raise OSError(errno.EINVAL, f"has {found.st_size} bytes, wanted {size}")
            yield _FileReader(fd)
        finally:
            os.close(fd)

    def forget(self, name: str) -> None:
        """Drop a file's pages, which are on the disk when a save is complete. What cannot be opened, a read reports."""
        with suppress(OSError):
            fd = self._open(name)
            try:
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def _open(self, name: str) -> int:
        return disk.open_safely(self.at(name)) if self.held is None else self.held.open(name)

    def identity(self) -> tuple[int, int]:
        """Device and number of the directory: no other has them while it is held."""
        return disk.identity(self.held.fd if self.held is not None else self.root)

    def inside(self, name: str) -> bool:
        """Whether no part of the name is a link."""
        if self.held is None:
            return os.path.realpath(self.at(name)) == self.at(name)
        parts = name.split("/")
        with suppress(OSError):  # what is not there is reported by who opens it
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
        if self.held is None:
            below, top = disk.files_below(self.root), self.root
        else:
            below, top = disk.files_below(".", self.fd), "."
        return sorted(os.path.relpath(os.path.join(folder, f), top) for folder, _, files in below for f in files)

    def entries(self) -> Iterator[Entry]:
        """Of the directory that is held, if it is, whatever has taken its name since."""
        return walk(self.root, self.fd)

    def sync(self) -> None:
        """Make the names in all directories durable; the files are."""
        with ThreadPoolExecutor(_FSYNCS) as pool:
            list(pool.map(whole.sync_directory, [folder for folder, _, _ in disk.files_below(self.root)]))


@dataclass(frozen=True)
class _FileReader:
    fd: int

    def read_into(self, into: np.ndarray, offset: int) -> int:
        return disk.look(lambda: os.preadv(self.fd, [into.data], offset))


@dataclass(frozen=True)
class FolderStore(Store[Folder]):
    """The place of a checkpoint in the file system, at an absolute path without links: a Store."""

    path: str

    @property
    def text(self) -> str:
        """The path."""
        return self.path

    # ---- what `Store` asks for

    def content(self, name: str) -> bytes | None:
        """Opened by its name each time: on a network file system an open is fresh, a listing need not be."""
        at = self.at(name)
        try:
            return disk.read_part(lambda: disk.open_safely(at), 0, FILE_BYTES)
        except OSError as error:
            if error.errno in disk.ABSENT:
                return None
            if error.errno in disk.DAMAGE:
                return b""
            raise OSError(error.errno, error.strerror, at) from None

    def is_there(self, name: str) -> bool:
        """Looked at by its name."""
        return disk.is_file(self.at(name))

    def inside(self, start: str = "") -> list[str]:
        """Names in the directory, sorted, without files that have not taken theirs."""

        def look() -> list[str]:
            with os.scandir(self.path) as entries:
                names = [e.name for e in entries if e.name.startswith(start) and not e.is_symlink()]
            return sorted(name for name in names if not name.startswith(whole.BESIDE))

        return disk.look(look, [])

    def make(self, token: str) -> None:
        """The draft, then the directory."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        for last in (*[False] * _TRIES, True):
            try:
                with suppress(FileExistsError):
                    os.mkdir(self.path)
                os.close(os.open(self.at(f".COMPLETE-{token}"), flags, 0o666))
                os.mkdir(self.at(token))
                break
            except FileNotFoundError:  # another process has removed the directory in between
                if last:
                    raise

    def fill(self, name: str, data: bytes) -> None:
        """Written to its end (a full disk may take a part), and synced."""
        fd = os.open(self.at(name), os.O_WRONLY | os.O_CLOEXEC)
        try:
            while data:
                data = data[os.write(fd, data) :]
            os.fsync(fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.at(name)) from None
        finally:
            os.close(fd)

    def put(self, name: str, data: bytes) -> None:
        """Written beside and renamed, if there is something to write."""
        if data:
            whole.write_whole(self.at(name), data)
        else:
            os.close(os.open(self.at(name), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))

    def move(self, name: str, to: str) -> None:
        """A rename of a file."""
        os.rename(self.at(name), self.at(to))

    def drop(self, name: str) -> None:
        """Remove a file."""
        with suppress(FileNotFoundError):
            os.remove(self.at(name))

    def delete(self, name: str, stop: threading.Event | None) -> None:
        """Remove a file or directory."""
        trees.remove(self.at(name), stop) if disk.is_directory(self.at(name)) else self.drop(name)

    def durable(self, below: str = "") -> None:
        """fsync of a directory. One that is gone has no names: who removed it has condemned what was in it first."""
        with suppress(FileNotFoundError):
            whole.sync_directory(os.path.normpath(self.at(below)))

    def files(
        self, token: str, lease: Lease | None = None, stated: dict[str, Any] | None = None, hold: bool = False
    ) -> Folder:
        """A directory in this one, or this one itself."""
        at = self.at(token) if token else siblings.resolve(self.path) if hold else self.path
        return Folder(at, Held(at) if hold else None, lease, stated)

    def published(self, token: str) -> None:
        """NAME/arrays leads to the arrays, as far as the file system has links."""
        at = self.at(_LINK)
        if disk.is_there(at) and not disk.is_link(at):
            return  # of a checkpoint of version 3 that could not be removed
        if disk.is_directory(self.at(f"{token}/{_LINK}")):
            os.symlink(f"{token}/{_LINK}", self.at(f".{_LINK}-{token}"))
            os.rename(self.at(f".{_LINK}-{token}"), at)
        else:
            self.drop(_LINK)

    def saved_at(self) -> float | None:
        """By the clock of the file system: when the pointer was written."""
        found = disk.look(lambda: os.stat(self.at(MARKER)), None)
        return None if found is None else found.st_mtime_ns / 1e9

    def is_link(self) -> bool:
        """Whether the directory is a link."""
        return disk.is_link(self.path)

    def unlink(self) -> None:
        """Remove the link."""
        os.remove(self.path)
        whole.sync_directory(os.path.dirname(self.path))

    def tidy(self) -> None:
        """Remove links to arrays that are gone, and the directory if it is empty."""
        for name in disk.names_in(self.path):
            at = self.at(name)
            if name == _LINK or name.startswith(f".{_LINK}-"):
                with suppress(FileNotFoundError):  # another process removes it
                    if disk.is_link(at) and not disk.is_there(os.path.realpath(at)):
                        os.remove(at)
        Notes(self.path).clean()
        with suppress(OSError):
            os.rmdir(self.path)

    def prepare(self) -> None:
        """Make the directory above it, durably."""
        self._check_target()
        parent = os.path.dirname(self.path)
        trees.make_directories(parent)
        for at in (self.path, parent):
            with suppress(PermissionError):  # a directory that we may write into and not read
                Notes(at).clean()  # of probes that were killed
        try:
            can = probe(self.path)
        except FileNotFoundError:  # there is none, or another process removes it now
            can = probe(parent)
        if not can:
            text = "got a file system that cannot sync directories, so a power cut may lose names of new checkpoints"
            warnings.warn(f"{self.path}: {text}; their files are synced", RuntimeWarning, stacklevel=4)

    def clean_old(self, watch: Watch) -> None:
        """Hidden directories beside it."""
        parent, name = os.path.split(self.path)
        siblings.clean(parent, re.escape(name), (), watch)

    def clean(self, pattern: str, keep: Collection[str], watch: Watch) -> None:
        """What is left of children, of older versions, too."""
        try:
            siblings.clean(self.path, pattern, tuple(keep), watch)
        finally:
            super().clean(pattern, keep, watch)

    def is_complete(self) -> bool:
        """Whether there is a complete save. (Of version 3 perhaps under a hidden name.)"""
        return super().is_complete() or siblings.resolve(self.path) != self.path

    def is_meant(self) -> bool:
        """Whether this is a checkpoint. (Of version 3 perhaps under a hidden name.)"""
        return super().is_meant() or siblings.resolve(self.path) != self.path

    def has_begun(self, token: str) -> bool:
        """Whether there is a draft; of version 3, a hidden directory."""
        return super().has_begun(token) or siblings.has_begun(self.path, token)

    def withdraw(self) -> Withdrawn:
        """(A hidden directory of version 3 has its name first.)"""
        siblings.finish(self.path)
        return super().withdraw()

    def set_aside(self) -> str:
        """(The same.)"""
        siblings.finish(self.path)
        return super().set_aside()

    # ---- the rest of a Store

    def at(self, name: str) -> str:
        """Path of a file in the directory."""
        return os.path.join(self.path, name)

    def limits(self) -> tuple[int, int]:
        """Those of the file system, for files of a save."""
        at = os.path.dirname(self.path)
        while not disk.is_there(at):
            at = os.path.dirname(at)
        try:
            part, longest = os.pathconf(at, "PC_NAME_MAX"), os.pathconf(at, "PC_PATH_MAX")
        except (OSError, ValueError):
            part, longest = 255, 4096
        return part, longest - 1 - len(os.fsencode(self.at("0" * 12))) - 1

    def child(self, name: str) -> FolderStore:
        """The place `name` in this directory."""
        return FolderStore(self.at(name))

    def children(self) -> list[str]:
        """Names of directories, and of such as version 3 has left under a hidden name only. Raises OSError."""
        names = {re.sub(r"^\.(.+)\.old-[0-9a-f]+$", r"\1", name) for name in disk.names_in(self.path)}
        return sorted(name for name in names if not name.startswith("."))

    def above(self) -> FolderStore:
        """The directory that it is in."""
        return FolderStore(os.path.dirname(self.path))

    def around(self) -> FolderStore | None:
        """The checkpoint in whose directory it would be. What is put there goes when that one is saved again."""
        at = FolderStore(os.path.realpath(self.path)).above()
        while (found := parse_pointer(at.content(MARKER))) is None or not (
            root_of(found) or disk.is_file(at.at(MANIFEST))
        ):
            if at == at.above():
                return None
            at = at.above()
        return at

    def notes(self) -> Notes:
        """Files in the directory itself."""
        return Notes(self.path)

    @property
    def saver_notes(self) -> Notes:
        """Files beside it."""
        return self.above().notes()

    def bytes_begun(self) -> int:
        """Bytes of all files of saves that are under way."""
        tokens = (name.removeprefix(".COMPLETE-") for name in self.inside(".COMPLETE-"))
        return sum(entry.size for token in tokens for entry in walk(self.at(token)))

    def how_to_move(self, to: str) -> str:
        """A command."""
        return f"mv {self.path} {to}"

    def to_json(self) -> dict[str, Any]:
        """The path."""
        return {"path": self.path}

    def _check_target(self) -> None:
        """Raise ValueError for a path that no checkpoint can be put at."""
        name, most = os.fsencode(os.path.basename(self.path)), self.limits()[0] - len("..reading-") - 12
        if len(name) > most:
            raise ValueError(f"{self.path}: got a name of {len(name)} bytes, wanted at most {most}; use a shorter one")
        if (around := self.around()) is not None:
            raise ValueError(f"{self.path}: got a path inside of the checkpoint {around.path}, wanted one beside it")
        if not disk.is_there(self.path):
            return
        if self.is_link():  # a save would be put into what it leads to
            raise ValueError(f"{self.path}: got a link to another place, wanted a name of its own; remove the link")
        if not disk.is_directory(self.path):
            raise ValueError(f"{self.path}: {_TAKEN}")
        names = self.inside()
        if names and MANIFEST not in names and not any(map(is_ours, names)):
            raise ValueError(f"{self.path}: {_TAKEN}")

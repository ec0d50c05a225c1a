"""Checkpoints in directories of the local file system: plain files, positioned reads, one hidden directory per save."""

from __future__ import annotations

import errno
import os
import re
import stat
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fmegatron.checkpoint.files import commit
from fmegatron.checkpoint.files.format import MANIFEST, MARKER, ZARR, Array
from fmegatron.checkpoint.files.held import Held
from fmegatron.checkpoint.files.keyvalue import KeyValues, file_values, unusual
from fmegatron.checkpoint.files.leases import LEASE_S, Holder, Lease, Watch, alive, saving_note, say_doubts, settling
from fmegatron.checkpoint.files.notes import Notes
from fmegatron.checkpoint.files.storage import Storage
from fmegatron.checkpoint.files.zarr_array import ZarrArray
from fmegatron.files import disk, whole

_FSYNCS = 8  # a disk takes many at a time
_LEFT = re.compile(r"\.(.+)\.(?:(?:tmp|old|gone)-[0-9a-f]+|saving-[0-9a-f]{12})")

_TAKEN = "got a path that exists and is no checkpoint, wanted a new one or a checkpoint; choose another, or remove it"


@dataclass(frozen=True)
class Folder:
    """Files below the directory `root`: a Storage.

    held: for reading what is complete; None for what is written.  lease: that of the save that writes it, where it was
    begun.
    """

    root: str
    held: Held | None = field(default=None, compare=False, repr=False)
    lease: Lease | None = field(default=None, compare=False, repr=False)
    writers = 4
    stated = None  # a directory has no pointer
    stays_open = True

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

    @cached_property
    def _values(self) -> KeyValues:
        """The same files, for tensorstore."""
        return file_values(self.root)

    def array(self, array: Array) -> ZarrArray:
        """An array to write. Its directory is made here: tensorstore would make the root, too."""
        self._make_parents(f"{array.name}/{ZARR}")
        return ZarrArray(array, self._values)

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

    def sync(self) -> None:
        """Make the names in all directories durable; the files are."""
        with ThreadPoolExecutor(_FSYNCS) as pool:
            list(pool.map(whole.sync_directory, [folder for folder, _, _ in disk.files_below(self.root)]))

    def delete(self) -> None:
        """Remove the directory, its marker first."""
        commit.remove(self.root)


@dataclass(frozen=True)
class _FileReader:
    fd: int

    def read_into(self, into: np.ndarray, offset: int) -> int:
        return disk.look(lambda: os.preadv(self.fd, [into.data], offset))


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
        """Whether there is a marker. Raises OSError if that cannot be seen."""
        return commit.is_complete(commit.resolve(self.path))

    def limits(self) -> tuple[int, int]:
        """Those of the file system, for files in the hidden directory."""
        at = os.path.dirname(self.path)
        while not disk.is_there(at):
            at = os.path.dirname(at)
        try:
            part, longest = os.pathconf(at, "PC_NAME_MAX"), os.pathconf(at, "PC_PATH_MAX")
        except (OSError, ValueError):
            part, longest = 255, 4096
        return part, longest - 1 - len(os.fsencode(commit.hidden(self.path, "tmp", "0" * 12))) - 1

    def begin(self) -> Folder:
        """A new hidden directory, after those of dead saves are gone. Its note is there first, so it has an owner."""
        self._check_target()
        commit.make_directories(os.path.dirname(self.path))
        try:
            doubts = self._clear(os.path.basename(self.path), Watch())
            fix = f"if they have died, `python -m fmegatron.checkpoint gc --watch 5m {self.above().path}` removes it"
            say_doubts(self.path, doubts, fix)
        except OSError as error:  # such as what belongs to another user; it is in no save's way
            text = f"{self.path}: what killed saves have left there could not be removed: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        token = commit.new_token()
        lease = Lease(self.above().notes(), saving_note(os.path.basename(self.path), token), exclusive=True)
        folder = Folder(commit.hidden(self.path, "tmp", token), lease=lease)
        try:
            os.mkdir(folder.root)
        except BaseException:
            lease.release()
            raise
        return folder

    def draft(self, root: str) -> Folder:
        """The hidden directory `root`."""
        return Folder(root)

    def publish(self, storage: Storage, marker: bytes) -> None:
        """Write the marker, and give the hidden directory its name."""
        storage.write(MARKER, [marker])
        whole.sync_directory(storage.root)
        commit.publish(storage.root, self.path)

    def end(self, storage: Storage | None) -> None:
        """Remove the hidden directory if it is still there, and with it the note of the save."""
        if storage is None:
            return
        with settling(storage.lease):
            # Interrupted between the two renames of `publish`, the name is still missing.
            commit.take_back(self.path, commit.hidden_name(storage.root)[3])
            if disk.is_there(storage.root):
                commit.remove(storage.root)

    def withdraw(self) -> Folder:
        """Hide the directory by a rename."""
        gone = Folder(commit.renamed_away(self.path))
        whole.sync_directory(os.path.dirname(self.path))
        return gone

    def set_aside(self) -> str:
        """Hide the directory by a rename, to stay; returns its new path."""
        aside = commit.renamed_away(self.path, "aside")
        whole.sync_directory(os.path.dirname(self.path))
        return aside

    def asides(self) -> list[tuple[str, Folder]]:
        """Directories that `set_aside` has hidden here, with the names that they had. Raises OSError."""
        found = ((name, commit.HIDDEN.fullmatch(name)) for name in disk.names_in(self.path))
        return [(m[1], Folder(os.path.join(self.path, name))) for name, m in found if m and m[2] == "aside"]

    def delete_aside(self, storage: Storage) -> None:
        """Remove the files of a checkpoint of this name that was set aside."""
        commit.discard(storage.root, self.path)

    def child(self, name: str) -> FolderStore:
        """The place `name` in this directory."""
        return FolderStore(os.path.join(self.path, name))

    def children(self) -> list[str]:
        """Names of directories, and of such as a crash has left under a hidden name only. Raises OSError."""
        names = {re.sub(r"^\.(.+)\.old-[0-9a-f]+$", r"\1", name) for name in disk.names_in(self.path)}
        return sorted(name for name in names if not name.startswith("."))

    def clean(self, pattern: str, keep: Collection[str], watch: Watch) -> None:
        """Remove what dead saves and deletions left of such children; finish a re-save that was killed half-way."""
        names = {
            m[1] for name in disk.names_in(self.path) if (m := _LEFT.fullmatch(name)) and re.fullmatch(pattern, m[1])
        }
        failed: list[OSError] = []
        for name in sorted(names.difference(keep)):
            try:
                self.child(name)._clear(name, watch)
            except OSError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _check_target(self) -> None:
        """Raise ValueError for a path that no checkpoint can be put at."""
        name, most = os.fsencode(os.path.basename(self.path)), self.limits()[0] - len("..reading-") - 12
        if len(name) > most:
            raise ValueError(f"{self.path}: got a name of {len(name)} bytes, wanted at most {most}; use a shorter one")
        if (why := unusual(self.path)) is not None:
            raise ValueError(f"{self.path!a}: got a path with {why}, wanted one that tensorstore writes to; rename it")
        if (around := self.around()) is not None:
            raise ValueError(f"{self.path}: got a path inside of the checkpoint {around.path}, wanted one beside it")
        if not disk.is_there(self.path):
            return
        if not disk.is_directory(self.path):
            raise ValueError(f"{self.path}: {_TAKEN}")
        if commit.is_mount_point(self.path):
            raise ValueError(f"{self.path}: got a mount point, wanted a path below one, as no rename replaces it")
        names = disk.names_in(self.path)
        if names and not {MARKER, MANIFEST} & set(names):
            raise ValueError(f"{self.path}: {_TAKEN}")

    def _clear(self, name: str, watch: Watch) -> list[tuple[str, Holder]]:
        """Remove what dead saves and deletions have left of this checkpoint. Raises OSError.

        Returns what is left of savers that may live, and may not.
        """
        notes = self.above().notes()
        left = {kind: commit.hidden_siblings(self.path, kind) for kind in ("tmp", "old", "gone")}
        savers = [(path, token, self._saver(path, token, watch)) for path, token in left["tmp"] + left["old"]]
        writing = {token for _, token, saver in savers if saver is not None}
        commit.finish(self.path, {token for _, token in left["old"]} - writing)
        for path, _ in left["gone"]:
            commit.discard(path, self.path)
        for path, token in left["tmp"] + left["old"]:
            if token not in writing:
                commit.discard(path, self.path)
        # Last, so that no leftover is ever without an owner: also notes of such that died before they made a directory.
        start = saving_note(name, "")
        for note in notes.names():
            if note.startswith(start) and note.removeprefix(start) not in writing and not alive(notes, note, watch):
                notes.remove(note)
        return [(path, saver) for path, _, saver in savers if saver is not None and not saver.sure]

    def _saver(self, path: str, token: str, watch: Watch) -> Holder | None:
        """Who may still save into a hidden directory. One without a note is of an older version."""
        notes, note = self.above().notes(), saving_note(os.path.basename(self.path), token)
        if notes.read(note) is not None:
            return alive(notes, note, watch)
        return Holder() if watch.quiet_s(path, disk.tree_stamp(path)) < LEASE_S else None

    def above(self) -> FolderStore:
        """The directory that it is in."""
        return FolderStore(os.path.dirname(self.path))

    def around(self) -> FolderStore | None:
        """The checkpoint in whose directory it would be. What is put there goes when that one is saved again."""
        at = FolderStore(os.path.realpath(self.path)).above()
        while not (commit.is_complete(at.path) and disk.is_file(os.path.join(at.path, MANIFEST))):
            if at == at.above():
                return None
            at = at.above()
        return at

    def notes(self) -> Notes:
        """Files in the directory itself."""
        return Notes(self.path)

    def to_json(self) -> dict[str, Any]:
        """The path."""
        return {"path": self.path}

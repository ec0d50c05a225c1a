"""File system queries: only ENOENT and ENOTDIR mean that nothing is there; other errors are retried, then raised.

A disk that hiccups, a server that is away, a directory that may not be read: none of them means that a file is missing.
`os.path.exists`, `isdir` and their kin answer False for all of them, so this room does not use them.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import xxhash

T = TypeVar("T")

ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})
# What may be over in a moment: disks and network file systems under load, servers that restart, handles that went stale
# because a directory was replaced. Permissions are not: they are what a user has set.
TRANSIENT = frozenset(
    getattr(errno, name)
    for name in "EIO ESTALE EINTR EAGAIN EBUSY ETIMEDOUT EREMOTEIO ECONNRESET ECONNREFUSED ENOTCONN ENETDOWN"
    " ENETUNREACH EHOSTDOWN EHOSTUNREACH ENOLINK ECOMM".split()
    if hasattr(errno, name)
)
# What a file's content or kind is the cause of: missing, no directory, a link, a pipe, a wrong size. (Errors of devices
# are not among them: EIO may be a bad sector, and is more often a server that is away, as ENXIO and ENODEV are a disk
# that went. A socket or device node in the place of a file has these two as well: see `open_safely`.)
DAMAGE = ABSENT | {errno.EINVAL, errno.ELOOP, errno.EISDIR, errno.ENAMETOOLONG}
_NO_DEVICE = frozenset({errno.ENXIO, errno.ENODEV})
_SAFE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
PAUSES_S = (0.05, 0.2, 0.75)  # between the tries


def look(ask: Callable[[], T], *absent: T) -> T:
    """The result of `ask()`, a function that only looks; `absent`, if given, when there is no such file or directory.

    Transient errors are tried again for a second. Raises OSError (FileNotFoundError too, without `absent`).

    >>> look(lambda: os.listdir("/no/such/directory"), [])
    []
    """
    for pause in (*PAUSES_S, None):
        try:
            return ask()
        except OSError as error:
            if absent and error.errno in ABSENT:
                return absent[0]
            if pause is None or error.errno not in TRANSIENT:
                raise
        time.sleep(pause)
    raise AssertionError("look: the last try returns or raises")


def check_damage(error: OSError, where: str) -> None:
    """Raise OSError, naming the place, for an error of reading a file (after `look`) that is not about the file.

    No permission, a server that is away, too many open files: what is behind may be good. Returns for damage.
    """
    if error.errno is not None and error.errno not in DAMAGE:
        text = f"{error.strerror}; whether it is good cannot be told; mend that, or restore another step by its number"
        raise OSError(error.errno, text, where) from error


def open_safely(path: str, dir_fd: int | None = None) -> int:
    """A descriptor for reading; no link is followed, and no pipe waited for. Raises OSError, tried once.

    EINVAL for a socket, or a device node without its device: that is what is wrong with the file. ENXIO and ENODEV of a
    regular file stay, as its disk is away.
    """
    try:
        return os.open(path, _SAFE, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in _NO_DEVICE and not stat.S_ISREG(os.lstat(path, dir_fd=dir_fd).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", path) from None
        raise


def names_in(path: str) -> list[str]:
    """Names in a directory, hidden ones too, sorted; [] without a directory. Raises OSError if it cannot be seen."""
    return sorted(look(lambda: os.listdir(path), []))


def listed(path: str | os.PathLike) -> list[str] | None:
    """Names in a directory, sorted; None for what is no directory. FileNotFoundError where nothing is; OSError."""
    try:
        return sorted(look(lambda: os.listdir(path)))
    except NotADirectoryError:
        return None


def read_part(opened: Callable[[], int], start: int = 0, size: int | None = None) -> bytes:
    """At most `size` bytes (None: all) of a regular file, from `start` on.

    opened: gives its descriptor (`open_safely`).  Raises OSError: EINVAL for what is no regular file.
    """

    def read() -> bytes:
        with os.fdopen(opened(), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "is no regular file")
            left = max(0, found.st_size - start)  # a size out of a damaged file takes no memory
            file.seek(start)
            return file.read(left if size is None else max(0, min(left, size)))

    return look(read)


def content_of(path: str | os.PathLike) -> bytes | None:
    """What is in a file, None where there is none. Raises OSError where that cannot be seen, as `exists` does not."""

    def read() -> bytes:
        with open(path, "rb") as file:
            return file.read()

    return look(read, None)


def open_regular(path: str | os.PathLike) -> int:
    """A descriptor for reading a regular file, a link to one too; no pipe is waited for. Raises OSError: EINVAL for
    what is no regular file, such as a device, which may have no end."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "is no regular file", os.fspath(path))
    return file


def text_of(path: str | os.PathLike, most: int = 64 << 20) -> str:
    """The text of a file for people or of JSON. Raises OSError: EINVAL for no regular file, EFBIG for more than `most`
    bytes; what is no UTF-8 becomes a mark."""

    def read() -> str:
        with os.fdopen(open_regular(path), "rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise OSError(errno.EFBIG, f"is longer than {most} bytes", os.fspath(path))
        return data.decode(errors="replace")

    return look(read)


def files_below(root: str, dir_fd: int | None = None) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk`, or `os.fwalk` with a descriptor, without following links, and without its silence.

    A directory that cannot be seen is an OSError; one that goes meanwhile is left out.
    """

    def unseen(error: OSError) -> None:
        if error.errno not in ABSENT:
            raise error

    if dir_fd is None:
        yield from os.walk(root, onerror=unseen)
    else:
        for folder, folders, files, _ in os.fwalk(root, onerror=unseen, dir_fd=dir_fd):
            yield folder, folders, files


def tree_stamp(root: str) -> bytes:
    """Bytes that change when anything below a directory does."""
    rows = []
    for folder, _, names in files_below(root):
        for at in (folder, *(os.path.join(folder, name) for name in sorted(names))):
            if (found := look(lambda at=at: os.lstat(at), None)) is not None:
                rows.append((at, found.st_size, found.st_mtime_ns))
    return xxhash.xxh3_64_hexdigest(repr(rows).encode()).encode()


def identity(at: str | int) -> tuple[int, int]:
    """Device and number of a file or directory, or of an open one: what it has whatever its name. Raises OSError."""
    found = look(lambda: os.stat(at))
    return found.st_dev, found.st_ino


def is_there(path: str) -> bool:
    """Whether anything has this name, a broken link too. Raises OSError if that cannot be seen."""
    return look(lambda: os.lstat(path), None) is not None


def is_directory(path: str) -> bool:
    """Whether this is a directory, or a link to one. Raises OSError if that cannot be seen."""
    return _is(stat.S_ISDIR, path)


def is_file(path: str) -> bool:
    """Whether this is a regular file, or a link to one. Raises OSError if that cannot be seen."""
    return _is(stat.S_ISREG, path)


def is_link(path: str) -> bool:
    """Whether this is a symbolic link. Raises OSError if that cannot be seen."""
    found = look(lambda: os.lstat(path), None)
    return found is not None and stat.S_ISLNK(found.st_mode)


def _is(kind: Callable[[int], Any], path: str) -> bool:
    found = look(lambda: os.stat(path), None)
    return found is not None and bool(kind(found.st_mode))

"""Atomic writes: a file appears complete and durable or not at all; it is written beside, synced and renamed."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from fmegatron.files.owners import owner

BESIDE = ".new-"  # a file before it takes its name: ".new-OWNER-HEX", so that what a dead process left is known as that
# What a file system answers that cannot sync a directory: its names are as durable as it makes them.
_NO_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})


def new_beside(directory: str | os.PathLike) -> str:
    """A path in a directory that no other file has, for one that is written and then renamed (`take_name`)."""
    return os.path.join(directory, f"{BESIDE}{owner()}-{secrets.token_hex(4)}")


@contextmanager
def whole_file(path: str | os.PathLike, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write that gets this name, in the place of one that has it, when the block ends without an error.

    After an error nothing has changed; after a crash there is the old file or the new one. A link of this name is
    replaced, not followed.

    Args:
        path: in a directory that is there.
        durable: when the block has ended, a power cut does not lose it.

    Raises OSError, naming the path: a full disk, no permission.
    """
    path = os.fspath(path)
    beside = new_beside(os.path.dirname(path))
    try:
        with open(beside, "xb") as file:
            yield file
            if durable:
                sync_file(file)
        take_name(beside, path, durable)
    except OSError as error:
        if error.errno is None or (error.filename is not None and error.filename != beside):
            raise
        raise OSError(error.errno, error.strerror, path) from None  # not the name that is gone by now
    finally:
        with suppress(FileNotFoundError):
            os.unlink(beside)


def write_whole(path: str | os.PathLike, data: bytes, durable: bool = True) -> None:
    """`whole_file` of these bytes."""
    with whole_file(path, durable) as file:
        file.write(data)


def take_name(new: str | os.PathLike, path: str | os.PathLike, durable: bool = True) -> None:
    """Rename a file or directory, whose content is durable, in the place of a file (or an empty directory) of the name.

    durable: when this returns, a power cut does not lose the name. Raises OSError.
    """
    os.replace(new, path)
    if durable:
        sync_directory(os.path.dirname(path))


def sync_file(file: BinaryIO) -> None:
    """What was written is durable when this returns. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: str | os.PathLike) -> None:
    """The names in a directory are durable when this returns; "" is where this process is. Raises OSError.

    On a file system that cannot sync directories they are as durable as it makes them.
    """
    can_sync(path)


def can_sync(path: str | os.PathLike) -> bool:
    """`sync_directory`; whether this file system can."""
    fd = os.open(path or os.curdir, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
        return False
    finally:
        os.close(fd)
    return True

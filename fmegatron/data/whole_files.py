"""Files that appear complete and durable or not at all, and the content of those that may be missing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A file to write that gets this name, in the place of one that has it, when the block ends without an error.

    When the block has ended, a power cut does not lose it. After an error nothing has changed.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(temporary, "wb") as file:
            yield file
            sync_file(file)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_file(file: BinaryIO) -> None:
    """What was written is durable when this returns."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: str | os.PathLike) -> None:
    """The names in a directory are durable when this returns."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def content_of(path: str | os.PathLike) -> bytes | None:
    """What is in a file, None where there is none. Raises OSError where that cannot be seen, as `exists` does not."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        return None


def names_in(path: str | os.PathLike) -> list[str] | None:
    """Names in a directory, None for what is no directory. FileNotFoundError where nothing is, OSError if unseen."""
    try:
        return sorted(os.listdir(path))
    except NotADirectoryError:
        return None

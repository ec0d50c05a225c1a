"""Directories: made durably, and removed file by file."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from fmegatron.checkpoint.files.format import MARKER
from fmegatron.files import disk, whole


def remove(path: str, stop: threading.Event | None = None) -> None:
    """Delete a directory tree, its marker first, file by file until `stop`. Raises its first OSError, at the end."""
    if disk.is_link(path):  # a user's link to another place: the link goes, and nothing else
        os.remove(path)
        return
    failed: list[OSError] = []

    def attempt(call: Callable[[str], None], at: str) -> None:
        try:
            call(at)
        except FileNotFoundError:
            pass  # another process removes it, too
        except OSError as error:
            failed.append(error)

    attempt(os.remove, os.path.join(path, MARKER))
    for folder, folders, files in os.walk(path, topdown=False, onerror=failed.append):
        for name in files:
            if stop is not None and stop.is_set():
                return
            attempt(os.remove, os.path.join(folder, name))
        for name in folders:  # empty by now; or links, which are not followed
            at = os.path.join(folder, name)
            attempt(os.remove if os.path.islink(at) else os.rmdir, at)
    attempt(os.rmdir, path)
    if failed := [error for error in failed if not isinstance(error, FileNotFoundError)]:
        raise failed[0]


def make_directories(path: str) -> None:
    """Make a directory and what is missing above it; a power cut does not lose them. Raises OSError."""
    missing = []
    while not disk.is_there(path):
        missing.append(path)
        path = os.path.dirname(path)
    for at in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another rank or job makes it, too
            os.mkdir(at)
        with contextlib.suppress(PermissionError):  # a directory that we may write into and not read
            whole.sync_directory(os.path.dirname(at))

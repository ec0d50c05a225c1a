"""Atomic commit in a file system: a directory is a complete checkpoint, or it is hidden and will be removed.

.NAME.tmp-TOKEN     being written, or (after an exchange) the old checkpoint on its way out
.NAME.old-TOKEN     the old checkpoint while the new one takes its name, where the system cannot exchange two names
.NAME.gone-TOKEN    being deleted; what is deleted has this name first, so that half of it is not taken for something
.NAME.aside-TOKEN   a checkpoint that a run has left behind when it went on from an older step
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import threading
from collections.abc import Callable, Collection

from fmegatron.checkpoint.files.format import MARKER
from fmegatron.files import disk, whole

HIDDEN = re.compile(r"\.(.+)\.(tmp|old|gone|aside)-([0-9a-f]+)")
_TRIES = 100  # of a publication that other savers of the same name come between


def is_complete(path: str) -> bool:
    """Whether a directory was written to its end (its content is checked when it is read). Raises OSError."""
    return disk.is_file(os.path.join(path, MARKER))


def hidden_name(path: str) -> re.Match[str]:
    """The name of a hidden directory, taken apart: [1] the checkpoint's, [2] the kind, [3] the token."""
    found = HIDDEN.fullmatch(os.path.basename(path))
    assert found is not None, f"{path} is the path of a hidden directory"
    return found


def hidden_siblings(path: str, *kinds: str) -> list[tuple[str, str]]:
    """(path, token) of the hidden directories of these kinds that belong to the checkpoint `path`."""
    parent, name = os.path.split(path)
    found = ((n, HIDDEN.fullmatch(n)) for n in disk.names_in(parent))
    return [(os.path.join(parent, n), m[3]) for n, m in found if m and m[1] == name and m[2] in kinds]


def resolve(path: str | os.PathLike, of: Collection[str] | None = None) -> str:
    """The directory that holds the checkpoint `path`: itself, or after a crash in `publish` the old or new one.

    of: tokens of the saves that count; None: all.  Raises OSError.
    """
    path = os.path.realpath(os.fspath(path))
    if not disk.is_there(path):
        # Only such a crash leaves an "old" without the name itself. Both are complete; the new one was decided upon.
        for old, token in hidden_siblings(path, "old"):
            if of is not None and token not in of:
                continue
            new = hidden(path, "tmp", token)
            if found := next((p for p in (new, old) if is_complete(p)), None):
                return found
    return path


def finish(path: str, of: Collection[str]) -> None:
    """Give a checkpoint its name back that one of these re-saves had when it was killed between two renames."""
    if not disk.is_there(path) and (found := resolve(path, of)) != path:
        # Another process may do the same, or save this one: then one of them has the name, and both are complete.
        with contextlib.suppress(FileNotFoundError):
            _rename_unless_there(found, path)


def take_back(path: str, token: str) -> None:
    """Give the checkpoint its name back that this save has hidden; if something has the name, delete what is hidden."""
    old = hidden(path, "old", token)
    if disk.is_there(old) and (disk.is_there(path) or not _rename_unless_there(old, path)):
        discard(old, path)


def publish(hidden_path: str, path: str) -> None:
    """Give the complete hidden directory its name, durably, and remove what had the name before.

    Several may save the same name at once: each becomes the checkpoint, the last one stays. Raises OSError when the
    name, or the last fsync, is refused: then what had the name has it again (or what another saver has given it since),
    and the new one is hidden.
    """
    parent, token = os.path.dirname(path), hidden_name(hidden_path)[3]
    undo = _take_name(hidden_path, path, token)
    try:
        whole.sync_directory(parent)
    except OSError as error:
        try:
            undo()
        except OSError as late:
            text = f"{error.strerror}; the names could not be put back ({late}), so the new checkpoint has its name"
            raise OSError(error.errno, text, parent) from late
        with contextlib.suppress(OSError):
            whole.sync_directory(parent)
        raise OSError(error.errno, error.strerror, parent) from None
    for left in (hidden_path, hidden(path, "old", token)):
        with contextlib.suppress(OSError):  # the new one is the checkpoint; the next save tries again, and reports it
            discard(left, path)


def discard(left: str, path: str) -> None:
    """Delete a hidden directory of the checkpoint `path`, if it is there: by another name first.

    Whoever still writes there, against all signs, then fails at the next file or the last rename, and nothing that is
    deleted bit by bit ever takes the name of a checkpoint. Raises OSError.
    """
    gone = left
    if hidden_name(left)[2] != "gone" and disk.is_there(left):
        gone = hidden(path, "gone", new_token())
        try:
            os.rename(left, gone)
        except FileNotFoundError:  # its owner, or another process that cleans, was faster
            return
    remove(gone)


def renamed_away(path: str, kind: str = "gone") -> str:
    """Hide a directory that is to be deleted, or set aside, in one step; returns its new name."""
    gone = hidden(path, kind, new_token())
    os.rename(path, gone)
    return gone


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


def hidden(path: str, kind: str, token: str) -> str:
    """The hidden directory of a checkpoint with this token."""
    parent, name = os.path.split(path)
    return os.path.join(parent, f".{name}.{kind}-{token}")


def new_token() -> str:
    """12 hex digits that no other save has."""
    return secrets.token_hex(6)


def is_mount_point(path: str) -> bool:
    """Whether a file system begins at this directory, so that no rename can put another one in its place."""
    if os.path.ismount(path):
        return True
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as f:  # of a part of the same file system
        escaped = "".join(f"\\{ord(c):03o}" if c in " \t\n\\" else c for c in path)
        return any(line.split(" ")[4] == escaped for line in f)
    return False


def _take_name(new: str, path: str, token: str) -> Callable[[], bool]:
    """Give `new` the name `path`, and hide what had it; returns what undoes that. Raises OSError: nothing changed."""
    old, ours = hidden(path, "old", token), disk.identity(new)
    for _ in range(_TRIES):
        if not disk.is_there(path):
            if _rename_unless_there(new, path):
                return lambda: _hide_again(path, new, ours, os.rename)
            continue
        if _exchange(new, path):
            return lambda: _hide_again(path, new, ours, _exchange_again)
        if not disk.is_there(new):
            raise FileNotFoundError(errno.ENOENT, "was taken away by another process before it had its name", new)
        # Between two renames the name is missing, but `resolve` finds both: there is no moment without a complete one.
        discard(old, path)  # of a try before
        try:
            os.rename(path, old)
        except FileNotFoundError:
            continue  # another process deletes it, or saves it
        try:
            if _rename_unless_there(new, path):
                return lambda: _hide_again(path, new, ours, os.rename) and _rename_unless_there(old, path)
        except OSError:
            _rename_unless_there(old, path)
            raise
    raise OSError(errno.EBUSY, "other processes save this checkpoint all the time", path)


def _hide_again(path: str, new: str, ours: tuple[int, int], swap: Callable[[str, str], None]) -> bool:
    """Take the name back from the checkpoint `ours`; False if another saver has given the name to its own since.

    That one was reported as saved: it must not be hidden with a save that failed.
    """
    if disk.look(lambda: disk.identity(path), None) != ours:
        return False
    swap(path, new)
    if disk.identity(new) == ours:
        return True
    swap(new, path)  # the other one came between the look and the swap
    return False


def _exchange_again(a: str, b: str) -> None:
    if not _exchange(a, b):
        raise OSError(errno.EIO, "could not be exchanged back", b)


def _rename_unless_there(source: str, path: str) -> bool:
    """Rename a directory; False if another one with something in it has the name by now, or the source is gone."""
    try:
        os.rename(source, path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _exchange(a: str, b: str) -> bool:
    """Swap two names in one step (Linux renameat2); False where the system or the file system cannot."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    at_cwd, exchange = -100, 2
    return call(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0

"""The file system's side of a save: a directory is a complete checkpoint, or it is hidden and will be removed.

.NAME.tmp-TOKEN   being written, or (after an exchange) the old checkpoint on its way out
.NAME.old-TOKEN   the old checkpoint while the new one takes its name, where the system cannot exchange two names
.NAME.gone-TOKEN  a checkpoint that is being deleted
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil

from fmegatron.checkpoint.files.format import MANIFEST, MARKER


def is_complete(path: str) -> bool:
    """Whether a directory was written to its end (its content is checked when it is read)."""
    return os.path.isfile(os.path.join(path, MARKER))


def checkpoint_around(path: str) -> str | None:
    """The checkpoint in whose directory the path would lie. What is put there goes when that one is saved again."""
    at = os.path.dirname(os.path.realpath(path))
    while not (is_complete(at) and os.path.isfile(os.path.join(at, MANIFEST))):
        at, below = os.path.dirname(at), at
        if at == below:
            return None
    return at


def hidden_siblings(path: str, kind: str = "") -> list[str]:
    """The hidden directories that saves of `path` have left behind, or have in use."""
    parent, name = os.path.split(path)
    starts = tuple(f".{name}.{k}-" for k in ([kind] if kind else ["tmp", "old"]))
    names = os.listdir(parent) if os.path.isdir(parent) else []
    return sorted(os.path.join(parent, n) for n in names if n.startswith(starts))


def resolve(path: str | os.PathLike) -> str:
    """The directory that holds the checkpoint `path`: itself, or after a crash in `publish` the old or new one."""
    path = os.path.realpath(os.fspath(path))
    if not os.path.lexists(path):
        # Only such a crash leaves an "old" without the name itself. Both are whole; the new one was decided upon.
        for old in hidden_siblings(path, "old"):
            new = _hidden(path, "tmp", old.rsplit("-", 1)[1])
            if found := next((p for p in (new, old) if is_complete(p)), None):
                return found
    return path


def begin(path: str) -> str:
    """Finish or remove what killed saves of this path left, and make a new hidden directory: rank 0 only."""
    if (around := checkpoint_around(path)) is not None:
        raise ValueError(f"{path}: lies inside the checkpoint {around}; choose a path beside it")
    parent = os.path.dirname(path)
    os.makedirs(parent, exist_ok=True)
    if os.path.lexists(path):
        if not os.path.isdir(path) or (
            os.listdir(path) and not any(os.path.lexists(f"{path}/{n}") for n in (MARKER, MANIFEST))
        ):
            raise ValueError(f"{path}: exists and is no checkpoint; choose another path, or remove it")
    elif (found := resolve(path)) != path:
        os.rename(found, path)
    for left in hidden_siblings(path):
        remove(left)
    hidden = _hidden(path, "tmp", secrets.token_hex(6))
    os.mkdir(hidden)
    return hidden


def publish(hidden: str, path: str) -> None:
    """Give the complete hidden directory its name, and remove what had the name before."""
    parent = os.path.dirname(path)
    if not os.path.lexists(path):
        os.rename(hidden, path)
    elif not _exchange(hidden, path):
        # Between two renames the name is missing, but `resolve` finds both: there is no moment without a whole one.
        old = _hidden(path, "old", hidden.rsplit("-", 1)[1])
        os.rename(path, old)
        os.rename(hidden, path)
    sync_directory(parent)
    for left in hidden_siblings(path):
        remove(left)


def end(path: str, hidden: str | None) -> None:
    """Rank 0, whatever happened: leave nothing hidden behind."""
    if hidden is not None:
        remove(hidden)
        if (found := resolve(path)) != path:  # interrupted between the two renames of `publish`
            os.rename(found, path)


def remove(path: str) -> None:
    """Delete a directory tree; the marker goes first, so that half of it never counts as complete."""
    if os.path.islink(path):  # what it points to is not ours
        os.remove(path)
        return
    if os.path.lexists(os.path.join(path, MARKER)):
        os.remove(os.path.join(path, MARKER))
    shutil.rmtree(path, ignore_errors=True)


def renamed_away(path: str) -> str:
    """Hide a directory that is to be deleted, in one step; returns its new name."""
    gone = _hidden(path, "gone", secrets.token_hex(6))
    os.rename(path, gone)
    return gone


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _hidden(path: str, kind: str, token: str) -> str:
    parent, name = os.path.split(path)
    return os.path.join(parent, f".{name}.{kind}-{token}")


def _exchange(a: str, b: str) -> bool:
    """Swap two names in one step (Linux renameat2); False where the system or the file system cannot."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    at_cwd, exchange = -100, 2
    return call(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0

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
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from fmegatron.checkpoint.format import DIGESTS, MANIFEST, MARKER, ZARR, Array, Manifest, zarr_metadata
from fmegatron.checkpoint.manifest import manifest_to_json, marker_to_json, to_json_text


def is_complete(path: str) -> bool:
    """Whether a directory was written to its end (its content is checked when it is read)."""
    return os.path.isfile(os.path.join(path, MARKER))


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


def describe(hidden: str, arrays: Iterable[Array]) -> None:
    """Write the zarr.json of arrays, for other readers; while the chunks are on their way."""
    for array in arrays:
        folder = os.path.join(hidden, array.name)
        os.makedirs(folder, exist_ok=True)
        put(os.path.join(folder, ZARR), to_json_text(zarr_metadata(array)).encode())


def complete(hidden: str, manifest: Manifest, digests: np.ndarray) -> None:
    """Write the metadata of the whole, make everything durable, then write the marker."""
    data, groups = manifest_to_json(manifest), set()
    for name in manifest.arrays:
        parts = name.split("/")[:-1]
        groups.update("/".join(parts[: i + 1]) for i in range(len(parts)))
    group = to_json_text({"zarr_format": 3, "node_type": "group", "attributes": {}}).encode()
    files = {DIGESTS: digests.tobytes(), MANIFEST: data} | {f"{name}/{ZARR}": group for name in groups}
    with ThreadPoolExecutor(8) as pool:  # a disk takes many fsyncs at a time
        list(pool.map(lambda item: put(os.path.join(hidden, item[0]), item[1]), files.items()))
        list(pool.map(sync_directory, [folder for folder, _, _ in os.walk(hidden)]))
    put(os.path.join(hidden, MARKER), marker_to_json(data))
    sync_directory(hidden)


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
    if os.path.lexists(os.path.join(path, MARKER)):
        os.remove(os.path.join(path, MARKER))
    shutil.rmtree(path, ignore_errors=True)


def renamed_away(path: str) -> str:
    """Hide a directory that is to be deleted, in one step; returns its new name."""
    gone = _hidden(path, "gone", secrets.token_hex(6))
    os.rename(path, gone)
    return gone


def put(path: str, data: bytes, durable: bool = True) -> None:
    """Write a file, down to the disk if durable."""
    with open(path, "wb") as f:
        f.write(data)
        f.flush()
        if durable:
            os.fsync(f.fileno())


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

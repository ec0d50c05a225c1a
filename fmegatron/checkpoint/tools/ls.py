"""ls: the checkpoints in a directory, complete or not, and leftovers of killed saves."""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from fmegatron.checkpoint.files import commit
from fmegatron.checkpoint.files.folder import FolderStore
from fmegatron.checkpoint.files.foreign import recognized
from fmegatron.checkpoint.files.format import MANIFEST, MARKER, CheckpointError, Manifest
from fmegatron.checkpoint.files.leases import STEP
from fmegatron.checkpoint.files.manifest import read_manifest
from fmegatron.checkpoint.files.saved import save_at
from fmegatron.checkpoint.files.storage import Storage, Store
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.manage.steps import Steps
from fmegatron.checkpoint.reading.source import Source
from fmegatron.files import disk
from fmegatron.files.disk import is_directory

NOTE = re.compile(r"\.(.+)\.(reading|leaving|saving|claim)-[0-9a-f]{12}|\.new-.+")  # a small file beside checkpoints
TEMPORARY = "temporary"  # where a Manager has its temporary checkpoints
_KINDS = (
    ("tmp", "being saved, or left by a killed save"),
    ("old", "replaced by a re-save"),
    ("gone", "being deleted"),
    ("aside", "set aside: a run went on from an older step"),
)


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a directory. problem: why it is not complete, or None.  nbytes, files: on disk (as the manifest
    has them where a store does not report it).  changed: when it was completed, seconds since 1970, None if unknown.
    held_by: the directory that holds it, a hidden one after a killed re-save.  finite: whether loss and gradient norm
    of its step were, as the run reported; None: it did not.
    """

    name: str
    path: str
    held_by: str
    problem: str | None
    step: int | None
    leaves: int
    nbytes: int
    files: int
    changed: float | None
    metadata: dict[str, Any]
    finite: bool | None = None


@dataclass(frozen=True)
class Leftover:
    """A hidden directory beside a checkpoint. kind: "tmp", "old", "gone" or "aside".  changed: newest time of all in
    it, None if unknown.  holds: whether the checkpoint `of` is here and nowhere else."""

    name: str
    path: str
    of: str
    kind: str
    nbytes: int
    files: int
    changed: float | None
    holds: bool

    @property
    def what(self) -> str:
        """What the kind means."""
        return dict(_KINDS)[self.kind]


@dataclass(frozen=True)
class Listing:
    """All checkpoints of a directory, by step and name, and the hidden directories beside them.

    is_directory: whether a directory of checkpoints was listed, and not a single checkpoint.
    """

    directory: str
    is_directory: bool
    checkpoints: tuple[Checkpoint, ...]
    leftovers: tuple[Leftover, ...]

    def to_json(self) -> dict[str, Any]:
        """All by names."""
        return asdict(self)


def listing(path: str | os.PathLike | Store) -> Listing:
    """The checkpoints in a directory, or the one at the path itself; of URLs what their store lists.

    A Manager's directory has temporary ones, too, in its directory `temporary`.

    Raises ValueError when the path does not exist, or is neither a checkpoint nor a directory that holds some.
    """
    store = open_store(path)
    if not isinstance(store, FolderStore):
        return _listing_of_store(store)
    if is_checkpoint(store.path):
        parent, name = os.path.split(store.path)
        return Listing(parent, False, (_checkpoint(store.path, name),), tuple(_leftovers(parent, name)))
    if not is_directory(store.path):
        what = "a file" if disk.is_there(store.path) else "nothing there"
        raise ValueError(f"{store.text}: got {what}, wanted a checkpoint or a directory of some")
    folders = [f for f in (store.path, os.path.join(store.path, TEMPORARY)) if _is_folder(f)]
    paths = [path for folder in folders for path in checkpoint_paths(folder)]
    checkpoints = tuple(sorted((_checkpoint(p, os.path.relpath(p, store.path)) for p in paths), key=_order))
    left = tuple(leftover for folder in folders for leftover in _leftovers(folder))
    if not checkpoints and not left and not all(map(NOTE.fullmatch, disk.names_in(store.path))):
        hint = recognized(store.locate()) or "check the path"
        raise ValueError(
            f"{store.text}: got a directory without checkpoints, wanted one, or a directory of some; {hint}"
        )
    return Listing(store.path, True, checkpoints, left)


def listing_of(source: Source) -> Listing:
    """An opened checkpoint of another system, alone."""
    root = source.text
    parent, name = os.path.split(root)
    size = sum(leaf.nbytes for leaf in source.leaves.values())
    files = sum(entry.kind != "directory" for entry in walk(root)) if is_directory(root) else 1
    facts = (source.step, len(source.leaves), size, files, None, dict(source.metadata), source.finite)
    return Listing(parent, False, (Checkpoint(name, root, root, None, *facts),), ())


def is_checkpoint(path: str) -> bool:
    """Whether a directory is meant as a single checkpoint: it has a marker or a manifest, or a killed re-save hides it,
    or it is named as a step."""
    path = os.path.realpath(path)
    if is_directory(path) and STEP.fullmatch(os.path.basename(path)):
        return True
    return commit.resolve(path) != path or any(disk.is_there(os.path.join(path, n)) for n in (MARKER, MANIFEST))


def checkpoint_paths(directory: str) -> list[str]:
    """The checkpoints in a directory of the file system, complete or not."""
    names = disk.names_in(directory)
    found = {n for n in names if n[0] != "." and is_checkpoint(os.path.join(directory, n))}
    found.update(m[1] for n in names if (m := commit.HIDDEN.fullmatch(n)) and m[2] == "old")
    paths = sorted(os.path.join(directory, n) for n in found)
    return [p for p in paths if is_directory(commit.resolve(p))]


def _is_folder(path: str) -> bool:
    return is_directory(path) and not disk.is_link(path) and not is_checkpoint(path)


def _order(found: Checkpoint) -> tuple[float, str]:
    return (math.inf if found.step is None else found.step, found.name)


def _checkpoint(path: str, name: str) -> Checkpoint:
    root = commit.resolve(path)
    files = [e for e in walk(root) if e.kind != "directory"]
    nbytes, changed = sum(e.size for e in files), max((e.changed for e in files), default=None)
    number = int(m[1]) if (m := STEP.fullmatch(os.path.basename(path))) else None
    try:
        manifest = save_at(FolderStore(path)).manifest
    except (CheckpointError, OSError) as error:
        return Checkpoint(name, path, root, _why(error, root), number, 0, nbytes, len(files), changed, {})
    at = next((e.changed for e in files if e.name == MARKER), changed)
    problem = _misnaming(FolderStore(path), number, manifest.step)
    facts = (manifest.step, len(manifest.leaves), nbytes, len(files), at, manifest.metadata, manifest.finite)
    return Checkpoint(name, path, root, problem, *facts)


def _misnaming(store: Store, number: int | None, step: int | None) -> str | None:
    """What is wrong with a checkpoint of this step under the name of step `number`, and what mends it."""
    if number is None or step in (None, number):
        return None
    return f"holds step {step}, and not {number}; {Steps(store.above()).mend(number, step)}"


def _why(error: Exception, root: str) -> str:
    if isinstance(error, CheckpointError) and not disk.is_there(os.path.join(root, MARKER)):
        return f"not complete: no {MARKER} file"
    return str(error)


def _leftovers(directory: str, of: str | None = None) -> list[Leftover]:
    found = []
    for name in disk.names_in(directory):
        path = os.path.join(directory, name)
        if not (m := commit.HIDDEN.fullmatch(name)) or of not in (None, m[1]):
            continue
        seen = disk.look(lambda path=path: os.lstat(path), None)
        if seen is None:  # the save that it belonged to has ended
            continue
        # What was renamed has another inode time; its content may be old.
        changed = max(seen.st_mtime, seen.st_ctime) if m[2] == "aside" else seen.st_mtime
        entries = list(walk(path)) if is_directory(path) and not disk.is_link(path) else []
        files = [e for e in entries if e.kind != "directory"]
        changed = max([changed, *(e.changed for e in entries)])
        holds = commit.resolve(os.path.join(directory, m[1])) == path
        found.append(Leftover(name, path, m[1], m[2], sum(e.size for e in files), len(files), changed, holds))
    return found


def _listing_of_store(store: Store) -> Listing:
    """What a store of objects lists: complete checkpoints; nothing of what killed saves left."""
    if store.is_complete():
        return Listing(store.text, False, (_stored(store, store.text.rstrip("/").rsplit("/", 1)[-1]),), ())
    names = [name for name in store.children() if store.child(name).is_complete()]
    left = tuple(_aside(name, storage) for name, storage in store.asides())
    if not names and not left:
        hint = recognized(store.locate()) or "check the URL"
        raise ValueError(f"{store.text}: got no complete checkpoint there or below, wanted one; {hint}")
    return Listing(store.text, True, tuple(sorted((_stored(store.child(n), n) for n in names), key=_order)), left)


def _aside(name: str, storage: Storage) -> Leftover:
    """A checkpoint of an object store that was set aside."""
    files, nbytes = storage.names(), 0
    with contextlib.suppress(CheckpointError):
        nbytes = stored_bytes(read_manifest(storage))
    return Leftover(f"{name}/{storage.root}", storage.text, name, "aside", nbytes, len(files), None, False)


def _stored(store: Store, name: str) -> Checkpoint:
    try:
        save = save_at(store)
    except CheckpointError as error:
        return Checkpoint(name, store.text, store.text, str(error), None, 0, 0, 0, None, {})
    m, number = save.manifest, int(found[1]) if (found := STEP.fullmatch(name)) else None
    facts = (m.step, len(m.leaves), stored_bytes(m), len(save.storage.names()), None, m.metadata, m.finite)
    problem = _misnaming(store, number, m.step)
    return Checkpoint(name, store.text, save.storage.text, problem, *facts)


def stored_bytes(manifest: Manifest) -> int:
    """Bytes of all chunk files of a checkpoint."""
    arrays = manifest.arrays.values()
    return sum(
        math.prod(a.grid) * a.chunk_nbytes + 16 * math.prod(a.file_grid) * math.prod(a.shard) * bool(a.shard)
        for a in arrays
    )


UNKNOWN = -1  # size of a file in a store that does not report it


@dataclass(frozen=True)
class Entry:
    """A name below a directory, by its relative path. kind: "file", "directory", "link" or "special"."""

    name: str
    kind: str
    size: int
    changed: float  # seconds since 1970


def walk(root: str, fd: int | None = None) -> Iterator[Entry]:
    """Everything below a directory. What vanishes on the way (another process deletes) is left out.

    fd: of the directory held open; what is below it is listed, whatever has taken the name `root` since.
    """
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        try:
            found = _inside(os.path.join(root, folder)) if fd is None else _inside_held(fd, folder)
        except FileNotFoundError:
            continue
        for name, seen in sorted(found):
            name, kind = f"{folder}/{name}" if folder else name, _kind(seen.st_mode)
            yield Entry(name, kind, seen.st_size if kind == "file" else 0, seen.st_mtime)
            if kind == "directory":
                waiting.append(name)


def _inside(path: str | int) -> list[tuple[str, os.stat_result]]:
    found = []
    with os.scandir(path) as entries:
        for e in entries:
            with contextlib.suppress(FileNotFoundError):
                found.append((e.name, e.stat(follow_symlinks=False)))
    return found


def _inside_held(fd: int, folder: str) -> list[tuple[str, os.stat_result]]:
    below = os.open(folder or ".", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
    try:
        return _inside(below)
    finally:
        os.close(below)


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "directory"
    if stat.S_ISLNK(mode):
        return "link"
    return "file" if stat.S_ISREG(mode) else "special"

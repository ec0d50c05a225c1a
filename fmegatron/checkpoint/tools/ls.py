"""ls: the checkpoints in a directory, complete or not, and leftovers of killed saves."""

from __future__ import annotations

import contextlib
import math
import os
import re
from dataclasses import asdict, dataclass
from typing import Any

from fmegatron.checkpoint.files.commit import Remnant, Store
from fmegatron.checkpoint.files.entries import UNKNOWN, walk
from fmegatron.checkpoint.files.foreign import recognized
from fmegatron.checkpoint.files.format import MARKER, CheckpointError, Manifest
from fmegatron.checkpoint.files.leases import STEP
from fmegatron.checkpoint.files.manifest import read_manifest
from fmegatron.checkpoint.files.saved import save_at
from fmegatron.checkpoint.files.siblings import HIDDEN, resolve
from fmegatron.checkpoint.files.storage import Storage
from fmegatron.checkpoint.files.stores import open_store
from fmegatron.checkpoint.manage.steps import Steps
from fmegatron.checkpoint.reading.source import Source
from fmegatron.files import disk
from fmegatron.files.disk import is_directory

NOTE = re.compile(r"\.(.+)\.(reading|leaving|saving|claim)-[0-9a-f]{12}|\.new-.+")  # a small file beside checkpoints
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
    held_by: the directory that holds its files.  finite: whether loss and gradient norm
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
    """A save in the place of a checkpoint that is not it, or (up to version 3) a hidden directory beside. kind: "tmp",
    "old", "gone" or "aside".  changed: newest time of all in it, None if unknown.  holds: whether the checkpoint `of`
    is here and nowhere else."""

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
    """All checkpoints of a directory, by step and name, and what else saves have there.

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

    Raises ValueError when the path does not exist, or is neither a checkpoint nor a directory that holds some.
    """
    store = open_store(path)
    if store.is_meant():
        parent, _, name = store.text.rstrip("/").rpartition("/")
        left = tuple(_leftover(name, remnant) for remnant in store.leftovers())
        return Listing(parent, False, (_checkpoint(store, name),), left + tuple(_hidden(parent, name)))
    rows = [_checkpoint(store.child(name), name) for name in _meant(store)]
    left = tuple(_leftover(name, remnant) for name, remnant in remnants(store)) + tuple(_hidden(store.text))
    there = is_directory(store.text)
    if not rows and not left and not (there and all(map(NOTE.fullmatch, disk.names_in(store.text)))):
        if not there and disk.is_there(store.text):
            raise ValueError(f"{store.text}: got a file, wanted a checkpoint or a directory of some")
        hint = recognized(store.files("")) or "check the path or URL"
        what = "a directory without checkpoints" if there else "nothing there"
        raise ValueError(f"{store.text}: got {what}, wanted a checkpoint, or a directory of some; {hint}")
    return Listing(store.text, True, tuple(sorted(rows, key=_order)), left)


def listing_of(source: Source) -> Listing:
    """An opened checkpoint of another system, alone."""
    root = source.text
    parent, name = os.path.split(root)
    size = sum(leaf.nbytes for leaf in source.leaves.values())
    files = sum(entry.kind != "directory" for entry in walk(root)) if is_directory(root) else 1
    facts = (source.step, len(source.leaves), size, files, None, dict(source.metadata), source.finite)
    return Listing(parent, False, (Checkpoint(name, root, root, None, *facts),), ())


def remnants(store: Store) -> list[tuple[str, Remnant]]:
    """The saves in a directory of checkpoints that are none of them, with the names that they were saved as."""
    found = []
    for name in store.children():
        with contextlib.suppress(OSError):  # what cannot be looked at is listed as such, with the checkpoints
            found += [(name, remnant) for remnant in store.child(name).leftovers()]
    return found


def _meant(store: Store) -> list[str]:
    """The names of checkpoints in a directory of them, complete or not."""

    def meant(child: Store) -> bool:
        try:
            return child.is_meant()
        except OSError:  # it is shown, with the reason
            return True

    return [name for name in store.children() if meant(store.child(name))]


def _order(found: Checkpoint) -> tuple[float, str]:
    return (math.inf if found.step is None else found.step, found.name)


def _checkpoint(store: Store, name: str) -> Checkpoint:
    number = int(m[1]) if (m := STEP.fullmatch(name.rpartition("/")[2])) else None
    try:
        save = save_at(store)
    except (CheckpointError, OSError) as error:
        nbytes, count, changed = _sizes(store.files(""))
        nbytes = nbytes or 0
        gone = isinstance(error, CheckpointError) and store.pointer() is None
        why = f"not complete: no {MARKER} file" if gone else str(error)
        return Checkpoint(name, store.text, store.text, why, number, 0, nbytes, count, changed, {})
    m, problem = save.manifest, _misnaming(store, number, save.manifest.step)
    nbytes, count, changed = _sizes(save.storage)
    facts = (m.step, len(m.leaves), stored_bytes(m) if nbytes is None else nbytes, count, store.saved_at() or changed)
    return Checkpoint(name, store.text, save.storage.text, problem, *facts, m.metadata, m.finite)


def _sizes(storage: Storage) -> tuple[int | None, int, float | None]:
    """Bytes (None: a store that does not report them), number and newest time (or None) of its files."""
    files = [entry for entry in storage.entries() if entry.kind != "directory"]
    if any(entry.size == UNKNOWN for entry in files):
        return None, len(files), None
    return sum(entry.size for entry in files), len(files), max((entry.changed for entry in files), default=None)


def _misnaming(store: Store, number: int | None, step: int | None) -> str | None:
    """What is wrong with a checkpoint of this step under the name of step `number`, and what mends it."""
    if number is None or step in (None, number):
        return None
    return f"holds step {step}, and not {number}; {Steps(store.above()).mend(number, step)}"


def _leftover(name: str, remnant: Remnant) -> Leftover:
    nbytes, count, changed = _sizes(remnant.files)
    if nbytes is None:
        with contextlib.suppress(CheckpointError, OSError):
            nbytes = stored_bytes(read_manifest(remnant.files))
    elif remnant.kind == "aside":  # its files may be old: the time at which it was set aside
        at = f"{remnant.place.text}/ASIDE-{remnant.token}"
        seen = disk.look(lambda: os.lstat(at), None)
        changed = changed if seen is None else max(seen.st_ctime, changed or 0.0)
    row = (f"{name}/{remnant.token}", remnant.files.text, name, remnant.kind, nbytes or 0, count, changed)
    return Leftover(*row, False)


def _hidden(directory: str, of: str | None = None) -> list[Leftover]:
    """What saves before version 4 have left beside their checkpoints."""
    found = []
    for name in disk.names_in(directory):
        path = os.path.join(directory, name)
        if not (m := HIDDEN.fullmatch(name)) or of not in (None, m[1]):
            continue
        seen = disk.look(lambda path=path: os.lstat(path), None)
        if seen is None:  # the save that it belonged to has ended
            continue
        # What was renamed has another inode time; its content may be old.
        changed = max(seen.st_mtime, seen.st_ctime) if m[2] == "aside" else seen.st_mtime
        entries = list(walk(path)) if is_directory(path) and not disk.is_link(path) else []
        files = [e for e in entries if e.kind != "directory"]
        changed = max([changed, *(e.changed for e in entries)])
        holds = resolve(os.path.join(directory, m[1])) == path
        found.append(Leftover(name, path, m[1], m[2], sum(e.size for e in files), len(files), changed, holds))
    return found


def stored_bytes(manifest: Manifest) -> int:
    """Bytes of all chunk files of a checkpoint."""
    arrays = manifest.arrays.values()
    return sum(
        math.prod(a.grid) * a.chunk_nbytes + 16 * math.prod(a.file_grid) * math.prod(a.shard) * bool(a.shard)
        for a in arrays
    )

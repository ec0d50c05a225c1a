"""DCP and Megatron torch_dist directories as sources of a restore: any mesh, only the shards that overlap.

Nothing in the files is executed (inert.py), every size is checked (dcp_directory.py), and with `verify` the checksum of
every shard that is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fmegatron.checkpoint import CheckpointError, Grain, Leaf, Source, Target
from fmegatron.checkpoint.dicts import values as plain
from fmegatron.files import disk
from fmegatron.interop.dcp_directory import COMMON, METADATA, Directory, Place, check_files, open_dcp
from fmegatron.interop.dcp_read import object_of, read_tensors
from fmegatron.layout import Box

NOTE = "fmegatron"  # the object of a DCP directory that holds step and metadata of the checkpoint it came from
RUN = "latest_checkpointed_iteration.txt"
_MOST_DIGITS = 18
_ITERATION = re.compile(r"iter_(\d{7,18})")


class DcpSource(Source):
    """A directory, opened. step: Megatron's iteration, where it has one.

    Objects of plain values are the values of a state, in the containers that torch's planner notes; the others are
    `unread`. "objects" in its metadata names them all (`read_dcp_object`).
    """

    def __init__(self, directory: Directory):
        self._directory = directory
        self._step, self._noted = words_of(directory)
        others = [name for name in directory.objects if name != NOTE]
        self._named = self._noted | ({"objects": others} if others else {})
        self._found: tuple[dict[str, Any], tuple[str, ...]] | None = None
        self._leaves = {t.path: Leaf.of(t.path, t.shape, t.dtype) for t in directory.tensors.values()}

    @property
    def kind(self) -> str:
        """Whose directory it is."""
        is_megatron = COMMON in self._directory.objects
        return "a torch_dist checkpoint of Megatron" if is_megatron else "a directory of torch.distributed.checkpoint"

    @property
    def verifies(self) -> bool:
        """Each shard is an archive with checksums."""
        return True

    @property
    def text(self) -> str:
        """The directory."""
        return self._directory.root

    @property
    def digest(self) -> int:
        """Of `.metadata`."""
        return self._directory.digest

    @property
    def leaves(self) -> Mapping[str, Leaf]:
        """The tensors."""
        return self._leaves

    @property
    def step(self) -> int | None:
        """Megatron's iteration, or the step that `fmegatron_to_dcp` has noted."""
        return self._step

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What `fmegatron_to_dcp` has noted, the names of objects, and the plain values among them."""
        values, containers = self._read[0], self._directory.containers
        if not values and not containers:
            return self._named
        return self._named | {plain.VALUES: values, plain.CONTAINERS: dict(containers)}

    @property
    def unread(self) -> tuple[str, ...]:
        """Objects that are no plain values: tensors within them, code, damage."""
        return self._read[1]

    @property
    def _read(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """(plain values as JSON, what is none), by path; read when it is first asked for."""
        if self._found is None:
            self._found = values_of(self._directory)
        return self._found

    def fill(self, wanted: Mapping[str, Sequence[Target]], verify: bool = True) -> None:
        """Fill the targets; with `verify` all of every shard that they touch is read, else the rows that they need."""
        self.require((path, target.box) for path, targets in wanted.items() for target in targets)
        read_tensors(self._directory, wanted, verify)

    def reads(self, path: str, box: Box) -> Iterator[Grain]:
        """The shards that a region touches, in full, as they are verified."""
        for place in self._at(path, box):
            yield Grain((path, place.file, place.offset), path, place.file, place.length)

    def require(self, wanted: Iterable[tuple[str, Box]]) -> None:
        """Raise CheckpointError unless the shards that these regions touch are in files that are large enough."""
        places = dict.fromkeys((path, place) for path, box in wanted for place in self._at(path, box))
        check_files(self._directory, places)

    def _at(self, path: str, box: Box) -> Iterator[Place]:
        """The shards that are touched."""
        tensor = self._directory.tensors[path]
        for stored, place in zip(tensor.boxes, tensor.places, strict=True):
            if stored.intersect(box.start, box.stop) is not None:
                yield place


def open_source(path: str | os.PathLike) -> DcpSource:
    """A directory, or the newest step of a run of Megatron, opened. Raises CheckpointError."""
    return DcpSource(open_dcp(newest_step(path)))


def newest_step(path: str | os.PathLike) -> str:
    """The directory of the newest step of a run of Megatron, as its tracker file names it; other paths as they are."""
    root = os.path.realpath(os.fspath(path))
    where = os.path.join(root, RUN)
    if disk.is_there(os.path.join(root, METADATA)) or not disk.is_there(where):
        return root
    try:
        text = disk.read_part(lambda: disk.open_safely(where), 0, 64).decode(errors="replace").strip()
    except OSError as error:
        disk.check_damage(error, where)
        raise CheckpointError(f"{where}: cannot be read ({error.strerror}); name one of the run's steps") from None
    if text != "release" and not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise CheckpointError(f"{where}: got {text!r:.40}, wanted an iteration or 'release'; name one of its steps")
    return os.path.join(root, text if text == "release" else f"iter_{int(text):07d}")


def words_of(directory: Directory) -> tuple[int | None, dict[str, Any]]:
    """(step, metadata) that are stored: as `fmegatron_to_dcp` has noted them, else Megatron's iteration.

    Raises CheckpointError for a note of another form.
    """
    found = object_of(directory, NOTE) if NOTE in directory.objects else {}
    step, metadata = (found.get("step"), found.get("metadata", {})) if isinstance(found, dict) else (None, None)
    if not (step is None or (type(step) is int and step >= 0)) or not isinstance(metadata, dict):
        raise CheckpointError(f"{directory.root}: {NOTE}: got another note than fmegatron writes; restore another step")
    return _iteration(directory) if step is None else step, metadata


def values_of(directory: Directory) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(objects of plain values, as JSON, by path; the paths of the others)."""
    values, unread = {}, []
    for name in directory.objects:
        if name == NOTE:
            continue
        try:
            values[name] = plain.to_json(object_of(directory, name), name)
        except (ValueError, RecursionError):  # CheckpointError is one: what is damaged is named, too
            unread.append(name)
    return values, tuple(unread)


def _iteration(directory: Directory) -> int | None:
    """Megatron's iteration: that of common.pt, or of the directory's name where that is no plain data; else None."""
    try:
        common = object_of(directory, COMMON, lenient=True) if COMMON in directory.objects else None
    except ValueError:  # it is damaged: what is asked of it by its name reports that
        common = None
    found = common.get("iteration") if isinstance(common, dict) else None
    if type(found) is int and found >= 0:
        return found
    named = _ITERATION.fullmatch(os.path.basename(directory.root))
    return int(named[1]) if named else None

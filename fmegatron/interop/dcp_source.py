"""DCP and Megatron torch_dist directories as sources of a restore: any mesh, only the shards that overlap.

Nothing in the files is executed (inert.py), every size is checked (dcp_directory.py), and with `verify` the checksum of
every shard that is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fmegatron.checkpoint import CheckpointError
from fmegatron.checkpoint.files.folder import Folder
from fmegatron.checkpoint.files.snapshot import Snapshot
from fmegatron.checkpoint.files.targets import Target
from fmegatron.files.look import check_damage, is_there
from fmegatron.interop.dcp_directory import COMMON, METADATA, Directory, Place, check_files, open_dcp
from fmegatron.interop.dcp_read import object_of, read_tensors
from fmegatron.interop.listed import snapshot_from
from fmegatron.layout import Box

NOTE = "fmegatron"  # the object of a DCP directory that holds step and metadata of the checkpoint it came from
RUN = "latest_checkpointed_iteration.txt"
_MOST_DIGITS = 18
_ITERATION = re.compile(r"iter_(\d{7,18})")


@dataclass(frozen=True)
class DcpReader:
    """Reads the elements of a directory."""

    directory: Directory
    verifies = True

    @property
    def kind(self) -> str:
        """What it is, in words."""
        is_megatron = COMMON in self.directory.objects
        return "a torch_dist checkpoint of Megatron" if is_megatron else "a directory of torch.distributed.checkpoint"

    def check(self, wanted: Mapping[str, Sequence[Box]]) -> None:
        """Raise CheckpointError unless the shards that these regions touch are in files that are large enough."""
        check_files(
            self.directory, ((path, place) for path, boxes in wanted.items() for place in self._at(path, boxes))
        )

    def fill(self, wanted: Mapping[str, Sequence[Target]], verify: bool) -> None:
        """Fill the targets; with `verify` all of every shard that they touch is read, else the rows that they need."""
        self.check({path: [target.box for target in targets] for path, targets in wanted.items()})
        read_tensors(self.directory, wanted, verify)

    def reads(self, path: str, box: Box) -> Iterator[tuple[str, int]]:
        """The shards that a region touches, in full, as they are verified."""
        return ((place.file, place.length) for place in self._at(path, [box]))

    def _at(self, path: str, boxes: Sequence[Box]) -> list[Place]:
        """The shards that are touched, each once."""
        tensor, found = self.directory.tensors[path], {}
        for box in boxes:
            for stored, place in zip(tensor.boxes, tensor.places, strict=True):
                if stored.intersect(box.start, box.stop) is not None:
                    found[place] = None
        return list(found)


def dcp_snapshot(path: str | os.PathLike) -> Snapshot:
    """A directory, or the newest step of a run of Megatron, opened. Raises CheckpointError.

    Its step is Megatron's iteration, where it has one; "objects" in its metadata names what is stored beside tensors
    (`read_dcp_object`).
    """
    directory = open_dcp(newest_step(path))
    step, metadata = words_of(directory)
    others = [name for name in directory.objects if name != NOTE]
    metadata = metadata | ({"objects": others} if others else {})
    tensors = {t.path: (t.shape, t.dtype) for t in directory.tensors.values()}
    return snapshot_from(directory.root, tensors, DcpReader(directory), directory.digest, step, metadata)


def newest_step(path: str | os.PathLike) -> str:
    """The directory of the newest step of a run of Megatron, as its tracker file names it; other paths as they are."""
    root = os.path.realpath(os.fspath(path))
    where = os.path.join(root, RUN)
    if is_there(os.path.join(root, METADATA)) or not is_there(where):
        return root
    try:
        text = Folder(root).read(RUN, 0, 64).decode(errors="replace").strip()
    except OSError as error:
        check_damage(error, where)
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

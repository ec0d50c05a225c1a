"""What a directory of torch.distributed.checkpoint holds: `.metadata` as plain values, every size checked.

Covers torch from 2.4 on and Megatron's `torch_dist`, which is the same with more in `.metadata` (the plans of all
ranks), objects next to tensors (`rng_state/shard_0_2`) and a `common.pt`. Nothing is executed: `.metadata` is a pickle
and is read by `inert.load` with the list of globals below.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash

from fmegatron.checkpoint import CheckpointError
from fmegatron.checkpoint.files import foreign, stores
from fmegatron.files import disk
from fmegatron.interop.inert import Global, Record, UnsafePickle, describe, load
from fmegatron.interop.torch_blob import dtype_from_global
from fmegatron.layout import Box
from fmegatron.layout.boxes import row_major_strides

_META, _PLAN = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner"
_FILES = "torch.distributed.checkpoint.filesystem"
ALLOWED = frozenset(
    {
        *(f"{_META}.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
        *(f"{_META}.{name}" for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
        f"{_META}.TensorProperties",
        f"{_FILES}._StorageInfo",
        f"{_FILES}._StoragePrefix",
        *(f"{_PLAN}.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
        f"{_PLAN}.BytesIOWriteData",
        "torch.Size",
        "torch.serialization._get_layout",
        "torch.strided",
        "collections.OrderedDict",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
        "pathlib.WindowsPath",
    }
)
COMMON = "common"  # Megatron's common.pt, as an object
METADATA, _MOST_METADATA_BYTES = ".metadata", 1 << 30


@dataclass(frozen=True)
class Place:
    """Bytes [offset, offset + length) of a file of the directory."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor: `name` is torch's, boxes and places (of the same index) state which part of it is where."""

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    places: tuple[Place, ...]


@dataclass(frozen=True)
class StoredObject:
    """Something pickled that is not a tensor; see `read_dcp_object`."""

    path: str
    name: str
    place: Place


@dataclass(frozen=True)
class Directory:
    """A DCP directory: its tensors and objects by path.

    A path joins the keys under which the state dict held a tensor by '/', where the directory has them
    (torch's default planner); else it is torch's flat name.  digest: 63 bits of the xxh3_64 of `.metadata`.
    containers: of those that the planner walked into, by path, what paths leave open.
    """

    root: str
    tensors: dict[str, StoredTensor]
    objects: dict[str, StoredObject]
    containers: dict[str, Any]
    digest: int = 0


def open_dcp(path: str | os.PathLike) -> Directory:
    """Read and check the metadata of a directory. Raises CheckpointError, naming what is missing or wrong."""
    root = os.path.realpath(os.fspath(path))
    where = os.path.join(root, METADATA)
    data = _metadata(root, where)
    try:
        value = load(data, lambda name: name in ALLOWED or dtype_from_global(name) is not None, where)
        return replace(_parse(root, value, where), digest=xxhash.xxh3_64_intdigest(data) >> 1)
    except UnsafePickle as error:
        raise CheckpointError(str(error)) from None
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{where}: not torch's metadata: {error!s:.300}") from None


def _metadata(root: str, where: str) -> bytes:
    """The bytes of `.metadata`. Raises CheckpointError: no pipe is waited for, and a hole takes no memory."""

    def part(start: int, size: int) -> bytes:
        return disk.read_part(lambda: disk.open_safely(where), start, size)

    try:
        size = os.stat(where, follow_symlinks=False).st_size
        if size > _MOST_METADATA_BYTES or (size and part(size - 1, 1) != b"."):  # how pickles end
            raise CheckpointError(f"{where}: got {size} bytes that are no pickle, wanted torch's metadata")
        return part(0, size)
    except OSError as error:
        disk.check_damage(error, where)
        hint = foreign.recognized(stores.open_store(root).locate()) if isinstance(error, FileNotFoundError) else None
        hint = hint or "wanted a directory that torch.distributed.checkpoint has written to its end"
        raise CheckpointError(f"{root}: no .metadata ({error.strerror}); {hint}") from None


def check_files(directory: Directory, wanted: Iterable[tuple[str, Place]]) -> None:
    """Raise CheckpointError unless these places, each with whose it is, are in files that are large enough for all.

    Nothing is read; so nothing is allocated for elements that are not there.
    """
    ends: dict[str, tuple[int, str]] = {}
    sums: dict[str, int] = {}
    for whose, place in wanted:
        ends[place.file] = max(ends.get(place.file, (0, "")), (place.offset + place.length, whose))
        sums[place.file] = sums.get(place.file, 0) + place.length
    for file, (end, whose) in ends.items():
        os.close(open_file(directory.root, Place(file, 0, max(end, sums[file])), whose))


def open_file(root: str, place: Place, where: str) -> int:
    """A file descriptor of a file of the directory that is long enough. Raises CheckpointError."""
    if os.path.basename(place.file) != place.file or place.file in ("", ".", ".."):
        raise CheckpointError(f"{where}: got the file name {place.file[:80]!r}, wanted one in {root}")
    at = os.path.join(root, place.file)
    try:
        fd = disk.look(lambda: disk.open_safely(at))
    except OSError as error:
        disk.check_damage(error, f"{where}: {at}")
        raise CheckpointError(f"{where}: its file {at} cannot be read ({error.strerror})") from None
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size < place.offset + place.length:
        os.close(fd)
        raise CheckpointError(
            f"{where}: its file {at} has {found.st_size} bytes, wanted at least {place.offset + place.length}"
        )
    return fd


# ---- records -> our own values


def _parse(root: str, value: Any, where: str) -> Directory:
    fields = _fields(value, "Metadata")
    keys, storage = _planner_paths(fields.get("planner_data")), fields.get("storage_data")
    if type(storage) is not dict or type(fields.get("state_dict_metadata")) is not dict:
        raise ValueError("got no state_dict_metadata or no storage_data, wanted both")
    places: dict[tuple[str, tuple[int, ...] | None], Place] = {}
    for index, info in storage.items():
        index, info = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
        file, offset, length = info["relative_path"], info["offset"], info["length"]
        if type(file) is not str or type(index["fqn"]) is not str:
            raise ValueError("got a file name or a tensor's name that is no text, wanted text")
        if info.get("transform_descriptors"):
            raise ValueError(
                f"{index['fqn'][:80]}: got chunks stored through transforms (compressed), wanted plain bytes"
            )
        _ints((offset, length))
        at = index.get("offset")
        places[index["fqn"], None if at is None else _ints(at)] = Place(file, offset, length)
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredObject] = {}
    for name, entry in fields["state_dict_metadata"].items():
        if type(name) is not str or type(entry) is not Record:
            raise ValueError("got an entry without a name, wanted names")
        path = keys.get(name, name)
        if path in tensors or path in objects:
            raise ValueError(f"{path[:80]}: got two entries with this path, wanted one")
        if entry.name == f"{_META}.BytesStorageMetadata":
            place = places.get((name, None))
            if place is None:
                raise ValueError(f"{name[:80]}: got no bytes, wanted them stored")
            objects[path] = StoredObject(path, name, place)
        else:
            tensors[path] = _tensor(path, name, _fields(entry, "TensorStorageMetadata"), places)
    if disk.is_file(common := os.path.join(root, "common.pt")) and COMMON not in tensors and COMMON not in objects:
        objects[COMMON] = StoredObject(COMMON, COMMON, Place("common.pt", 0, os.path.getsize(common)))
    return Directory(root, tensors, objects, _planner_containers(fields.get("planner_data")))


def _tensor(path: str, name: str, fields: dict[str, Any], places: dict) -> StoredTensor:
    shape, properties = _ints(fields["size"]), fields["properties"]
    state = properties.state
    if type(state) is not tuple or not state or type(state[0]) is not Global:
        raise ValueError(f"{name[:80]}: got no dtype, wanted one")
    dtype = dtype_from_global(state[0].name)
    if dtype is None:
        raise ValueError(
            f"{name[:80]}: got dtype {state[0].name[:40]!r}, wanted one that torch {torch.__version__} has"
        )
    boxes, at = [], []
    for chunk in fields["chunks"]:
        chunk = _fields(chunk, "ChunkStorageMetadata")
        start, sizes = _ints(chunk["offsets"]), _ints(chunk["sizes"])
        if not len(start) == len(sizes) == len(shape):
            raise ValueError(f"{name[:80]}: got a chunk with other dims than the tensor, wanted the same")
        if any(a + n > whole for a, n, whole in zip(start, sizes, shape, strict=True)):
            raise ValueError(f"{name[:80]}: got a chunk outside of the tensor, wanted it inside")
        if 0 in sizes:
            continue
        place = places.get((name, start))
        if place is None:
            raise ValueError(f"{name[:80]}: got no bytes for the chunk at {start}, wanted them stored")
        if place.length < (need := math.prod(sizes) * dtype.itemsize):
            raise ValueError(
                f"{name[:80]}: got {place.length} stored bytes for the chunk at {start}, wanted {need} or more"
            )
        boxes.append(Box(start, sizes, 0, row_major_strides(sizes)))
        at.append(place)
    if (held := sum(box.size for box in boxes)) != math.prod(shape):  # that they do not overlap is checked when read
        raise ValueError(f"{name[:80]}: got chunks of {held} elements, wanted {math.prod(shape)}")
    return StoredTensor(path, name, shape, dtype, tuple(boxes), tuple(at))


def _planner_paths(value: Any) -> dict[str, str]:
    """torch's flat name -> path, from the planner's own table of keys; nothing where there is none."""
    if type(value) is not dict:
        return {}
    return {
        name: "/".join(map(str, keys))
        for name, keys in value.items()
        if type(name) is str and type(keys) is tuple and keys and all(type(k) in (str, int) for k in keys)
    }


def _planner_containers(value: Any) -> dict[str, Any]:
    """What paths leave open, by path, as a save of ours states it: lists, whose items the planner's table numbers, and
    dicts with a key that holds a "/"."""
    items: dict[str, dict[Any, None]] = {}
    for name in _planner_paths(value):
        keys = value[name]
        for i, key in enumerate(keys):
            items.setdefault("/".join(map(str, keys[:i])), {})[key] = None
    found: dict[str, Any] = {}
    for path, keys in sorted(items.items()):
        if all(type(key) is int for key in keys):
            found[path] = "list"
        elif any(type(key) is str and "/" in key for key in keys):
            found[path] = {"dict": list(keys)}
    return found


def _fields(record: Any, kind: str) -> dict[str, Any]:
    if type(record) is not Record or record.name.rpartition(".")[2] != kind or type(record.state or {}) is not dict:
        raise ValueError(f"got {describe(record)}, wanted a {kind}")
    return record.state or {}


def _ints(values: Any) -> tuple[int, ...]:
    if type(values) is not tuple or any(type(n) is not int or not 0 <= n < 1 << 62 for n in values):
        raise ValueError(f"got {describe(values)}, wanted a tuple of whole numbers of 0 or more")
    return values

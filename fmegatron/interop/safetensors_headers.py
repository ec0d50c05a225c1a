"""Headers of safetensors files: which tensors a folder or a file has and where, everything checked, nothing trusted."""

from __future__ import annotations

import errno
import math
import os
import stat
import warnings
from typing import Any, NamedTuple

import torch
import xxhash

from fmegatron.checkpoint import CheckpointError
from fmegatron.files import disk, strict_json
from fmegatron.interop.safetensors_files import DTYPES, ENDING, INDEX

INDEXES = (INDEX,)
WEIGHTS = (f"model{ENDING}", f"adapter_model{ENDING}")
_MOST_BYTES = 100 << 20  # of a header, as the safetensors package has it, and of an index
_MOST_DIMS = 64  # torch's own bound
_AGAIN = "download it again"


class Place(NamedTuple):
    """Where a tensor is: file, dtype, shape, first byte."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class Headers(NamedTuple):
    """What a folder holds.

    places: by name.  sizes: bytes of each file.  metadata: the texts that the first file has.  digest: 63 bits of all
    headers.
    """

    places: dict[str, Place]
    sizes: dict[str, int]
    metadata: dict[str, str]
    digest: int


def headers(path: str | os.PathLike) -> Headers:
    """The headers of a safetensors file, or of the files of a folder. Raises CheckpointError, OSError."""
    root = os.fspath(path)
    where, owners = {root: root}, None
    if disk.is_directory(root):
        owners = _index(root)
        names = sorted(set(owners.values())) if owners is not None else [_single(root)]
        where = {name: os.path.join(root, name) for name in names}
    places: dict[str, Place] = {}
    sizes: dict[str, int] = {}
    texts: list[dict[str, str]] = []
    digests: list[int] = []
    for name, file in where.items():
        found, sizes[file], text, number = _header(file)
        texts.append(text)
        digests.append(number)
        for key, place in found.items():
            if owners is not None and owners.get(key, name) != name:
                continue  # another file has it, by the index
            if key in places:
                raise CheckpointError(f"{file}: {key[:80]}: is in {places[key].file} too; {_AGAIN}")
            places[key] = place
    for key, name in (owners or {}).items():
        if key not in places:
            raise CheckpointError(f"{root}: {key[:80]}: got no such tensor in {name}; {_AGAIN}")
    return Headers(places, sizes, texts[0] if texts else {}, xxhash.xxh3_64_intdigest(repr(digests).encode()) >> 1)


def _single(root: str) -> str:
    """The name of the one file with the weights of a folder."""
    for name in WEIGHTS:
        if disk.is_there(os.path.join(root, name)):
            return name
    raise CheckpointError(f"{root}: got no {WEIGHTS[0]} and no {INDEX}, wanted a folder with safetensors files")


def _index(root: str) -> dict[str, str] | None:
    """Tensor -> name of its file; None without an index."""
    where = os.path.join(root, INDEX)
    if not disk.is_there(where):
        return None
    fd, size = open_regular(where)
    try:
        found = _json(_read(fd, 0, _bounded(size, size, where), where), where).get("weight_map")
    finally:
        os.close(fd)
    if type(found) is not dict or not found or any(type(name) is not str for name in found.values()):
        raise CheckpointError(f"{where}: got no weight_map, wanted the file of each tensor; {_AGAIN}")
    for name in set(found.values()):
        if os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name:
            raise CheckpointError(f"{where}: names the file {name!r:.80}; only names without folders are read")
    if WEIGHTS[0] not in found.values() and disk.is_there(os.path.join(root, WEIGHTS[0])):
        warnings.warn(
            f"{root}: got {WEIGHTS[0]} and {INDEX}, which names other files; the first is read, as transformers does; "
            "remove the one that is older",
            stacklevel=2,
        )
        return None
    return found


def _header(path: str) -> tuple[dict[str, Place], int, dict[str, str], int]:
    """(tensors, size of the file, its texts, digest of the header)."""
    fd, size = open_regular(path)
    try:
        n = int.from_bytes(_read(fd, 0, min(8, size), path), "little")
        if size < 10:
            raise CheckpointError(f"{path}: got {size} bytes, wanted a header; {_AGAIN}")
        data = _read(fd, 8, _bounded(n, size - 8, path), path)
    finally:
        os.close(fd)
    entries = _json(data, path)
    texts = entries.pop("__metadata__", {})
    if type(texts) is not dict or any(type(text) is not str for text in texts.values()):
        raise CheckpointError(f"{path}: got metadata that is no table of texts; {_AGAIN}")
    found, end = [], 0
    for name, entry in entries.items():
        found.append((*_entry(entry, f"{path}: {name[:80]}"), name))
    places = {}
    for first, last, dtype, shape, name in sorted(found, key=lambda row: row[:2]):
        if first != end:
            raise CheckpointError(f"{path}: {name[:80]}: begins at byte {first}, wanted {end}, without a gap; {_AGAIN}")
        places[name], end = Place(path, dtype, shape, 8 + n + first), last
    if 8 + n + end != size:
        raise CheckpointError(f"{path}: {size} bytes where the header has {8 + n + end}; {_AGAIN}")
    return places, size, texts, xxhash.xxh3_64_intdigest(data)


def _entry(entry: Any, where: str) -> tuple[int, int, torch.dtype, tuple[int, ...]]:
    """(first byte, one past the last, dtype, shape) of a tensor."""
    fields = entry if type(entry) is dict else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if type(dtype) is not str or dtype not in DTYPES:
        raise CheckpointError(f"{where}: got dtype {dtype!r:.40}, wanted one of {', '.join(DTYPES)}")
    if type(shape) is not list or len(shape) > _MOST_DIMS or any(type(n) is not int or n < 0 for n in shape):
        raise CheckpointError(f"{where}: got shape {shape!r:.80}, wanted whole numbers of 0 or more; {_AGAIN}")
    if type(offsets) is not list or len(offsets) != 2 or any(type(n) is not int or n < 0 for n in offsets):
        raise CheckpointError(f"{where}: got offsets {offsets!r:.80}, wanted two whole numbers; {_AGAIN}")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(f"{where}: got bytes {offsets[0]} to {offsets[1]}, wanted {nbytes} of them; {_AGAIN}")
    return offsets[0], offsets[1], DTYPES[dtype], tuple(shape)


def _json(data: bytes, where: str) -> dict[str, Any]:
    try:
        return strict_json.parse_json(data)
    except ValueError as error:
        raise CheckpointError(f"{where}: not safetensors: {error!s:.200}; {_AGAIN}") from None


def _bounded(n: int, size: int, where: str) -> int:
    """A number of bytes to read, which must be there."""
    if not 2 <= n <= min(size, _MOST_BYTES):
        raise CheckpointError(f"{where}: got a header of {n} bytes in a file with {size} behind it; {_AGAIN}")
    return n


def open_regular(path: str) -> tuple[int, int]:
    """(descriptor, size) of a file, a link to one too, as the folders of Hugging Face's cache have them.

    No pipe is waited for. Raises CheckpointError for what is no file.
    """
    try:
        fd = disk.look(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        if error.errno != errno.ENXIO:
            disk.check_damage(error, path)
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); {_AGAIN}") from None
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise CheckpointError(f"{path}: is no regular file; {_AGAIN}")
    return fd, found.st_size


def _read(fd: int, offset: int, size: int, where: str) -> bytes:
    data = disk.look(lambda: os.pread(fd, size, offset))
    if len(data) != size:
        raise CheckpointError(f"{where}: ended at byte {offset + len(data)}; {_AGAIN}")
    return data

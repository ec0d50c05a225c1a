"""The types of the on-disk format: names, dtypes, sizes, digests; FORMAT.md specifies them for other readers."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import xxhash

from fmegatron.checkpoint.files import version1
from fmegatron.layout import Box

FORMAT, VERSION = "fmegatron.checkpoint", 4
READABLE = (version1.VERSION, 3, VERSION)  # versions of markers and manifests
MARKER_VERSION = 2  # of a pointer: a marker that is not of files beside it
MANIFEST, DIGESTS, MARKER, ZARR = "manifest.json", "digests.bin", "COMPLETE", "zarr.json"
LOCK = ".__lock"  # the end of the name that tensorstore gives a file while it writes it
SMALL_BYTES = 64 << 10  # leaves below this (global) are small,
MOST_SMALL = 256  # and packed if there are more: a file of its own costs about 1 ms (LOG.md), in a pack 0.1
CHUNK_BYTES = 16 << 20  # aim for the size of a chunk
MOST_CHUNK_BYTES = 64 << 20  # of any chunk, whatever shape and mesh
SHARD_BYTES = 256 << 20  # most of a file, one chunk at least
BAND_BYTES = 1 << 20  # most bytes under one digest
_SMALL_BAND_BYTES = 64 << 10  # bands of rows are not made smaller than this on purpose
ALIGN_BYTES = 64  # of a leaf inside a packed array

# Types that zarr.json names, spelled as torch spells them; others are unsigned integers of their width, with the name
# as an attribute: few zarr3 readers know a float8.
_ZARR_TYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64"
    " complex128".split()
)
_RAW = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128})


class CheckpointError(ValueError):
    """A checkpoint that is missing, incomplete, damaged or of another format; other steps may be good.

    A request that does not fit a good checkpoint (wrong shape, unknown leaf) is a plain ValueError.
    """


# ---- the typed content of the manifest


@dataclass(frozen=True)
class Array:
    """One stored zarr3 array. `chunk` and `band` are shapes: bands tile a chunk, and each is contiguous in its file.

    first_digest: index into digests.bin of the digest of the first band of the first chunk (chunks row-major, then
    bands row-major).  digest: xxh3_64 of the array's part of digests.bin.  version: of the format that it is stored in.
    shard: chunks in a file, for each dim; (): a chunk is a file, without an index.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    band: tuple[int, ...]
    first_digest: int = 0
    digest: str = ""
    version: int = VERSION
    shard: tuple[int, ...] = ()

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each dim."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))

    @property
    def bands(self) -> tuple[int, ...]:
        """Number of bands of a chunk along each dim."""
        return tuple(-(-c // b) for c, b in zip(self.chunk, self.band, strict=True))

    @property
    def digest_count(self) -> int:
        """Number of digests of the full array."""
        return math.prod(self.grid) * math.prod(self.bands)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return dtype_of(self.dtype).itemsize

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of a chunk: all are full ones."""
        return math.prod(self.chunk) * self.itemsize

    # ---- files: of each, the chunks that are inside of the array one after another, row-major, then the index

    @property
    def file_grid(self) -> tuple[int, ...]:
        """Number of files along each dim."""
        return tuple(-(-n // k) for n, k in zip(self.grid, self.shard, strict=True)) if self.shard else self.grid

    def file_of(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """Which file holds a chunk."""
        return tuple(i // k for i, k in zip(index, self.shard, strict=True)) if self.shard else index

    def file_name(self, file: tuple[int, ...]) -> str:
        """Path of a file inside the checkpoint."""
        return f"{self.name}/{'.'.join(('c', *map(str, file)))}"

    def chunk_file(self, index: tuple[int, ...]) -> str:
        """Path of a chunk's file inside the checkpoint."""
        return self.file_name(self.file_of(index))

    def file_chunks(self, file: tuple[int, ...]) -> tuple[range, ...]:
        """Per dim the chunks in a file; those beyond the array are not there."""
        if not self.shard:
            return tuple(range(i, i + 1) for i in file)
        ends = zip(file, self.shard, self.grid, strict=True)
        return tuple(range(i * k, min((i + 1) * k, n)) for i, k, n in ends)

    def offset(self, index: tuple[int, ...]) -> int:
        """The byte of its file at which a chunk begins."""
        at = 0
        for i, inside in zip(index, self.file_chunks(self.file_of(index)), strict=True):
            at = at * len(inside) + i - inside.start
        return at * self.chunk_nbytes

    def index_span(self, file: tuple[int, ...]) -> tuple[int, int]:
        """The bytes [start, stop) of a file's index; its chunks end at `start`, and it at `stop`."""
        data = math.prod(map(len, self.file_chunks(file))) * self.chunk_nbytes
        return data, data + 16 * math.prod(self.shard) * bool(self.shard)

    def file_index(self, file: tuple[int, ...]) -> np.ndarray:
        """The index at the end of a file: (offset, bytes) of each chunk, row-major, all ones where there is none."""
        rows = np.full((*self.shard, 2), 2**64 - 1, "<u8")
        counts = tuple(map(len, self.file_chunks(file)))
        places = np.arange(math.prod(counts), dtype="<u8").reshape(counts) * self.chunk_nbytes
        rows[(*map(slice, counts), 0)], rows[(*map(slice, counts), 1)] = places, self.chunk_nbytes
        return rows.reshape(-1)[: 2 * math.prod(self.shard) * bool(self.shard)]


@dataclass(frozen=True)
class Piece:
    """A writer's local storage of a leaf, verbatim, `offset` bytes into a one-chunk array; `boxes` give it meaning."""

    array: str
    offset: int
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Leaf:
    """A leaf of any source. dtype: torch's name of it, also where this torch does not have it."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> Leaf:
        """A leaf of a dtype of this torch."""
        return Leaf(path, shape, dtype_text(dtype))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype. Raises CheckpointError for one that this torch does not have."""
        return dtype_of(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class StoredLeaf(Leaf):
    """One leaf of a checkpoint of ours: in an array in global shape (`array`), or in pieces.

    at: where the array is a stack of leaves, the leading index of this one.
    """

    layout: dict[str, Any]  # spec and flat, and the index of the mesh; see manifest.py
    array: str | None = None
    pieces: tuple[Piece, ...] = ()
    at: tuple[int, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint except the elements.

    digest: xxh3_64 of manifest.json as it was read. The digests of all elements are in that file, so saves with the
    same digest hold the same.
    finite: whether loss and gradient norm of its step were finite, as the run reported; None: it did not.
    """

    step: int | None
    metadata: dict[str, Any]
    meshes: tuple[dict[str, Any], ...]
    leaves: dict[str, StoredLeaf]
    arrays: dict[str, Array]
    digest_count: int
    digest: str = ""
    finite: bool | None = None
    version: int = VERSION


# ---- names, types, bits


def dtype_text(dtype: torch.dtype) -> str:
    """Name of a dtype in the JSON: torch's own, e.g. `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name in the JSON. Raises CheckpointError for one that this torch does not have."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"dtype: got {name[:40]!r}, wanted a dtype of torch {torch.__version__}")
    return dtype


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers of the same width (complex128 stays); the same memory."""
    return x.detach().view(_RAW[x.element_size()])


def raw(x: torch.Tensor) -> np.ndarray:
    """`bits` of a CPU tensor for numpy; the same memory."""
    return np.asarray(_Memory(bits(x)))


class _Memory:
    """A tensor as numpy's array interface has it: `numpy()` marks the memory for good as one that has another owner,
    and a step that is given it with `donate` then copies it."""

    def __init__(self, x: torch.Tensor):
        assert x.is_cpu, "numpy has host memory only"
        self.kept = x
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(x.shape),
            "typestr": raw_dtype(x.element_size()).str,
            "strides": tuple(n * x.element_size() for n in x.stride()),
            "data": (x.data_ptr(), False),
        }


def raw_dtype(itemsize: int) -> np.dtype:
    """The numpy type of `raw` for elements of this many bytes."""
    return np.dtype(dtype_text(_RAW[itemsize]))


def digest(data: Any) -> int:
    """xxh3_64 of a contiguous buffer."""
    return xxhash.xxh3_64_intdigest(data)


def digest_text(data: Any) -> str:
    """xxh3_64 of a contiguous buffer, 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(data)


def array_name(path: str) -> str:
    """The directory of a leaf's array: its path, percent-quoted where a file system or zarr would object.

    >>> array_name("blocks/w qkv"), array_name("../x"), array_name("a/zarr.json"), array_name("a.__lock")
    ('arrays/blocks/w%20qkv', 'arrays/%2E./x', 'arrays/a/%7Aarr.json', 'arrays/a%2E__lock')
    """
    return f"arrays/{_quoted(path)}"


def piece_name(path: str, rank: int, number: int = 0) -> str:
    """The directory of what a rank keeps of a leaf that has no array in global shape: the first 64 MiB, or the next."""
    return f"pieces/{_quoted(path)}/{rank}.{number}" if number else f"pieces/{_quoted(path)}/{rank}"


def packed_name(rank: int, number: int = 0) -> str:
    """The directory of a rank's packed leaves: the first one, or the next."""
    return f"packed/{rank}.{number}" if number else f"packed/{rank}"


def _quoted(path: str) -> str:
    def quote(part: str) -> str:
        text = re.sub(r"[^A-Za-z0-9_.\-]", lambda c: "".join(f"%{b:02X}" for b in c[0].encode()), part)
        if not text:
            return "%"
        if text.endswith(LOCK):  # tensorstore takes no name for a file that ends as those do which it is still writing
            text = f"{text.removesuffix(LOCK)}%2E{LOCK[1:]}"
        return f"%{ord(text[0]):02X}{text[1:]}" if text[0] == "." or text == ZARR else text

    return "/".join(map(quote, path.split("/")))


def band_shape(chunk: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The digested bands of a chunk: full trailing dims, then as many rows as fit 1 MiB (an exact divisor if near).

    A matrix has at least 8 bands of rows unless they get small, so that a third of its rows can be read without much
    of the rest; one that is larger than usual has more, up to 256.
    """
    band, size = [1] * len(chunk), itemsize
    for d in reversed(range(len(chunk))):
        most = max(1, min(chunk[d], BAND_BYTES // size))
        if d == len(chunk) - 2:
            tall = math.prod(chunk) * itemsize > 1.5 * CHUNK_BYTES  # few columns of very many rows
            most = min(most, max(-(-chunk[d] // (256 if tall else 8)), _SMALL_BAND_BYTES // size, 1))
        if most < chunk[d]:
            band[d] = next((n for n in range(most, most // 2, -1) if chunk[d] % n == 0), most)
            break
        band[d] = chunk[d]
        size *= chunk[d]
    return tuple(band)


def zarr_metadata(array: Array) -> dict[str, Any]:
    """The zarr3 metadata of an array, as its zarr.json holds it."""
    known = array.dtype in _ZARR_TYPES
    name, attributes = (array.dtype, {}) if known else (f"uint{8 * array.itemsize}", {"dtype": array.dtype})
    if array.version == version1.VERSION:
        name, attributes = version1.zarr_type(array.dtype, name)
    fill = False if name == "bool" else [0.0, 0.0] if "complex" in name else 0.0 if "float" in name else 0
    raw: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    inner = {"chunk_shape": list(array.chunk), "codecs": raw, "index_codecs": raw, "index_location": "end"}
    shard = [c * k for c, k in zip(array.chunk, array.shard, strict=True)] if array.shard else list(array.chunk)
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(array.shape),
        "data_type": name,
        "fill_value": fill,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [{"name": "sharding_indexed", "configuration": inner}] if array.shard else raw,
        "attributes": attributes,
    }


def zarr_json(array: Array) -> bytes:
    """The bytes of an array's zarr.json."""
    return json.dumps(zarr_metadata(array), separators=(",", ":")).encode()

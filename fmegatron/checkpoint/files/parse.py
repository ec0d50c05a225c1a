"""The parser of the manifest's JSON: untrusted input with bounded work and memory.

Sizes are bounded by what they describe: a chunk is no larger than its array, a packed array neither larger nor smaller
than the leaves in it, no two elements of a box are at one place, and the boxes of a leaf cover it exactly once (a gap
would be restored as whatever was in memory before). So a leaf is no larger than the files that hold it. All checks take
time and memory in proportion to the file's length.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import reprlib
import secrets
from functools import lru_cache
from typing import Any

from fmegatron.checkpoint.files.format import (
    ALIGN_BYTES,
    BAND_BYTES,
    READABLE,
    Array,
    Manifest,
    Piece,
    StoredLeaf,
    dtype_of,
)
from fmegatron.files import strict_json
from fmegatron.layout import Box, Layout, Mesh, dtypes

_MOST_DIMS = 64  # torch's own bound
_MOST_SMALL_BANDS = 1 << 16  # of an array whose bands are below _SMALL_BAND_BYTES
_SMALL_BAND_BYTES = 4 << 10
_MOST_SLOTS = 1 << 20  # chunks of a file: their index takes 16 MiB
_MOST_ARRAY_BYTES = 1 << 62  # of an array or a leaf: all numbers of a reader fit 64 bits
MOST_STEP = 1 << 62
MOST_PATH = 4096  # characters, as file systems have it
MOST_DEPTH = 64  # parts of a path: each may become a dict
_PRIME = (1 << 61) - 1
_MOST_PARTS = 1 << 16  # interleaved parts of a dim
_PART = r"(?!zarr\.json(?:/|$))[A-Za-z0-9_%\-][A-Za-z0-9_.%\-]*"
_NAME = re.compile(f"(?:{_PART})(?:/{_PART})+")


@strict_json.no_collection()
def parse_manifest(value: dict[str, Any]) -> Manifest:
    """The manifest of parsed JSON, every type and size checked. Raises ValueError naming the leaf or array."""
    # used: bytes of each array that leaves have, and padding.  places: (array, at) of leaves
    name, arrays, leaves, used, places = "manifest", {}, {}, {}, set()
    try:
        count = _child(value, "digest_count", int)
        if (version := value.get("version")) not in READABLE:
            raise ValueError(f"got version {shown(version)}, wanted one of {READABLE}")
        for name, row in _child(value, "arrays", dict).items():
            arrays[name] = _parse_array(name, row, count, version)
        name = "manifest"
        if (total := sum(a.digest_count for a in arrays.values())) != count:
            raise ValueError(f"got digest_count {shown(count)}, wanted {total}, as the arrays have")
        rows = _child(value, "leaves", dict)
        _check_paths(rows)
        for name, row in rows.items():
            leaves[name] = _parse_leaf(name, row, arrays, used, places)
        for name, array in arrays.items():
            held, padding = used.get(name, (-1, 0))
            if not held <= math.prod(array.shape) * array.itemsize <= held + padding:
                raise ValueError(f"{array.shape} elements are more than its leaves have, or fewer")
        name, step = "manifest", value.get("step")
        if step is not None and (type(step) is not int or abs(step) >= MOST_STEP):
            raise ValueError(f"got step {shown(step)}, wanted a whole number or null")
        if (finite := value.get("finite")) not in (None, True, False) or type(finite) in (int, float):
            raise ValueError(f"got finite {shown(finite)}, wanted true, false or null")
        meshes, metadata = _child(value, "meshes", list), _child(value, "metadata", dict)
    except ValueError as error:
        raise ValueError(f"{shown(name).strip(chr(39))}: {error}") from None
    return Manifest(step, metadata, tuple(meshes), leaves, arrays, count, finite=finite, version=version)


def _padded(value: Any) -> int:
    if value is None or value is True:
        return value is True
    if type(value) is not int or not 1 < value < MOST_STEP:
        raise ValueError(f"got padded {shown(value)}, wanted true, or a unit of ranges, 2 or more")
    return value


def parse_layout(leaf: StoredLeaf, meshes: tuple[dict[str, Any], ...]) -> Layout:
    """The layout that a leaf had when it was written. Raises ValueError."""
    number, spec = _child(leaf.layout, "mesh", int), _child(leaf.layout, "spec", list)
    if not 0 <= number < len(meshes):
        raise ValueError(f"got mesh {shown(number)}, wanted one of {len(meshes)}")
    if len(spec) > len(leaf.shape):
        raise ValueError(f"spec {shown(spec)} is longer than shape {leaf.shape}")
    pieces = 1
    for entry in spec:
        if type(entry) is dict:
            parts = entry.get("parts")
            if "parts" not in entry:  # pieces that are assigned
                parts = _child(entry, "sizes", list)
                _ints(entry.get("order", []), most=_MOST_PARTS)
                pieces *= max(1, len(parts))
            if type(parts) is int and not 1 <= parts <= _MOST_PARTS:
                raise ValueError(f"{shown(parts)} parts")
            if type(parts) is not int:
                _ints(parts, most=_MOST_PARTS)
            entry = _child(entry, "axes", list)
        if entry is not None and type(entry) is not str:
            _names(entry)
    if pieces > _MOST_PARTS:
        raise ValueError(f"{pieces} pieces")
    row = {
        "shape": list(leaf.shape),
        "dtype": dtypes.dtype_name(dtype_of(leaf.dtype)),
        "spec": spec,
        "flat": list(_names(_child(leaf.layout, "flat", list))),
        "unreduced": [],
        "padded": _padded(leaf.layout.get("padded")),
        "flat_from": _child({"flat_from": 0, **leaf.layout}, "flat_from", int),
        "mesh": parse_mesh(meshes[number]).to_json(),
    }
    return Layout.from_json(row)


def parse_mesh(row: Any) -> Mesh:
    """A mesh that layouts refer to. Raises ValueError."""
    names, sizes = _names(_child(row, "names", list)), _ints(_child(row, "sizes", list), 1)
    digits = [_ints(pair, 1) for pair in _child(row, "digits", list)[: _MOST_DIMS + 1]]
    if len(names) != len(sizes) or any(len(pair) != 2 for pair in digits) or len(digits) > _MOST_DIMS:
        raise ValueError(f"mesh {shown(row)}: names, sizes and digits do not fit")
    # The digits are a permutation of the ranks: sorted by stride, each counts on where the one before ends.
    end = 1
    for size, stride in sorted(digits, key=lambda pair: pair[1]):
        if size > 1 and stride != end:
            raise ValueError(f"mesh {shown(row)}: its digits do not number the ranks")
        end *= size
    if end != math.prod(sizes) or end >= 1 << 62:
        raise ValueError(f"mesh {shown(row)}: its digits do not number the ranks")
    return Mesh.from_json({"names": names, "sizes": sizes, "digits": digits})


def _parse_array(name: str, row: Any, count: int, version: int) -> Array:
    if not _NAME.fullmatch(name):
        raise ValueError("not the name of a directory inside")
    shape, chunk, band = (_ints(_child(row, k, list), int(k != "shape")) for k in ("shape", "chunk", "band"))
    first, dtype = _child(row, "first_digest", int), _child(row, "dtype", str)
    if not len(shape) == len(chunk) == len(band):
        raise ValueError(f"shape {shape}, chunk {chunk} and band {band} differ in length")
    if any(c > max(n, 1) for c, n in zip(chunk, shape, strict=True)):
        raise ValueError(f"chunk {chunk} is larger than the array {shape}")
    shard = _ints(_child({"shard": [], **row}, "shard", list), 1)
    array = Array(name, shape, dtype, chunk, band, first, _child(row, "digest", str), version, shard)
    last = next((d for d, n in enumerate(band) if n > 1), len(band))  # dims after it must be full
    width, digests = math.prod(band) * array.itemsize, array.digest_count
    fits = band[last + 1 :] == chunk[last + 1 :] and band[last : last + 1] <= chunk[last : last + 1]
    if math.prod(shape) * array.itemsize >= _MOST_ARRAY_BYTES:
        raise ValueError(f"shape {shape} is larger than any array")
    if width > max(BAND_BYTES, 16) or not fits:
        raise ValueError(f"band {band} is not a contiguous part of at most 1 MiB of chunk {chunk}")
    if digests > _MOST_SMALL_BANDS and width < _SMALL_BAND_BYTES:
        raise ValueError(f"{digests} bands of {width} bytes are too small")
    if shard and (len(shard) != len(shape) or any(k > n for k, n in zip(shard, array.grid, strict=True))):
        raise ValueError(f"shard {shard} is not a part of {array.grid} chunks")
    if math.prod(shard) > _MOST_SLOTS:
        raise ValueError(f"shard {shard} has more than {_MOST_SLOTS} chunks")
    if first < 0 or first + digests > count:
        raise ValueError(f"digests {shown(first)} to {shown(first + digests)} of {shown(count)}")
    return array


def _parse_leaf(
    path: str,
    row: Any,
    arrays: dict[str, Array],
    used: dict[str, tuple[int, int]],
    places: set[tuple[str, tuple[int, ...]]],
) -> StoredLeaf:
    """A leaf. `used`: bytes of each array that are a leaf's, and most bytes of padding between them; grows, as does
    `places`: which leaf of which array."""
    shape, dtype, layout = _ints(_child(row, "shape", list)), _child(row, "dtype", str), _child(row, "layout", dict)
    width = _known(dtype)
    if "array" in row:
        array, at = arrays.get(_child(row, "array", str)), _ints(_child({"at": [], **row}, "at", list), 0, 1)
        if array is None or (array.shape[len(at) :], array.dtype) != (shape, dtype):
            raise ValueError("its array is missing, or has another shape or dtype")
        if at and (at[0] >= array.shape[0] or array.chunk[0] != 1):
            raise ValueError(f"at {at} is no leaf of a stack of {array.shape} in chunks of {array.chunk}")
        if (array.name, at) in places or (array.name in used and not at) or (array.name, ()) in places:
            raise ValueError(f"{array.name}{list(at) or ''} is another leaf's array")
        places.add((array.name, at))
        used[array.name] = used.get(array.name, (0, 0))[0] + math.prod(shape) * width, 0
        return StoredLeaf(path, shape, dtype, layout, array.name, at=at)
    pieces, everything = [], []
    for piece in _child(row, "pieces", list):
        array, offset = arrays.get(_child(piece, "array", str)), _child(piece, "offset", int)
        if array is None or len(array.shape) != 1 or array.shape != array.chunk or offset < 0:
            raise ValueError("a piece is not in an array of one dim and one chunk")
        boxes = _parse_boxes(_child(piece, "boxes", list), shape, array.shape[0] * array.itemsize - offset, width)
        held, padding = used.get(array.name, (0, 0))
        used[array.name] = held + sum(box.size for box in boxes) * width, padding + ALIGN_BYTES
        everything += boxes
        pieces.append(Piece(array.name, offset, boxes))
    _check_cover(everything, shape)
    return StoredLeaf(path, shape, dtype, layout, None, tuple(pieces))


def _parse_boxes(rows: list, shape: tuple[int, ...], size: int, width: int) -> tuple[Box, ...]:
    """Boxes of an array of `shape` whose elements, `width` bytes each, are within `size` stored bytes."""
    boxes = []
    if not rows:
        raise ValueError("a piece without boxes")
    for row in rows:
        if type(row) is not list or len(row) != 4 or type(row[2]) is not int or not 0 <= row[2] < 1 << 62:
            raise ValueError(f"got {shown(row)}, wanted a box [start, shape, offset, strides]")
        box = Box(_ints(row[0]), _ints(row[1], 1), row[2], _ints(row[3], 1))
        if not len(box.start) == len(box.shape) == len(box.strides) == len(shape):
            raise ValueError(f"{box} has other dims than the array")
        if any(a + n > whole for a, n, whole in zip(box.start, box.shape, shape, strict=True)):
            raise ValueError(f"{box} lies outside the array")
        span = 0  # from the first to the last element of the dims with smaller strides
        for stride, n in sorted(zip(box.strides, box.shape, strict=True)):
            if n > 1 and stride <= span:
                raise ValueError(f"{box} has two elements at one place")
            span += (n - 1) * stride
        if (box.offset + span + 1) * width > size:
            raise ValueError(f"{box} lies outside the stored bytes")
        boxes.append(box)
    return tuple(boxes)


def _check_cover(boxes: list[Box], shape: tuple[int, ...]) -> None:
    """ValueError unless the boxes cover the array exactly once.

    Give each index x of each dim d an unknown number X(d, x). A box from a to b stands for the product over the dims of
    X(d, a) - X(d, b), which is the sum of products at its corners with their signs. Boxes that cover the array once add
    up to the full product, because inner corners cancel; others do not, as how often each element is covered
    distinguishes such sums. So: random numbers in place of the unknowns, modulo a prime. The sums of other boxes are
    equal with a probability below 2^-54 (a polynomial of at most 64 factors, Schwartz 1980), and no file knows the
    numbers before. It takes one product for each box, no matter where they are.
    """
    if 0 in shape or (len(boxes) == 1 and boxes[0].shape == shape):
        if 0 in shape and boxes:
            raise ValueError("an empty leaf has pieces")
        return
    if (total := sum(box.size for box in boxes)) != math.prod(shape):
        raise ValueError(f"its {len(boxes)} boxes hold {total} of {math.prod(shape)} elements, not each exactly once")
    draw = random.Random(secrets.randbits(128)).getrandbits
    numbers: list[dict[int, int]] = [{} for _ in shape]

    def product(start: tuple[int, ...], stop: tuple[int, ...]) -> int:
        value = 1
        for known, a, b in zip(numbers, start, stop, strict=True):
            for x in (a, b):
                if x not in known:
                    known[x] = draw(61)
            value = value * (known[a] - known[b]) % _PRIME
        return value

    if sum(product(box.start, box.stop) for box in boxes) % _PRIME != product((0,) * len(shape), shape):
        raise ValueError(f"its {len(boxes)} boxes do not cover {shape} exactly once")


def _check_paths(leaves: dict[str, Any]) -> None:
    """Raise ValueError for paths that are too long, no text, or below another leaf's."""
    for path in leaves:
        if len(path) > MOST_PATH:
            raise ValueError(f"a path of {len(path)} characters, wanted at most {MOST_PATH}")
        if path.count("/") >= MOST_DEPTH:
            raise ValueError(f"a path of {path.count('/') + 1} parts, wanted at most {MOST_DEPTH}")
        if not path.isascii():
            path.encode()  # half a surrogate pair is an error (a ValueError)
    # Sorted as folders, what is below a leaf follows it.
    folders = sorted(f"{path}/" for path in leaves)
    for above, below in itertools.pairwise(folders):
        if below.startswith(above):
            raise ValueError(f"{shown(below[:-1])} lies below the leaf {shown(above[:-1])}")


@lru_cache(maxsize=64)
def _known(dtype: str) -> int:
    """Bytes of an element of a dtype that a state can have."""
    found = dtype_of(dtype)
    dtypes.dtype_name(found)
    return found.itemsize


def _child(row: Any, key: str, kind: type) -> Any:
    """row[key], which must have exactly this type."""
    got = row.get(key) if type(row) is dict else None
    if type(got) is not kind:
        raise ValueError(f"got {key} {shown(got)}, wanted {kind.__name__}")
    return got


def _names(values: Any) -> tuple[str, ...]:
    """A list of different axis names."""
    if type(values) is list and len(values) <= _MOST_DIMS and all(type(name) is str for name in values):
        if len(set(values)) == len(values):
            return tuple(values)
    raise ValueError(f"got {shown(values)}, wanted a list of different axes")


def _ints(values: Any, least: int = 0, most: int = _MOST_DIMS) -> tuple[int, ...]:
    """A short list of whole numbers in a range where products do no harm."""
    if type(values) is list and len(values) <= most:
        for n in values:
            if type(n) is not int or not least <= n < 1 << 62:
                break
        else:
            return tuple(values)
    raise ValueError(f"got {shown(values)}, wanted a list of at most {most} whole numbers of at least {least}")


def shown(value: Any) -> str:
    """The repr of a value, shortened before it is made: it may be very long or deep."""
    return reprlib.repr(value)

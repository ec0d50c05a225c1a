"""The manifest: one typed, versioned JSON file that says everything about a checkpoint but its elements; out and in."""

from __future__ import annotations

import json
import math
import os
from typing import Any

from fmegatron.checkpoint.format import (
    BAND_BYTES,
    FORMAT,
    MANIFEST,
    MARKER,
    VERSION,
    Array,
    CheckpointError,
    Leaf,
    Manifest,
    Piece,
    digest_text,
    dtype_of,
)
from fmegatron.layout import Box, Layout, Mesh, dtype_name

# ---- JSON out


def to_json_text(value: Any) -> str:
    """Compact JSON. Raises ValueError for what JSON does not have (NaN, infinity)."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def layout_to_json(layout: Layout, meshes: list[Mesh]) -> dict[str, Any]:
    """A layout without shape and dtype, its mesh as an index into `meshes` (which grows)."""
    if layout.mesh not in meshes:
        meshes.append(layout.mesh)
    value = {k: v for k, v in layout.to_json().items() if k not in ("shape", "dtype", "mesh", "unreduced")}
    return {"mesh": meshes.index(layout.mesh), **value}


def manifest_to_json(manifest: Manifest) -> bytes:
    """The bytes of manifest.json: one line for each leaf and array. Raises ValueError for metadata that is not JSON."""

    def table(rows: list[tuple[str, Any]]) -> str:
        return "{" + ",".join(f"\n  {to_json_text(k)}: {to_json_text(v)}" for k, v in rows) + "\n }"

    leaves, arrays = [], []
    for leaf in manifest.leaves.values():
        row = {"shape": leaf.shape, "dtype": leaf.dtype, "layout": leaf.layout}
        if leaf.array is not None:
            row["array"] = leaf.array
        else:
            row["pieces"] = [{"array": p.array, "offset": p.offset, "boxes": p.boxes} for p in leaf.pieces]
        leaves.append((leaf.path, row))
    for a in manifest.arrays.values():
        row = {"shape": a.shape, "dtype": a.dtype, "chunk": a.chunk, "band": a.band}
        arrays.append((a.name, {**row, "first_digest": a.first_digest, "digest": a.digest}))
    rows = {
        "format": to_json_text(FORMAT),
        "version": to_json_text(VERSION),
        "step": to_json_text(manifest.step),
        "metadata": to_json_text(manifest.metadata),
        "meshes": to_json_text(manifest.meshes),
        "digest_count": to_json_text(manifest.digest_count),
        "leaves": table(leaves),
        "arrays": table(arrays),
    }
    return ("{\n" + ",\n".join(f' "{k}": {v}' for k, v in rows.items()) + "\n}\n").encode()


def marker_to_json(manifest_bytes: bytes) -> bytes:
    """The bytes of the marker file, which says that all is written and pins the manifest."""
    return json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "manifest_bytes": len(manifest_bytes),
            "manifest_xxh3_64": digest_text(manifest_bytes),
        }
    ).encode()


# ---- JSON in: nothing in the files is trusted


def load_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object without duplicate keys. Raises CheckpointError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            raise ValueError("a key stands twice")
        return value

    try:
        value = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: not the JSON that was written ({str(error)[:200]}); {RESTORE_ANOTHER}"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: got a {type(value).__name__}, wanted an object; {RESTORE_ANOTHER}")
    return value


RESTORE_ANOTHER = "restore another step (Manager.restore_latest finds the newest good one)"


def read_manifest(root: str) -> Manifest:
    """The checked manifest of a complete checkpoint directory. Raises CheckpointError."""
    marker_at, manifest_at = os.path.join(root, MARKER), os.path.join(root, MANIFEST)
    try:
        with open(marker_at, "rb") as f:
            marker = load_json(f.read(4096), marker_at)
    except FileNotFoundError:
        what = "is a directory, but holds no complete checkpoint" if os.path.isdir(root) else "does not exist"
        raise CheckpointError(
            f"{root}: got no {MARKER} file ({root} {what}), wanted a checkpoint that was saved to its end;"
            " check the path, or restore another step"
        ) from None
    if (marker.get("format"), marker.get("version")) != (FORMAT, VERSION):
        got = f"{marker.get('format')!r:.60} version {marker.get('version')!r:.20}"
        raise CheckpointError(
            f"{root}: got format {got}, wanted {FORMAT!r} version {VERSION}; read it with its own version"
        )
    try:
        with open(manifest_at, "rb") as f:
            data = f.read()
    except OSError as error:
        raise CheckpointError(f"{manifest_at}: cannot be read ({error.strerror}); {RESTORE_ANOTHER}") from None
    want = (marker.get("manifest_bytes"), marker.get("manifest_xxh3_64"))
    for name, found in zip(("manifest_bytes", "manifest_xxh3_64"), want, strict=True):
        if found is None:
            raise CheckpointError(f"{marker_at}: got no {name}; the file was altered after the save; {RESTORE_ANOTHER}")
    if (len(data), digest_text(data)) != want:
        raise CheckpointError(
            f"{manifest_at}: got {len(data)} bytes with xxh3_64 {digest_text(data)}, wanted {want[0]!r:.20} bytes with"
            f" {want[1]!r:.20}; the file was altered after the save; {RESTORE_ANOTHER}"
        )
    return _parse(load_json(data, manifest_at), manifest_at)


def _parse(value: dict[str, Any], where: str) -> Manifest:
    """The manifest of parsed JSON, every type and size checked."""
    name = "manifest"
    try:
        count, arrays, leaves = _child(value, "digest_count", int), {}, {}
        for name, row in _child(value, "arrays", dict).items():
            arrays[name] = _parse_array(name, row, count)
        for name, row in _child(value, "leaves", dict).items():
            leaves[name] = _parse_leaf(name, row, arrays)
        name, step = "manifest", value.get("step")
        if step is not None and type(step) is not int:
            raise ValueError(f"got step {step!r:.60}, wanted a whole number or null")
        meshes, metadata = _child(value, "meshes", list), _child(value, "metadata", dict)
    except ValueError as error:
        raise CheckpointError(f"{where}: {name[:200]}: {error}; {RESTORE_ANOTHER}") from None
    return Manifest(step, metadata, tuple(meshes), leaves, arrays, count)


def _parse_array(name: str, row: Any, count: int) -> Array:
    if not all(p and p[0] != "." and "\0" not in p and "\\" not in p for p in name.split("/")):
        raise ValueError("not the name of a directory inside")
    shape, chunk, band = (_ints(_child(row, k, list), int(k != "shape")) for k in ("shape", "chunk", "band"))
    first, dtype = _child(row, "first_digest", int), _child(row, "dtype", str)
    if not len(shape) == len(chunk) == len(band):
        raise ValueError(f"shape {shape}, chunk {chunk} and band {band} differ in length")
    array = Array(name, shape, dtype, chunk, band, first, _child(row, "digest", str))
    last = next((d for d, n in enumerate(band) if n > 1), len(band))  # dims after it must be whole
    if math.prod(band) * array.itemsize > max(BAND_BYTES, 16) or band[last + 1 :] != chunk[last + 1 :]:
        raise ValueError(f"band {band} is not a contiguous part of at most 1 MiB of chunk {chunk}")
    if first < 0 or first + array.digest_count > count:
        raise ValueError(f"digests {first} to {first + array.digest_count} of {count}")
    return array


def _parse_leaf(path: str, row: Any, arrays: dict[str, Array]) -> Leaf:
    shape, dtype, layout = _ints(_child(row, "shape", list)), _child(row, "dtype", str), _child(row, "layout", dict)
    width = dtype_of(dtype).itemsize
    if "array" in row:
        array = arrays.get(_child(row, "array", str))
        if array is None or (array.shape, array.dtype) != (shape, dtype):
            raise ValueError("its array is missing, or has another shape or dtype")
        return Leaf(path, shape, dtype, layout, array.name)
    pieces, stored = [], 0
    for piece in _child(row, "pieces", list):
        array, offset = arrays.get(_child(piece, "array", str)), _child(piece, "offset", int)
        if array is None or len(array.shape) != 1 or array.shape != array.chunk or offset < 0:
            raise ValueError("a piece is not in an array of one dim and one chunk")
        size, boxes = array.shape[0] * array.itemsize - offset, []
        for box in _child(piece, "boxes", list):
            if type(box) is not list or len(box) != 4 or type(box[2]) is not int or box[2] < 0:
                raise ValueError(f"got {box!r:.60}, wanted a box [start, shape, offset, strides]")
            box = Box(_ints(box[0]), _ints(box[1], 1), box[2], _ints(box[3]))
            if not len(box.start) == len(box.shape) == len(box.strides) == len(shape):
                raise ValueError(f"{box} has other dims than the array")
            if any(a + n > whole for a, n, whole in zip(box.start, box.shape, shape, strict=True)):
                raise ValueError(f"{box} lies outside the array")
            last = box.offset + sum((n - 1) * s for n, s in zip(box.shape, box.strides, strict=True))
            if (last + 1) * width > size:
                raise ValueError(f"{box} lies outside the stored bytes")
            stored += box.size
            boxes.append(box)
        pieces.append(Piece(array.name, offset, tuple(boxes)))
    if stored != math.prod(shape):
        raise ValueError(f"pieces hold {stored} of {math.prod(shape)} elements")
    return Leaf(path, shape, dtype, layout, None, tuple(pieces))


def _child(row: Any, key: str, kind: type) -> Any:
    """row[key], which must have exactly this type."""
    got = row.get(key) if type(row) is dict else None
    if type(got) is not kind:
        raise ValueError(f"got {key} {got!r:.60}, wanted {kind.__name__}")
    return got


def _ints(values: Any, least: int = 0) -> tuple[int, ...]:
    """A list of whole numbers in a range where products do no harm."""
    if type(values) is list:
        for n in values:
            if type(n) is not int or not least <= n < 1 << 62:
                break
        else:
            return tuple(values)
    raise ValueError(f"got {values!r:.60}, wanted a list of whole numbers of at least {least}")


def layout_from_json(leaf: Leaf, meshes: tuple[dict[str, Any], ...]) -> Layout:
    """The layout that a leaf had when it was written. Raises CheckpointError."""
    row = {**leaf.layout, "shape": list(leaf.shape), "dtype": dtype_name(dtype_of(leaf.dtype)), "unreduced": []}
    try:
        return Layout.from_json({**row, "mesh": meshes[leaf.layout["mesh"]]})
    except (ValueError, TypeError, KeyError, IndexError, AssertionError) as error:
        raise CheckpointError(f"{leaf.path}: its stored layout cannot be read ({error}); {RESTORE_ANOTHER}") from None

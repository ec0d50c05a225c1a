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
    if (len(data), digest_text(data)) != want:
        raise CheckpointError(
            f"{manifest_at}: got {len(data)} bytes with xxh3_64 {digest_text(data)}, wanted {want[0]!r:.20} bytes with"
            f" {want[1]!r:.20}; the file was altered after the save; {RESTORE_ANOTHER}"
        )
    return _parse(load_json(data, manifest_at), manifest_at)


def _parse(value: dict[str, Any], where: str) -> Manifest:
    """The manifest of parsed JSON, every type and size checked."""

    def need(condition: bool, what: str) -> None:
        if not condition:
            raise CheckpointError(f"{where}: {what[:300]}; {RESTORE_ANOTHER}")

    def ints(x: Any, what: str, least: int = 0) -> tuple[int, ...]:
        ok = isinstance(x, list) and all(type(n) is int and least <= n < 1 << 62 for n in x)
        need(ok, f"{what}: got {str(x)[:60]}, wanted a list of whole numbers of at least {least}")
        return tuple(x)

    def child(x: Any, key: str, kind: type, what: str) -> Any:
        got = x.get(key) if isinstance(x, dict) else None
        need(type(got) is kind, f"{what}: got {key} {str(got)[:60]!r}, wanted {kind.__name__}")
        return got

    def box(x: Any, what: str) -> Box:
        need(isinstance(x, list) and len(x) == 4 and type(x[2]) is int and x[2] >= 0, f"{what}: not a box")
        return Box(ints(x[0], what), ints(x[1], what, 1), x[2], ints(x[3], what))

    arrays: dict[str, Array] = {}
    for name, row in child(value, "arrays", dict, "manifest").items():
        what = f"array {name!r}"
        parts = name.split("/")
        need(all(p and p[0] != "." and "\0" not in p and "\\" not in p for p in parts), f"{what}: not a name inside")
        shape, chunk, band = (
            ints(child(row, k, list, what), what, int(k != "shape")) for k in ("shape", "chunk", "band")
        )
        need(len(shape) == len(chunk) == len(band), f"{what}: shape, chunk and band differ in length")
        dtype, first = child(row, "dtype", str, what), child(row, "first_digest", int, what)
        arrays[name] = Array(name, shape, dtype, chunk, band, first, child(row, "digest", str, what))
        size = math.prod(band) * arrays[name].itemsize
        tail = next((d for d, (c, b) in enumerate(zip(chunk, band, strict=True)) if b > 1), len(band))
        contiguous = band[tail + 1 :] == chunk[tail + 1 :]
        need(size <= max(BAND_BYTES, 16) and contiguous, f"{what}: band {band} of chunk {chunk} is not contiguous")
    count = child(value, "digest_count", int, "manifest")
    for a in arrays.values():
        need(
            0 <= a.first_digest and a.first_digest + a.digest_count <= count, f"array {a.name!r}: digests out of range"
        )
    leaves: dict[str, Leaf] = {}
    for path, row in child(value, "leaves", dict, "manifest").items():
        what = f"leaf {path!r}"
        shape, dtype = ints(child(row, "shape", list, what), what), child(row, "dtype", str, what)
        layout, width = child(row, "layout", dict, what), dtype_of(dtype).itemsize
        if "array" in row:
            a = arrays.get(child(row, "array", str, what))
            need(a is not None and (a.shape, a.dtype) == (shape, dtype), f"{what}: no array of this shape and dtype")
            leaves[path] = Leaf(path, shape, dtype, layout, a.name)
            continue
        pieces = []
        for p in child(row, "pieces", list, what):
            a, offset = arrays.get(child(p, "array", str, what)), child(p, "offset", int, what)
            boxes = tuple(box(b, what) for b in child(p, "boxes", list, what))
            need(
                a is not None and len(a.shape) == 1 and a.shape == a.chunk,
                f"{what}: its array is not one chunk of one dim",
            )
            for b in boxes:
                need(len(b.start) == len(b.shape) == len(b.strides) == len(shape), f"{what}: a box with other dims")
                need(all(e <= n for e, n in zip(b.stop, shape, strict=True)), f"{what}: a box outside the array")
                last = offset + width * (
                    1 + b.offset + sum((n - 1) * s for n, s in zip(b.shape, b.strides, strict=True))
                )
                need(offset >= 0 and last <= a.shape[0] * a.itemsize, f"{what}: a box outside the stored bytes")
            pieces.append(Piece(a.name, offset, boxes))
        stored = sum(b.size for p in pieces for b in p.boxes)
        need(stored == math.prod(shape), f"{what}: pieces hold {stored} of {math.prod(shape)} elements")
        leaves[path] = Leaf(path, shape, dtype, layout, None, tuple(pieces))
    step, meshes = value.get("step"), child(value, "meshes", list, "manifest")
    need(step is None or type(step) is int, "step: wanted a whole number or null")
    return Manifest(step, child(value, "metadata", dict, "manifest"), tuple(meshes), leaves, arrays, count)


def layout_from_json(leaf: Leaf, meshes: tuple[dict[str, Any], ...]) -> Layout:
    """The layout that a leaf had when it was written. Raises CheckpointError."""
    row = {**leaf.layout, "shape": list(leaf.shape), "dtype": dtype_name(dtype_of(leaf.dtype)), "unreduced": []}
    try:
        return Layout.from_json({**row, "mesh": meshes[leaf.layout["mesh"]]})
    except (ValueError, TypeError, KeyError, IndexError, AssertionError) as error:
        raise CheckpointError(f"{leaf.path}: its stored layout cannot be read ({error}); {RESTORE_ANOTHER}") from None

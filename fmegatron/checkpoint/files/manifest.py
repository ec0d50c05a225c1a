"""The manifest: one typed, versioned JSON file with the tree, layouts and metadata of a checkpoint."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from fmegatron.checkpoint.files.foreign import recognized
from fmegatron.checkpoint.files.format import (
    FORMAT,
    MANIFEST,
    MARKER,
    READABLE,
    VERSION,
    CheckpointError,
    Manifest,
    StoredLeaf,
    digest_text,
)
from fmegatron.checkpoint.files.parse import (
    parse_layout,
    parse_manifest,
    parse_mesh,
)
from fmegatron.checkpoint.files.storage import Storage
from fmegatron.files import disk, strict_json
from fmegatron.layout import Layout, Mesh

_HEAD = re.compile(rb'\{\s*"format":\s*"[^"]*",\s*"version":\s*\d+,\s*"step":\s*(\d+),')

# ---- JSON out


def to_json_text(value: Any) -> str:
    """Compact JSON. Raises ValueError for what JSON does not have (NaN, infinity)."""
    return _encoder().encode(value)


def _encoder() -> json.JSONEncoder:
    return json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def layout_to_json(layout: Layout, meshes: list[Mesh]) -> dict[str, Any]:
    """A layout without shape and dtype, its mesh as an index into `meshes` (which grows)."""
    if layout.mesh not in meshes:
        meshes.append(layout.mesh)
    value = {k: v for k, v in layout.to_json().items() if k not in ("shape", "dtype", "mesh", "unreduced")}
    return {"mesh": meshes.index(layout.mesh), **value}


def manifest_to_json(manifest: Manifest) -> bytes:
    """The bytes of manifest.json: one line for each leaf and array. Raises ValueError for metadata that is not JSON."""

    text = _encoder().encode  # one for all rows

    def table(rows: Iterable[tuple[str, Any]]) -> str:
        return "{" + ",".join(f"\n  {text(k)}: {text(v)}" for k, v in rows) + "\n }"

    def leaves() -> Iterator[tuple[str, Any]]:
        for leaf in manifest.leaves.values():
            row = {"shape": leaf.shape, "dtype": leaf.dtype, "layout": leaf.layout}
            if leaf.array is not None:
                row |= {"array": leaf.array, "at": leaf.at} if leaf.at else {"array": leaf.array}
            else:
                row["pieces"] = [{"array": p.array, "offset": p.offset, "boxes": p.boxes} for p in leaf.pieces]
            yield leaf.path, row

    def arrays() -> Iterator[tuple[str, Any]]:
        for a in manifest.arrays.values():
            row = {"shape": a.shape, "dtype": a.dtype, "chunk": a.chunk, "band": a.band}
            row |= {"shard": a.shard} if a.shard else {}
            yield a.name, {**row, "first_digest": a.first_digest, "digest": a.digest}

    rows = {
        "format": text(FORMAT),
        "version": text(manifest.version),
        "step": text(manifest.step),
        "finite": text(manifest.finite),
        "metadata": text(manifest.metadata),
        "meshes": text(manifest.meshes),
        "digest_count": text(manifest.digest_count),
        "leaves": table(leaves()),
        "arrays": table(arrays()),
    }
    data = ("{\n" + ",\n".join(f' "{k}": {v}' for k, v in rows.items()) + "\n}\n").encode()
    try:
        strict_json.check_memory(data)
    except ValueError as error:
        raise ValueError(
            f"metadata and {len(manifest.leaves)} leaves: got a manifest that no reader takes ({error}), wanted a"
            " smaller one; keep large values in tensors, or stack the leaves of layers"
        ) from None
    return data


def marker_to_json(manifest_bytes: bytes, version: int = VERSION, step: int | None = None) -> bytes:
    """The bytes of the marker file, which states that all is written, pins the manifest and repeats its step."""
    value = {
        "format": FORMAT,
        "version": version,
        "manifest_bytes": len(manifest_bytes),
        "manifest_xxh3_64": digest_text(manifest_bytes),
    }
    return json.dumps(value if step is None else {**value, "step": step}).encode()


# ---- JSON in: nothing in the files is trusted


def load_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object without duplicate keys, NaN or infinity. Raises CheckpointError."""
    try:
        return strict_json.parse_json(data)
    except ValueError as error:
        raise CheckpointError(
            f"{where}: not the JSON that was written ({str(error)[:200]}); {RESTORE_ANOTHER}"
        ) from None


_MARKER_BYTES = 4096  # most of a marker that are read
_WITHOUT_OCDBT = (
    "commit 147eaa7 of fmegatron is the last that reads it, and rewrites it as plain files:"
    " `python -m fmegatron.checkpoint reshard OLD NEW --like OLD`"
)
RESTORE_ANOTHER = "restore another step (Manager.restore_latest finds the newest good one)"


def read_manifest(storage: Storage) -> Manifest:
    """The checked manifest of a complete checkpoint. Raises CheckpointError, OSError for what cannot be looked at.

    One of another system, or in a format that is no longer read, is named in the error, with what reads it.
    """
    marker_at, manifest_at = storage.at(MARKER), storage.at(MANIFEST)
    marker = _read_marker(storage)
    want = (marker.get("manifest_bytes"), marker.get("manifest_xxh3_64"))
    for name, found in zip(("manifest_bytes", "manifest_xxh3_64"), want, strict=True):
        if found is None:
            raise CheckpointError(f"{marker_at}: got no {name}; the file was altered after the save; {RESTORE_ANOTHER}")
    for name in ("format", "manifest_bytes", "manifest_xxh3_64", "step") if storage.stated is not None else ():
        got, stated = marker.get(name), (storage.stated or {}).get(name)
        if got != stated:
            raise CheckpointError(
                f"{marker_at}: got {name} {got!r:.40}, wanted {stated!r:.40} as its pointer says; one of them was"
                f" altered after the save; {RESTORE_ANOTHER}"
            )
    if type(want[0]) is not int or not 0 <= want[0] <= strict_json.MOST_BYTES:
        got = f"{want[0]!r:.40} for the size of the manifest"
        raise CheckpointError(
            f"{marker_at}: got {got}, wanted at most {strict_json.MOST_BYTES} bytes; {RESTORE_ANOTHER}"
        )
    try:
        data = storage.read(MANIFEST, 0, want[0] + 1)
    except OSError as error:
        disk.check_damage(error, manifest_at)
        raise CheckpointError(f"{manifest_at}: cannot be read ({error.strerror}); {RESTORE_ANOTHER}") from None
    if (len(data), digest_text(data)) != want:
        raise CheckpointError(
            f"{manifest_at}: got {len(data)} bytes with xxh3_64 {digest_text(data)}, wanted {want[0]!r:.20} bytes with"
            f" {want[1]!r:.20} as {marker_at} says; one of them was altered after the save; {RESTORE_ANOTHER}"
        )
    try:
        return replace(parse_manifest(load_json(data, manifest_at)), digest=want[1])
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{manifest_at}: {error}; {RESTORE_ANOTHER}") from None


def step_of_marker(marker: bytes) -> int | None:
    """The step that a marker names as that of its checkpoint; None: none, or it is damaged (which a read reports)."""
    try:
        step = strict_json.parse_json(marker).get("step")
    except ValueError:
        return None
    return step if type(step) is int else None


def step_of_head(manifest: bytes) -> int | None:
    """The step that the first bytes of a manifest of ours name; None: none, or they are not such."""
    found = _HEAD.match(manifest)
    return int(found[1]) if found else None


def _read_marker(storage: Storage) -> dict[str, Any]:
    """The marker of a complete checkpoint in the format that this version reads. Raises CheckpointError."""
    root, at = storage.text, storage.at(MARKER)
    try:
        marker = load_json(storage.read(MARKER, 0, _MARKER_BYTES), at)
    except (FileNotFoundError, NotADirectoryError):
        what = "is a directory, but holds no complete checkpoint" if disk.is_directory(root) else "does not exist"
        what = "is a file" if disk.is_file(root) else what
        hint = recognized(storage) or "check the path, or restore another step"
        if disk.is_link(root):  # in the place of a save: others may change what it leads to, or remove it
            what = f"is a link to {os.path.realpath(root)}, and links inside of a checkpoint are not followed"
            hint = "put in its place what it leads to, or restore that"
        raise CheckpointError(
            f"{root}: got no {MARKER} file ({root} {what}), wanted a checkpoint that was saved to its end; {hint}"
        ) from None
    except OSError as error:
        disk.check_damage(error, at)
        raise CheckpointError(f"{at}: cannot be read ({error.strerror}); {RESTORE_ANOTHER}") from None
    if (marker.get("format"), marker.get("store")) == (FORMAT, "ocdbt"):
        raise CheckpointError(
            f"{at}: got a checkpoint whose arrays lie in an OCDBT database, wanted plain files; {_WITHOUT_OCDBT}"
        )
    version = marker.get("version")
    if marker.get("format") != FORMAT or type(version) is not int or version not in READABLE:
        got = f"{marker.get('format')!r:.60} version {marker.get('version')!r:.20}"
        raise CheckpointError(
            f"{at}: got format {got}, wanted {FORMAT!r} version {VERSION}, {READABLE[1]} or {READABLE[0]};"
            " read it with its own version"
        )
    return marker


def layout_from_json(leaf: StoredLeaf, meshes: tuple[dict[str, Any], ...]) -> Layout:
    """The layout that a leaf had when it was written. Raises CheckpointError."""
    try:
        return parse_layout(leaf, meshes)
    except (ValueError, TypeError, KeyError, AssertionError) as error:
        raise CheckpointError(
            f"{leaf.path[:200]}: its stored layout cannot be read ({str(error)[:300]}); {RESTORE_ANOTHER}"
        ) from None


def mesh_from_json(row: Any) -> Mesh:
    """A mesh that the layouts of a checkpoint refer to. Raises CheckpointError."""
    try:
        return parse_mesh(row)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"a stored mesh: cannot be read ({str(error)[:300]}); {RESTORE_ANOTHER}") from None

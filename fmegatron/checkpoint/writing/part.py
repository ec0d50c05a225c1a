"""Parts: the records of what each rank has written, merged by rank 0 into one manifest."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fmegatron.checkpoint.files.format import (
    DIGESTS,
    MANIFEST,
    ZARR,
    Array,
    Manifest,
    Piece,
    StoredLeaf,
    band_shape,
    digest_text,
    dtype_of,
    dtype_text,
    zarr_json,
)
from fmegatron.checkpoint.files.manifest import layout_to_json, manifest_to_json, marker_to_json, to_json_text
from fmegatron.checkpoint.files.storage import Storage
from fmegatron.checkpoint.writing.plan import LeafPlan, grid_array
from fmegatron.files import strict_json
from fmegatron.layout import Box, Layout, Mesh


@dataclass
class Part:
    """What a rank has written.

    chunks: by array, the row-major numbers of its chunks.  digests: by array, uint64 [chunks, bands of a chunk].
    arrays: the one-chunk arrays that only this rank knows of.  pieces: by path, one after another.
    """

    rank: int
    plan: str
    chunks: dict[str, list[int]] = field(default_factory=dict)
    digests: dict[str, np.ndarray] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)

    def add(self, other: Part) -> None:
        """Take in more that the same rank has written: other leaves, or other chunks of the same."""
        for name, numbers in other.chunks.items():
            self.wrote(name, numbers, other.digests[name])
        self.arrays.update(other.arrays)
        self.pieces.update(other.pieces)

    def wrote(self, name: str, numbers: list[int], digests: np.ndarray) -> None:
        """Chunks of an array were written."""
        self.chunks[name] = self.chunks.get(name, []) + numbers
        had = [self.digests[name]] if name in self.digests else []
        self.digests[name] = np.concatenate([*had, digests])

    def store(self, storage: Storage) -> None:
        """Leave the part among the files of the save, for rank 0."""
        value = {
            "plan": self.plan,
            "chunks": [[name, numbers, self.digests[name].shape[1]] for name, numbers in self.chunks.items()],
            "arrays": [[a.name, a.shape, a.dtype] for a in self.arrays.values()],
            "pieces": [[path, p.array, p.offset, p.boxes] for path, some in self.pieces.items() for p in some],
        }
        digests = (self.digests[name].tobytes() for name in self.chunks)
        storage.write(f"part.{self.rank}", [json.dumps(value).encode(), b"\n", *digests], durable=False)

    @staticmethod
    def load(storage: Storage, rank: int) -> Part:
        """Take the part of a rank out of the files of the save, where it is removed."""
        text, _, digests = storage.read(f"part.{rank}").partition(b"\n")
        value, flat, at = json.loads(text), np.frombuffer(digests, "<u8"), 0
        part = Part(rank, value["plan"])
        for name, numbers, bands in value["chunks"]:
            part.chunks[name] = numbers
            part.digests[name] = flat[at : at + len(numbers) * bands].reshape(len(numbers), bands)
            at += len(numbers) * bands
        for name, shape, dtype in value["arrays"]:
            part.arrays[name] = one_chunk(name, shape[0], dtype)
        for path, array, offset, boxes in value["pieces"]:
            boxes = tuple(Box(tuple(start), tuple(shape), at, tuple(strides)) for start, shape, at, strides in boxes)
            part.pieces.setdefault(path, []).append(Piece(array, offset, boxes))
        storage.remove(f"part.{rank}")
        return part


def one_chunk(name: str, n: int, dtype: str) -> Array:
    """A 1-D array of n elements in one chunk."""
    return Array(name, (n,), dtype, (n,), band_shape((n,), dtype_of(dtype).itemsize))


def plan_digest(plans: Sequence[LeafPlan]) -> str:
    """A digest of what is stored and how; ranks that save together must have the same."""
    meshes, rows = dict[Mesh, int](), dict[tuple, int]()
    known: dict[Layout, int] = {}  # few; the text of one costs more than all else of a leaf
    leaves = []
    for p in plans:
        if (number := known.get(x := p.layout)) is None:
            row = x.shape, x.dtype, x.spec, x.flat, x.flat_from, x.padded, meshes.setdefault(x.mesh, len(meshes))
            number = known[x] = rows.setdefault(row, len(rows))
        leaves.append((p.path, number))
    return digest_text(repr((leaves, list(rows), list(meshes))).encode())


@strict_json.no_collection()
def merge(
    plans: Sequence[LeafPlan],
    parts: Iterable[Part],
    step: int | None,
    metadata: dict[str, Any],
    finite: bool | None = None,
) -> tuple[Manifest, np.ndarray]:
    """The manifest of what all ranks have written, and the content of digests.bin (uint64).

    Raises ValueError when the ranks saved different trees, RuntimeError when a chunk has no writer or two.
    """
    arrays = {array.name: array for array in map(grid_array, (p for p in plans if p.home == "grid"))}
    total = 0
    for name, array in arrays.items():
        arrays[name] = replace(array, first_digest=total)
        total += array.digest_count
    digests, times = np.zeros(total, "<u8"), {name: np.zeros(math.prod(a.grid), np.int8) for name, a in arrays.items()}
    own: list[np.ndarray] = []
    pieces: dict[str, list[Piece]] = {}
    expected = plan_digest(plans)
    for part in parts:
        if part.plan != expected:
            raise ValueError(
                f"rank {part.rank}: got a tree whose paths, shapes, dtypes or layouts differ, wanted that of rank 0;"
                " give the same layouts to save on all ranks"
            )
        for name, numbers in part.chunks.items():
            if name in part.arrays:
                arrays[name] = replace(part.arrays[name], first_digest=total)
                total += arrays[name].digest_count
                own.append(part.digests[name].reshape(-1))
            else:
                a = arrays[name]
                table = digests[a.first_digest : a.first_digest + a.digest_count].reshape(len(times[name]), -1)
                table[numbers] = part.digests[name]
                times[name][numbers] += 1
        for path, some in part.pieces.items():
            pieces.setdefault(path, []).extend(some)
    for name, count in times.items():
        if (count != 1).any():
            number = int(np.flatnonzero(count != 1)[0])
            raise RuntimeError(f"{name}: chunk number {number} has {int(count[number])} writers, wanted one")
    digests = np.concatenate([digests, *own])
    for name, a in arrays.items():
        arrays[name] = replace(a, digest=digest_text(digests[a.first_digest : a.first_digest + a.digest_count]))
    meshes: list[Mesh] = []
    leaves, rows = {}, {}
    for p in plans:
        # Thousands of leaves share a few.
        key = p.layout.mesh, p.layout.spec, p.layout.flat, p.layout.flat_from, p.layout.padded
        if (row := rows.get(key)) is None:
            row = rows[key] = layout_to_json(p.layout, meshes)
        common = (p.path, p.layout.shape, dtype_text(p.layout.dtype), row)
        leaves[p.path] = (
            StoredLeaf(*common, grid_array(p).name, at=p.at)
            if p.home == "grid"
            else StoredLeaf(*common, None, tuple(pieces.get(p.path, ())))
        )
    known = tuple(mesh.to_json() for mesh in meshes)
    return Manifest(step, metadata, known, leaves, arrays, len(digests), finite=finite), digests


def complete(storage: Storage, manifest: Manifest, digests: np.ndarray) -> bytes:
    """Write the metadata of the checkpoint and make everything durable; returns the marker, for `Store.publish`."""
    data, groups = manifest_to_json(manifest), _groups(manifest)
    group = to_json_text({"zarr_format": 3, "node_type": "group", "attributes": {}}).encode()
    files = {DIGESTS: digests.tobytes(), MANIFEST: data} | {f"{name}/{ZARR}": group for name in groups}
    # Of arrays without elements no rank has written a chunk.
    files |= {f"{a.name}/{ZARR}": zarr_json(a) for a in manifest.arrays.values() if 0 in a.shape}
    with ThreadPoolExecutor(storage.writers) as pool:
        list(pool.map(lambda item: storage.write(item[0], [item[1]]), files.items()))
    storage.sync()
    check_written(storage, manifest)
    return marker_to_json(data, step=manifest.step)


def check_written(storage: Storage, manifest: Manifest) -> None:
    """Raise RuntimeError when a file that was written is not there: files were removed while they were written."""
    found, arrays = set(storage.names()), manifest.arrays.values()
    described = (f"{name}/{ZARR}" for name in itertools.chain(_groups(manifest), manifest.arrays))
    written = (a.file_name(file) for a in arrays for file in itertools.product(*map(range, a.file_grid)))
    for name in itertools.chain((DIGESTS, MANIFEST), described, written):
        if name not in found:
            raise RuntimeError(
                f"{storage.at(name)}: was written and has vanished; does another run save to this place?"
            )


def _groups(manifest: Manifest) -> set[str]:
    """The zarr groups: the directories above the arrays."""
    groups = set()
    for name in manifest.arrays:
        parts = name.split("/")[:-1]
        groups.update("/".join(parts[: i + 1]) for i in range(len(parts)))
    return groups

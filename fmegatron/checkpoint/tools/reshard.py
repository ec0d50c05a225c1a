"""reshard: the same elements in chunks for another layout, in bounded memory, whatever the size of a leaf.

What `write_part` writes from tensors in memory is written here from another checkpoint: the plan is the same, and so
are the files. One process does the work of all ranks of the target mesh, file after file. As many files as the bound
allows are filled by one `Fetch`, so a band of the source is read once for all of them; a file above the bound is
made and written portion by portion.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import xxhash

from fmegatron.checkpoint.files.format import ZARR, Piece, zarr_metadata
from fmegatron.checkpoint.files.manifest import to_json_text
from fmegatron.checkpoint.files.storage import Storage, Store, open_store
from fmegatron.checkpoint.reading.rounds import in_rounds
from fmegatron.checkpoint.tools.outfiles import OutFile, band_sizes, out_files
from fmegatron.checkpoint.tools.source import Source
from fmegatron.checkpoint.writing.part import Part, complete, merge, plan_digest
from fmegatron.checkpoint.writing.plan import LeafPlan

BOUND_BYTES = 256 << 20  # of elements in memory at a time
_GRAIN = 64  # no element crosses a multiple of it, in any file


@dataclass(frozen=True)
class Resharded:
    """What was written: where, how many files and bytes of chunks, and how many leaves."""

    path: str
    files: int
    nbytes: int
    leaves: int


def reshard(
    source: Source,
    path: str | os.PathLike | Store,
    plans: Sequence[LeafPlan],
    *,
    bound: int = BOUND_BYTES,
    overwrite: bool = False,
) -> Resharded:
    """Write the elements of a checkpoint anew at `path`, as a save under another plan would; step and metadata stay.

    plans: of all leaves of the source (see `plan_of`).  bound: bytes of elements in memory at a time.  All that is read
    is verified. The new checkpoint is complete and durable when this returns; if it raises, nothing is left.

    Raises ValueError when there is something at `path` (a checkpoint, unless `overwrite`), CheckpointError for damage
    in the source, OSError.
    """
    store = open_store(path)
    if store.is_complete() and not overwrite:
        raise ValueError(f"{store.text}: a checkpoint is there already; choose another path, or pass --overwrite")
    storage, files, nbytes = None, 0, 0
    parts = {0: Part(0, plan_digest(plans))}
    try:
        storage = store.begin()
        for group in in_rounds(out_files(source, plans), bound):
            for file, digests in _write(source, storage, group, bound):
                _note(parts.setdefault(file.rank, Part(file.rank, parts[0].plan)), file, digests)
                files, nbytes = files + 1, nbytes + file.nbytes
        for part in parts.values():
            for name, rows in part.digests.items():
                part.digests[name] = np.array(rows, "<u8")
        merged = merge(plans, parts.values(), source.manifest.step, source.manifest.metadata, source.manifest.finite)
        store.publish(storage, complete(storage, *merged))
    finally:
        store.end(storage)
    return Resharded(store.text, files, nbytes, len(plans))


def _note(part: Part, file: OutFile, digests: list[int]) -> None:
    """Enter a written file into its rank's part."""
    name = file.array.name
    part.chunks.setdefault(name, []).append(int(np.ravel_multi_index(file.index, file.array.grid)))
    part.digests.setdefault(name, []).append(digests)
    if not file.in_grid:
        part.arrays[name] = file.array
        for leaf, offset, boxes in file.content:
            part.pieces[leaf.path] = Piece(name, offset, boxes)


def _write(source: Source, storage: Storage, group: list[OutFile], bound: int) -> Iterator[tuple[OutFile, list[int]]]:
    """Read what the files of a group hold, and write them; each with the digests of its bands."""
    for file in group:
        if not any(file.index):
            storage.write(f"{file.array.name}/{ZARR}", [to_json_text(zarr_metadata(file.array)).encode()])
    if len(group) == 1:
        filled = [_portions(source, group[0], max(_GRAIN, bound // _GRAIN * _GRAIN))]
    else:
        filled = [[data] for data in _filled(source, [(file, 0, file.nbytes) for file in group])]

    def one(file: OutFile, portions: Iterable[np.ndarray]) -> list[int]:
        digests: list[int] = []
        storage.write(file.array.chunk_file(file.index), _digested(portions, band_sizes(file.array), digests))
        return digests

    with ThreadPoolExecutor(storage.writers) as pool:
        yield from zip(group, pool.map(one, group, filled), strict=True)


def _portions(source: Source, file: OutFile, most: int) -> Iterator[np.ndarray]:
    """The bytes of a file, some at a time."""
    for lo in range(0, file.nbytes, most):
        yield _filled(source, [(file, lo, min(lo + most, file.nbytes))])[0]


def _filled(source: Source, wanted: Sequence[tuple[OutFile, int, int]]) -> list[np.ndarray]:
    """The bytes [lo, hi) of files, read together."""
    buffers, targets = [], {}
    for file, lo, hi in wanted:
        buffers.append(np.zeros(-(-(hi - lo) // _GRAIN) * _GRAIN, np.uint8))  # whole elements of any type
        for leaf, target in file.targets(lo, hi, buffers[-1]):
            targets.setdefault(leaf.path, (leaf, []))[1].append(target)
    source.fetch(targets.values())
    return [buffer[: hi - lo] for buffer, (_, lo, hi) in zip(buffers, wanted, strict=True)]


def _digested(portions: Iterable[np.ndarray], sizes: Sequence[int], digests: list[int]) -> Iterator[np.ndarray]:
    """The portions as they are; appends the digest of every band, wherever portions begin and end."""
    left, hasher = iter(sizes), xxhash.xxh3_64()
    missing = next(left)
    for data in portions:
        at = 0
        while data.nbytes - at >= missing:
            hasher.update(data[at : at + missing])
            digests.append(hasher.intdigest())
            at, missing = at + missing, next(left, 1 << 62)
            hasher.reset()
        hasher.update(data[at:])
        missing -= data.nbytes - at
        yield data

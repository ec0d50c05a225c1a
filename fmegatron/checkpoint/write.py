"""One rank's writes: chunks of its leaves to zarr3 arrays through tensorstore, digested from the same memory."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence

import numpy as np
import tensorstore as ts
import torch

from fmegatron.checkpoint import commit
from fmegatron.checkpoint.format import (
    ALIGN_BYTES,
    Array,
    Piece,
    digest,
    dtype_text,
    packed_name,
    piece_name,
    raw,
    raw_dtype,
    zarr_metadata,
)
from fmegatron.checkpoint.part import Part, grid_array, one_chunk, plan_digest
from fmegatron.checkpoint.plan import LeafPlan, chunks_to_write
from fmegatron.layout import Box

Chunks = Sequence[tuple[tuple[int, ...], Box]]  # (index in the grid, where it is in a tensor), as `chunks_to_write`

_STAGED_BYTES = 1 << 30  # host copies (of device or strided tensors) held at a time


def write_part(
    root: str,
    plans: Sequence[LeafPlan],
    tensors: Sequence[torch.Tensor],
    rank: int,
    chunks: Sequence[Chunks | None] | None = None,
) -> Part:
    """Write all that `rank` has to write below `root`; durable on return. Raises OSError naming the leaf.

    tensorstore's threads copy and write straight from the tensors' memory while this thread digests the same bytes.
    chunks: for some of the `grid` leaves, those to write now, as boxes of the tensor given here, which may hold nothing
    else; None: all that the rank has to write.
    """
    part = Part(rank, plan_digest(plans))
    writer = _Writer(root, part)
    small: list[np.ndarray] = []
    size = 0
    try:
        for leaf, x, some in zip(plans, tensors, chunks or [None] * len(plans), strict=True):
            if leaf.home == "grid":
                if some is not None or leaf.layout.replicas > 1:
                    todo = chunks_to_write(leaf, rank) if some is None else some
                    writer.grid(leaf, todo, [box for _, box in todo], x)
                else:
                    writer.grid(leaf, chunks_to_write(leaf, rank), leaf.layout.boxes(rank), x)
            elif leaf.home != "empty" and leaf.writes(rank):
                boxes = leaf.layout.boxes(rank)
                if leaf.home == "packed":
                    data = raw(_on_host(x)).reshape(-1).view(np.uint8)
                    part.pieces[leaf.path] = Piece(packed_name(rank), size, boxes)
                    small += [data, np.zeros(-data.nbytes % ALIGN_BYTES, np.uint8)]
                    size += data.nbytes + small[-1].nbytes
                else:
                    name = piece_name(leaf.path, rank)
                    part.pieces[leaf.path] = Piece(name, 0, boxes)
                    writer.whole(name, x, dtype_text(x.dtype), leaf.path)
        if small:
            writer.whole(packed_name(rank), torch.from_numpy(np.concatenate(small)), "uint8", "the small leaves")
        writer.drain()
    finally:
        writer.wait()  # after an error, too: nothing may be written any more when the hidden directory is removed
    return part


class _Writer:
    """Writes in flight, and the digests still to be made of the same memory."""

    def __init__(self, root: str, part: Part):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.root, self.part, self.staged = root, part, 0
        self.pending: list[tuple[str, ts.Future]] = []
        self.undigested: list[tuple[Array, list[np.ndarray]]] = []
        # One writer per chunk in a directory of our own: no locks. Sync: each file is on disk when its write is done.
        self.context = ts.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},
                "file_io_concurrency": {"limit": 4},
                "data_copy_concurrency": {"limit": min(4, cores)},
                "file_io_sync": True,
                "file_io_locking": {"mode": "none"},
            }
        )

    def grid(self, leaf: LeafPlan, chunks: Chunks, boxes: Iterable[Box], x: torch.Tensor) -> None:
        """Write these chunks, which make up the boxes, of a leaf that has an array of its own in global shape."""
        if not chunks:
            return
        array = grid_array(leaf)
        name = array.name
        local, store = self._host_bits(x), self._open(array)
        for box in boxes:
            self._start(leaf.path, store, box.slices, box.view(local).numpy())
        self.part.chunks[name] = [int(np.ravel_multi_index(index, array.grid)) for index, _ in chunks]
        self.undigested.append((array, [box.view(local).numpy() for _, box in chunks]))
        self._bound()

    def whole(self, name: str, x: torch.Tensor, dtype: str, what: str) -> None:
        """Write a tensor, flattened, as an array of one chunk."""
        data = self._host_bits(x).reshape(-1)
        array = one_chunk(name, data.numel(), dtype)
        self._start(what, self._open(array), (slice(0, data.numel()),), data.numpy())
        self.part.arrays[name], self.part.chunks[name] = array, [0]
        self.undigested.append((array, [data.numpy()]))
        self._bound()

    def _host_bits(self, x: torch.Tensor) -> torch.Tensor:
        host = _on_host(x)
        self.staged += 0 if host.data_ptr() == x.data_ptr() else host.nbytes
        return torch.from_numpy(raw(host))

    def _open(self, array: Array) -> ts.Future:
        # Bits move as integers of the same width; the zarr.json that is written at the end names the real type. Both
        # flags matter: by default a chunk of zeros is not stored, and a missing chunk reads as zeros.
        metadata = {**zarr_metadata(array), "data_type": raw_dtype(array.itemsize).name, "fill_value": 0}
        if array.itemsize == 16:
            metadata["fill_value"] = [0.0, 0.0]
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{self.root}/{array.name}/"},
            "metadata": metadata,
            "store_data_equal_to_fill_value": True,
            "fill_missing_data_reads": False,
        }
        return ts.open(spec, open=True, assume_metadata=True, context=self.context)

    def _start(self, what: str, store: ts.Future, where: tuple[slice, ...], data: np.ndarray) -> None:
        self.pending.append((what, write_chunks(store.result(), where, data)))

    def _bound(self) -> None:
        if self.staged > _STAGED_BYTES:
            self.drain()

    def drain(self) -> None:
        """Make the digests that are due, then wait for the writes. Raises OSError naming the leaf."""
        for array, views in self.undigested:
            digests = [band_digests(view, array.chunk, array.band) for view in views]
            self.part.digests[array.name] = np.array(digests, "<u8")
        # Of an array that several ranks write, the one with its first chunk writes the metadata.
        commit.describe(self.root, [a for a, _ in self.undigested if 0 in self.part.chunks[a.name]])
        for what, future in self.pending:
            try:
                future.result()
            except Exception as error:
                raise OSError(f"{what}: a chunk could not be written: {error}") from error
        self.undigested.clear()
        self.pending.clear()
        self.staged = 0

    def wait(self) -> None:
        """Wait for all writes, whatever becomes of them."""
        for _, future in self.pending:
            future.exception()


def write_chunks(store: ts.TensorStore, where: tuple[slice, ...], data: np.ndarray) -> ts.Future:
    """Start to write `data`, whose memory the caller keeps alive and unchanged until the future is done."""
    return store[where].write(data, can_reference_source_data_indefinitely=True)


def _on_host(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is contiguous in host memory; otherwise a copy that is."""
    x = x.detach()
    if x.device.type == "cpu" and x.is_contiguous() and not x.is_conj() and not x.is_neg():
        return x
    return x.resolve_conj().resolve_neg().cpu().contiguous()


def band_digests(view: np.ndarray, chunk: tuple[int, ...], band: tuple[int, ...]) -> list[int]:
    """The digest of each band of a chunk, bands row-major. Where `view` is smaller, the chunk is padded with zeros."""
    starts = itertools.product(*(range(0, c, b) for c, b in zip(chunk, band, strict=True)))
    digests = []
    for start in starts:
        shape = tuple(min(b, c - a) for a, b, c in zip(start, band, chunk, strict=True))
        data = view[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
        if data.shape != shape:
            data = np.pad(data, [(0, n - m) for n, m in zip(shape, data.shape, strict=True)])
        digests.append(digest(np.ascontiguousarray(data)))
    return digests

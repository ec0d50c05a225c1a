"""The writes of one rank: files of chunks of its leaves, band by band, with a digest of each.

A file is made under its own name, filled from its first byte to its last and synced once: two operations of the file
system. Bands are digested while they are in the cache and written from the tensor's memory; what is not contiguous
there is copied to a buffer of one band before. Some threads write, a file each.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from fmegatron.checkpoint.files.format import (
    ALIGN_BYTES,
    MOST_CHUNK_BYTES,
    ZARR,
    Array,
    Piece,
    digest,
    dtype_text,
    packed_name,
    piece_name,
    raw,
    zarr_json,
)
from fmegatron.checkpoint.files.storage import Storage
from fmegatron.checkpoint.writing.part import Part, one_chunk, plan_digest
from fmegatron.checkpoint.writing.plan import LeafPlan, boxes_to_write, chunks_to_write, grid_array
from fmegatron.layout import Box
from fmegatron.layout.boxes import row_major_strides

PACKED_BYTES = 8 << 20  # most of an array of packed leaves
_AHEAD_BYTES = 128 << 20  # of files in memory at a time, two at least, where a store cannot take them in pieces


Chunks = Sequence[tuple[tuple[int, ...], Box]]  # (index in the grid, where it is in a tensor), as `chunks_to_write`


def write_part(
    storage: Storage,
    plans: Sequence[LeafPlan],
    tensors: Sequence[torch.Tensor],
    rank: int,
    chunks: Sequence[Chunks | None] | None = None,
) -> Part:
    """Write all that `rank` has to write, and make it durable but for the names of files (`storage.sync`).

    Raises OSError naming the leaf.

    Args:
        storage: where to.
        plans: of the leaves.
        tensors: the rank's local tensor of each leaf, on any device, of any strides.
        rank: who writes.
        chunks: for some of the `grid` leaves, those to write now, as boxes of the tensor given here, which may hold
            nothing else; None: all that the rank has to write. Those of one file are given together.
    """
    part = Part(rank, plan_digest(plans))
    files: dict[tuple[str, tuple[int, ...]], tuple[Array, list[_Chunk]]] = {}
    for leaf, x, some in zip(plans, tensors, chunks or [None] * len(plans), strict=True):
        if leaf.home == "grid" and (todo := chunks_to_write(leaf, rank) if some is None else some):
            array, source = grid_array(leaf), _Tensor(x)
            for index, box in todo:
                file = array.file_of(index := (*leaf.at, *index))
                found = files.setdefault((array.name, file), (array, []))
                found[1].append(_Chunk(leaf.path, index, box, source))
    jobs = [_file(array, file, some) for (_, file), (array, some) in files.items()]
    packed: list[tuple[LeafPlan, torch.Tensor, tuple[Box, ...]]] = []
    for leaf, x, boxes in zip(plans, tensors, boxes_to_write(plans, rank), strict=True):
        if boxes and leaf.home == "packed":
            packed.append((leaf, x, boxes))
        elif boxes and leaf.home == "piece":
            jobs += _pieces(part, leaf, x, boxes)
    jobs += _packed(part, packed)
    _run(storage, jobs)
    for job in jobs:
        part.wrote(job.array.name, job.numbers, job.table)
    return part


@dataclass(frozen=True)
class _Job:
    """A file to write.

    what: whose bytes, for errors.  numbers: of its chunks in the grid.  table: uint64 [chunks, bands], their digests,
    filled while `blocks` are made.
    """

    what: str
    array: Array
    file: tuple[int, ...]
    numbers: list[int]
    table: np.ndarray
    blocks: Callable[[], Iterable[np.ndarray]]

    def write(self, storage: Storage, stop: threading.Event) -> None:
        """Write it, unless another one has failed. Raises OSError naming the leaf."""
        try:
            if 0 in self.numbers:  # of several ranks that write an array, one writes the metadata
                storage.write(f"{self.array.name}/{ZARR}", [zarr_json(self.array)])
            storage.write(self.array.file_name(self.file), _until(stop, self.blocks()))
        except OSError as error:
            raise OSError(f"{self.what}: a chunk could not be written: {error}") from error


class _Stopped(Exception):
    """Another file has failed."""


def _until(stop: threading.Event, blocks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    for block in blocks:
        if stop.is_set():
            raise _Stopped
        yield block


def _run(storage: Storage, jobs: Sequence[_Job]) -> None:
    """Write the files; on return all is written, or, after an error, nothing is any more."""
    largest = max((job.table.shape[0] * job.array.chunk_nbytes for job in jobs), default=1)
    threads = storage.writers if storage.streams else min(storage.writers, max(2, _AHEAD_BYTES // largest))
    stop = threading.Event()

    def work(job: _Job) -> None:
        if not stop.is_set():
            try:
                job.write(storage, stop)
            except BaseException:
                stop.set()
                raise

    if min(threads, len(jobs)) < 2:
        for job in jobs:
            work(job)
        return
    with ThreadPoolExecutor(threads) as pool:
        try:
            futures = [pool.submit(work, job) for job in jobs]
            errors = [error for future in futures if (error := future.exception()) is not None]
        finally:
            stop.set()
    for error in errors:
        if not isinstance(error, _Stopped):
            raise error


def _file(array: Array, file: tuple[int, ...], chunks: Sequence[_Chunk]) -> _Job:
    """A file of these chunks, which are all that are in it, in their order there."""
    assert len(chunks) == math.prod(map(len, array.file_chunks(file))), f"{array.file_name(file)}: {len(chunks)} chunks"
    chunks = sorted(chunks, key=lambda chunk: chunk.index)
    numbers = [int(np.ravel_multi_index(chunk.index, array.grid)) for chunk in chunks]
    table = np.zeros((len(chunks), math.prod(array.bands)), "<u8")

    def blocks() -> Iterator[np.ndarray]:
        buffer = np.empty(math.prod(array.band) * array.itemsize, np.uint8)
        for chunk, row in zip(chunks, table, strict=True):
            yield from _bands(chunk.source.part(chunk.box), array, row, buffer)
        if array.shard:
            yield array.file_index(file).view(np.uint8)

    return _Job(chunks[0].what, array, file, numbers, table, blocks)


def _bands(chunk: np.ndarray, array: Array, digests: np.ndarray, buffer: np.ndarray) -> Iterator[np.ndarray]:
    """The bytes of a chunk's bands, row-major; digests: filled with theirs. What is copied is in `buffer`."""
    if not array.band:
        data = chunk.reshape(1).view(np.uint8)
        digests[0] = digest(data)
        yield data
        return
    chunk = chunk[(*(None,) * (len(array.chunk) - chunk.ndim), ...)]  # in a stack
    starts = itertools.product(*(range(0, c, b) for c, b in zip(array.chunk, array.band, strict=True)))
    for i, start in enumerate(starts):
        shape = tuple(min(b, c - a) for a, b, c in zip(start, array.band, array.chunk, strict=True))
        data = chunk[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
        if data.shape != shape or not data.flags.c_contiguous:
            band = buffer[: math.prod(shape) * array.itemsize].view(chunk.dtype).reshape(shape)
            if data.shape != shape:
                band[...] = 0
            band[tuple(map(slice, data.shape))] = data
            data = band
        digests[i] = digest(data)
        yield data.reshape(-1).view(np.uint8)


def _pieces(part: Part, leaf: LeafPlan, x: torch.Tensor, boxes: tuple[Box, ...]) -> Iterator[_Job]:
    """Files of a rank's local storage of a leaf, of one chunk each; `part` notes where it is."""
    kept, n, found = boxes, x.numel(), part.pieces.setdefault(leaf.path, [])
    if leaf.layout.padded or x.nbytes > MOST_CHUNK_BYTES:
        kept, n = _closed_up(boxes), sum(box.size for box in boxes)
    for start, stop, some in _in_arrays(kept, n, MOST_CHUNK_BYTES // x.dtype.itemsize):
        array = one_chunk(piece_name(leaf.path, part.rank, len(found)), stop - start, dtype_text(x.dtype))
        part.arrays[array.name] = array
        found.append(Piece(array.name, 0, some))
        yield _whole(leaf.path, array, partial(_elements, x, boxes if kept != boxes else None, start, stop))


def _elements(x: torch.Tensor, boxes: Sequence[Box] | None, start: int, stop: int) -> Iterator[np.ndarray]:
    """Elements [start, stop) of a tensor, or of its boxes one after another."""
    if boxes is None:
        x = x if x.is_contiguous() else _on_host(x)
        yield raw(_on_host(x.view(-1)[start:stop])).view(np.uint8)
        return
    host = torch.from_numpy(raw(_on_host(x)))
    yield torch.cat([box.view(host).reshape(-1) for box in boxes])[start:stop].numpy().view(np.uint8)


def _packed(part: Part, leaves: Sequence[tuple[LeafPlan, torch.Tensor, tuple[Box, ...]]]) -> Iterator[_Job]:
    """Files of packed leaves, one after another; `part` notes where they are."""
    todo: list[tuple[torch.Tensor, tuple[Box, ...] | None]] = []
    size = number = 0

    def job() -> _Job:
        array = one_chunk(packed_name(part.rank, number), size, "uint8")
        part.arrays[array.name] = array
        return _whole("the packed leaves", array, partial(_aligned, tuple(todo)))

    for leaf, x, boxes in leaves:
        kept, nbytes = boxes, x.nbytes
        if leaf.layout.padded:
            kept, nbytes = _closed_up(boxes), sum(box.size for box in boxes) * x.dtype.itemsize
        if todo and size + nbytes > PACKED_BYTES:
            yield job()
            todo, size, number = [], 0, number + 1
        part.pieces[leaf.path] = [Piece(packed_name(part.rank, number), size, kept)]
        todo.append((x, None if kept is boxes else boxes))
        size += nbytes + -nbytes % ALIGN_BYTES
    if todo:
        yield job()


def _aligned(leaves: Sequence[tuple[torch.Tensor, tuple[Box, ...] | None]]) -> Iterator[np.ndarray]:
    """The elements of leaves, or of boxes of them, each from a multiple of 64 bytes on."""
    for x, boxes in leaves:
        nbytes = 0
        for block in _elements(x, boxes, 0, x.numel()):
            nbytes += block.nbytes
            yield block
        if nbytes % ALIGN_BYTES:
            yield np.zeros(-nbytes % ALIGN_BYTES, np.uint8)


def _whole(what: str, array: Array, data: Callable[[], Iterable[np.ndarray]]) -> _Job:
    """A file of an array of one chunk, whose bytes come in any blocks."""
    table, band = np.zeros((1, math.prod(array.bands)), "<u8"), array.band[0] * array.itemsize

    def blocks() -> Iterator[np.ndarray]:
        for i, block in enumerate(_equal(data(), band)):
            table[0, i] = digest(block)
            yield block

    return _Job(what, array, (0,), [0], table, blocks)


def _equal(data: Iterable[np.ndarray], nbytes: int) -> Iterator[np.ndarray]:
    """The same bytes in blocks of `nbytes`, the last one of what is left; what has to be joined is in one buffer."""
    buffer, used = np.empty(nbytes, np.uint8), 0
    for block in data:
        at = 0
        while at < block.nbytes:
            n = min(nbytes - used, block.nbytes - at)
            if n == nbytes:
                yield block[at : at + n]
            else:
                buffer[used : used + n] = block[at : at + n]
                if (used := (used + n) % nbytes) == 0:
                    yield buffer
            at += n
    if used:
        yield buffer[:used]


def _closed_up(boxes: tuple[Box, ...]) -> tuple[Box, ...]:
    """The boxes of a local tensor as they are when their elements are one after another."""
    at, out = 0, []
    for box in boxes:
        out.append(Box(box.start, box.shape, at, row_major_strides(box.shape)))
        at += box.size
    return tuple(out)


def _in_arrays(boxes: tuple[Box, ...], n: int, most: int) -> Iterator[tuple[int, int, tuple[Box, ...]]]:
    """(start, stop, boxes) of arrays of at most `most` of the n elements of the boxes, one after another."""
    if n <= most:
        yield 0, n, boxes
        return
    at, some, todo = 0, [], list(reversed(boxes))
    while todo:
        box = todo.pop()
        if box.offset + box.size - at > most and some:
            yield at, box.offset, tuple(some)
            at, some = box.offset, []
        if box.size > most:
            todo += reversed(_halves(box))
            continue
        some.append(Box(box.start, box.shape, box.offset - at, box.strides))
    yield at, n, tuple(some)


def _halves(box: Box) -> list[Box]:
    """The box in two, each contiguous where it is."""
    d = next(d for d, k in enumerate(box.shape) if k > 1)
    cut = box.start[d] + box.shape[d] // 2
    low = [*box.start[:d], cut, *box.start[d + 1 :]]
    high = [*(box.stop[:d]), cut, *(box.stop[d + 1 :])]
    return [half for half in (box.intersect(box.start, high), box.intersect(low, box.stop)) if half is not None]


class _Chunk(NamedTuple):
    """A chunk to write: index in the grid of its array, and the box of a tensor that holds it."""

    what: str
    index: tuple[int, ...]
    box: Box
    source: _Tensor


class _Tensor:
    """A tensor of which boxes are written."""

    def __init__(self, x: torch.Tensor):
        self.x = x.detach()
        self.on_host, self.lock = _is_plain(x), threading.Lock()

    def part(self, box: Box) -> np.ndarray:
        """The bits of a box, in any strides: the tensor's own memory, or a copy on the host."""
        found = self._view(box)
        return raw(found) if self.on_host else raw(found.resolve_conj().resolve_neg().cpu().contiguous())

    def _view(self, box: Box) -> torch.Tensor:
        with self.lock:
            if not self.x.is_contiguous() and box.strides != row_major_strides(self.x.shape):
                self.x = self.x.contiguous()  # boxes of other dims than it has
        if self.x.is_contiguous():
            return box.view(self.x)
        at, rest = [], box.offset  # the strides of the box are those that it would have if it were contiguous
        for stride, n in zip(box.strides, box.shape, strict=True):
            start, rest = divmod(rest, stride)
            at.append(slice(start, start + n))
        return self.x[tuple(at)]


def _on_host(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is contiguous in host memory; otherwise a copy that is."""
    x = x.detach()
    if _is_plain(x) and x.is_contiguous():
        return x
    return x.resolve_conj().resolve_neg().cpu().contiguous()


def _is_plain(x: torch.Tensor) -> bool:
    """Whether the elements are in host memory as they are."""
    return x.device.type == "cpu" and not x.is_conj() and not x.is_neg()

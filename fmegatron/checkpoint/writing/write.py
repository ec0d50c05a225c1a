"""The writes of one rank: files of chunks of its leaves, band by band, with a digest of each.

A file is made under its own name, filled from its first byte to its last and synced once: two operations of the file
system. Some threads write, a file each. A band of live memory is copied into a buffer, and both its digest and what is
written are of the copy: whatever other threads do to the state, what is on the disk has the digests of the manifest.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from fmegatron.checkpoint.writing.job import Files, How, Job
from fmegatron.checkpoint.writing.part import Part, one_chunk, plan_digest
from fmegatron.checkpoint.writing.plan import LeafPlan, boxes_to_write, chunks_to_write, grid_array
from fmegatron.checkpoint.writing.unchanged import Live
from fmegatron.layout import Box
from fmegatron.layout.boxes import row_major_strides

PACKED_BYTES = 8 << 20  # most of an array of packed leaves
_PAGE = 4096  # bytes
_AHEAD_BYTES = 128 << 20  # of files in memory at a time, two at least, where a store cannot take them in pieces


Chunks = Sequence[tuple[tuple[int, ...], Box]]  # (index in the grid, where it is in a tensor), as `chunks_to_write`


def write_part(
    storage: Storage,
    plans: Sequence[LeafPlan],
    tensors: Sequence[torch.Tensor],
    rank: int,
    chunks: Sequence[Chunks | None] | None = None,
    live: Live | None = None,
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
        live: all that the rank has to write, of memory that others write to; without it the memory is of this call
            alone.
    """
    files = files_to_write(plans, tensors, rank, chunks) if live is None else live.files
    _run(storage, files.jobs, "use" if live is None else "copy")
    for job in files.jobs:
        files.part.wrote(job.array.name, job.numbers, job.table)
    return files.part


def files_to_write(
    plans: Sequence[LeafPlan],
    tensors: Sequence[torch.Tensor],
    rank: int,
    chunks: Sequence[Chunks | None] | None = None,
) -> Files:
    """The files of `write_part`."""
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
    return Files(part, [*jobs, *_packed(part, packed)])


def _write(job: Job, storage: Storage, stop: threading.Event, how: How) -> None:
    """Write a file, unless another one has failed. Raises OSError naming the leaf."""
    what = "the packed leaves" if job.is_packed else job.names[0]

    def blocks() -> Iterator[np.ndarray]:
        for block in job.blocks(how):
            if stop.is_set():
                raise _Stopped
            yield block

    try:
        if 0 in job.numbers:  # of several ranks that write an array, one writes the metadata
            storage.write(f"{job.array.name}/{ZARR}", [zarr_json(job.array)])
        storage.write(job.array.file_name(job.file), blocks())
    except OSError as error:
        raise OSError(f"{what}: a chunk could not be written: {error}") from error


class _Stopped(Exception):
    """Another file has failed."""


def _run(storage: Storage, jobs: Sequence[Job], how: How) -> None:
    """Write the files; on return all is written, or, after an error, nothing is any more."""
    largest = max((job.nbytes for job in jobs), default=1)
    threads = storage.writers if storage.streams else min(storage.writers, max(2, _AHEAD_BYTES // largest))
    stop = threading.Event()

    def work(job: Job) -> None:
        if not stop.is_set():
            try:
                _write(job, storage, stop, how)
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


def _file(array: Array, file: tuple[int, ...], chunks: Sequence[_Chunk]) -> Job:
    """A file of these chunks, which are all that are in it, in their order there."""
    assert len(chunks) == math.prod(map(len, array.file_chunks(file))), f"{array.file_name(file)}: {len(chunks)} chunks"
    chunks = sorted(chunks, key=lambda chunk: chunk.index)
    numbers = [int(np.ravel_multi_index(chunk.index, array.grid)) for chunk in chunks]
    table = np.zeros((len(chunks), math.prod(array.bands)), "<u8")
    on_host = [chunk.source.x.is_cpu for chunk in chunks]

    def blocks(how: How) -> Iterator[np.ndarray]:
        buffer = _Buffer(math.prod(array.band) * array.itemsize)
        for chunk, row, is_cpu in zip(chunks, table, on_host, strict=True):
            if is_cpu or how != "look":
                yield from _bands(chunk.source.part(chunk.box, how == "look"), array, row, buffer, how)
        if array.shard and how != "look":
            yield array.file_index(file).view(np.uint8)

    return Job(array, file, numbers, table, table, [chunk.what for chunk in chunks], on_host, blocks)


def _bands(chunk: np.ndarray, array: Array, digests: np.ndarray, buffer: _Buffer, how: How) -> Iterator[np.ndarray]:
    """The bytes of a chunk's bands, row-major; digests: filled with theirs. What is copied is in `buffer`."""
    if not array.band:
        data = chunk.copy().reshape(1).view(np.uint8)
        digests[0] = digest(data)
        yield data
        return
    chunk = chunk[(*(None,) * (len(array.chunk) - chunk.ndim), ...)]  # in a stack
    starts = itertools.product(*(range(0, c, b) for c, b in zip(array.chunk, array.band, strict=True)))
    for i, start in enumerate(starts):
        shape = tuple(min(b, c - a) for a, b, c in zip(start, array.band, array.chunk, strict=True))
        data = chunk[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
        if how == "copy" or data.shape != shape or not data.flags.c_contiguous:
            data = buffer.copy(data, shape)
        digests[i] = digest(data)
        yield data.reshape(-1).view(np.uint8)


class _Buffer:
    """Memory for one block at a time."""

    def __init__(self, nbytes: int):
        self.memory = np.empty(nbytes + _PAGE, np.uint8)
        self.at = self.memory.ctypes.data

    def copy(self, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """A contiguous copy, with zeros behind it along each dim where `shape` is larger.

        It begins in its page where the data do in theirs: 1 to 16 bytes further, copies take six times as long (Zen 3).
        """
        start = (data.ctypes.data - self.at) % _PAGE
        block = self.memory[start : start + math.prod(shape) * data.itemsize].view(data.dtype).reshape(shape)
        if data.shape != shape:
            block[...] = 0
        order = sorted(range(data.ndim), key=lambda d: -abs(data.strides[d]) if data.shape[d] > 1 else 0)
        if data.ndim > 1 and abs(data.strides[-1]) > data.itemsize and order[-1] != data.ndim - 1:
            # Of other dims in memory: in their order first, then in the cache, takes a third of the time.
            data = np.ascontiguousarray(data.transpose(order)).transpose(np.argsort(order))
        block[tuple(map(slice, data.shape))] = data
        return block


def _pieces(part: Part, leaf: LeafPlan, x: torch.Tensor, boxes: tuple[Box, ...]) -> Iterator[Job]:
    """Files of a rank's local storage of a leaf, of one chunk each; `part` notes where it is."""
    kept, n, found = boxes, x.numel(), part.pieces.setdefault(leaf.path, [])
    if leaf.layout.padded or x.nbytes > MOST_CHUNK_BYTES:
        kept, n = _closed_up(boxes), sum(box.size for box in boxes)
    for start, stop, some in _in_arrays(kept, n, MOST_CHUNK_BYTES // x.dtype.itemsize):
        array = one_chunk(piece_name(leaf.path, part.rank, len(found)), stop - start, dtype_text(x.dtype))
        part.arrays[array.name] = array
        found.append(Piece(array.name, 0, some))
        some_boxes = boxes if kept != boxes else None
        yield _one_chunk(array, [leaf.path], [x.is_cpu], partial(_piece, x, some_boxes, start, stop))


def _piece(x: torch.Tensor, boxes: Sequence[Box] | None, start: int, stop: int, how: How) -> Iterator[np.ndarray]:
    if x.is_cpu or how != "look":
        yield from _elements(x, boxes, start, stop)


def _elements(x: torch.Tensor, boxes: Sequence[Box] | None, start: int, stop: int) -> Iterator[np.ndarray]:
    """Elements [start, stop) of a tensor, or of its boxes one after another."""
    if boxes is None:
        x = x if x.is_contiguous() else _on_host(x)
        yield raw(_on_host(x.view(-1)[start:stop])).view(np.uint8)
        return
    host = torch.from_numpy(raw(_on_host(x)))
    yield torch.cat([box.view(host).reshape(-1) for box in boxes])[start:stop].numpy().view(np.uint8)


def _packed(part: Part, leaves: Sequence[tuple[LeafPlan, torch.Tensor, tuple[Box, ...]]]) -> Iterator[Job]:
    """Files of packed leaves, one after another; `part` notes where they are."""
    todo: list[tuple[str, torch.Tensor, tuple[Box, ...] | None]] = []
    size = number = 0

    def job() -> Job:
        array = one_chunk(packed_name(part.rank, number), size, "uint8")
        part.arrays[array.name] = array
        some, marks = tuple(todo), np.zeros((len(todo), 1), "<u8")
        names, on_host = [path for path, _, _ in some], [x.is_cpu for _, x, _ in some]
        return _one_chunk(array, names, on_host, partial(_aligned, some, marks[:, 0]), marks)

    for leaf, x, boxes in leaves:
        kept, nbytes = boxes, x.nbytes
        if leaf.layout.padded:
            kept, nbytes = _closed_up(boxes), sum(box.size for box in boxes) * x.dtype.itemsize
        if todo and size + nbytes > PACKED_BYTES:
            yield job()
            todo, size, number = [], 0, number + 1
        part.pieces[leaf.path] = [Piece(packed_name(part.rank, number), size, kept)]
        todo.append((leaf.path, x, None if kept is boxes else boxes))
        size += nbytes + -nbytes % ALIGN_BYTES
    if todo:
        yield job()


def _aligned(
    leaves: Sequence[tuple[str, torch.Tensor, tuple[Box, ...] | None]], marks: np.ndarray, how: How
) -> Iterator[np.ndarray]:
    """The elements of leaves, or of boxes of them, each from a multiple of 64 bytes on; marks: filled with digests."""
    for i, (_, x, boxes) in enumerate(leaves):
        if how == "look" and not x.is_cpu:
            continue
        nbytes, whole = 0, boxes is None and _is_plain(x) and x.is_contiguous()
        for block in [raw(x).reshape(-1).view(np.uint8)] if whole else _elements(x, boxes, 0, x.numel()):
            nbytes += block.nbytes
            if how == "copy":
                block = block.copy()
            if how != "use":
                marks[i] = digest(block)
            yield block
        if nbytes % ALIGN_BYTES:
            yield np.zeros(-nbytes % ALIGN_BYTES, np.uint8)


def _one_chunk(
    array: Array,
    names: Sequence[str],
    on_host: Sequence[bool],
    data: Callable[[How], Iterable[np.ndarray]],
    marks: np.ndarray | None = None,
) -> Job:
    """A file of an array of one chunk, whose bytes come in any blocks."""
    table, band = np.zeros((1, math.prod(array.bands)), "<u8"), array.band[0] * array.itemsize

    def blocks(how: How) -> Iterator[np.ndarray]:
        if how == "look" and marks is not None:
            yield from data(how)
            return
        for i, block in enumerate(_equal(data(how), band, how)):
            table[0, i] = digest(block)
            yield block

    return Job(array, (0,), [0], table, table if marks is None else marks, names, on_host, blocks)


def _equal(data: Iterable[np.ndarray], nbytes: int, how: How) -> Iterator[np.ndarray]:
    """The same bytes in blocks of `nbytes`, the last one of what is left; what has to be joined is in one buffer."""
    buffer, used = np.empty(nbytes, np.uint8), 0
    for block in data:
        at = 0
        while at < block.nbytes:
            n = min(nbytes - used, block.nbytes - at)
            if n == nbytes and how != "copy":
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
        self.x, self.again, self.lock = x.detach(), None, threading.Lock()
        self.on_host = _is_plain(x)

    def part(self, box: Box, look: bool) -> np.ndarray:
        """The bits of a box, in any strides: the tensor's own memory, or a copy on the host. look: of what is now."""
        found = self._view(box, look)
        return raw(found) if self.on_host else raw(found.resolve_conj().resolve_neg().cpu().contiguous())

    def _view(self, box: Box, look: bool) -> torch.Tensor:
        if self.x.is_contiguous():
            return box.view(self.x)
        if box.strides != row_major_strides(self.x.shape):  # boxes of other dims than it has
            if look:
                return box.view(self.x.contiguous())
            with self.lock:
                if self.again is None:
                    self.again = self.x.contiguous()
                return box.view(self.again)
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

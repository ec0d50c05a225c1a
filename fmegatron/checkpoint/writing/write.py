"""The writes of one rank: files of chunks of its leaves through tensorstore, with a digest of each band.

A chunk of an uncompressed zarr3 array is its elements and nothing else, so tensorstore's threads write it from the
tensor's memory, without a copy, while this thread digests it. What is not contiguous there is copied band by band into
a buffer, and digested while it is in the cache; then a file at a time is in memory, and the next one beside it.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

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
)
from fmegatron.checkpoint.files.keyvalue import done
from fmegatron.checkpoint.files.storage import Storage
from fmegatron.checkpoint.files.zarr_array import ZarrArray
from fmegatron.checkpoint.writing.part import Part, one_chunk, plan_digest
from fmegatron.checkpoint.writing.plan import LeafPlan, chunks_to_write, grid_array
from fmegatron.layout import Box
from fmegatron.layout.boxes import row_major_strides

_STAGED_BYTES = 64 << 20  # host copies of pieces on devices held at a time
_BUFFER_BYTES = 8 << 20  # copies of chunks held at a time, those of two files at least
PACKED_BYTES = 8 << 20  # most of an array of packed leaves
_AHEAD_BYTES = 128 << 20  # given to tensorstore and not yet written, two files at least: no more after an error
_AHEAD_WRITES = 512  # the same in writes: beside its bytes, each takes some 10 KiB, and stores take far fewer at once


Chunks = Sequence[tuple[tuple[int, ...], Box]]  # (index in the grid, where it is in a tensor), as `chunks_to_write`


def write_part(
    storage: Storage,
    plans: Sequence[LeafPlan],
    tensors: Sequence[torch.Tensor],
    rank: int,
    chunks: Sequence[Chunks | None] | None = None,
) -> Part:
    """Write all that `rank` has to write, and make it durable but for names of files (`storage.sync`).

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
    packed: list[np.ndarray] = []
    size = number = 0
    with _Writer(storage, part) as writer:
        files: dict[tuple[str, tuple[int, ...]], tuple[Array, list[_Chunk]]] = {}
        for leaf, x, some in zip(plans, tensors, chunks or [None] * len(plans), strict=True):
            if leaf.home == "grid" and (todo := chunks_to_write(leaf, rank) if some is None else some):
                array, source = grid_array(leaf), _Tensor(x)
                for index, box in todo:
                    file = array.file_of(index := (*leaf.at, *index))
                    found = files.setdefault((array.name, file), (array, []))
                    found[1].append(_Chunk(leaf.path, index, box, source))
        for (_, file), (array, some) in files.items():
            writer.file(array, file, some)
        for leaf, x in zip(plans, tensors, strict=True):
            if leaf.home != "grid" and leaf.writes(rank):
                boxes = leaf.layout.boxes(rank)
                if leaf.home == "packed":
                    data = raw(_on_host(x))
                    if leaf.layout.padded:
                        bits, boxes = _without_padding(torch.from_numpy(data), boxes)
                        data = bits.numpy()
                    data = data.reshape(-1).view(np.uint8)
                    if packed and size + data.nbytes > PACKED_BYTES:
                        writer.packed(packed_name(rank, number), packed, size)
                        packed, size, number = [], 0, number + 1
                    part.pieces[leaf.path] = [Piece(packed_name(rank, number), size, boxes)]
                    packed.append(data)
                    size += data.nbytes + -data.nbytes % ALIGN_BYTES
                else:
                    data, staged = writer.host_bits(x)
                    if leaf.layout.padded or data.nbytes > MOST_CHUNK_BYTES:
                        data, boxes = _without_padding(data, boxes)
                    data, found = data.view(-1), part.pieces.setdefault(leaf.path, [])
                    for start, stop, some in _in_arrays(boxes, data.numel(), MOST_CHUNK_BYTES // data.itemsize):
                        name = piece_name(leaf.path, rank, len(found))
                        found.append(Piece(name, 0, some))
                        array = one_chunk(name, stop - start, dtype_text(x.dtype))
                        writer.whole(array, data[start:stop], leaf.path, staged if stop == data.numel() else 0)
        if packed:
            writer.packed(packed_name(rank, number), packed, size)
    return part


def _without_padding(x: torch.Tensor, boxes: tuple[Box, ...]) -> tuple[torch.Tensor, tuple[Box, ...]]:
    """The elements of the boxes of a local tensor, one box after another, and the boxes as they are there."""
    at, out = 0, []
    for box in boxes:
        out.append(Box(box.start, box.shape, at, row_major_strides(box.shape)))
        at += box.size
    if tuple(out) == boxes and at == x.numel():
        return x, boxes
    return torch.cat([box.view(x).reshape(-1) for box in boxes]), tuple(out)


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
        self.on_host = _is_plain(x)

    def part(self, box: Box) -> np.ndarray:
        """The bits of a box, in any strides: the tensor's own memory, or a copy on the host."""
        found = self._view(box)
        return raw(found) if self.on_host else raw(found.resolve_conj().resolve_neg().cpu().contiguous())

    def _view(self, box: Box) -> torch.Tensor:
        if not self.x.is_contiguous() and box.strides != row_major_strides(self.x.shape):
            self.x = self.x.contiguous()  # boxes of other dims than it has
        if self.x.is_contiguous():
            return box.view(self.x)
        at, rest = [], box.offset  # the strides of the box are those that it would have if it were contiguous
        for stride, n in zip(box.strides, box.shape, strict=True):
            start, rest = divmod(rest, stride)
            at.append(slice(start, start + n))
        return self.x[tuple(at)]


class _Write(NamedTuple):
    """A write that tensorstore has been given; staged, buffers: host memory that is free when it is done."""

    what: str
    futures: list[Any]
    nbytes: int
    staged: int
    buffers: Sequence[np.ndarray]


class _Writer:
    """Gives chunks to tensorstore; on leaving the block all is written, or, after an error, nothing is any more."""

    def __init__(self, storage: Storage, part: Part):
        self.storage, self.part = storage, part
        self.pending: deque[_Write] = deque()
        self.ahead = self.staged = self.buffered = 0  # bytes in `pending`
        self.free: list[np.ndarray] = []
        self.arrays: dict[str, ZarrArray] = {}
        self.names: list[str] = []  # of files

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            while self.pending and error is None:
                self._wait_for_oldest()
        finally:
            for write in self.pending:  # the hidden directory is about to be removed
                for future in write.futures:
                    future.exception()
        if error is None:
            self.storage.sync_files(self.names)

    def file(self, array: Array, file: tuple[int, ...], chunks: Sequence[_Chunk]) -> None:
        """Write a file of these chunks, which are all that are in it."""
        what, nbytes, bands = chunks[0].what, len(chunks) * array.chunk_nbytes, math.prod(array.bands)
        with _named(what):
            if (stored := self.arrays.get(array.name)) is None:
                stored = self.arrays[array.name] = self.storage.array(array)
        numbers = [int(np.ravel_multi_index(chunk.index, array.grid)) for chunk in chunks]
        table = np.zeros((len(chunks), bands), "<u8")
        if 0 in numbers:  # of several ranks that write an array, one writes the metadata
            self._describe(what, stored)
        self._wait(nbytes)
        views, buffers, late = [], [], []
        for chunk, row in zip(chunks, table, strict=True):
            view = chunk.source.part(chunk.box)
            view = view[(*(None,) * (len(array.chunk) - view.ndim), ...)]  # in a stack
            if view.shape == array.chunk and view.flags.c_contiguous:
                views.append((chunk.index, view))
                late.append((view, row))
                continue
            buffers.append(buffer := self._buffer(array.chunk_nbytes, nbytes))
            data = buffer.view(view.dtype).reshape(array.chunk)
            _digest_bands(data, array.band, row, view)
            views.append((chunk.index, data))
        self._give(what, stored, file, views, late, buffers=buffers)
        self.part.wrote(array.name, numbers, table)

    def whole(self, array: Array, data: torch.Tensor, what: str, staged: int) -> None:
        """Write an array of one chunk."""
        table = np.zeros((1, math.prod(array.bands)), "<u8")
        with _named(what):
            stored = self.storage.array(array)
        self._describe(what, stored)
        self._wait(data.nbytes)
        view = data.numpy()
        self._give(what, stored, (0,), [((0,), view)], [(view, table[0])], staged=staged)
        self.part.arrays[array.name] = array
        self.part.wrote(array.name, [0], table)

    def packed(self, name: str, leaves: list[np.ndarray], size: int) -> None:
        """Write an array of `size` bytes of packed leaves."""
        while self.pending and self.staged + size > 2 * PACKED_BYTES:
            self._wait_for_oldest()
        self.staged += size
        joined, at = torch.zeros(size, dtype=torch.uint8), 0
        for data in leaves:
            joined.numpy()[at : at + data.nbytes] = data
            at += data.nbytes + -data.nbytes % ALIGN_BYTES
        self.whole(one_chunk(name, size, "uint8"), joined, "the packed leaves", size)

    def host_bits(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The bits of a tensor in contiguous host memory, and how many bytes that took."""
        while self.pending and self.staged > _STAGED_BYTES:
            self._wait_for_oldest()
        host = _on_host(x)
        staged = 0 if host.data_ptr() == x.data_ptr() else host.nbytes
        self.staged += staged
        return torch.from_numpy(raw(host)), staged

    def _wait(self, nbytes: int) -> None:
        """Until tensorstore may be given so much more."""
        while self.pending and self.ahead + nbytes > max(_AHEAD_BYTES, 2 * nbytes):
            self._wait_for_oldest()

    def _give(
        self,
        what: str,
        stored: ZarrArray,
        file: tuple[int, ...],
        chunks: list[tuple[tuple[int, ...], np.ndarray]],
        late: list[tuple[np.ndarray, np.ndarray]],
        buffers: Sequence[np.ndarray] = (),
        staged: int = 0,
    ) -> None:
        """Give a file of all its chunks to tensorstore: (index in the grid, contiguous elements as bits, in the chunk's
        shape); digest meanwhile what was not copied: (chunk, its digests).

        Chunks stay as they are until all futures are done. One that is dropped before takes its write with it.
        """
        futures: list[Any] = []
        lasting = stored.by_reference
        with _named(what):
            places, transaction = stored.places(file, [index for index, _ in chunks])
            for place, (_, bits) in zip(places, chunks, strict=True):
                given = bits.view(place.dtype.numpy_dtype)
                futures.append(place.write(given, can_reference_source_data_indefinitely=lasting))
            if transaction is not None:
                for future in futures:
                    done(future.copy)  # now it is in the transaction
                futures.append(transaction.commit_async())
        self.names.append(stored.array.file_name(file))
        nbytes = sum(bits.nbytes for _, bits in chunks)
        self._begun(_Write(what, futures, nbytes, staged, buffers))
        for view, row in late:
            _digest_bands(view, stored.array.band, row)

    def _describe(self, what: str, stored: ZarrArray) -> None:
        """Write the array's metadata."""
        with _named(what):
            future = stored.describe()
        self.names.append(f"{stored.array.name}/{ZARR}")
        self._begun(_Write(what, [future], 0, 0, []))

    def _buffer(self, nbytes: int, file_nbytes: int) -> np.ndarray:
        """Memory for a chunk of a file of so many bytes; of the file before there may be some, too."""
        while self.pending and self.buffered + nbytes > max(_BUFFER_BYTES, 2 * file_nbytes):
            self._wait_for_oldest()
        found = next((i for i, buffer in enumerate(self.free) if buffer.nbytes == nbytes), None)
        buffer = self.free.pop(found) if found is not None else None
        if buffer is None:
            self.free.clear()
            buffer = np.empty(nbytes, np.uint8)
        self.buffered += nbytes
        return buffer

    def _begun(self, write: _Write) -> None:
        """tensorstore has been given a write."""
        self.pending.append(write)
        self.ahead += write.nbytes
        while self.pending and (len(self.pending) > _AHEAD_WRITES or all(f.done() for f in self.pending[0].futures)):
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        what, futures, nbytes, staged, buffers = self.pending[0]
        with _named(what):
            for future in reversed(futures):  # the last is that of the file
                done(future)
        self.pending.popleft()
        self.ahead, self.staged = self.ahead - nbytes, self.staged - staged
        self.buffered -= sum(buffer.nbytes for buffer in buffers)
        self.free += buffers


@contextmanager
def _named(what: str) -> Iterator[None]:
    """An error names whose bytes it concerns."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{what}: a chunk could not be written: {error}") from error


def _digest_bands(
    chunk: np.ndarray, band: tuple[int, ...], digests: np.ndarray, source: np.ndarray | None = None
) -> None:
    """The digests of a contiguous chunk's bands, row-major; with a source, copied from it first and padded by zeros."""
    if not band:
        digests[0] = digest(chunk.reshape(1))
        return
    for i, start in enumerate(itertools.product(*(range(0, c, b) for c, b in zip(chunk.shape, band, strict=True)))):
        at = tuple(slice(a, a + b) for a, b in zip(start, band, strict=True))
        data = chunk[at]
        if source is not None:
            part = source[at]
            if part.shape != data.shape:
                data[...] = 0
            data[tuple(map(slice, part.shape))] = part
        digests[i] = digest(data)


def _on_host(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is contiguous in host memory; otherwise a copy that is."""
    x = x.detach()
    if _is_plain(x) and x.is_contiguous():
        return x
    return x.resolve_conj().resolve_neg().cpu().contiguous()


def _is_plain(x: torch.Tensor) -> bool:
    """Whether the elements are in host memory as they are."""
    return x.device.type == "cpu" and not x.is_conj() and not x.is_neg()

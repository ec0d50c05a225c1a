"""The writes of one rank: chunks of its leaves into zarr3 arrays, with a digest of each band.

A chunk of an uncompressed zarr3 array is its elements and nothing else, so a chunk's file is written straight from the
tensor's memory: one pass over memory for digesting and writing together, on a few threads.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from fmegatron.checkpoint.files.format import (
    ALIGN_BYTES,
    ZARR,
    Array,
    Piece,
    digest,
    dtype_text,
    packed_name,
    piece_name,
    raw,
    zarr_metadata,
)
from fmegatron.checkpoint.files.manifest import to_json_text
from fmegatron.checkpoint.files.storage import Storage
from fmegatron.checkpoint.writing.part import Part, grid_array, one_chunk, plan_digest
from fmegatron.checkpoint.writing.plan import LeafPlan, chunks_to_write
from fmegatron.layout import Box
from fmegatron.layout.boxes import row_major_strides

_STAGED_BYTES = 64 << 20  # host copies (of tensors on devices, mostly) held at a time


Chunks = Sequence[tuple[tuple[int, ...], Box]]  # (index in the grid, where it is in a tensor), as `chunks_to_write`


def write_part(
    storage: Storage,
    plans: Sequence[LeafPlan],
    tensors: Sequence[torch.Tensor],
    rank: int,
    chunks: Sequence[Chunks | None] | None = None,
) -> Part:
    """Write all that `rank` has to write; durable after `storage.sync`. Raises OSError naming the leaf.

    chunks: for some of the `grid` leaves, those to write now, as boxes of the tensor given here, which may hold nothing
    else; None: all that the rank has to write.
    """
    part = Part(rank, plan_digest(plans))
    small: list[np.ndarray] = []
    size = 0
    with _Writer(storage, part) as writer:
        for leaf, x, some in zip(plans, tensors, chunks or [None] * len(plans), strict=True):
            if leaf.home == "grid":
                if todo := chunks_to_write(leaf, rank) if some is None else some:
                    writer.grid(leaf, todo, x)
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
                    data, staged = writer.host_bits(x)
                    flat = data.view(-1).numpy()
                    writer.whole(one_chunk(name, flat.size, dtype_text(x.dtype)), [flat], leaf.path, staged)
        if small:
            writer.whole(one_chunk(packed_name(rank), size, "uint8"), small, "the small leaves", 0)
    return part


class _Writer:
    """Threads that write chunks; on leaving the block all is written, or, after an error, nothing is any more."""

    def __init__(self, storage: Storage, part: Part):
        self.storage, self.part, self.staged, self.failed = storage, part, 0, False
        self.pool = ThreadPoolExecutor(storage.writers)
        self.pending: deque[tuple[str, int, Future]] = deque()

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            if error is None:
                while self.pending:
                    self._wait_for_oldest()
        finally:
            self.failed = True  # for what is still in the queue; the hidden directory is about to be removed
            self.pool.shutdown(cancel_futures=True)

    def grid(self, leaf: LeafPlan, chunks: Chunks, x: torch.Tensor) -> None:
        """Write these chunks of a leaf that has an array of its own in global shape."""
        array = grid_array(leaf)
        self.part.chunks[array.name] = [int(np.ravel_multi_index(index, array.grid)) for index, _ in chunks]
        table = self.part.digests[array.name] = np.zeros((len(chunks), math.prod(array.bands)), "<u8")
        # A strided tensor is made contiguous band by band, if the boxes have the dims that it has.
        in_place = _is_plain(x) and all(box.strides == row_major_strides(x.shape) for _, box in chunks)
        local, staged = (torch.from_numpy(raw(x)), 0) if in_place else self.host_bits(x)
        if 0 in self.part.chunks[array.name]:  # of several ranks that write an array, one writes the metadata
            self._describe(array, leaf.path)
        for row, (index, box) in zip(table, chunks, strict=True):
            view = _part(local, box)
            blocks = lambda view=view: band_blocks(view, array.chunk, array.band)  # noqa: E731
            self._start(leaf.path, array.chunk_file(index), blocks, row, staged if index == chunks[-1][0] else 0)

    def whole(self, array: Array, data: list[np.ndarray], what: str, staged: int) -> None:
        """Write an array of one chunk, which is all of `data` (flat) one after another."""
        self.part.arrays[array.name], self.part.chunks[array.name] = array, [0]
        table = self.part.digests[array.name] = np.zeros((1, math.prod(array.bands)), "<u8")
        self._describe(array, what)
        band = array.band[0] * array.itemsize
        self._start(what, array.chunk_file((0,)), lambda: _even_blocks(data, band), table[0], staged)

    def host_bits(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The bits of a tensor in contiguous host memory, and how many bytes that took."""
        while self.pending and self.staged > _STAGED_BYTES:
            self._wait_for_oldest()
        host = _on_host(x)
        staged = 0 if host.data_ptr() == x.data_ptr() else host.nbytes
        self.staged += staged
        return torch.from_numpy(raw(host)), staged

    def _describe(self, array: Array, what: str) -> None:
        text = to_json_text(zarr_metadata(array)).encode()
        self._start(what, f"{array.name}/{ZARR}", lambda: [text], None, 0)

    def _start(
        self, what: str, name: str, blocks: Callable[[], Iterable[np.ndarray]], digests: np.ndarray | None, staged: int
    ) -> None:
        def work() -> None:
            if not self.failed:
                self.storage.write(name, blocks() if digests is None else _digested(blocks(), digests))

        self.pending.append((what, staged, self.pool.submit(work)))

    def _wait_for_oldest(self) -> None:
        what, staged, future = self.pending.popleft()
        try:
            future.result()
        except Exception as error:
            raise OSError(f"{what}: a chunk could not be written: {error}") from error
        self.staged -= staged


def _part(local: torch.Tensor, box: Box) -> np.ndarray:
    """A box of a tensor of any strides; the strides of the box are those that it would have if it were contiguous."""
    if local.is_contiguous():
        return box.view(local).numpy()
    at, rest = [], box.offset
    for stride, n in zip(box.strides, box.shape, strict=True):
        start, rest = divmod(rest, stride)
        at.append(slice(start, start + n))
    return local.numpy()[tuple(at)]


def _digested(blocks: Iterable[np.ndarray], digests: np.ndarray) -> Iterator[np.ndarray]:
    """The blocks, each digested just before it is written."""
    for i, block in enumerate(blocks):
        digests[i] = digest(block)
        yield block


def band_blocks(view: np.ndarray, chunk: tuple[int, ...], band: tuple[int, ...]) -> Iterator[np.ndarray]:
    """The bands of a chunk, row-major, contiguous. Where `view` is smaller, the chunk is padded with zeros."""
    for start in itertools.product(*(range(0, c, b) for c, b in zip(chunk, band, strict=True))):
        shape = tuple(min(b, c - a) for a, b, c in zip(start, band, chunk, strict=True))
        data = view[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
        if data.shape != shape:
            data = np.pad(data, [(0, n - m) for n, m in zip(shape, data.shape, strict=True)])
        yield np.ascontiguousarray(data)


def _even_blocks(parts: list[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """The bytes of flat arrays one after another, in blocks of `size` (the last may be shorter)."""
    held, count = [], 0
    for part in parts:
        data = part.view(np.uint8)
        while count + data.nbytes >= size:
            head, data = data[: size - count], data[size - count :]
            yield np.concatenate([*held, head]) if held else head
            held, count = [], 0
        if data.nbytes:
            held.append(data)
            count += data.nbytes
    if held:
        yield np.concatenate(held)


def _on_host(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is contiguous in host memory; otherwise a copy that is."""
    x = x.detach()
    if _is_plain(x) and x.is_contiguous():
        return x
    return x.resolve_conj().resolve_neg().cpu().contiguous()


def _is_plain(x: torch.Tensor) -> bool:
    """Whether the elements lie in host memory as they are."""
    return x.device.type == "cpu" and not x.is_conj() and not x.is_neg()

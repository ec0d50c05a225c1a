"""A live state as safetensors files: every rank writes what it holds, under other names and shapes by rules.

Rank 0 makes the files in their full size, with headers; then each rank puts its boxes where they belong, through
buffers of a few MiB, on a few threads; so nothing is gathered and nothing is held twice. Ranks write disjoint ranges of
one file, as POSIX file systems have it.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import NamedTuple

import torch

from fmegatron.checkpoint.calls.ranks import together
from fmegatron.checkpoint.files import targets
from fmegatron.checkpoint.reading import view as views_of
from fmegatron.collectives import World
from fmegatron.interop.safetensors_files import DTYPES, INDEX, Entry, File, grouped, index_text, planned, put
from fmegatron.layout import Box, Layout, boxes

_BLOCK_BYTES = 4 << 20
_MOST_THREADS = 4
_METADATA = MappingProxyType({"format": "pt"})


class _Piece(NamedTuple):
    """A region of a tensor that is written, and this rank's elements for it, with dims as it has them."""

    start: tuple[int, ...]
    x: torch.Tensor


def write_state(
    folder: str,
    tensors: Mapping[str, torch.Tensor],
    layouts: Mapping[str, Layout],
    ranks: World,
    *,
    rule: Callable[[dict[str, views_of.View]], dict[str, views_of.View]],
    order: Sequence[str],
    shard: int,
) -> list[str]:
    """Write a state into a folder that is there; the names of the files. All ranks call it.

    Args:
        folder: is there, on all ranks the same.
        tensors: by path, this rank's.
        layouts: by path.
        ranks: the ranks that hold them together.
        rule: what becomes of names and shapes, as in a restore.
        order: names of the tensors that are written, in the order of the files.
        shard: most bytes of elements in a file, unless it is one tensor.

    Raises ValueError for a rule that does not fit, and dtypes that safetensors lacks; OSError (RuntimeError elsewhere).
    """

    def plan() -> tuple[dict[str, views_of.View], list[File]]:
        views = rule({path: views_of.whole(path, layout.shape) for path, layout in layouts.items()})
        entries = [Entry(name, _dtype(name, views[name], layouts), views[name].shape) for name in order]
        files = planned(grouped(entries, lambda entry: entry.nbytes, shard), _METADATA)
        if ranks.rank == 0:
            for file in files:
                put(os.path.join(folder, file.name), [file.head])
                os.truncate(os.path.join(folder, file.name), file.nbytes)
            if len(files) > 1:
                put(os.path.join(folder, INDEX), [index_text(files, _METADATA)])
        return views, files

    def fill() -> None:
        owned = {path: layout.owner(ranks.rank, turn) for turn, (path, layout) in enumerate(layouts.items())}
        for file in files:
            found = [
                (at, views[name].shape, piece)
                for name, at in file.places.items()
                for piece in _pieces(views[name], tensors, layouts, owned, ranks.rank)
            ]
            if found:
                _write_file(os.path.join(folder, file.name), found)

    what = f"writing {folder}"
    views, files = together(ranks, what, plan)
    together(ranks, what, fill)
    return [file.name for file in files]


def _dtype(name: str, view: views_of.View, layouts: Mapping[str, Layout]) -> torch.dtype:
    found = {layouts[source].dtype for source in view.sources}
    if len(found) != 1 or any(part.source is views_of.Fill.FRESH for part in view.parts):
        raise ValueError(f"{name}: got parts of {sorted(map(str, found))}, wanted one dtype; change the rules")
    if (dtype := found.pop()) not in DTYPES.values():
        raise ValueError(f"{name}: got {dtype}, wanted a dtype that safetensors has; cast it before")
    if any(layouts[source].unreduced for source in view.sources):
        raise ValueError(f"{name}: got a pending sum, wanted its value; reduce it before")
    views_of.check_parts(view)
    return dtype


def _pieces(
    view: views_of.View,
    tensors: Mapping[str, torch.Tensor],
    layouts: Mapping[str, Layout],
    owned: Mapping[str, bool],
    rank: int,
) -> Iterator[_Piece]:
    """The regions of a view that this rank has to write. What nothing is stored for is a hole of the file: zeros."""
    for part in view.parts:
        if isinstance(part.source, str) and owned[part.source]:
            for box in layouts[part.source].boxes(rank):
                piece = _shown(part, box)
                if piece is not None:
                    start, inside = piece
                    yield _Piece(start, _as_view(part, inside.view(tensors[part.source])))


def _shown(part: views_of.Part, box: Box) -> tuple[tuple[int, ...], Box] | None:
    """(where in the view, piece of the box) that a part shows of a box of its source; None for nothing."""
    low, high = list(part.at), [a + 1 for a in part.at]
    for v, dim in enumerate(part.dims):
        if dim is not None:
            high[dim] = low[dim] + part.shape[v]
    inside = box.intersect(low, high)
    if inside is None:
        return None
    start = list(part.start)
    for v, dim in enumerate(part.dims):
        if dim is not None:
            start[v] += inside.start[dim] - part.at[dim]
    return tuple(start), inside


def _as_view(part: views_of.Part, x: torch.Tensor) -> torch.Tensor:
    """Elements with dims as the source has them as the view has them; the same memory."""
    kept = [dim for dim in part.dims if dim is not None]
    for dim in reversed([d for d in range(x.ndim) if d not in kept]):
        x = x.select(dim, 0)
    left = sorted(kept)
    x = x.permute([left.index(dim) for dim in kept])
    for v, dim in enumerate(part.dims):
        if dim is None:
            x = x.unsqueeze(v)
    return x


def _write_file(path: str, found: Sequence[tuple[int, tuple[int, ...], _Piece]]) -> None:
    """Write pieces, each with its tensor's first byte and shape, and sync the file."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        blocks = (
            (at, shape, block) for at, shape, piece in found for block in _blocks(piece) if 0 not in block.x.shape
        )
        with ThreadPoolExecutor(min(_MOST_THREADS, cores)) as pool:
            waiting = [pool.submit(_write_block, fd, *block) for block in blocks]
            try:
                for one in waiting:
                    one.result()
            finally:
                pool.shutdown(cancel_futures=True)
        os.fsync(fd)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(fd)


def _blocks(piece: _Piece) -> Iterator[_Piece]:
    """A piece cut along its first dims into blocks of moderate size."""
    shape, width = piece.x.shape, piece.x.element_size()
    if not shape or 0 in shape:
        yield piece
        return
    dim = next(d for d in range(len(shape) + 1) if math.prod(shape[d + 1 :]) * width <= _BLOCK_BYTES)
    step = max(1, _BLOCK_BYTES // (math.prod(shape[dim + 1 :]) * width))
    for *at, first in itertools.product(*map(range, shape[:dim]), range(0, shape[dim], step)):
        x = piece.x[tuple(slice(i, i + 1) for i in at)].narrow(dim, first, min(step, shape[dim] - first))
        start = (a + i for a, i in zip(piece.start, (*at, first, *[0] * (len(shape) - dim - 1)), strict=True))
        yield _Piece(tuple(start), x)


def _write_block(fd: int, at: int, shape: tuple[int, ...], block: _Piece) -> None:
    """Write a block's elements as runs of the file. at: first byte of the tensor.  shape: of the tensor."""
    x, width = block.x, block.x.element_size()
    data = targets.bytes_of(x).data
    dim = len(shape)  # dims from here on are written in full
    while dim and x.shape[dim - 1] == shape[dim - 1]:
        dim -= 1
    outer = [range(a, a + n) for a, n in zip(block.start, x.shape, strict=True)][: max(dim - 1, 0)]
    size, strides, done = math.prod(x.shape[max(dim - 1, 0) :]) * width, boxes.row_major_strides(shape), 0
    for index in itertools.product(*outer):
        first = (*index, *block.start[len(index) :])
        offset = at + sum(i * s for i, s in zip(first, strides, strict=True)) * width
        run = data[done : done + size]
        done += size
        while run:
            wrote = os.pwrite(fd, run, offset)
            run, offset = run[wrote:], offset + wrote

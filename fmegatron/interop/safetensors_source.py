"""Safetensors files as a source of restores: only the ranges that a rank holds are read, transposed on the way.

A few threads share blocks of at most 2 MiB. A block goes straight into the tensor where it is one run there; else
into a buffer, and from there to its place (`Target.put`). Positioned reads, not maps: a file that gets shorter while it
is read is an error and no SIGBUS.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import os
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fmegatron.checkpoint import CheckpointError, Grain, Leaf, Source, Target
from fmegatron.files import disk
from fmegatron.interop.safetensors_headers import Headers, Place, headers, open_regular
from fmegatron.layout import Box, boxes

_BLOCK_BYTES = 2 << 20  # each thread holds two of it: as stored and transposed
_MOST_THREADS = 4
_AGAIN = "download it again"


def _step(found: Headers) -> int | None:
    try:
        step = json.loads(found.metadata.get("fmegatron.step", "null"))
    except (ValueError, RecursionError):
        return None
    return step if type(step) is int else None


class _Block(NamedTuple):
    """Some rows of a target: its file, the tensor in it, where the block begins there and its shape."""

    fd: int
    place: Place
    target: Target
    start: tuple[int, ...]
    shape: tuple[int, ...]


class SafetensorsSource(Source):
    """A file, or the files of a folder, opened; its step is that which `checkpoint export` has written."""

    def __init__(self, path: str | os.PathLike):
        """Raises CheckpointError: headers are compared with the sizes of the files."""
        self._path, self._headers = os.fspath(path), headers(path)
        self._leaves = {name: Leaf.of(name, place.shape, place.dtype) for name, place in self._headers.places.items()}

    @property
    def kind(self) -> str:
        """Whose files they are."""
        return "safetensors files of Hugging Face"

    @property
    def text(self) -> str:
        """The file or folder."""
        return self._path

    @property
    def digest(self) -> int:
        """Of all headers."""
        return self._headers.digest

    @property
    def leaves(self) -> Mapping[str, Leaf]:
        """The tensors."""
        return self._leaves

    @property
    def step(self) -> int | None:
        """As `checkpoint export` has written it."""
        return _step(self._headers)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The texts of the headers, where there are some, as "safetensors"."""
        texts = {name: text for name, text in self._headers.metadata.items() if name != "fmegatron.step"}
        return {"safetensors": texts} if texts else {}

    def reads(self, path: str, box: Box) -> Iterator[Grain]:
        """The bytes of a region, and no others."""
        place = self._headers.places[path]
        yield Grain((path, *box), path, os.path.basename(place.file), box.size * place.dtype.itemsize)

    def fill(self, wanted: Mapping[str, Sequence[Target]], verify: bool = True) -> None:
        """Fill the targets. The files have no checksums, so there is nothing to `verify`."""
        fds: dict[str, int] = {}
        try:
            blocks = []
            for path, targets in wanted.items():
                place = self._headers.places[path]
                if place.file not in fds:
                    fds[place.file], size = open_regular(place.file)
                    if size != self._headers.sizes[place.file]:
                        raise CheckpointError(f"{place.file}: changed while it was read; open it again")
                blocks += [block for target in targets for block in _blocks(fds[place.file], place, target)]
            _read_all(sorted(blocks, key=lambda block: (block.place.file, _offset(block.place, block.start))))
        finally:
            for fd in fds.values():
                os.close(fd)


def _blocks(fd: int, place: Place, target: Target) -> Iterator[_Block]:
    """A target cut along its first dims into blocks of moderate size."""
    box, width = target.box, place.dtype.itemsize
    if not box.shape or 0 in box.shape:
        if not box.shape:
            yield _Block(fd, place, target, (), ())
        return
    dim = next(d for d in range(len(box.shape) + 1) if math.prod(box.shape[d + 1 :]) * width <= _BLOCK_BYTES)
    inner = box.shape[dim + 1 :]
    step = max(1, _BLOCK_BYTES // (math.prod(inner) * width))
    outer = [range(a, a + n) for a, n in zip(box.start[:dim], box.shape[:dim], strict=True)]
    for *at, first in itertools.product(*outer, range(box.start[dim], box.stop[dim], step)):
        shape = (*(1,) * dim, min(step, box.stop[dim] - first), *inner)
        yield _Block(fd, place, target, (*at, first, *box.start[dim + 1 :]), shape)


def _read_all(blocks: Sequence[_Block]) -> None:
    """Read and place the blocks on a few threads. Raises the first error when all threads have stopped."""
    waiting: queue.SimpleQueue[_Block] = queue.SimpleQueue()
    for block in blocks:
        waiting.put(block)
    errors: list[BaseException] = []

    def work() -> None:
        buffers: list[np.ndarray] = []  # made by the first block that needs them
        try:
            while not errors:
                _read_block(waiting.get_nowait(), buffers)
        except queue.Empty:
            pass
        except BaseException as error:
            errors.append(error)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    nbytes = sum(math.prod(block.shape) for block in blocks)
    more = min(_MOST_THREADS, cores, len(blocks)) - 1 if nbytes > _BLOCK_BYTES // 4 else 0
    threads = [threading.Thread(target=work, daemon=True) for _ in range(more)]
    for thread in threads:
        thread.start()
    try:
        work()
    finally:
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def _read_block(block: _Block, buffers: list[np.ndarray]) -> None:
    place, target = block.place, block.target
    memory = target.memory(block.start, block.shape)  # transient errors of the disk: the block is read again
    if memory is not None:
        disk.look(lambda: _read_runs(block, memory))
        return
    nbytes = math.prod(block.shape) * place.dtype.itemsize
    if not buffers or buffers[0].nbytes < nbytes:
        buffers[:] = [np.empty(-(-nbytes // 16) * 16, np.uint8) for _ in range(2)]
    into, kind = buffers[0][:nbytes], target.bits
    disk.look(lambda: _read_runs(block, into))
    target.put(block.start, into.view(kind).reshape(block.shape), torch.from_numpy(buffers[1].view(kind)))


def _read_runs(block: _Block, into: np.ndarray) -> None:
    """Read the runs of a block, each in one piece of the file, one after another."""
    shape, width = block.place.shape, block.place.dtype.itemsize
    dim = len(shape)  # dims from here on are read in full
    while dim and block.shape[dim - 1] == shape[dim - 1]:
        dim -= 1
    outer = [range(n) for n in block.shape[: max(dim - 1, 0)]]
    steps = [stride * width for stride in boxes.row_major_strides(shape)]
    size, first, view, at = (
        math.prod(block.shape[len(outer) :]) * width,
        _offset(block.place, block.start),
        into.data,
        0,
    )
    for index in itertools.product(*outer):  # often thousands: little is done for each
        offset, stop = first + sum(map(operator.mul, index, steps)), at + size
        if os.preadv(block.fd, [view[at:stop]], offset) != size:
            _read_slowly(block, view[at:stop], offset)
        at = stop


def _read_slowly(block: _Block, into: memoryview, offset: int) -> None:
    """Read a run that the system gives in parts, or not at all. Raises CheckpointError."""
    while into:
        got = os.preadv(block.fd, [into], offset)
        if not got:
            raise CheckpointError(f"{block.place.file}: ended at byte {offset}; {_AGAIN}")
        into, offset = into[got:], offset + got


def _offset(place: Place, index: Sequence[int]) -> int:
    """The byte of the file that an element begins at."""
    strides = boxes.row_major_strides(place.shape)
    return place.start + sum(i * s for i, s in zip(index, strides, strict=True)) * place.dtype.itemsize

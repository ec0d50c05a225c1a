"""Tensors and objects of DCP and Megatron torch_dist directories, read shard by shard on a few threads."""

from __future__ import annotations

import itertools
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from fmegatron.checkpoint import CheckpointError, Target
from fmegatron.interop.dcp_directory import Directory, Place, StoredTensor, open_dcp, open_file
from fmegatron.interop.torch_blob import Blob, open_tensor, read_object
from fmegatron.layout import Box, boxes, check_cover
from fmegatron.tree import structure

_BLOCK_BYTES = 16 << 20  # read, verified and copied at a time, by each of a few threads
_THREADS = 4


def dcp_objects(path: str | os.PathLike) -> list[str]:
    """Paths of what is stored beside tensors, opaque until `read_dcp_object`."""
    return list(open_dcp(path).objects)


def read_dcp_object(path: str | os.PathLike, name: str) -> Any:
    """An object of the directory, if it is plain: numbers, strings, containers, dtypes, tensors.

    An argparse.Namespace becomes a dict. Raises ValueError, naming it, for anything else: it would be code.
    """
    directory = open_dcp(path)
    return object_of(directory, name)


def object_of(directory: Directory, name: str, lenient: bool = False) -> Any:
    """As `read_dcp_object`, of an open directory. lenient: what is not plain stays inert in its place."""
    found = directory.objects.get(name)
    if found is None:
        near = structure.did_you_mean(name, list(directory.objects))
        raise ValueError(
            f"{name}: got no such object in {directory.root}{near}, wanted one of those that dcp_objects lists"
        )
    fd = open_file(directory.root, found.place, name)
    try:
        return read_object(fd, found.place.offset, found.place.length, f"{name} in {found.place.file}", lenient)
    finally:
        os.close(fd)


def read_tensors(directory: Directory, requests: Mapping[str, Sequence[Target]], verify: bool) -> None:
    """Fill the targets, by path of the stored tensor. Raises CheckpointError, naming tensor and file."""
    jobs: list[tuple[StoredTensor, Box, Place, list[Target]]] = []
    for name, targets in requests.items():
        tensor = directory.tensors[name]
        try:
            check_cover(tensor.boxes, tensor.shape)
        except ValueError as error:
            raise CheckpointError(f"{directory.root}: {name}: {error}") from None
        for box, place in zip(tensor.boxes, tensor.places, strict=True):
            touched = [t for t in targets if box.intersect(t.box.start, t.box.stop) is not None]
            if touched:
                jobs.append((tensor, box, place, touched))
    with ThreadPoolExecutor(_THREADS) as pool:
        futures = [pool.submit(_read_shard, directory.root, *job, verify) for job in jobs]
        try:
            for future in futures:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _read_shard(
    root: str, tensor: StoredTensor, box: Box, place: Place, targets: Sequence[Target], verify: bool
) -> None:
    where = f"{tensor.path}: its shard at {box.start} in {place.file}"
    fd = open_file(root, place, where)
    try:
        blob = open_tensor(fd, place.offset, place.length, where)
        # Megatron has stored shards of stacked layers with and without the leading dims of size 1.
        if _without_ones(blob.shape) != _without_ones(box.shape) or blob.dtype is not tensor.dtype:
            raise CheckpointError(
                f"{where}: got {blob.dtype} {blob.shape}, wanted {tensor.dtype} {box.shape}; the directory is damaged"
            )
        crc = 0
        for start, shape, data in _blocks(fd, blob, box, targets, verify, where):
            if verify and blob.is_plain:
                crc = zlib.crc32(data.data, crc)
            for target in targets:
                part = Box(start, shape, 0, boxes.row_major_strides(shape)).intersect(target.box.start, target.box.stop)
                if part is not None:
                    inside = tuple(
                        slice(a - s, a - s + n) for a, s, n in zip(part.start, start, part.shape, strict=True)
                    )
                    target.put(part.start, data.reshape(shape)[inside])
        if verify and blob.is_plain and crc != blob.crc:
            raise CheckpointError(
                f"{where} is damaged: got crc32 {crc:08x}, wanted {blob.crc:08x}; restore another step (verify=False"
                " reads it all the same, for files written with torch's crc32 switched off)"
            )
    finally:
        os.close(fd)


def _blocks(
    fd: int, blob: Blob, box: Box, targets: Sequence[Target], verify: bool, where: str
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], np.ndarray]]:
    """(global start, shape, bits) of consecutive parts of a shard: all of it to verify, else what targets touch."""
    width, kind = blob.dtype.itemsize, targets[0].bits
    if not blob.is_plain:  # strided in its storage (nothing of DCP's own making): the full storage in memory
        data = _pread(fd, np.empty(blob.nbytes, np.uint8), blob.start, where)
        if verify and zlib.crc32(data.data) != blob.crc:
            raise CheckpointError(f"{where} is damaged: the checksum of its storage is wrong; restore another step")
        strides = [s * width for s in blob.strides]
        view = np.ndarray(blob.shape, kind, data, blob.offset * width, strides)
        yield box.start, box.shape, np.ascontiguousarray(view).reshape(box.shape)
        return
    # Full trailing dims, then as many rows of the dim before as fit a block.
    dim = next((d for d in range(len(box.shape)) if math.prod(box.shape[d + 1 :]) * width <= _BLOCK_BYTES), 0)
    row = math.prod(box.shape[dim + 1 :])
    step = max(1, _BLOCK_BYTES // (row * width))
    steps = range(0, box.shape[dim], step) if box.shape else (0,)
    scratch = np.empty(min(step, box.shape[dim] if box.shape else 1) * row * width, np.uint8)
    for number, outer in enumerate(itertools.product(*(range(n) for n in box.shape[:dim]))):
        for at in steps:
            count = min(step, box.shape[dim] - at) if box.shape else 1
            inner = box.shape[dim + 1 :]
            shape = (*(1,) * dim, count, *inner) if box.shape else ()
            start = tuple(a + i for a, i in zip(box.start, (*outer, at, *(0,) * len(inner)), strict=False))
            part = Box(start, shape, 0, boxes.row_major_strides(shape))
            if verify or any(part.intersect(t.box.start, t.box.stop) is not None for t in targets):
                offset = (number * (box.shape[dim] if box.shape else 1) + at) * row * width
                data = _pread(fd, scratch[: count * row * width], blob.start + offset, where)
                yield start, shape, data.view(kind)


def _pread(fd: int, into: np.ndarray, offset: int, where: str) -> np.ndarray:
    done = 0
    while done < into.nbytes:
        got = os.preadv(fd, [into[done:].data], offset + done)
        if got == 0:
            raise CheckpointError(f"{where}: ends at byte {offset + done} of its file; the directory is damaged")
        done += got
    return into


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [n for n in shape if n != 1]

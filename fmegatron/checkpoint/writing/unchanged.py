"""Whether a state stayed as it was while it was saved: a save of what another thread changes is refused.

A digest of what is written does not show it: taken while it is written, bytes and digest may differ
(acknowledged and unreadable); taken of a copy, both agree on a state that never was (torn). So the live memory itself
is looked at before the first byte is given away, and again when all is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from fmegatron.checkpoint.files.format import bits, digest
from fmegatron.checkpoint.files.torch_private import write_count
from fmegatron.checkpoint.writing.plan import LeafPlan, boxes_to_write, chunks_to_write
from fmegatron.layout import Box

_LOOK_BYTES = 1 << 20  # what is strided is copied so much at a time, and digested while it is in the cache
_PART_BYTES = 8 << 20  # of a tensor that a thread looks at at a time


class Seen(NamedTuple):
    """What `look` saw of what a rank writes: of each leaf a number. boxes: None: all of the tensor."""

    paths: list[str]
    tensors: list[torch.Tensor]
    boxes: list[list[Box] | None]
    found: list[int]


def look(plans: Sequence[LeafPlan], tensors: Sequence[torch.Tensor], rank: int) -> Seen:
    """What `rank` is to write, as it is now.

    Digests of the elements in host memory, and the version that torch counts (a write through `.data` is not in it).
    On a device only the version: a copy of all to the host would take as long as the save. In host memory it shows
    what has changed and is back by the second look; but not for a part of a tensor, beside which others may write.
    """
    seen = Seen([], [], [], [])  # and no object for each of very many leaves
    for leaf, x, boxes in zip(plans, tensors, boxes_to_write(plans, rank), strict=True):
        parts = None
        if leaf.home == "grid" and leaf.layout.replicas > 1:  # the other replicas look at the others
            parts = [box for _, box in chunks_to_write(leaf, rank)]
        if boxes if parts is None else parts:
            seen.paths.append(leaf.path)
            seen.tensors.append(x)
            seen.boxes.append(parts)
    seen.found.extend(_look(seen))
    return seen


def require_unchanged(before: Seen) -> None:
    """Raise RuntimeError naming the first leaf that is not as `look` saw it."""
    for path, then, now in zip(before.paths, before.found, _look(before), strict=True):
        if then != now:
            raise RuntimeError(changed(path))


def changed(path: str) -> str:
    """The error for a leaf that changed meanwhile."""
    return (
        f"{path}: got a leaf that changed while it was saved, wanted one that stays as it is until the call returns;"
        " have no other thread write to the state meanwhile, or save a clone of it (nothing was saved)"
    )


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often torch has written to the memory of each tensor; tensors of inference mode do not count: 0."""
    return [0 if x.is_inference() else write_count(x) for x in tensors]


def _look(seen: Seen) -> list[int]:
    """A number for each leaf. Of large tensors several threads look at parts; digests leave the others running."""
    large: list[tuple[int, np.ndarray]] = []
    found = versions(seen.tensors)
    for i, (x, boxes) in enumerate(zip(seen.tensors, seen.boxes, strict=True)):
        if not x.is_cpu:
            continue
        if x.untyped_storage().nbytes() != x.nbytes:
            found[i] = 0
        if x.nbytes > _PART_BYTES:
            large += [(i, part) for part in _parts(x, boxes)]
            continue
        for part in _parts(x, boxes):
            found[i] = hash((found[i], _digest(part)))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(min(4, cores)) as pool:
        for (i, _), one in zip(large, pool.map(_digest, (part for _, part in large)), strict=True):
            found[i] = hash((found[i], one))
    return found


def _parts(x: torch.Tensor, boxes: list[Box] | None) -> Iterator[np.ndarray]:
    """The elements in parts, of any strides, in an order that is the same each time: that of memory."""
    local = bits(x.resolve_conj().resolve_neg())
    if boxes is not None:
        local = local.contiguous()
    for x in [local] if boxes is None else [box.view(local) for box in boxes]:
        if not x.is_contiguous():
            x = x.permute(sorted(range(x.ndim), key=lambda d: -x.stride(d) if x.shape[d] > 1 else 0))
        if x.nbytes <= _PART_BYTES:
            yield x.numpy()
            continue
        if x.is_contiguous():
            x = x.reshape(-1)
        yield from (part.numpy() for part in x.split(max(1, _PART_BYTES // x[0].nbytes)))


def _digest(part: np.ndarray) -> int:
    """Of its elements: as they are in memory, or of copies of a few rows."""
    if part.flags.c_contiguous:
        return digest(part)
    found, rows = xxhash.xxh3_64(), max(1, _LOOK_BYTES // part[0].nbytes)
    for i in range(0, len(part), rows):
        found.update(np.ascontiguousarray(part[i : i + rows]).data)
    return found.intdigest()

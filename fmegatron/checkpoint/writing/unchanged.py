"""Whether a state stayed as it was while it was saved: a save of what another thread changes is refused.

Two looks, of which the second is the copy that is written: all of the state is digested (`look`), the ranks agree, then
each band is copied, and what is copied must have the digest of before. So what was saved is what all ranks had at the
moment at which they agreed, bit for bit, whatever else writes to the memory before or after. What is written behind the
copy is in no checkpoint; it is an error as far as torch counts it or a sample shows it (`require_unchanged`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from fmegatron.checkpoint.files.format import bits, digest
from fmegatron.checkpoint.files.torch_private import write_count

if TYPE_CHECKING:
    from fmegatron.checkpoint.writing.write import Files, Job

_STEP_BYTES = 64 << 10  # of these, a sample has
_LINE_BYTES = 64  # a line of the processor's cache


class Seen(NamedTuple):
    """What `look` saw of what a rank writes. first: of each file the digests (`Job.marks`).  names, tensors: the leaves.
    counts, samples: of each, see `versions` and `samples`."""

    files: Files
    first: list[np.ndarray]
    names: list[str]
    tensors: list[torch.Tensor]
    counts: list[int]
    samples: list[int]


def look(files: Files, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> Seen:
    """What is to be written, as it is now: digests of the elements in host memory, and how often torch has written.

    On a device only the latter: a copy of all to the host would take as long as the save.

    Args:
        files: made of these tensors.
        names, tensors: the leaves, paths and the rank's local tensors.
    """
    held = {name for job in files.jobs for name in job.names}
    mine = [(name, x) for name, x in zip(names, tensors, strict=True) if name in held]
    paths, some = [name for name, _ in mine], [x for _, x in mine]
    return Seen(files, _look(files.jobs), paths, some, versions(some), samples(some))


def require_unchanged(seen: Seen) -> None:
    """Raise RuntimeError naming a leaf that was written to behind `look`, as far as that can be seen without a third
    look: by torch's counts, in leaves of at most 64 KiB, and at every 64 KiB of the others."""
    beside = set()
    now = zip(seen.names, seen.tensors, seen.counts, versions(seen.tensors), strict=True)
    for (name, x, before, count), then, sample in zip(now, seen.samples, samples(seen.tensors), strict=True):
        moved, is_all = before != count, x.untyped_storage().nbytes() == x.nbytes
        if then != sample or (moved and (is_all or not x.is_cpu)):
            raise RuntimeError(changed(name))
        if moved:
            beside.add(name)
    again = [
        (job, first)
        for job, first in zip(seen.files.jobs, seen.first, strict=True)
        if job.is_packed or job.nbytes <= _STEP_BYTES or not beside.isdisjoint(job.names)
    ]
    for (job, first), found in zip(again, _look([job for job, _ in again]), strict=True):
        require_same(job, first, found)


def require_same(job: Job, first: np.ndarray, found: np.ndarray) -> None:
    """Raise RuntimeError naming the first leaf in host memory whose digests differ."""
    for i in np.flatnonzero((first != found).any(1)):
        if job.on_host[i]:
            raise RuntimeError(changed(job.names[i]))


def changed(path: str) -> str:
    """The error for a leaf that changed meanwhile."""
    return (
        f"{path}: got a leaf that changed while it was saved, wanted one that stays as it is until the call returns;"
        " have no other thread write to the state meanwhile, or save a clone of it (nothing was saved)"
    )


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often torch has written to the memory of each tensor; tensors of inference mode do not count: 0."""
    return [0 if x.is_inference() else write_count(x) for x in tensors]


def samples(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A digest of a line of every 64 KiB of each tensor, and of its end; 0 for a smaller one, and on devices.

    Whatever is writing to a tensor shows in two samples when it has come 64 KiB further in between.
    """
    large = [i for i, x in enumerate(tensors) if x.nbytes > _STEP_BYTES and x.is_cpu]
    found = [0] * len(tensors)
    for i in large:
        for part in _sample(tensors[i]):
            found[i] = hash((found[i], digest(np.ascontiguousarray(part.numpy()))))
    return found


def _sample(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of the elements that `samples` takes."""
    x = bits(x.resolve_conj().resolve_neg())
    x = x.permute(sorted(range(x.ndim), key=lambda d: -x.stride(d)))
    if x.is_contiguous():
        x = x.reshape(-1)
    at, row, line = x.ndim - 1, x.element_size(), max(1, _LINE_BYTES // x.element_size())
    while at and row * x.shape[at] < _STEP_BYTES:
        row, at = row * x.shape[at], at - 1
    if at == x.ndim - 1:
        yield x.unfold(at, line, _STEP_BYTES // row)
        yield x[..., -line:]
    else:
        for part in (x[(*[slice(None)] * at, slice(None, None, max(1, _STEP_BYTES // row)))], x.narrow(at, -1, 1)):
            yield part[(..., *[0] * (x.ndim - at - 2), slice(line))]


def _look(jobs: Iterable[Job]) -> list[np.ndarray]:
    """The digests of each file, of what is in host memory now. Several threads: digests leave the others running."""

    def one(job: Job) -> np.ndarray:
        for _ in job.blocks("look"):
            pass
        return job.marks.copy()

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(min(4, cores)) as pool:
        return list(pool.map(one, jobs))

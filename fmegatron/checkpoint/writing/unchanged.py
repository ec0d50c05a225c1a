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
from typing import NamedTuple

import numpy as np
import torch

from fmegatron.checkpoint.files.format import bits, digest
from fmegatron.checkpoint.files.torch_private import write_count
from fmegatron.checkpoint.writing.job import Files, Job

_STEP_BYTES = 64 << 10  # of these, a sample has
_LINE_BYTES = 64  # a line of the processor's cache


class Signs(NamedTuple):
    """What shows at little cost that tensors are written to.

    counts: how often torch has done so, to the memory of each (at the end of a write); tensors of inference mode do not
    count: 0.  samples: a digest of a line of every 64 KiB of each, and of its end: a write that is under way shows in
    two samples when it has come so far in between. 0 for smaller tensors, and on devices.
    """

    counts: list[int]
    samples: list[int]


class Seen(NamedTuple):
    """What `look` saw of what a rank writes. first: of each file the digests (`Job.marks`).  names, tensors, signs: of
    the leaves."""

    files: Files
    first: list[np.ndarray]
    names: list[str]
    tensors: list[torch.Tensor]
    signs: Signs


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
    before = signs(some)
    return Seen(files, _look(files.jobs), paths, some, before)


def require_unchanged(seen: Seen) -> None:
    """Raise RuntimeError naming a leaf that was written to behind `look`, as far as that can be seen without a third
    look: by torch's counts, in leaves of at most 64 KiB, and at every 64 KiB of the others."""
    beside = set()
    moved, written = compared(seen.signs, signs(seen.tensors))
    for i in sorted({*moved, *written}):
        if i in moved or not _is_part(seen.tensors[i]):
            raise RuntimeError(changed(seen.names[i]))
        beside.add(seen.names[i])
    again = [
        (job, first)
        for job, first in zip(seen.files.jobs, seen.first, strict=True)
        if job.is_packed or job.nbytes <= _STEP_BYTES or not beside.isdisjoint(job.names)
    ]
    for (job, first), found in zip(again, _look([job for job, _ in again]), strict=True):
        require_same(job, first, found)


def require_same(job: Job, first: np.ndarray, found: np.ndarray) -> None:
    """Raise RuntimeError naming the first leaf in host memory whose digests differ."""
    for i in np.flatnonzero((first != found).any(1)).tolist():
        if job.on_host[i]:
            raise RuntimeError(changed(job.names[i]))


def changed(path: str) -> str:
    """The error for a leaf that changed meanwhile."""
    return (
        f"{path}: got a leaf that changed while it was saved, wanted one that stays as it is until the call returns;"
        " have no other thread write to the state meanwhile, or save a clone of it (nothing was saved)"
    )


def signs(tensors: Sequence[torch.Tensor]) -> Signs:
    """Of the tensors, now."""
    counts = [0 if x.is_inference() else write_count(x) for x in tensors]
    samples = [0] * len(tensors)
    for i in [i for i, x in enumerate(tensors) if x.nbytes > _STEP_BYTES and x.is_cpu]:
        for part in _sample(tensors[i]):
            # A copy, as numpy() of the memory itself would mark it as shared: a donated step would not reuse it.
            samples[i] = hash((samples[i], digest(part.clone(memory_format=torch.contiguous_format).numpy())))
    return Signs(counts, samples)


def compared(before: Signs, after: Signs) -> tuple[set[int], set[int]]:
    """Numbers of the tensors whose elements have changed, and of those to whose memory torch has written, which may be
    beside them, where a tensor is a part of another."""
    moved, written = (
        {i for i, (then, now) in enumerate(zip(*both, strict=True)) if then != now}
        for both in ((before.samples, after.samples), (before.counts, after.counts))
    )
    return moved, written


def _is_part(x: torch.Tensor) -> bool:
    """Whether its memory may have elements that are not its own: several of it that are one leave room for others."""
    return x.is_cpu and (x.untyped_storage().nbytes() != x.nbytes or not _as_in_memory(x).is_contiguous())


def _as_in_memory(x: torch.Tensor) -> torch.Tensor:
    """The same elements, dims in the order of their strides."""
    return x.permute(sorted(range(x.ndim), key=lambda d: -x.stride(d)))


def _sample(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of the elements that `Signs.samples` are of."""
    x = _as_in_memory(bits(x.resolve_conj().resolve_neg()))
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

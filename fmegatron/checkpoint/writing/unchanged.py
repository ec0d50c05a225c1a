"""Whether a state stayed as it was while it was saved: a save of what another thread changes is refused.

Two equal looks hold it: each band is copied, and both its digest and what is written are of the copy; when all ranks
have written all of theirs, all of the state is digested again (`require_unchanged`), and must be what was copied. So
what was saved is what all ranks had at the moment at which they agreed that all is written, bit for bit, whatever else
writes to the memory. A write that is under way all the time makes half a state of it; it moves if it gets to run, so
the threads of the process that wait for a core get one before the second look.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from fmegatron.checkpoint.files.format import bits, digest, raw
from fmegatron.checkpoint.files.other_threads import changed, let_others_run
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


class Live(NamedTuple):
    """What a rank is to write out of memory that other threads may write to. elsewhere: of the leaves that are not in
    host memory path, tensor and how often torch has written to it; a second copy of all of them to the host would take
    as long as the save."""

    files: Files
    elsewhere: list[tuple[str, torch.Tensor, int]]

    @staticmethod
    def of(files: Files, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> Live:
        """files: made of these tensors.  names: their paths."""
        held = {name for job in files.jobs for name in job.names}
        given = zip(names, tensors, strict=True)
        return Live(files, [(name, x, _count(x)) for name, x in given if not x.is_cpu and name in held])


def require_unchanged(live: Live) -> None:
    """Raise RuntimeError naming a leaf that is not as it was written: digests of all that is in host memory."""
    for name, x, count in live.elsewhere:
        if _count(x) != count:
            raise RuntimeError(changed(name))
    written = [job.marks.copy() for job in live.files.jobs]
    let_others_run()
    for job, first, found in zip(live.files.jobs, written, _look(live.files.jobs), strict=True):
        for i in np.flatnonzero((first != found).any(1)).tolist():
            if job.on_host[i]:
                raise RuntimeError(changed(job.names[i]))


def signs(tensors: Sequence[torch.Tensor]) -> Signs:
    """Of the tensors, now."""
    counts = [_count(x) for x in tensors]
    samples = [0] * len(tensors)
    for i in [i for i, x in enumerate(tensors) if x.nbytes > _STEP_BYTES and x.is_cpu]:
        for part in _sample(tensors[i]):
            samples[i] = hash((samples[i], digest(np.ascontiguousarray(raw(part)))))
    return Signs(counts, samples)


def compared(before: Signs, after: Signs) -> tuple[set[int], set[int]]:
    """Numbers of the tensors whose elements have changed, and of those to whose memory torch has written, which may be
    beside them, where a tensor is a part of another."""
    moved, written = (
        {i for i, (then, now) in enumerate(zip(*both, strict=True)) if then != now}
        for both in ((before.samples, after.samples), (before.counts, after.counts))
    )
    return moved, written


def _count(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else write_count(x)


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

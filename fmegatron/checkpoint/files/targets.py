"""Targets: where a region of a stored array goes in memory, whatever the files are that it comes from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fmegatron.checkpoint.files.format import bits, raw, raw_dtype
from fmegatron.layout import Box


@dataclass(frozen=True)
class Target:
    """A box of the global array and the view of the rank's tensor that it goes to; `stored` is the dtype on disk."""

    path: str
    box: Box
    view: torch.Tensor
    stored: torch.dtype

    @property
    def bits(self) -> np.dtype:
        """The numpy type of raw bits that `put` takes: integers of the width of the stored dtype."""
        return raw_dtype(self.stored.itemsize)

    def put(self, start: Sequence[int], data: np.ndarray, spare: torch.Tensor | None = None) -> None:
        """Copy `data` (raw bits of the stored dtype), which begins at the global index `start`, to its place.

        spare: contiguous memory of the same type for as many elements at least, to transpose in.
        """
        at = tuple(slice(g - a, g - a + n) for g, a, n in zip(start, self.box.start, data.shape, strict=True))
        x = self.view[at]
        dense = min((d for d in range(x.ndim) if x.shape[d] > 1), key=x.stride, default=0)
        if x.ndim > 1 and dense != x.ndim - 1 and x.shape[-1] > 1 and data.flags.c_contiguous:
            for rows, into in matrices(torch.from_numpy(data), x, dense):
                if self.stored is x.dtype:
                    raw(into.t())[...] = turned(rows, spare).numpy()
                else:
                    into.t().copy_(turned(rows, spare).view(self.stored))
        elif self.stored is x.dtype:
            raw(x)[...] = data
        else:
            x.copy_(torch.from_numpy(np.asarray(data)).view(self.stored))

    def memory(self, start: Sequence[int], shape: Sequence[int]) -> np.ndarray | None:
        """The bytes of the tensor that [start, start + shape) goes to, if they are the stored ones, in one run."""
        if self.stored is not self.view.dtype:
            return None
        at = (slice(g - a, g - a + n) for g, a, n in zip(start, self.box.start, shape, strict=True))
        part = raw(self.view)[(..., *at)]  # of a scalar the element itself, not a copy
        return part.reshape(-1).view(np.uint8) if part.flags.c_contiguous else None


def turned(x: torch.Tensor, spare: torch.Tensor | None = None) -> torch.Tensor:
    """The transpose of a contiguous matrix, in memory of its own or in `spare`.

    torch copies it in blocks where the memory of the result is contiguous: 1.2 GB/s for two bytes an element, of one
    thread; a strided copy to where it goes, numpy's as torch's, has a quarter of that.
    """
    n = x.numel()
    into = torch.empty(n, dtype=x.dtype) if spare is None else spare[:n]
    return into.view(x.shape[1], x.shape[0]).copy_(x.t())


def matrices(a: torch.Tensor, b: torch.Tensor, dim: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The matrices of two tensors of one shape along `dim` and the last dim."""
    others = [d for d in range(a.ndim - 1) if d != dim]
    for index in itertools.product(*(range(a.shape[d]) for d in others)):
        x, y = a, b
        for d, i in sorted(zip(others, index, strict=True), reverse=True):
            x, y = x.select(d, i), y.select(d, i)
        yield x, y


def bytes_of(x: torch.Tensor) -> np.ndarray:
    """The elements as bytes in row-major order, uint8 [nbytes], on the CPU; the memory itself where it is that."""
    return raw(_dense(bits(x)).reshape(-1)).view(np.uint8)


def _dense(x: torch.Tensor) -> torch.Tensor:
    x = x.cpu()
    if x.is_contiguous():
        return x
    dense = min((d for d in range(x.ndim) if x.shape[d] > 1), key=x.stride, default=0)
    if dense == x.ndim - 1 or x.shape[-1] == 1:
        return x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    for into, rows in matrices(out, x, dense):  # dense along their first dim; torch turns contiguous ones in blocks
        into.copy_(rows.t().contiguous().t())
    return out

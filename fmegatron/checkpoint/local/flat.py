"""The tensors of a rank as one flat byte range, read and filled a portion at a time."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence

import torch


class Flat:
    """`tensors` one after another, in row-major order, without gaps; `nbytes` in all.

    Bits are bits: NaN payloads, fp8 and padding go through unchanged. A tensor that is not contiguous is copied while
    it is being read, one at a time; what a view does not show is never touched.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._tensors = [x.detach() for x in tensors]
        self._ends = list(itertools.accumulate(x.numel() * x.element_size() for x in self._tensors))
        self._held: tuple[int, torch.Tensor] | None = None  # the tensor that is being read, if it had to be copied

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, out: torch.Tensor) -> None:
        """Fill `out` (uint8 [n], CPU) with the bytes [start, start + n)."""
        for i, inside, outside in self._pieces(start, out.numel()):
            out[outside].copy_(self._bytes(i)[inside])

    def fill(self, start: int, data: torch.Tensor) -> None:
        """Put `data` (uint8 [n], CPU) at the bytes [start, start + n); all tensors must be contiguous."""
        for i, inside, outside in self._pieces(start, data.numel()):
            self._tensors[i].view(-1).view(torch.uint8)[inside].copy_(data[outside])

    def _pieces(self, start: int, count: int) -> Iterator[tuple[int, slice, slice]]:
        """(tensor, which of its bytes, which bytes of the portion)."""
        at, stop = start, start + count
        i = bisect.bisect_right(self._ends, at)
        while at < stop:
            first = self._ends[i - 1] if i else 0
            end = min(stop, self._ends[i])
            if end > at:
                yield i, slice(at - first, end - first), slice(at - start, end - start)
            at, i = end, i + 1

    def _bytes(self, i: int) -> torch.Tensor:
        x = self._tensors[i]
        if not x.is_contiguous() or x.is_conj() or x.is_neg():
            if self._held is None or self._held[0] != i:
                self._held = i, x.resolve_conj().resolve_neg().contiguous()
            x = self._held[1]
        return x.view(-1).view(torch.uint8)

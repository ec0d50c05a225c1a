"""Buckets of pieces of leaves in host memory, and the order in which they are fetched, updated and stored.

While bucket i is updated on the device, bucket i + 1 travels up and bucket i - 1 down. Host memory that is read is not
written before the piece that it holds has arrived; device memory that is stored is not given back before it has left.
Rajbhandari et al. 2021 (ZeRO-Infinity, arXiv 2104.07857, section 5.2.2) stream optimizer states through the device so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = [
    "ARRAYS",
    "Copies",
    "Cut",
    "InOrder",
    "OnStreams",
    "Piece",
    "Places",
    "copies_on",
    "cut_of",
    "cuts",
    "run",
    "table",
]

Cut = tuple[tuple[int, int], ...]  # (start, stop) of leading dims; () is the whole
Place = tuple[str, int]  # (name of a list of arrays, number in it)
ARRAYS = ("whole", "new", "given")  # written in place, written for the first time, read


@dataclass(frozen=True)
class Piece:
    """The part of the graph that it belongs to; what it is of that part's leaves; its shape."""

    part: int
    cut: Cut
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Places:
    """Where a part finds what is fetched and what is given, where its outputs go, which of these are stored.

    What is fetched travels to where the part is computed, and what is stored away from there; all else is there: see
    `run`. bytes_per_element: of what travels one way; of the ways the one that has more.
    """

    fetched: tuple[Place, ...]
    given: tuple[Place, ...]
    outs: tuple[Place, ...]
    stored: tuple[bool, ...]
    bytes_per_element: int


def cuts(shape: Sequence[int], bytes_per_element: int, most: int) -> list[Cut]:
    """The pieces of a contiguous array, each contiguous and of at most `most` bytes, or of one element.

    >>> cuts((4, 3), 4, 24), cuts((2, 3), 4, 8)
    ([((0, 2),), ((2, 4),)], [((0, 1), (0, 2)), ((0, 1), (2, 3)), ((1, 2), (0, 2)), ((1, 2), (2, 3))])
    """
    size = math.prod(shape) * bytes_per_element
    if size <= most or not shape:
        return [()]
    row = size // shape[0]
    if row > most and len(shape) > 1:
        inner = cuts(shape[1:], bytes_per_element, most)
        return [((i, i + 1), *cut) for i in range(shape[0]) for cut in inner]
    rows = max(1, most // row)
    rows = -(-shape[0] // -(-shape[0] // rows))  # as many pieces, of sizes that differ less
    return [((start, min(start + rows, shape[0])),) for start in range(0, shape[0], rows)]


def cut_shape(shape: Sequence[int], cut: Cut) -> tuple[int, ...]:
    """The shape of a piece."""
    return (*(stop - start for start, stop in cut), *shape[len(cut) :])


def cut_of(x: torch.Tensor, shape: Sequence[int], cut: Cut) -> torch.Tensor:
    """The piece of an array of `shape`, or of one that is broadcast to it: a view."""
    missing = len(shape) - x.dim()
    for dim, (start, stop) in enumerate(cut):
        if dim >= missing and x.shape[dim - missing] == shape[dim]:
            x = x.narrow(dim - missing, start, stop - start)
    return x


def table(parts: Mapping[int, tuple[Sequence[int], int]], most: int) -> tuple[tuple[Piece, ...], ...]:
    """The buckets, each of pieces that have at most `most` bytes together, or of one piece.

    parts: by its number, of each the shape of its leaves, and its bytes per element.
    """
    found: list[list[Piece]] = []
    room = 0
    for i, (shape, width) in parts.items():
        for cut in cuts(shape, width, most):
            piece = Piece(i, cut, cut_shape(shape, cut))
            size = math.prod(piece.shape) * width
            if not found or size > room:
                found.append([])
                room = most
            found[-1].append(piece)
            room -= size
    return tuple(map(tuple, found))


class Copies(Protocol):
    """How arrays travel to where is computed, the device (or the host), and away from there, in one update."""

    def fetch(self, sources: list[torch.Tensor]) -> list[torch.Tensor]:
        """Begin to copy arrays of the host -> memory of the device that has them once `arrived` has returned."""
        ...

    def bring(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Begin to copy arrays of the host into memory of the device, (into, array) of each: `arrived` ends it."""
        ...

    def arrived(self) -> None:
        """What the device computes from now on comes after all fetches so far."""
        ...

    def store(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Begin to copy values of the device into memory of the host: (into, value) of each."""
        ...

    def left(self) -> None:
        """What the device does from now on comes after all stores so far: memory of their values may be taken again."""
        ...

    def landed(self) -> None:
        """Wait until nothing travels: the host may read what was stored."""
        ...


class InOrder:
    """Copies that are made at once, into contiguous memory."""

    def fetch(self, sources: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of the arrays."""
        return [x.clone(memory_format=torch.contiguous_format) for x in sources]

    def store(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each value."""
        for into, x in pairs:
            into.copy_(x)

    bring = store

    def arrived(self) -> None:
        """Nothing to wait for, as in `left` and `landed`."""

    left = landed = arrived


class OnStreams:
    """Copies between a device of CUDA and page-locked memory, on two streams beside the one that computes.

    host_computes: what is fetched comes down, and what is stored goes up; else the other way round.
    """

    def __init__(self, device: torch.device, host_computes: bool = False):
        self.device, self.host_computes = device, host_computes
        self.coming, self.leaving = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def _copy(self, stream: torch.cuda.Stream, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for into, x in pairs:
                into.copy_(x, non_blocking=True)

    def fetch(self, sources: list[torch.Tensor]) -> list[torch.Tensor]:
        """See `Copies`. Memory of the device is that of the stream that computes, which waits for the copy and gives it
        back, so that the allocator need not ask whether a copy is done."""
        where: dict[str, Any] = {"pin_memory": True} if self.host_computes else {"device": self.device}
        found = [torch.empty(x.shape, dtype=x.dtype, **where) for x in sources]
        self.bring(list(zip(found, sources, strict=True)))
        return found

    def bring(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """See `Copies`."""
        self._copy(self.coming, pairs)

    def arrived(self) -> None:
        """See `Copies`. Where the host computes next, it waits."""
        if self.host_computes:
            self.coming.synchronize()
        else:
            torch.cuda.current_stream(self.device).wait_stream(self.coming)

    def store(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """See `Copies`. What the host has computed goes from page-locked memory, which torch does not give away before
        the copy is done."""
        self._copy(self.leaving, [(into, x.pin_memory()) for into, x in pairs] if self.host_computes else pairs)

    def left(self) -> None:
        """See `Copies`. Of what the host has computed a copy travels, so there is nothing to wait for."""
        if not self.host_computes:
            torch.cuda.current_stream(self.device).wait_stream(self.leaving)

    def landed(self) -> None:
        """See `Copies`. The host waits for the device here, as either may read next what the other has sent."""
        self.coming.synchronize()
        self.leaving.synchronize()


def copies_on(device: torch.device, host_computes: bool = False) -> Copies:
    """How arrays travel between a device and the host, which computes or does not."""
    if device.type != "cuda":
        return InOrder()
    return OnStreams(device, host_computes)


def run(
    buckets: Sequence[Sequence[Piece]],
    shapes: Sequence[Sequence[int]],
    places: Sequence[Places],
    arrays: Mapping[str, list[torch.Tensor]],
    update: Callable[[Piece, list[torch.Tensor]], list[torch.Tensor]],
    copies: Copies,
) -> None:
    """Update all pieces, bucket after bucket, on the device or on the host, whichever `copies` bring things to.

    shapes, places: of the parts. arrays: lists by name, which hold what `places` name. update: a piece, and its tensors
    (fetched, then given) -> its outputs, in memory that nobody writes before `left`. An output that is not stored
    is written at once.
    """

    def pieces_of(piece: Piece, at: Sequence[Place]) -> list[torch.Tensor]:
        return [cut_of(arrays[name][i], shapes[piece.part], piece.cut) for name, i in at]

    def fetch(bucket: Sequence[Piece]) -> Iterator[torch.Tensor]:
        return iter(copies.fetch([x for piece in bucket for x in pieces_of(piece, places[piece.part].fetched)]))

    if not buckets:
        return
    try:
        coming, leaving = fetch(buckets[0]), []
        for i, bucket in enumerate(buckets):
            copies.arrived()
            copies.left()
            here, leaving = coming, []  # what left needs its memory no more
            coming = fetch(buckets[i + 1]) if i + 1 < len(buckets) else iter(())
            for piece in bucket:
                at = places[piece.part]
                tensors = [next(here) for _ in at.fetched] + pieces_of(piece, at.given)
                results = update(piece, tensors)
                del tensors
                for into, x, stored in zip(pieces_of(piece, at.outs), results, at.stored, strict=True):
                    if stored:
                        leaving.append((into, x))
                    else:
                        into.copy_(x)
                del results
            copies.store(leaving)
    finally:
        copies.landed()

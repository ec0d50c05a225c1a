"""The bands of files that contain a box of a stored leaf, by integer arithmetic; nothing is read.

Bands are what a restore reads and verifies at once, so they are what ranks share out among each other (once.py) and
what is counted before any byte moves (explain.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from fmegatron.checkpoint.files.format import Array, Manifest, StoredLeaf, dtype_of
from fmegatron.checkpoint.reading.source import Grain
from fmegatron.layout import Box


def _band(array: Array, index: tuple[int, ...], number: int) -> Grain:
    """Band number `number` (row-major) of chunk `index` of an array; the last ones of a chunk may be smaller."""
    size, key = array.itemsize, (array.name, array.file_of(index), index, number)
    for count, b, c in reversed(list(zip(array.bands, array.band, array.chunk, strict=True))):
        number, i = divmod(number, count)
        size *= min(b, c - i * b)
    return Grain(key, array.name, array.chunk_file(index), size)


def cells(manifest: Manifest, leaf: StoredLeaf, box: Box) -> Iterator[tuple[tuple[Grain, ...], Box]]:
    """The box cut along the bands of the files, as (bands to read for it, piece of the box), in the order of the files.

    box: of the leaf; it need not be in any tensor. Where the leaf has an array of its own there is one band for each
    piece. Of stored ranges, whose rows do not begin where bands begin, the last row of a piece may need the next band.
    """
    if leaf.array is not None:
        skip, array = len(leaf.at), manifest.arrays[leaf.array]
        for bands, cell in _chunk_cells(array, in_stack(box, leaf.at)):
            yield bands, Box(cell.start[skip:], cell.shape[skip:], cell.offset, cell.strides[skip:])
        return
    width = dtype_of(leaf.dtype).itemsize
    for piece in leaf.pieces:
        array = manifest.arrays[piece.array]
        for stored in piece.boxes:
            if (part := stored.intersect(box.start, box.stop)) is not None:
                for first, stop, cell in _range_cells(part, piece.offset, width, array.band[0] * array.itemsize):
                    place = Box(cell.start, cell.shape, *_place(box, cell))
                    yield tuple(_band(array, (0,), n) for n in range(first, stop)), place


def in_stack(box: Box, at: tuple[int, ...]) -> Box:
    """A box of a leaf as one of the array in which the leaf is at a leading index."""
    return Box((*at, *box.start), (*(1 for _ in at), *box.shape), box.offset, (*(0 for _ in at), *box.strides))


def _place(box: Box, cell: Box) -> tuple[int, tuple[int, ...]]:
    """Offset and strides of a piece of `box` in the tensor that the box is in."""
    at = zip(cell.start, box.start, box.strides, strict=True)
    return box.offset + sum((a - b) * s for a, b, s in at), box.strides


def _chunk_cells(a: Array, box: Box) -> Iterator[tuple[tuple[Grain, ...], Box]]:
    chunks = (range(x // c, -(-y // c)) for x, y, c in zip(box.start, box.stop, a.chunk, strict=True))
    for index in itertools.product(*chunks):
        origin = [i * c for i, c in zip(index, a.chunk, strict=True)]
        part = box.intersect(origin, [o + c for o, c in zip(origin, a.chunk, strict=True)])
        assert part is not None, "a chunk that the box touches"
        ranges = (
            range((x - o) // b, -(-(y - o) // b))
            for x, y, o, b in zip(part.start, part.stop, origin, a.band, strict=True)
        )
        for at in itertools.product(*ranges):
            start = [o + i * b for o, i, b in zip(origin, at, a.band, strict=True)]
            cell = part.intersect(start, [s + b for s, b in zip(start, a.band, strict=True)])
            assert cell is not None, "a band that the part touches"
            number = 0
            for i, count in zip(at, a.bands, strict=True):
                number = number * count + i
            yield (_band(a, index, number),), cell


def _range_cells(part: Box, base: int, width: int, band: int) -> Iterator[tuple[int, int, Box]]:
    """(first band, one past the last, piece) of a strided box whose element 0 of storage is at byte `base`.

    The box is cut along its widest stride into the rows that begin in the same band, and a row that is longer than
    that along the next stride.
    """
    lo = base + part.offset * width
    span = (1 + sum((n - 1) * s for n, s in zip(part.shape, part.strides, strict=True))) * width
    first, stop = lo // band, -(-(lo + span) // band)
    widest = max(range(len(part.shape)), key=lambda d: (part.shape[d] > 1) * part.strides[d], default=None)
    if stop - first <= 1 or widest is None or part.shape[widest] == 1:
        yield first, stop, part
        return
    row, start, end = part.strides[widest] * width, list(part.start), list(part.stop)
    i, n = 0, part.shape[widest]
    while i < n:
        last = min(n, max(i + 1, -(-(((lo + i * row) // band + 1) * band - lo) // row)))
        start[widest], end[widest] = part.start[widest] + i, part.start[widest] + last
        piece = part.intersect(start, end)
        assert piece is not None, "rows of the part"
        if last - i == 1 < math.prod(piece.shape):
            yield from _range_cells(piece, base, width, band)
        else:
            inside = (1 + sum((k - 1) * s for k, s in zip(piece.shape, piece.strides, strict=True))) * width
            at = base + piece.offset * width
            yield at // band, -(-(at + inside) // band), piece
        i = last

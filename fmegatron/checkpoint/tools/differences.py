"""diff: two checkpoints, leaf by leaf: structure, layouts, metadata, then values; streamed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from fmegatron.checkpoint.files.format import CheckpointError, Leaf, raw
from fmegatron.checkpoint.reading.source import Source
from fmegatron.checkpoint.tools.source import PORTION_BYTES, Block, Shape, batches, cut, leaves_of, read
from fmegatron.layout import boxes

_BLOCK = 1 << 20  # elements that are compared in float64 at a time


@dataclass(frozen=True)
class LeafDifference:
    """What differs of one leaf. only: "a" or "b" if the other has none.  shapes, dtypes, layouts: both, if they differ.
    values: how the elements compare, None where that was not asked for or makes no sense."""

    path: str
    only: str | None = None
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    dtypes: tuple[str, str] | None = None
    layouts: tuple[str, str] | None = None
    values: Comparison | None = None
    index: tuple[int, ...] | None = None  # of the first element that differs

    @property
    def structure(self) -> bool:
        """Whether the leaf is missing on one side or has another shape or dtype there."""
        return bool(self.only or self.shapes or self.dtypes)


@dataclass(frozen=True)
class Difference:
    """What differs between two checkpoints. metadata: key -> (a's value, b's value), missing ones as "(nothing)".

    leaves: those that differ.  compared: number of leaves on both sides.  skipped_bytes: of leaves that were equal by
    their digests, unread.
    """

    a: str
    b: str
    steps: tuple[int | None, int | None]
    metadata: dict[str, tuple[Any, Any]]
    leaves: tuple[LeafDifference, ...]
    compared: int
    skipped_bytes: int

    @property
    def equal(self) -> bool:
        """Whether nothing differs, steps and what was ignored left aside."""
        return not self.metadata and not self.leaves

    def to_json(self) -> dict[str, Any]:
        """All by names."""
        value = asdict(self)
        value["equal"] = self.equal
        for row, leaf in zip(value["leaves"], self.leaves, strict=True):
            if leaf.values is not None:
                names = ("count", "bits", "values", "beyond", "first", "max_abs", "max_rel")
                row["values"] = {name: getattr(leaf.values, name) for name in names}
        return value


def diff(
    a: Source,
    b: Source,
    pattern: str | None = None,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    ignore: frozenset[str] = frozenset(),
    read_all: bool = False,
    most: int = PORTION_BYTES,
) -> Difference:
    """Compare two checkpoints leaf by leaf.

    Elements are equal when |a - b| <= atol + rtol * |b|; without tolerances when their bits are.

    Args:
        a: a checkpoint.
        b: another one.
        pattern: regular expression; only leaves whose path has a match on either side. None: all.
        atol: absolute tolerance.
        rtol: relative tolerance.
        ignore: any of "layouts", "metadata", "values".
        read_all: read values even where both sides have the same chunks with the same digests.
        most: bytes of elements in memory at a time.

    Raises ValueError for a pattern that matches nothing, CheckpointError for damage in what is read.
    """
    left, right = ({leaf.path: leaf for leaf in _leaves(s, pattern, other)} for s, other in ((a, b), (b, a)))
    skipped, rows, reading = 0, {}, []
    for path in [*left, *(p for p in right if p not in left)]:
        if path not in left or path not in right:
            rows[path] = LeafDifference(path, only="a" if path in left else "b")
            continue
        x, y = left[path], right[path]
        layouts = None if "layouts" in ignore else _layouts(a, x, b, y)
        shapes = (x.shape, y.shape) if x.shape != y.shape else None
        dtypes = (x.dtype, y.dtype) if x.dtype != y.dtype else None
        rows[path] = LeafDifference(path, None, shapes, dtypes, layouts)
        if shapes is None and "values" not in ignore:
            reading.append(path)
    compared = {path: Comparison(atol, rtol) for path in reading}
    full = []
    for path in reading:
        chunks = None if read_all else _different_chunks(a, left[path], b, right[path])
        if chunks is None:
            full.append(path)
            continue
        skipped += _compare_chunks(a, b, left[path], right[path], chunks, compared[path], most)
    _compare_full(a, b, [(left[path], right[path]) for path in full], compared, most)
    found = [_finished(row, compared.get(path), left.get(path)) for path, row in rows.items()]
    metadata = {} if "metadata" in ignore else _metadata(dict(a.metadata), dict(b.metadata))
    both = sum(path in right for path in left)
    steps = a.step, b.step
    return Difference(a.text, b.text, steps, metadata, tuple(filter(None, found)), both, skipped)


def _leaves(source: Source, pattern: str | None, other: Source) -> list[Leaf]:
    try:
        return leaves_of(source, pattern)
    except ValueError:
        leaves_of(other, pattern)  # a pattern that matches on one side only is a difference, not a wrong use
        return []


def _layouts(a: Source, x: Leaf, b: Source, y: Leaf) -> tuple[str, str] | None:
    texts = []
    for source, leaf in ((a, x), (b, y)):
        try:
            layout = source.layout_of(leaf.path)
            texts.append((layout.mesh, layout.spec, layout.flat, str(layout)))
        except CheckpointError as error:
            texts.append((None, None, None, f"unreadable: {error}"))
    return (texts[0][3], texts[1][3]) if texts[0][:3] != texts[1][:3] or texts[0][0] is None else None


def _metadata(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    def same(x: Any, y: Any) -> bool:  # 1, 1.0 and true are three values
        return repr(x) == repr(y) if type(x) is not dict or type(y) is not dict else not _metadata(x, y)

    keys = [*a, *(k for k in b if k not in a)]
    none = "(nothing)"
    return {k: (a.get(k, none), b.get(k, none)) for k in keys if k not in a or k not in b or not same(a[k], b[k])}


def _finished(row: LeafDifference, values: Comparison | None, leaf: Leaf | None) -> LeafDifference | None:
    """The row with its values, or None when nothing differs."""
    differs = values is not None and not values.within
    if not differs and not row.structure and not row.layouts:
        return None
    index = None
    if values is not None and leaf is not None and differs and values.first is not None:
        index = tuple(int(i) for i in np.unravel_index(values.first, leaf.shape)) if leaf.shape else ()
    return LeafDifference(row.path, row.only, row.shapes, row.dtypes, row.layouts, values, index)


def _compare_full(a: Source, b: Source, pairs: list[tuple[Leaf, Leaf]], into: dict[str, Comparison], most: int) -> None:
    """Read both sides of leaves, block by block."""
    other = {x.path: y for x, y in pairs}
    for batch in batches(a, (x for x, _ in pairs), most // 2):
        xs, ys = read(a, batch), read(b, [replace(block, leaf=other[block.leaf.path]) for block in batch])
        for block, x, y in zip(batch, xs, ys, strict=True):
            into[block.leaf.path].add(x, y, lambda at, first=block.first: at + first)


def _different_chunks(a: Source, x: Leaf, b: Source, y: Leaf) -> list[int] | None:
    """The numbers of the chunks whose digests differ; None where both sides do not have the same chunks."""
    p, q = a.digests(x.path), b.digests(y.path)
    if p is None or q is None or x.dtype != y.dtype or (p.chunk, p.band) != (q.chunk, q.band):
        return None
    if p.combined == q.combined:
        return []
    return np.flatnonzero((p.table() != q.table()).any(1)).tolist()


def _compare_chunks(a: Source, b: Source, x: Leaf, y: Leaf, chunks: list[int], into: Comparison, most: int) -> int:
    """Read these chunks of both sides; returns the bytes of the leaf that were not read."""
    digests, itemsize = a.digests(x.path), x.torch_dtype.itemsize
    assert digests is not None, "`_different_chunks` has compared them"
    grid = [-(-n // c) for n, c in zip(x.shape, digests.chunk, strict=True)]
    unread = math.prod(x.shape)
    for chunk in chunks:
        origin = [int(i) * c for i, c in zip(np.unravel_index(chunk, grid), digests.chunk, strict=True)]
        shape = tuple(min(c, n - o) for o, c, n in zip(origin, digests.chunk, x.shape, strict=True))
        for at, part in cut(shape, most // 2 // itemsize, (digests.band,)):
            start = tuple(o + i for o, i in zip(origin, at, strict=True))
            (p,), (q,) = (read(s, [Block(leaf, start, part, 0, False)]) for s, leaf in ((a, x), (b, y)))
            into.add(p, q, lambda at, start=start, part=part: _numbers(at, start, part, x.shape))
        unread -= math.prod(shape)
    into.count += unread
    return unread * itemsize


def _numbers(at: np.ndarray, start: Shape, part: Shape, shape: Shape) -> np.ndarray:
    """Row-major numbers in an array of `shape` of positions in the part of it that begins at `start`."""
    if not shape:
        return at
    index = [i + s for i, s in zip(np.unravel_index(at, part), start, strict=True)]
    return sum((i * n for i, n in zip(index, boxes.row_major_strides(shape), strict=True)), np.zeros_like(at))


@dataclass
class Comparison:
    """Of the elements seen so far. NaN equals NaN.

    count: elements.  bits: elements with other bits.  values: those whose values differ, too (not -0 and 0, not two
    NaNs).  beyond: those that differ by more than the tolerance.  first: row-major number of the first element that
    is `beyond` (or, without one, has other bits).  max_abs, max_rel: greatest |a - b| and |a - b| / |b|.
    """

    atol: float = 0.0
    rtol: float = 0.0
    count: int = 0
    bits: int = 0
    values: int = 0
    beyond: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    _first_beyond: int | None = None
    _first_bits: int | None = None

    @property
    def first(self) -> int | None:
        """Row-major number of the first element that differs, None when all bits are equal."""
        return self._first_bits if self._first_beyond is None else self._first_beyond

    def add(self, a: torch.Tensor, b: torch.Tensor, number: Callable[[np.ndarray], np.ndarray]) -> None:
        """Take in CPU tensors of one shape. number: from positions in them to row-major numbers in the leaf."""
        a, b, same_type = a.reshape(-1), b.reshape(-1), a.dtype is b.dtype
        self.count += a.numel()
        for at in range(0, a.numel(), _BLOCK):
            x, y = raw(a[at : at + _BLOCK]), raw(b[at : at + _BLOCK])
            where = np.flatnonzero(_differ(x, y)) if same_type else np.arange(len(x))
            if len(where):
                found = torch.from_numpy(number(where + at))
                x, y = torch.from_numpy(x[where]).view(a.dtype), torch.from_numpy(y[where]).view(b.dtype)
                self._add(x, y, found, same_type)

    def _add(self, x: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor, same_type: bool) -> None:
        distance, size, equal = _distance(x, y)
        beyond = ~equal & ~(distance <= self.atol + self.rtol * size)
        if same_type:
            self.bits += len(x)
            self._first_bits = _least(self._first_bits, numbers)
        self.values += int((~equal).sum())
        self.beyond += int(beyond.sum())
        self._first_beyond = _least(self._first_beyond, numbers[beyond])
        relative = torch.where(equal, 0.0, distance / size)
        self.max_abs = max(self.max_abs, _most(torch.where(equal, 0.0, distance)))
        self.max_rel = max(self.max_rel, _most(relative))

    @property
    def within(self) -> bool:
        """Whether all is equal: bit for bit, or within the tolerance where there is one."""
        return not self.beyond and (not self.bits or bool(self.atol or self.rtol))


def _differ(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Which elements have other bits."""
    if x.dtype.itemsize < 16:
        return x != y
    return (x.view(np.int64) != y.view(np.int64)).reshape(-1, 2).any(1)


def _distance(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(|x - y|, |y|, whether equal), in float64; NaN where one is NaN. Exact for integers of one type."""
    if x.dtype is y.dtype and not x.is_floating_point() and not x.is_complex():
        a, b = x.numpy(), y.numpy()
        unsigned = np.dtype(f"u{a.itemsize}")
        up = a > b
        a, b = (a.view(unsigned), b.view(unsigned)) if a.dtype != bool else (a.astype(np.uint8), b.astype(np.uint8))
        distance = torch.from_numpy(np.where(up, a - b, b - a).astype(np.float64))
        return distance, y.to(torch.float64).abs(), torch.from_numpy(a == b)
    a, b = _wide(x), _wide(y)
    if not a.is_complex() and not b.is_complex():
        return (a - b).abs(), b.abs(), (a == b) | (a.isnan() & b.isnan())
    a, b = a.to(torch.complex128), b.to(torch.complex128)
    equal = (a.real == b.real) | (a.real.isnan() & b.real.isnan())
    return (a - b).abs(), b.abs(), equal & ((a.imag == b.imag) | (a.imag.isnan() & b.imag.isnan()))


def _wide(x: torch.Tensor) -> torch.Tensor:
    """float64 or complex128; over float32, the only way that exists for every float of a byte."""
    if x.is_complex():
        return x.to(torch.complex128)
    return (x.float() if x.is_floating_point() and x.element_size() < 4 else x).to(torch.float64)


def _least(old: int | None, numbers: torch.Tensor) -> int | None:
    if not len(numbers):
        return old
    new = int(numbers.min())
    return new if old is None else min(old, new)


def _most(x: torch.Tensor) -> float:
    """The greatest, where NaN (a number against a NaN) counts as infinity."""
    return float(x.nan_to_num(nan=float("inf"), posinf=float("inf")).max()) if x.numel() else 0.0

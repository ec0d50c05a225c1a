"""show: the tree of a checkpoint, its meshes and layouts, and the statistics of its leaves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fmegatron.checkpoint.files.format import CheckpointError, Leaf, StoredLeaf
from fmegatron.checkpoint.reading.source import Source
from fmegatron.checkpoint.tools.source import PORTION_BYTES, leaves_of, stream

_BLOCK = 1 << 20  # elements that are looked at in float64 at a time


@dataclass(frozen=True)
class LeafRow:
    """What `show` reports of one leaf. home: "array", "packed", "pieces" or "empty".  chunk: of its array, if any."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    home: str
    chunk: tuple[int, ...] | None
    layout: str
    statistics: Statistics | None = None

    @property
    def elements(self) -> int:
        """Number of elements of the global array."""
        return math.prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        """The row by names."""
        row = {k: getattr(self, k) for k in ("path", "shape", "dtype", "nbytes", "elements", "home", "chunk", "layout")}
        return row | ({"statistics": self.statistics.to_json()} if self.statistics else {})


@dataclass(frozen=True)
class Shown:
    """A checkpoint at a glance. meshes: of the layouts when written.  finite: whether loss and gradient norm
    of its step were, as the run reported; None: it did not.
    """

    root: str
    step: int | None
    metadata: dict[str, Any]
    meshes: tuple[str, ...]
    leaves: tuple[LeafRow, ...]
    finite: bool | None = None

    @property
    def elements(self) -> int:
        """Elements of the leaves shown."""
        return sum(row.elements for row in self.leaves)

    @property
    def nbytes(self) -> int:
        """Bytes of the leaves shown."""
        return sum(row.nbytes for row in self.leaves)

    def to_json(self) -> dict[str, Any]:
        """All by names."""
        return {
            "path": self.root,
            "step": self.step,
            "finite": self.finite,
            "metadata": self.metadata,
            "meshes": self.meshes,
            "elements": self.elements,
            "bytes": self.nbytes,
            "leaves": [row.to_json() for row in self.leaves],
        }


def show(source: Source, pattern: str | None = None, stats: bool = False, most: int = PORTION_BYTES) -> Shown:
    """The leaves that match a pattern; with statistics if asked (then their elements are read, `most` bytes at a time).

    Raises ValueError for a pattern without a match, CheckpointError for damage in what is read.
    """
    leaves = leaves_of(source, pattern)
    counted = {leaf.path: Statistics() for leaf in leaves} if stats else {}
    if stats:
        for block, x in stream(source, leaves, most):
            counted[block.leaf.path].add(x)
    rows = tuple(_row(source, leaf, counted.get(leaf.path)) for leaf in leaves)
    meshes = tuple(_mesh(mesh) for mesh in source.meshes)
    return Shown(source.text, source.step, dict(source.metadata), meshes, rows, source.finite)


def _row(source: Source, leaf: Leaf, statistics: Statistics | None) -> LeafRow:
    grid = source.grid(leaf.path)
    chunk = grid[0] if grid else None
    try:
        layout = str(source.layout_of(leaf.path))
    except CheckpointError as error:
        layout = f"unreadable: {error}"
    return LeafRow(leaf.path, leaf.shape, leaf.dtype, leaf.nbytes, home(leaf), chunk, layout, statistics)


def home(leaf: Leaf) -> str:
    """Where a leaf is stored: "array", "packed", "pieces" or "empty" in a checkpoint of ours, else "file"."""
    if not isinstance(leaf, StoredLeaf):
        return "file" if 0 not in leaf.shape else "empty"
    if leaf.array is not None:
        return "array"
    return leaf.pieces[0].array.split("/")[0] if leaf.pieces else "empty"


def _mesh(mesh: Any) -> str:
    try:
        return ", ".join(f"{name}={int(size)}" for name, size in zip(mesh["names"], mesh["sizes"], strict=True))
    except (KeyError, TypeError, ValueError):
        return "unreadable"


@dataclass
class Statistics:
    """Of the elements seen so far. min, max, mean and std are those of the finite ones (of magnitudes, if complex).

    count: elements.  nonfinite: NaNs and infinities.  zeros: of either sign.
    """

    count: int = 0
    nonfinite: int = 0
    zeros: int = 0
    min: int | float | None = None
    max: int | float | None = None
    _mean: float = 0.0
    _squares: float = 0.0  # sum of squared distances from the mean

    @property
    def finite(self) -> int:
        """Number of finite elements."""
        return self.count - self.nonfinite

    @property
    def mean(self) -> float | None:
        """Mean of the finite elements, None without any."""
        return self._mean if self.finite else None

    @property
    def std(self) -> float | None:
        """Standard deviation (of the population) of the finite elements, None without any."""
        return math.sqrt(self._squares / self.finite) if self.finite else None

    def add(self, x: torch.Tensor) -> None:
        """Take in the elements of a CPU tensor."""
        for exact, values in _values(x):
            self.count += values.numel()
            self.zeros += values.numel() - int(values.count_nonzero())
            if not all(map(math.isfinite, torch.stack(values.aminmax()).tolist())):
                finite = values.isfinite()
                self.nonfinite += int((~finite).sum())
                exact, values = exact[finite], values[finite]
            kept, before = values.numel(), self.finite - values.numel()
            if not kept:
                continue
            low, high = exact.numpy().min().item(), exact.numpy().max().item()  # torch has no min of uint64
            self.min = low if self.min is None else min(self.min, low)
            self.max = high if self.max is None else max(self.max, high)
            # Chan, Golub and LeVeque 1979: means and squares of two sets make those of both.
            variance, mean = map(float, torch.var_mean(values, correction=0))
            away = mean - self._mean
            self._squares += variance * kept + away * away * before * kept / (before + kept)
            self._mean += away * kept / (before + kept)

    def to_json(self) -> dict[str, int | float | None]:
        """The numbers by name."""
        names = ("count", "nonfinite", "zeros", "min", "max", "mean", "std")
        return {name: getattr(self, name) for name in names}


def _values(x: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Portions of x, flat: in a type that is exact and that numpy has, and in float64."""
    flat = x.reshape(-1)
    for at in range(0, flat.numel(), _BLOCK):
        part = flat[at : at + _BLOCK]
        if part.is_complex():
            part = part.to(torch.complex128).abs()
        # Over float32, the only way that exists for every float of a byte.
        values = (part.float() if part.is_floating_point() and part.element_size() < 4 else part).to(torch.float64)
        yield values if part.is_floating_point() else part, values

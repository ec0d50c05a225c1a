"""show: the tree of a checkpoint, its meshes and layouts, and the statistics of its leaves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fmegatron.checkpoint.files.format import CheckpointError, Leaf, dtype_of
from fmegatron.checkpoint.files.manifest import layout_from_json
from fmegatron.checkpoint.tools.source import PORTION_BYTES, Source, stream
from fmegatron.checkpoint.tools.statistics import Statistics


@dataclass(frozen=True)
class LeafRow:
    """What `show` tells of one leaf. home: "array", "packed", "pieces" or "empty".  chunk: of its array, if any."""

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
    """A checkpoint at a glance. meshes: on which the layouts lay when written.  finite: whether loss and gradient norm
    of its step were, as the run said; None: it did not say.
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
    leaves = source.leaves(pattern)
    counted = {leaf.path: Statistics() for leaf in leaves} if stats else {}
    if stats:
        for block, x in stream(source, leaves, most):
            counted[block.leaf.path].add(x)
    rows = tuple(_row(source, leaf, counted.get(leaf.path)) for leaf in leaves)
    meshes = tuple(_mesh(mesh) for mesh in source.manifest.meshes)
    m = source.manifest
    return Shown(source.text, m.step, m.metadata, meshes, rows, m.finite)


def _row(source: Source, leaf: Leaf, statistics: Statistics | None) -> LeafRow:
    chunk = source.manifest.arrays[leaf.array].chunk if leaf.array is not None else None
    nbytes = math.prod(leaf.shape) * dtype_of(leaf.dtype).itemsize
    try:
        layout = str(layout_from_json(leaf, source.manifest.meshes))
    except CheckpointError as error:
        layout = f"unreadable: {error}"
    return LeafRow(leaf.path, leaf.shape, leaf.dtype, nbytes, home(leaf), chunk, layout, statistics)


def home(leaf: Leaf) -> str:
    """Where a leaf lies: "array", "packed", "pieces" or "empty"."""
    if leaf.array is not None:
        return "array"
    return leaf.pieces[0].array.split("/")[0] if leaf.pieces else "empty"


def _mesh(mesh: Any) -> str:
    try:
        return ", ".join(f"{name}={int(size)}" for name, size in zip(mesh["names"], mesh["sizes"], strict=True))
    except (KeyError, TypeError, ValueError):
        return "unreadable"

"""A checkpoint as the tools read it: opened by path, its elements streamed in portions of bounded size."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fmegatron import tree
from fmegatron.checkpoint.files.format import Array, CheckpointError, Leaf, Manifest, dtype_of
from fmegatron.checkpoint.files.snapshot import Saved, Snapshot, snapshot_of
from fmegatron.checkpoint.files.storage import Storage
from fmegatron.checkpoint.files.targets import Target
from fmegatron.checkpoint.reading.digests import stored_digests
from fmegatron.checkpoint.reading.fetch import read_all
from fmegatron.checkpoint.reading.rounds import in_rounds
from fmegatron.layout import Box, row_major_strides

Shape = tuple[int, ...]
PORTION_BYTES = 64 << 20  # read at a time, by default


@dataclass(frozen=True)
class Source:
    """An opened checkpoint: one save of it, whatever is saved there meanwhile."""

    snapshot: Snapshot

    @property
    def storage(self) -> Storage:
        """Its files."""
        return self.snapshot.storage

    @property
    def manifest(self) -> Manifest:
        """Its checked manifest."""
        return self.snapshot.manifest

    @property
    def text(self) -> str:
        """Path or URL, for messages."""
        return self.storage.text

    def leaves(self, pattern: str | None = None) -> list[Leaf]:
        """The leaves whose path has a match of a regular expression, in the order of the tree. ValueError for none."""
        return [self.manifest.leaves[path] for path in self.matching(pattern, list(self.manifest.leaves))]

    def matching(self, pattern: str | None, paths: Sequence[str]) -> list[str]:
        """Those of some paths that have a match of a regular expression, all for None. ValueError for none."""
        if pattern is None:
            return list(paths)
        try:
            wanted = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"got the pattern {pattern!r}, wanted a regular expression: {error}") from None
        found = [path for path in paths if wanted.search(path)]
        if not found:
            near = tree.did_you_mean(pattern, list(paths))
            raise ValueError(f"{self.text}: got the pattern {pattern!r}, wanted one that matches a leaf{near}")
        return found

    def read(self, wanted: Sequence[Block], dtypes: Mapping[str, torch.dtype] | None = None) -> list[torch.Tensor]:
        """The elements of blocks, verified, as contiguous CPU tensors, cast where `dtypes` has the path.

        Blocks that are read together share bands: each is read once. Raises CheckpointError naming leaf and file.
        """
        tensors, targets = [], {}
        for block in wanted:
            x = torch.empty(block.shape, dtype=(dtypes or {}).get(block.leaf.path) or dtype_of(block.leaf.dtype))
            tensors.append(x)
            if x.numel():
                targets.setdefault(block.leaf.path, (block.leaf, []))[1].append(block.target(x))
        self.fetch(targets.values())
        return tensors

    def digests(self, array: Array, leaf: str) -> np.ndarray:
        """The digests of the bands of a leaf's array, uint64 [chunks, bands]. Raises CheckpointError."""
        try:
            return stored_digests(self.snapshot, array, leaf)
        except CheckpointError as error:
            self.snapshot.check(error)
            raise

    def fetch(self, wanted: Iterable[tuple[Leaf, list[Target]]]) -> None:
        """Fill targets, leaf by leaf; each leaf stands once. Raises CheckpointError naming leaf and file."""
        read_all(self.snapshot, wanted, True)


@dataclass(frozen=True)
class Block:
    """The elements [start, start + shape) of a leaf: full rows of it, so that its blocks follow each other in memory.

    first: row-major number of its first element in the leaf.  last: whether the leaf ends here.
    """

    leaf: Leaf
    start: tuple[int, ...]
    shape: tuple[int, ...]
    first: int
    last: bool

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return math.prod(self.shape) * dtype_of(self.leaf.dtype).itemsize

    def target(self, x: torch.Tensor) -> Target:
        """What `Fetch` fills: `x`, a tensor of the block's shape."""
        return Target(
            self.leaf.path, Box(self.start, self.shape, 0, row_major_strides(self.shape)), x, dtype_of(self.leaf.dtype)
        )


def open_source(path: Saved) -> Source:
    """The checkpoint at a path. Raises CheckpointError when there is none, or its manifest is damaged.

    What reads it raises SavedAgain, a RuntimeError, when it was saved again meanwhile: then it is to be opened anew.
    """
    return Source(snapshot_of(path))


def blocks(source: Source, leaf: Leaf, most: int = PORTION_BYTES) -> Iterator[Block]:
    """A leaf in blocks of at most `most` bytes (or one element), in row-major order; one for an empty leaf.

    They end where stored chunks end wherever that is possible, so that nothing is read twice.
    """
    array = source.manifest.arrays[leaf.array] if leaf.array is not None else None
    steps = (array.chunk, array.band) if array is not None else ()
    total, first = math.prod(leaf.shape), 0
    for start, shape in cut(leaf.shape, most // dtype_of(leaf.dtype).itemsize, steps):
        size = math.prod(shape)
        yield Block(leaf, start, shape, first, first + size == total)
        first += size


def cut(shape: Shape, room: int, steps: Sequence[Shape] = ()) -> Iterator[tuple[Shape, Shape]]:
    """(start, shape) of parts of at most `room` elements (or one), contiguous in a row-major array and in its order.

    steps: shapes whose multiples are good places to end, the best ones first.

    >>> list(cut((2, 5), 3, [(1, 2)]))
    [((0, 0), (1, 2)), ((0, 2), (1, 2)), ((0, 4), (1, 1)), ((1, 0), (1, 2)), ((1, 2), (1, 2)), ((1, 4), (1, 1))]
    """

    def below(start: Shape) -> Iterator[tuple[Shape, Shape]]:
        dim, rest = len(start), shape[len(start) :]
        if math.prod(rest) <= max(1, room):
            yield start + (0,) * len(rest), (1,) * dim + rest
            return
        step = room // math.prod(rest[1:])  # full rows of this dim
        if step == 0:
            for at in range(rest[0]):
                yield from below((*start, at))
            return
        step = next((step // n[dim] * n[dim] for n in steps if step >= n[dim]), step)
        for at in range(0, rest[0], step):
            yield (*start, at) + (0,) * len(rest[1:]), (1,) * dim + (min(step, rest[0] - at),) + rest[1:]

    yield from below(())


def batches(source: Source, leaves: Iterable[Leaf], most: int = PORTION_BYTES) -> Iterator[list[Block]]:
    """The blocks of leaves, in groups of about `most` bytes.

    Many small leaves are read together, so that the files and bands that they share are read once.
    """
    return in_rounds((block for leaf in leaves for block in blocks(source, leaf, most)), most)


def stream(
    source: Source, leaves: Iterable[Leaf], most: int = PORTION_BYTES, dtypes: Mapping[str, torch.dtype] | None = None
) -> Iterator[tuple[Block, torch.Tensor]]:
    """The elements of leaves, block by block in row-major order; at most about `most` stored bytes are held at a time.

    dtypes: by path, what to cast to.
    """
    for batch in batches(source, leaves, most):
        tensors = source.read(batch, dtypes)
        tensors.reverse()
        for block in batch:
            yield block, tensors.pop()  # given back when its reader is done with it

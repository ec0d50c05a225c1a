"""A source of leaves as the tools read it: opened by path, its elements streamed in portions of bounded size."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fmegatron.checkpoint.files.format import Leaf
from fmegatron.checkpoint.files.targets import Target
from fmegatron.checkpoint.reading.rounds import in_rounds
from fmegatron.checkpoint.reading.snapshot import Saved, snapshot_of
from fmegatron.checkpoint.reading.source import Source
from fmegatron.layout import Box, boxes
from fmegatron.tree import structure

Shape = tuple[int, ...]
PORTION_BYTES = 64 << 20  # read at a time, by default


def leaves_of(source: Source, pattern: str | None = None) -> list[Leaf]:
    """The leaves whose path has a match of a regular expression, in the order of the tree. ValueError for none."""
    return [source.leaves[path] for path in matching(source, pattern, list(source.leaves))]


def matching(source: Source, pattern: str | None, paths: Sequence[str]) -> list[str]:
    """Those of some paths that have a match of a regular expression, all for None. ValueError for none."""
    if pattern is None:
        return list(paths)
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"got the pattern {pattern!r}, wanted a regular expression: {error}") from None
    found = [path for path in paths if wanted.search(path)]
    if not found:
        near = structure.did_you_mean(pattern, list(paths))
        raise ValueError(f"{source.text}: got the pattern {pattern!r}, wanted one that matches a leaf{near}")
    return found


def read(source: Source, wanted: Sequence[Block]) -> list[torch.Tensor]:
    """The elements of blocks, verified, as contiguous CPU tensors.

    Blocks that are read together share bands: each is read once. Raises CheckpointError naming leaf and file.
    """
    tensors: list[torch.Tensor] = []
    targets: dict[str, list[Target]] = {}
    for block in wanted:
        x = torch.empty(block.shape, dtype=block.leaf.torch_dtype)
        tensors.append(x)
        if x.numel():
            targets.setdefault(block.leaf.path, []).append(block.target(x))
    source.fill(targets)
    return tensors


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
        return math.prod(self.shape) * self.leaf.torch_dtype.itemsize

    def target(self, x: torch.Tensor) -> Target:
        """What a source fills: `x`, a tensor of the block's shape."""
        box = Box(self.start, self.shape, 0, boxes.row_major_strides(self.shape))
        return Target(self.leaf.path, box, x, self.leaf.torch_dtype)


def open_source(path: Saved) -> Source:
    """The checkpoint at a path. Raises CheckpointError when there is none, or its manifest is damaged.

    What reads it raises SavedAgain, a RuntimeError, when it was saved again meanwhile: then it is to be opened anew.
    """
    return snapshot_of(path)


def blocks(source: Source, leaf: Leaf, most: int = PORTION_BYTES) -> Iterator[Block]:
    """A leaf in blocks of at most `most` bytes (or one element), in row-major order; one for an empty leaf.

    They end where stored chunks end wherever that is possible, so that nothing is read twice.
    """
    total, first = math.prod(leaf.shape), 0
    for start, shape in cut(leaf.shape, most // leaf.torch_dtype.itemsize, source.grid(leaf.path)):
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


def stream(source: Source, leaves: Iterable[Leaf], most: int = PORTION_BYTES) -> Iterator[tuple[Block, torch.Tensor]]:
    """The elements of leaves, block by block in row-major order; about `most` stored bytes are held at a time."""
    for batch in batches(source, leaves, most):
        tensors = read(source, batch)
        tensors.reverse()
        for block in batch:
            yield block, tensors.pop()  # given back when its reader is done with it

"""A source of leaves: all that restores, tools and Managers ask of a checkpoint of any system.

Five things have no default: what it is, where, which save of it, what is in it, and how a box of a leaf is read. Our
own is `Snapshot`; `fmegatron.interop.source` opens those of DCP, Megatron, Hugging Face and safetensors. One of ten
lines is in docs/interop.md.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fmegatron.checkpoint.dicts.described import stored_values
from fmegatron.checkpoint.files.format import BAND_BYTES, Leaf
from fmegatron.checkpoint.files.targets import Target
from fmegatron.layout import Box, Layout, Mesh


class Grain(NamedTuple):
    """What is read at once.

    key: the same for the same bytes, in the order of their addresses in an array.  array, file: in words of the source.
    """

    key: tuple[Any, ...]
    array: str
    file: str
    nbytes: int


class Digests(NamedTuple):
    """What was digested of a leaf when it was written.

    chunk, band: shapes; bands tile a chunk.  combined: the digest of all digests.  table: those of the bands,
    uint64 [chunks, bands], row-major, read when it is called; raises CheckpointError.
    """

    chunk: tuple[int, ...]
    band: tuple[int, ...]
    combined: str
    table: Callable[[], np.ndarray]


class Source(ABC):
    """Leaves with elements, opened: what is read is of one save, whatever is written to its place meanwhile."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """What it is, in words: "a directory of torch.distributed.checkpoint"."""

    @property
    @abstractmethod
    def text(self) -> str:
        """Path or URL, for messages."""

    @property
    @abstractmethod
    def digest(self) -> int:
        """63 bits that two saves have in common only if they hold the same; ranks that read together compare it."""

    @property
    def named(self) -> str:
        """The save, as messages distinguish it from others of its place."""
        return f"digest {self.digest:016x}"

    @property
    @abstractmethod
    def leaves(self) -> Mapping[str, Leaf]:
        """The leaves by path, in their order."""

    @abstractmethod
    def fill(self, wanted: Mapping[str, Sequence[Target]], verify: bool = True) -> None:
        """Fill the targets, by path of the leaf that each is a box of.

        verify: compare all that is read with digests, where there are some. Raises CheckpointError, naming leaf and
        file; RuntimeError where the save has been replaced by another.
        """

    # ---- what it knows beside the elements

    @property
    def step(self) -> int | None:
        """The update that it is of; None where that is not known."""
        return None

    @property
    def finite(self) -> bool | None:
        """Whether loss and gradient norm of that update were finite; None where that is not known."""
        return None

    @property
    def metadata(self) -> Mapping[str, Any]:
        """JSON values that were saved with it, a state's plain values among them (dicts/values.py)."""
        return {}

    @property
    def values(self) -> dict[str, Any]:
        """The plain values that a state had beside its arrays, by path. Raises CheckpointError for what is not ours."""
        return stored_values(self.metadata, self.text)

    @property
    def unread(self) -> Sequence[str]:
        """Paths of what is stored beside arrays and is no plain value, so that no restore gives it back."""
        return ()

    @property
    def version(self) -> int:
        """Of its format."""
        return 1

    @property
    def meshes(self) -> Sequence[Mapping[str, Any]]:
        """The meshes of its layouts, as JSON has them."""
        return (Mesh().to_json(),)

    def layout_of(self, path: str) -> Layout:
        """The layout under which a leaf was written; all on one process where that is not known.

        Raises CheckpointError where it cannot be read.
        """
        leaf = self.leaves[path]
        return Layout(leaf.shape, leaf.torch_dtype, Mesh())

    # ---- granularity

    def cells(self, path: str, box: Box) -> Iterator[tuple[tuple[Grain, ...], Box]]:
        """A box of a leaf cut along what is read at once: (what is read for it, piece of the box), in their order.

        Ranks that need the same share the reading along these. By default blocks of rows of about 1 MiB.
        """
        leaf = self.leaves[path]
        if 0 in leaf.shape:
            return
        width = leaf.torch_dtype.itemsize
        for cell in rows(box, width, BAND_BYTES):
            yield (Grain((path, cell.start, cell.shape), path, "", cell.size * width),), cell

    def reads(self, path: str, box: Box) -> Iterator[Grain]:
        """What `fill` reads for a box of a leaf, with verification."""
        for grains, _ in self.cells(path, box):
            yield from grains

    def grid(self, path: str) -> tuple[tuple[int, ...], ...]:
        """Shapes at multiples of which reading a leaf part by part ends best, the best first; none by default."""
        return ()

    # ---- trust

    @property
    def verifies(self) -> bool:
        """Whether the files have digests, which `fill` compares."""
        return False

    def digests(self, path: str) -> Digests | None:
        """The digests of a leaf's elements; None where there are none that another source could have too."""
        return None

    def digest_of(self, path: str) -> str | None:
        """What differs where two saves hold other elements, or another layout, for a leaf; None where it is not known.

        Of a small leaf that is packed with others, it may differ with them.
        """
        return None

    def require(self, wanted: Iterable[tuple[str, Box]]) -> None:
        """Raise CheckpointError unless these boxes of leaves are in the files; nothing has been allocated for them."""
        del wanted

    # ---- pinning

    def pinned(self) -> AbstractContextManager[None]:
        """A block in which the files are not deleted by what knows of it."""
        return nullcontext()


@dataclass(frozen=True)
class Foreign:
    """A source that is opened when it is read, by `look`, so that what is wrong with it is an error of all ranks.

    `fmegatron.interop.source` makes it. text: the path.
    """

    text: str
    look: Callable[[], Source]


def rows(box: Box, width: int, most: int) -> Iterator[Box]:
    """A box cut along its first dims into blocks of rows of about `most` bytes. width: bytes of an element."""
    if not box.shape:
        yield box
        return
    dim = next((d for d in range(len(box.shape)) if math.prod(box.shape[d + 1 :]) * width <= most), 0)
    step = max(1, most // max(1, math.prod(box.shape[dim + 1 :]) * width))
    outer = [range(a, a + n) for a, n in zip(box.start[:dim], box.shape[:dim], strict=True)]
    rest = box.start[dim + 1 :], box.stop[dim + 1 :]
    for *at, first in itertools.product(*outer, range(box.start[dim], box.stop[dim], step)):
        cell = box.intersect((*at, first, *rest[0]), (*(a + 1 for a in at), min(first + step, box.stop[dim]), *rest[1]))
        assert cell is not None, "rows of the box"
        yield cell

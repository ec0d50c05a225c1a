"""A file to write, and how its bytes are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from fmegatron.checkpoint.files.format import Array
from fmegatron.checkpoint.writing.part import Part

# How the blocks of a file are made. "look": those of devices are left out; "copy": each is in a buffer that no other
# thread writes to; "use": what is contiguous is given as it is in the tensor's memory.
How = Literal["look", "copy", "use"]


@dataclass(frozen=True)
class Job:
    """A file to write.

    array, file: of which it is one.  numbers: of its chunks in the grid.  table: uint64 [chunks, bands], their digests.
    marks: the same, or of packed leaves one a leaf.  names, on_host: the leaf of each row of `marks`, and whether it is
    in host memory.  blocks: its bytes; `table` and `marks` are filled while they are made.
    """

    array: Array
    file: tuple[int, ...]
    numbers: list[int]
    table: np.ndarray
    marks: np.ndarray
    names: Sequence[str]
    on_host: Sequence[bool]
    blocks: Callable[[How], Iterable[np.ndarray]]

    @property
    def is_packed(self) -> bool:
        """Whether it holds many small leaves."""
        return self.marks is not self.table

    @property
    def nbytes(self) -> int:
        """Bytes of the file, without an index."""
        return len(self.numbers) * self.array.chunk_nbytes


class Files(NamedTuple):
    """The files that a rank has to write. part: what is known of them before."""

    part: Part
    jobs: list[Job]

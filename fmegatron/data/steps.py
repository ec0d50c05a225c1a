"""Batches by step: what all training batches have in common, and the part of each batch that one rank holds."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, Self

import numpy as np
import torch

from fmegatron.layout import DataParallel, Layout, Mesh, zigzag
from fmegatron.tree import in_words
from fmegatron.tree.labels import labelled

Batch = dict[str, torch.Tensor]
Ranges = tuple[tuple[int, int], ...]  # (start, stop) of rows or columns, in the order in which a rank holds them


class StepBatches:
    """Training batches as a pure function of the step: sample n, the row of a batch, depends on n alone.

    What `Batches`, `Blend` and `SourceBatches` have in common. batch_size: rows of all ranks. seq_len: columns.
    offset: see `after`. zigzag: for how many ranks the columns are in zigzag order (see `Batches`).
    """

    batch_size: int
    seq_len: int
    offset: int
    zigzag: int

    def after(self, samples: int | None, step: int) -> Self:
        """The same data, of which `step` steps have read `samples` samples: the batch of `step` begins behind them.

        For a run that goes on with another batch size. A sample is a row of a batch, a window of the data; None: as
        many as steps of this batch size read.

        >>> from fmegatron.data import Batches
        >>> few, many = (Batches(np.arange(1000), size, 8, seed=0) for size in (4, 6))
        >>> torch.equal(many.after(few.samples(3), 3).at(3)["tokens"][:4], few.at(3)["tokens"])
        True
        """
        name = type(self).__name__
        step = whole(step, f"{name}.after: step")
        samples = step * self.batch_size if samples is None else whole(samples, f"{name}.after: samples")
        if samples < 0 or step < 0:
            raise ValueError(f"{name}.after: got {samples} samples and {step} steps, wanted 0 or more of both")
        return replace(self, offset=samples - step * self.batch_size)  # pyright: ignore[reportArgumentType] a dataclass

    def samples(self, step: int) -> int:
        """How many samples the first `step` steps read: the position of the data, whatever the batch size was."""
        return self.offset + step * self.batch_size

    def at(self, step: int) -> Batch:
        """The full batch of `step` (0, 1, 2 …)."""
        return self.rows_at(step, ((0, self.batch_size),))

    def rows_at(self, step: int, rows: Ranges) -> Batch:
        """Some rows of the batch of `step`: ranges (start, stop) of its rows."""
        if step < 0 or self.samples(step) < 0:
            more = f", from {-(self.offset // self.batch_size)} on" if self.offset < 0 else ""
            raise ValueError(f"{type(self).__name__}.at: got step {step}, wanted 0 or more{more}")
        return arranged(self.read_rows(operator.index(step), rows), self.zigzag)

    def read_rows(self, step: int, rows: Ranges) -> dict[str, np.ndarray]:
        """Arrays [rows, S] of these rows of the batch of `step`, in order."""
        return self.read(self.samples(step) + numbers_in(rows))

    def read(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Arrays [n, S] of the samples of these numbers (int64 [n]): "tokens" and "labels" int64, and more."""
        raise TypeError(f"{type(self).__name__}.read: got a class without it, wanted one of Batches, Blend, ...")

    def describe(self) -> dict[str, Any]:
        """What a checkpoint states of this data, as JSON: what samples depend on, and digests of their data.

        `loop.Run` puts it into every checkpoint, and refuses a resume with other data by what differs. The batch size
        is none of it: it may change.
        """
        raise TypeError(f"{type(self).__name__}.describe: got a class without it, wanted one of Batches, Blend, ...")

    def layout(self, mesh: Mesh, strategy: DataParallel | None = None, microbatches: int = 1) -> Layout:
        """The layout of tokens and labels: `strategy.batch_layout` of their shape; None: rows over dp and fsdp."""
        return layout_of(self, mesh, strategy, microbatches)

    def for_rank(self, layout: Layout, rank: int, device: torch.device | str | None = None) -> RankBatches:
        """What one rank gets: `.at(step)` is its part of the batch of `step` under the batch's layout (`layout()`).

        device: where its tensors are put; None: they stay in host memory.
        """
        return RankBatches(self, layout, rank, device)


class _Rows(Protocol):
    """What a rank can have a part of."""

    @property
    def batch_size(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def zigzag(self) -> int: ...
    def rows_at(self, step: int, rows: Ranges, /) -> Batch: ...


@dataclass(frozen=True, eq=False)
class RankBatches:
    """The part of every batch that one rank holds under a layout of the batch, [B, S].

    ValueError for a layout of another shape, or under which ranks hold unequal parts, or whose ranks along the sequence
    are not those for which the batch is in zigzag order.
    """

    batches: _Rows
    layout: Layout
    rank: int
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        wanted = self.batches.batch_size, self.batches.seq_len
        if not isinstance(self.layout, Layout):
            raise ValueError(
                f"for_rank: got {in_words(self.layout)} as the layout, wanted one Layout, of tokens and labels; give "
                "batches.layout(mesh, strategy, microbatches), or one of those that the step declares"
            )
        if self.layout.shape != wanted or not self.layout.is_even or self.layout.flat or self.layout.unreduced:
            raise ValueError(
                f"for_rank: got the layout {self.layout}, wanted one of shape {wanted} with equal parts for all ranks; "
                "give batches.layout(mesh, strategy, microbatches)"
            )
        ranks = self.layout.shard_counts[1]
        if ranks % self.batches.zigzag:
            raise ValueError(
                f"for_rank: got a batch in zigzag order for {self.batches.zigzag} ranks and a layout that splits its "
                f"sequences over {ranks}, wanted a multiple; give Batches(..., zigzag={ranks})"
            )
        self.layout.mesh.check_rank(self.rank)

    @cached_property
    def _ranges(self) -> tuple[Ranges, ...]:
        """Of rows and of columns."""
        return tuple(
            tuple((s.start, s.start + s.length) for s in self.layout.segments(self.rank, dim)) for dim in range(2)
        )

    def at(self, step: int) -> Batch:
        """This rank's part of a batch."""
        rows, columns = self._ranges
        batch = self.batches.rows_at(step, rows)
        if columns != ((0, self.batches.seq_len),):
            batch = {name: torch.cat([x[:, a:b] for a, b in columns], 1) for name, x in batch.items()}
        if self.device is not None:
            batch = {name: x.to(self.device) for name, x in batch.items()}
        return {name: labelled(x, self._layout_of(x)) for name, x in batch.items()}

    @cached_property
    def _layouts(self) -> dict[tuple, Layout]:
        """By dtype and further dims: of what was read so far, so that equal arrays have one Layout."""
        return {}

    def _layout_of(self, x: torch.Tensor) -> Layout:
        key = x.dtype, x.dim(), x.shape[2:]
        if key not in self._layouts:
            shape = (*self.layout.shape[: x.dim()], *x.shape[2:])
            self._layouts[key] = self.layout.replace(shape=shape, dtype=x.dtype, spec=self.layout.spec[: x.dim()])
        return self._layouts[key]


def arranged(arrays: dict[str, np.ndarray], n: int) -> Batch:
    """Arrays [rows, S] as tensors whose columns are in zigzag order for n ranks, and their positions beside them."""
    if n > 1:
        rows, length = arrays["tokens"].shape
        if "positions" not in arrays:
            arrays = {**arrays, "positions": np.broadcast_to(np.arange(length), (rows, length))}
        columns = numbers_in(zigzag(length, n))
        arrays = {name: x[:, columns] for name, x in arrays.items()}
    return {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in arrays.items()}


def numbers_in(ranges: Ranges) -> np.ndarray:
    """int64: the numbers of ranges, one after the other."""
    return np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in ranges])


def whole(value: Any, what: str) -> int:
    """The value as an int; ValueError for what is no whole number: 4.0 rows would fail later, or read other rows."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ValueError(f"{what}: got {value!r:.40} ({type(value).__name__}), wanted a whole number; pass int(...) of it")


def check_sizes(of: Any) -> None:
    """batch_size, seq_len and zigzag as ints of 1 or more, a sequence that they divide, and a seed, where there is one,
    as an int; else ValueError.
    """
    name = type(of).__name__
    for field in ("batch_size", "seq_len", "zigzag", *(("seed",) if hasattr(of, "seed") else ())):
        object.__setattr__(of, field, whole(getattr(of, field), f"{name}: {field}"))
    if of.batch_size < 1 or of.seq_len < 1:
        raise ValueError(f"{name}: got batch_size {of.batch_size} and seq_len {of.seq_len}, wanted 1 or more")
    zigzag(of.seq_len, of.zigzag)


def require_from_start(batches: StepBatches, who: str) -> None:
    """ValueError for batches of which `after` was taken: what is made of them counts its own samples, from 0."""
    if batches.offset:
        raise ValueError(
            f"{who}: got batches with after(...), wanted them from their beginning; take after() of the result"
        )


def layout_of(of: Any, mesh: Mesh, strategy: DataParallel | None, microbatches: int) -> Layout:
    """The layout of a batch: `strategy.batch_layout`; None: rows over dp and fsdp."""
    return (strategy or DataParallel()).batch_layout((of.batch_size, of.seq_len), torch.int64, mesh, microbatches)

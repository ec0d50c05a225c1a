"""Batches by step: what all training batches have in common, and the part of each batch that one rank holds."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import torch

from fmegatron import tree
from fmegatron.data.contract import Placed, Ranges, Source, source_name
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.layout.zigzag import zigzag
from fmegatron.tree import labels, structure

Batch = dict[str, torch.Tensor]


class TokenBatches(Source):
    """Batches of token windows: a source that knows the sizes of its batches, and reads what rows it is asked for.

    batch_size: rows of all ranks. seq_len: columns. zigzag: for how many ranks the columns are in zigzag order.
    """

    batch_size: int
    seq_len: int
    zigzag: int

    def at(self, position: int) -> Batch:
        """The full batch of a position."""
        return self.rows(position, ((0, self.batch_size),))

    @abstractmethod
    def rows(self, position: int, ranges: Ranges) -> Batch:
        """Some rows of a batch: ranges (start, stop) of its rows."""

    def layout(self, mesh: Mesh, strategy: DataParallel | None = None, microbatches: int = 1) -> Layout:
        """The layout of tokens and labels: `strategy.batch_layout` of their shape; None: rows over dp and fsdp."""
        shape = self.batch_size, self.seq_len
        return (strategy or DataParallel()).batch_layout(shape, torch.int64, mesh, microbatches)

    def for_rank(self, layout: Layout, rank: int, device: torch.device | str | None = None) -> Source:
        """What one rank gets: `.at(position)` is its part of the batch under the batch's layout (`layout()`).

        device: where its tensors are put; None: they stay in host memory. A run does this (`loop.own_rows`).
        """
        part = RankBatches(self, layout, rank)
        return part if device is None else Placed(part, torch.device(device))


class StepBatches(TokenBatches):
    """Training batches as a pure function of the step: sample n, the row of a batch, depends on n alone.

    What `Batches`, `Blend` and `SourceBatches` have in common. offset: see `after`.
    """

    offset: int

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

    def rows(self, position: int, ranges: Ranges) -> Batch:
        """Some rows of the batch of a step (0, 1, 2 …): ranges (start, stop) of its rows."""
        step = position
        if step < 0 or self.samples(step) < 0:
            more = f", from {-(self.offset // self.batch_size)} on" if self.offset < 0 else ""
            raise ValueError(f"{type(self).__name__}.at: got step {step}, wanted 0 or more{more}")
        return arranged(self.read_rows(operator.index(step), ranges), self.zigzag)

    def read_rows(self, step: int, rows: Ranges) -> dict[str, np.ndarray]:
        """Arrays [rows, S] of these rows of the batch of `step`, in order."""
        return self.read(self.samples(step) + numbers_in(rows))

    def read(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Arrays [n, S] of the samples of these numbers (int64 [n]): "tokens" and "labels" int64, and more."""
        raise TypeError(f"{type(self).__name__}.read: got a class without it, wanted one of Batches, Blend, ...")


@dataclass(frozen=True, eq=False)
class RankBatches(Source):
    """The part of every batch of a source that one rank has: its rows, and its columns where they are split.

    layout: of the arrays of a batch: one Layout [B, S], which all of them have in their first two dims; or a tree of
    Layouts or ArraySpecs (`step.Description.batch`), and arrays that it does not name are split like its first one; or
    a function (shape, dtype) -> Layout, where no shape is known before. vocab_size: of the model; None: not known.
    ValueError for a layout of another shape, or under which ranks hold unequal parts, or whose ranks along the sequence
    are not those for which the batch is in zigzag order; and, naming the array, for a batch of other shapes or dtypes,
    and for "tokens", "labels", "ahead" or "ahead_tokens" in host memory that the vocabulary does not have (labels below
    0 are none).
    """

    batches: Source
    layout: Layout | Callable[[tuple[int, ...], torch.dtype], Layout] | structure.Tree
    rank: int
    name: str | None = None  # of the source in messages; None: `source_name`
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.batches, TokenBatches):
            self._check_tokens(self.batches)
        for layout in self._stated.values():
            if not layout.divides or layout.flat or layout.unreduced:
                raise ValueError(f"RankBatches: got the layout {layout}, wanted equal parts for all ranks")
            layout.mesh.check_rank(self.rank)

    def _check_tokens(self, batches: TokenBatches) -> None:
        wanted = batches.batch_size, batches.seq_len
        if not isinstance(self.layout, Layout):
            raise ValueError(
                f"for_rank: got {structure.in_words(self.layout)} as the layout, wanted one Layout, of tokens and "
                "labels; give batches.layout(mesh, strategy, microbatches), or one of those of a step's Description"
            )
        if self.layout.shape != wanted or not self.layout.divides or self.layout.flat or self.layout.unreduced:
            raise ValueError(
                f"for_rank: got the layout {self.layout}, wanted one of shape {wanted} with equal parts for all ranks; "
                "give batches.layout(mesh, strategy, microbatches)"
            )
        ranks = self.layout.shard_counts[1]
        if ranks % batches.zigzag:
            raise ValueError(
                f"for_rank: got a batch in zigzag order for {batches.zigzag} ranks and a layout that splits its "
                f"sequences over {ranks}, wanted a multiple; give Batches(..., zigzag={ranks})"
            )

    @cached_property
    def _stated(self) -> dict[str, Layout]:
        """The layouts that are known before a batch is read, by path."""
        if callable(self.layout):
            return {}
        found = tree.layouts(self.layout)
        return dict(zip(tree.paths(found), tree.leaves(found), strict=True))

    @cached_property
    def _first(self) -> Layout | None:
        """The first of those layouts that has rows."""
        return next((layout for layout in self._stated.values() if layout.shape), None)

    @cached_property
    def ranges(self) -> Ranges | None:
        """The rows of this rank; None where they are not known before a batch is read, or differ by array."""
        found = {(x.shape[0], _ranges(x, self.rank, 0)) for x in self._stated.values() if x.shape}
        return next(iter(found))[1] if len(found) == 1 and all(x.shape for x in self._stated.values()) else None

    def at(self, position: int) -> structure.Tree:
        """This rank's part of the batch of a position."""
        where = f"{self.name or source_name(self.batches)}: the batch of position {position}"
        if self.ranges is not None and self._first is not None:
            got = self.batches.rows(position, self.ranges)
            if got is not None:
                count = sum(stop - start for start, stop in self.ranges)
                return self._cut(got, where, count, self._first.shape[0])
        return self._cut(self.batches.at(position), where, None, 0)

    def describe(self) -> dict[str, Any] | None:
        """What the source states."""
        return self.batches.describe()

    def state(self) -> structure.Tree | None:
        """That of the source."""
        return self.batches.state()

    def restore(self, state: structure.Tree) -> None:
        """Go on there, with the source."""
        self.batches.restore(state)

    def _cut(self, batch: structure.Tree, where: str, count: int | None, total: int) -> structure.Tree:
        """The part of this rank. count: rows that are there, of `total`; None: all of them."""
        paths, leaves, spec = structure.flatten(batch)
        if not isinstance(self.layout, Layout):
            for path in self._stated:
                if path not in paths:
                    raise ValueError(
                        f"{where}: got the arrays {', '.join(map(repr, paths)) or 'none'}, wanted {path!r} among them, "
                        "as the Description of the step has it"
                    )
        parts = []
        for path, x in zip(paths, leaves, strict=True):
            if isinstance(x, torch.Tensor):
                x = self._part(x, path, f"{where}: {path!r}", count, total)
                if path in _LEAST and self.vocab_size is not None:
                    _require_in_vocabulary(x, f"{where}: {path!r}", self.vocab_size, _LEAST[path])
            parts.append(x)
        return structure.unflatten(spec, parts)

    def _part(self, x: torch.Tensor, path: str, where: str, count: int | None, total: int) -> torch.Tensor:
        known = labels.layout_of(x)
        if count is None and known is not None and any(n > 1 for n in known.shard_counts):
            raise ValueError(
                f"{where}: got an array that is known to be a part, {known}, wanted the whole one: a source gives the "
                "batch of all ranks, of which the run gives each rank its rows"
            )
        shape = tuple(x.shape)
        if count is not None:
            if shape[:1] != (count,):
                raise ValueError(f"{where}: got shape {shape} of rows(...), wanted the {count} rows that it asked for")
            shape = total, *shape[1:]
        layout = self._layout_of(path, shape, x.dtype, where)
        cut = False
        for dim in range(0 if count is None else 1, x.dim()):
            ranges = _ranges(layout, self.rank, dim)
            if ranges != ((0, shape[dim]),):
                x, cut = torch.cat([x.narrow(dim, a, b - a) for a, b in ranges], dim), True
        return labels.labelled(x.contiguous() if cut else x, layout)

    @cached_property
    def _layouts(self) -> dict[tuple, Layout]:
        """By path, shape and dtype: of what was read so far, so that equal arrays have one Layout."""
        return {}

    def _layout_of(self, path: str, shape: tuple[int, ...], dtype: torch.dtype, where: str) -> Layout:
        key = path, shape, dtype
        if key not in self._layouts:
            self._layouts[key] = self._new_layout(path, shape, dtype, where)
        return self._layouts[key]

    def _new_layout(self, path: str, shape: tuple[int, ...], dtype: torch.dtype, where: str) -> Layout:
        if callable(self.layout):
            try:
                return self.layout(shape, dtype)  # pyright: ignore[reportReturnType]  a function is one of layouts
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        if not isinstance(self.layout, Layout) and path in self._stated:
            wanted = self._stated[path]
            if (shape, dtype) != (wanted.shape, wanted.dtype):
                raise ValueError(
                    f"{where}: got {shape} {dtype}, wanted {wanted.shape} {wanted.dtype}, as the Description of the "
                    "step has it, for all ranks together"
                )
            return wanted
        like = self._first
        if like is None:
            return Layout(shape, dtype, next(iter(self._stated.values())).mesh)
        if shape and shape[0] != like.shape[0]:
            raise ValueError(f"{where}: got {shape}, wanted {like.shape[0]} rows, as the other arrays have them")
        return like.replace(shape=shape, dtype=dtype, spec=like.spec[: len(shape)])


# Entries of ids, and the least id; None: any
_LEAST = MappingProxyType({"tokens": 0, "labels": None, "ahead": None, "ahead_tokens": 0})


def _require_in_vocabulary(x: torch.Tensor, where: str, vocab_size: int, least: int | None) -> None:
    """ValueError for an id that the model does not have. Of tensors in host memory: nothing waits for a device."""
    if x.device.type != "cpu" or not x.numel() or x.is_floating_point():
        return
    low, high = (int(end) for end in torch.aminmax(x))
    if high < vocab_size and (least is None or low >= least):
        return
    wrong = high if high >= vocab_size else low
    more = ", or below 0 for none" if least is None else ""
    raise ValueError(
        f"{where}: got the id {wrong} in row {int((x == wrong).nonzero()[0, 0])} of this rank, wanted 0 to "
        f"{vocab_size - 1}, the vocabulary of the model{more}; read data of its tokenizer, or raise Decoder.vocab_size"
    )


def _ranges(layout: Layout, rank: int, dim: int) -> Ranges:
    return tuple((s.start, s.start + s.length) for s in layout.segments(rank, dim))


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

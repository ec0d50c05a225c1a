"""Batches as pure functions of a position: training batches of (seed, step), evaluation batches of their number.

There is no iterator state. To resume, ask for the next step; to change the mesh, ask for other rows. A batch is
`{"tokens": [B, S] int64, "labels": [B, S] int64}` with labels[b, s] the token that follows tokens[b, s]. Which rows a
rank gets is what the batch's layout states: `strategy.batch_layout(shape, dtype, mesh, microbatches)`.
"""

import operator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
import torch

from fmegatron.data.permutation import permuted
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.tree import fold_in, in_words

Batch = dict[str, torch.Tensor]
_Ranges = tuple[tuple[int, int], ...]  # (start, stop) of rows or columns, in the order in which a rank holds them
# Rows whose places in the order are computed at once, and at most one epoch. The cost of `permuted` is its number of
# calls of numpy: 0.6 ms for 32 positions, 1.2 ms for 1,024 of them.
_TOGETHER = 1024


class Tokens(Protocol):
    """What batches are cut from: a numpy array or a TokenArray; a slice of it is a numpy array of integers."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: slice, /) -> np.ndarray: ...


def train_and_held_out(tokens: Tokens, held_out: float = 0.1) -> tuple[tuple[int, int], tuple[int, int]]:
    """Ranges (start, stop) of the training and the held-out tokens; the last `held_out` (a fraction) of the tokens is
    held out.

    >>> train_and_held_out(np.arange(1000), held_out=0.1)
    ((0, 900), (900, 1000))
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out: got {held_out}, wanted a fraction between 0 and 1, such as 0.1")
    cut = len(tokens) - round(len(tokens) * held_out)
    return (0, cut), (cut, len(tokens))


@dataclass(frozen=True, eq=False)
class Batches:
    """Training batches: every epoch visits each window of `seq_len` + 1 tokens once, in an order that (seed, epoch)
    fixes.

    Windows start every `seq_len` tokens of the range `split` = (start, stop) (default: all tokens), so that each token
    but the first is a label once in an epoch; a rest shorter than a window is left out. A batch may reach over the end
    of an epoch. ValueError when the range is shorter than one window.

    >>> batches = Batches(np.arange(100), batch_size=4, seq_len=8, seed=0)
    >>> batch = batches.at(step=3)
    >>> batch["tokens"].shape, bool((batch["labels"] == batch["tokens"] + 1).all())
    (torch.Size([4, 8]), True)
    """

    tokens: Tokens
    batch_size: int
    seq_len: int
    seed: int
    split: tuple[int, int] | None = None
    offset: int = 0  # see `after`

    def __post_init__(self) -> None:
        _check_sizes(self)

    def after(self, samples: int | None, step: int) -> "Batches":
        """The same data, of which `step` steps have read `samples` samples: the batch of `step` begins behind them.

        For a run that goes on with another batch size. A sample is a row of a batch, a window of the data; None: as
        many as steps of this batch size read.

        >>> few, many = (Batches(np.arange(1000), size, 8, seed=0) for size in (4, 6))
        >>> torch.equal(many.after(few.samples(3), 3).at(3)["tokens"][:4], few.at(3)["tokens"])
        True
        """
        step = _whole(step, "Batches.after: step")
        samples = step * self.batch_size if samples is None else _whole(samples, "Batches.after: samples")
        if samples < 0 or step < 0:
            raise ValueError(f"Batches.after: got {samples} samples and {step} steps, wanted 0 or more of both")
        return replace(self, offset=samples - step * self.batch_size)

    def samples(self, step: int) -> int:
        """How many samples the first `step` steps read: the position of the data, whatever the batch size was."""
        return self.offset + step * self.batch_size

    @property
    def windows(self) -> int:
        """Number of windows in an epoch."""
        return _window_count(self)

    @property
    def steps_per_epoch(self) -> float:
        """How many batches show every window once."""
        return self.windows / self.batch_size

    def at(self, step: int) -> Batch:
        """The full batch of `step` (0, 1, 2 …)."""
        return self._rows_at(step, ((0, self.batch_size),))

    def _rows_at(self, step: int, rows: _Ranges) -> Batch:
        if step < 0 or self.samples(step) < 0:
            more = f", from {-(self.offset // self.batch_size)} on" if self.offset < 0 else ""
            raise ValueError(f"Batches.at: got step {step}, wanted 0 or more{more}")
        part = sum(stop - start for start, stop in rows)
        steps = max(1, min(_TOGETHER // part, self.windows // self.batch_size))
        block, at = divmod(operator.index(step), steps)
        first = self.samples(block * steps)
        return _cut(self, _order(self.seed, self.windows, self.batch_size, rows, steps, first)[at])

    def layout(self, mesh: Mesh, strategy: DataParallel | None = None, microbatches: int = 1) -> Layout:
        """The layout of tokens and labels: `strategy.batch_layout` of their shape; None: rows over dp and fsdp."""
        return _layout(self, mesh, strategy, microbatches)

    def for_rank(self, layout: Layout, rank: int, device: torch.device | str | None = None) -> "RankBatches":
        """What one rank gets: `.at(step)` is its part of the batch of `step` under the batch's layout (`layout()`).

        device: where its tensors are put; None: they stay in host memory.
        """
        return RankBatches(self, layout, rank, device)


@dataclass(frozen=True, eq=False)
class EvaluationBatches:
    """Fixed batches for evaluation: `windows` windows, evenly spaced over the range `split`; default: all of them, in
    order.

    When the windows do not fill the last batch, every batch has a third entry, "mask" [B, S] bool, that is False on the
    rows of padding; so the loss over all batches is the same for every batch size. `len(...)` is the number of batches.

    >>> evaluation = EvaluationBatches(np.arange(100), batch_size=5, seq_len=8)
    >>> len(evaluation), evaluation.real_tokens(0), evaluation.real_tokens(2)
    (3, 40, 16)
    """

    tokens: Tokens
    batch_size: int
    seq_len: int
    split: tuple[int, int] | None = None
    windows: int | None = None

    def __post_init__(self) -> None:
        _check_sizes(self)
        if self.windows is not None and not 1 <= self.windows <= _window_count(self):
            raise ValueError(
                f"EvaluationBatches: got windows={self.windows}, wanted 1 to {_window_count(self)}, which the range has"
            )

    def __len__(self) -> int:
        return -(-self._shown // self.batch_size)

    @property
    def _shown(self) -> int:
        return self.windows or _window_count(self)

    def real_tokens(self, number: int) -> int:
        """How many tokens of the full batch (all ranks) are not padding: the weight of its mean loss."""
        return self.seq_len * min(self.batch_size, self._shown - number * self.batch_size)

    def at(self, number: int) -> Batch:
        """The full batch `number`; ValueError when there is no such batch."""
        return self._rows_at(number, ((0, self.batch_size),))

    def layout(self, mesh: Mesh, strategy: DataParallel | None = None) -> Layout:
        """The layout of tokens, labels and mask: `strategy.batch_layout`; None: rows over dp and fsdp."""
        return _layout(self, mesh, strategy, 1)

    def for_rank(self, layout: Layout, rank: int, device: torch.device | str | None = None) -> "RankBatches":
        """What one rank gets: `.at(number)` is its part of batch `number` (see `Batches.for_rank`)."""
        return RankBatches(self, layout, rank, device)

    def _rows_at(self, number: int, ranges: _Ranges) -> Batch:
        if not 0 <= number < len(self):
            raise ValueError(f"EvaluationBatches.at: got batch {number}, wanted 0 to {len(self) - 1}")
        rows = number * self.batch_size + _rows(ranges)
        real = rows < self._shown
        batch = _cut(self, np.where(real, rows, 0) * _window_count(self) // self._shown)
        if self._shown % self.batch_size:
            batch["mask"] = torch.from_numpy(real)[:, None].repeat(1, self.seq_len)
        return batch


@dataclass(frozen=True, eq=False)
class RankBatches:
    """The part of every batch that one rank holds under a layout of the batch, [B, S].

    ValueError for a layout of another shape, or under which ranks hold unequal parts.
    """

    batches: Batches | EvaluationBatches
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
        self.layout.mesh.check_rank(self.rank)

    @cached_property
    def _ranges(self) -> tuple[_Ranges, ...]:
        """Of rows and of columns."""
        return tuple(
            tuple((s.start, s.start + s.length) for s in self.layout.segments(self.rank, dim)) for dim in range(2)
        )

    def at(self, step: int) -> Batch:
        """This rank's part of a batch."""
        rows, columns = self._ranges
        batch = self.batches._rows_at(step, rows)
        if columns != ((0, self.batches.seq_len),):
            batch = {name: torch.cat([x[:, a:b] for a, b in columns], 1) for name, x in batch.items()}
        return batch if self.device is None else {name: x.to(self.device) for name, x in batch.items()}


def _range(of: Batches | EvaluationBatches) -> tuple[int, int]:
    return (0, len(of.tokens)) if of.split is None else of.split


def _window_count(of: Batches | EvaluationBatches) -> int:
    start, stop = _range(of)
    return int((stop - start - 1) // of.seq_len)  # numpy's numbers may come in by the split


def _check_sizes(of: Batches | EvaluationBatches) -> None:
    name, (start, stop), size = type(of).__name__, _range(of), len(of.tokens)
    for field in ("batch_size", "seq_len"):
        object.__setattr__(of, field, _whole(getattr(of, field), f"{name}: {field}"))
    if of.batch_size < 1 or of.seq_len < 1:
        raise ValueError(f"{name}: got batch_size {of.batch_size} and seq_len {of.seq_len}, wanted 1 or more")
    if not 0 <= start <= stop <= size:
        raise ValueError(f"{name}: split: got ({start}, {stop}), wanted a range of the {size:,} tokens")
    if _window_count(of) < 1:
        raise ValueError(
            f"{name}: got {stop - start:,} tokens, wanted one window of seq_len + 1 = {of.seq_len + 1:,} or more; "
            "give a longer text, a smaller seq_len or another split"
        )


def _whole(value: Any, what: str) -> int:
    """The value as an int; ValueError for what is no whole number: 4.0 rows would fail later, or read other rows."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ValueError(f"{what}: got {value!r:.40} ({type(value).__name__}), wanted a whole number; pass int(...) of it")


def _layout(of: Batches | EvaluationBatches, mesh: Mesh, strategy: DataParallel | None, microbatches: int) -> Layout:
    strategy = strategy or DataParallel()
    return strategy.batch_layout((of.batch_size, of.seq_len), torch.int64, mesh, microbatches)


def _rows(ranges: _Ranges) -> np.ndarray:
    return np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in ranges])


@lru_cache(maxsize=8)  # the current block of several readers: ranks of a test, a run and its read-ahead
def _order(seed: int, windows: int, batch_size: int, ranges: _Ranges, steps: int, first: int) -> np.ndarray:
    """Which windows some rows of a batch show in a block of steps that begins with sample `first`: int64 [steps, rows],
    read-only. One permutation of many positions costs little more than of few. A block may begin before sample 0
    (`Batches.after`); no rank asks for those rows."""
    rows = np.arange(first, first + steps * batch_size, batch_size, dtype=np.int64)[:, None]
    rows = rows + _rows(ranges)
    epochs, order = rows // windows, np.empty_like(rows)
    for epoch in range(int(epochs.min()), int(epochs.max()) + 1):
        here = epochs == epoch
        order[here] = permuted(rows[here] % windows, windows, fold_in(seed, "epoch", epoch))
    order.flags.writeable = False
    return order


def _cut(of: Batches | EvaluationBatches, windows: np.ndarray) -> Batch:
    starts = _range(of)[0] + windows * of.seq_len
    cut = np.stack([of.tokens[start : start + of.seq_len + 1] for start in starts.tolist()]).astype(np.int64)
    return {
        "tokens": torch.from_numpy(np.ascontiguousarray(cut[:, :-1])),
        "labels": torch.from_numpy(np.ascontiguousarray(cut[:, 1:])),
    }

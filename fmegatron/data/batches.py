"""Batches as pure functions of a position: training batches of (seed, step), evaluation batches of their number.

There is no iterator state. To resume, ask for the next step; to change the mesh, ask for other rows. A batch is
`{"tokens": [B, S] int64, "labels": [B, S] int64}` with labels[b, s] the token that follows tokens[b, s]. Rank i of n
gets rows [i*B/n, (i+1)*B/n), which is the layout (("dp", "fsdp"), None).
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch

from fmegatron.data.permutation import permuted
from fmegatron.layout import Mesh
from fmegatron.tree import fold_in

Batch = dict[str, torch.Tensor]
DATA_AXES = ("dp", "fsdp")
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
        raise ValueError(f"held_out: got {held_out}, want a fraction between 0 and 1, such as 0.1")
    cut = len(tokens) - round(len(tokens) * held_out)
    return (0, cut), (cut, len(tokens))


def data_coordinates(mesh: Mesh, rank: int, axes: tuple[str, ...] = DATA_AXES) -> tuple[int, int]:
    """(index, count): which part of every batch a rank reads, of how many. Axes that the mesh does not have count as
    size 1.

    >>> data_coordinates(Mesh(dp=2, tp=2), rank=3)
    (1, 2)
    """
    axes = tuple(axis for axis in axes if axis in mesh)
    count = 1
    for axis in axes:
        count *= mesh[axis]
    return (mesh.index(rank, axes) if axes else 0), count


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
        samples = step * self.batch_size if samples is None else samples
        if samples < 0 or step < 0:
            raise ValueError(f"Batches.after: got {samples} samples and {step} steps, want 0 or more of both")
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

    def at(self, step: int, index: int = 0, count: int = 1) -> Batch:
        """Rows of part `index` of `count` of the batch of `step` (0, 1, 2 …); the parts of any `count` make up the same
        batch.

        ValueError when `batch_size` does not divide by `count`.
        """
        if step < 0 or self.samples(step) < 0:
            more = f", from {-(self.offset // self.batch_size)} on" if self.offset < 0 else ""
            raise ValueError(f"Batches.at: got step {step}, want 0 or more{more}")
        part = len(_rows(self.batch_size, index, count))
        steps = max(1, min(_TOGETHER // part, self.windows // self.batch_size))
        block, at = divmod(operator.index(step), steps)
        first = self.samples(block * steps)
        return _cut(self, _order(self.seed, self.windows, self.batch_size, index, count, steps, first)[at])

    def for_rank(
        self,
        mesh: Mesh,
        rank: int,
        axes: tuple[str, ...] = DATA_AXES,
        device: torch.device | str | None = None,
    ) -> "RankBatches":
        """The rows of one rank of a mesh: `.at(step)` gives the part at the rank's coordinates on the data axes.

        device: where its tensors are put; None: they stay in host memory.
        """
        return RankBatches(self, *data_coordinates(mesh, rank, axes), device)


@dataclass(frozen=True, eq=False)
class RankBatches:
    """Part `index` of `count` of every training batch. ValueError when the batch size does not divide by `count`."""

    batches: Batches
    index: int = 0
    count: int = 1
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        _rows(self.batches.batch_size, self.index, self.count)

    def at(self, step: int) -> Batch:
        """This rank's rows of the batch of `step`."""
        batch = self.batches.at(step, self.index, self.count)
        return batch if self.device is None else {name: x.to(self.device) for name, x in batch.items()}


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
                f"EvaluationBatches: got windows={self.windows}, the range has 1 to {_window_count(self)} of them"
            )

    def __len__(self) -> int:
        return -(-self._shown // self.batch_size)

    @property
    def _shown(self) -> int:
        return self.windows or _window_count(self)

    def real_tokens(self, number: int) -> int:
        """How many tokens of the whole batch (all ranks) are not padding: the weight of its mean loss."""
        return self.seq_len * min(self.batch_size, self._shown - number * self.batch_size)

    def at(self, number: int, index: int = 0, count: int = 1) -> Batch:
        """Rows of part `index` of `count` of batch `number`; ValueError when there is no such batch or part."""
        if not 0 <= number < len(self):
            raise ValueError(f"EvaluationBatches.at: got batch {number}, there are {len(self)} (0 to {len(self) - 1})")
        rows = number * self.batch_size + _rows(self.batch_size, index, count)
        real = rows < self._shown
        batch = _cut(self, np.where(real, rows, 0) * _window_count(self) // self._shown)
        if self._shown % self.batch_size:
            batch["mask"] = torch.from_numpy(real)[:, None].repeat(1, self.seq_len)
        return batch


def evaluation_batches(
    tokens: Tokens,
    batch_size: int,
    seq_len: int,
    split: tuple[int, int] | None = None,
    windows: int | None = None,
    index: int = 0,
    count: int = 1,
) -> Iterator[Batch]:
    """Iterate over part `index` of `count` of all `EvaluationBatches` of these arguments (see there)."""
    batches = EvaluationBatches(tokens, batch_size, seq_len, split, windows)
    return (batches.at(number, index, count) for number in range(len(batches)))


def _range(of: Batches | EvaluationBatches) -> tuple[int, int]:
    return (0, len(of.tokens)) if of.split is None else of.split


def _window_count(of: Batches | EvaluationBatches) -> int:
    start, stop = _range(of)
    return (stop - start - 1) // of.seq_len


def _check_sizes(of: Batches | EvaluationBatches) -> None:
    name, (start, stop), size = type(of).__name__, _range(of), len(of.tokens)
    if of.batch_size < 1 or of.seq_len < 1:
        raise ValueError(f"{name}: got batch_size {of.batch_size} and seq_len {of.seq_len}, want 1 or more")
    if not 0 <= start <= stop <= size:
        raise ValueError(f"{name}: split: got ({start}, {stop}), want a range of the {size:,} tokens")
    if _window_count(of) < 1:
        raise ValueError(
            f"{name}: {stop - start:,} tokens are fewer than one window of seq_len + 1 = {of.seq_len + 1:,}; give a"
            " longer text, a smaller seq_len or another split"
        )


def _rows(batch_size: int, index: int, count: int) -> np.ndarray:
    if not 0 <= index < count:
        raise ValueError(f"batch: got part {index} of {count}, want 0 to {count - 1}")
    if batch_size % count:
        below, above = batch_size - batch_size % count, batch_size + count - batch_size % count
        better = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            f"batch_size: got {batch_size}, which {count} data-parallel ranks cannot share evenly; use {better}, or a"
            " mesh whose data axes multiply to a divisor of it"
        )
    part = batch_size // count
    return np.arange(index * part, (index + 1) * part, dtype=np.int64)


@lru_cache(maxsize=8)  # the current block of several readers: ranks of a test, a run and its read-ahead
def _order(seed: int, windows: int, batch_size: int, index: int, count: int, steps: int, first: int) -> np.ndarray:
    """Which windows part `index` of `count` shows in a block of steps that begins with sample `first`: int64 [steps,
    rows], read-only. One permutation of many positions costs little more than of few. A block may begin before sample 0
    (`Batches.after`); nobody asks for those rows."""
    rows = np.arange(first, first + steps * batch_size, batch_size, dtype=np.int64)[:, None]
    rows = rows + _rows(batch_size, index, count)
    epochs, order = rows // windows, np.empty_like(rows)
    for epoch in range(int(epochs[0, 0]), int(epochs[-1, -1]) + 1):
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

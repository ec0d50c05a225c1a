"""Batches as pure functions of a position: training batches of (seed, step), evaluation batches of their number.

There is no iterator state. To resume, ask for the next step; to change the mesh, ask for other rows. A batch is
`{"tokens": [B, S] int64, "labels": [B, S] int64}` with labels[b, s] the token that follows tokens[b, s]. Which rows a
rank gets is what the batch's layout states: `strategy.batch_layout(shape, dtype, mesh, microbatches)`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from fmegatron.data.contract import Ranges
from fmegatron.data.documents import Tokens, check_documents, document_ends, document_entries
from fmegatron.data.fingerprint import fingerprint
from fmegatron.data.indexed import IndexedTokens
from fmegatron.data.megatron_order import Megatron, MegatronOrder
from fmegatron.data.order import shuffled, shuffled_rows
from fmegatron.data.packing import Packing
from fmegatron.data.steps import (
    Batch,
    StepBatches,
    TokenBatches,
    arranged,
    check_sizes,
    numbers_in,
)
from fmegatron.data.stored import digest_of
from fmegatron.data.tokens import TokenArray


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
class Batches(StepBatches):
    """Training batches: every epoch visits each window of `seq_len` + 1 tokens once, in an order that (seed, epoch)
    fixes.

    Windows start every `seq_len` tokens of the range `split` = (start, stop) (default: all tokens), so that each token
    but the first is a label once in an epoch; a rest shorter than a window is left out. A batch may reach over the end
    of an epoch. ValueError when the range is shorter than one window.

    documents: True, for tokens that know their documents (`IndexedTokens`), or the id that ends a document. Batches
    then have "documents" and "positions" int64 [B, S], which attention respects, and "mask" bool [B, S], False where
    the label is of another document. Default: documents follow one another as if they were one text.
    packing: rows of a stored plan (`data.pack`) in place of windows: few documents are cut, and no token sees another
    document. order: "megatron" or `Megatron(...)`: the samples of Megatron's GPTDataset, in its order; `split` then is
    one of sequences, in `Megatron`.
    zigzag: the number of ranks of cp, for models with context="balanced": the columns of a batch are in the order
    `layout.zigzag`, and "positions" are an entry; the layout stays what it is.

    >>> batches = Batches(np.arange(100), batch_size=4, seq_len=8, seed=0)
    >>> batch = batches.at(3)
    >>> batch["tokens"].shape, bool((batch["labels"] == batch["tokens"] + 1).all())
    (torch.Size([4, 8]), True)
    >>> Batches(np.arange(9), 1, 8, seed=0, zigzag=2).at(0)["positions"]
    tensor([[0, 1, 6, 7, 2, 3, 4, 5]])
    """

    tokens: Tokens
    batch_size: int
    seq_len: int
    seed: int
    split: tuple[int, int] | None = None
    offset: int = 0  # see `after`
    documents: bool | int = False
    zigzag: int = 1
    packing: Packing | None = None
    order: Literal["own", "megatron"] | Megatron = "own"

    def __post_init__(self) -> None:
        if self.packing is not None or self.order != "own":
            _check_plan(self)
        else:
            _check(self)

    @cached_property
    def _megatron(self) -> MegatronOrder | None:
        if self.order == "own":
            return None
        options = Megatron() if isinstance(self.order, str) else self.order
        return MegatronOrder(self.tokens, self.seq_len, self.seed, options)

    @cached_property
    def windows(self) -> int:
        """Number of windows in an epoch; of Megatron's order, in all its epochs."""
        if self._megatron is not None:
            return len(self._megatron)
        return _window_count(self) if self.packing is None else len(self.packing)

    @property
    def steps_per_epoch(self) -> float:
        """How many batches show every window once."""
        return self.windows / self.batch_size

    def read_rows(self, step: int, rows: Ranges) -> dict[str, np.ndarray]:
        """Arrays [rows, S] of these rows of the batch of `step`; the order of many steps is computed at once."""
        if self._megatron is not None:
            return self.read(self.samples(step) + numbers_in(rows))
        return _cut(self, shuffled_rows(self.seed, self.windows, self.batch_size, rows, step, self.offset))

    def read(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Arrays [n, S] of the samples of these numbers, int64 [n]."""
        if self._megatron is not None:
            return _megatrons(self._megatron, samples, self.documents)
        return _cut(self, shuffled(self.seed, self.windows, samples))

    def describe(self) -> dict[str, Any]:
        """What a checkpoint states of this data, as JSON."""
        tokenizer = getattr(self.tokens, "tokenizer", None)
        order = {"kind": "megatron", **asdict(self.order)} if isinstance(self.order, Megatron) else self.order
        if isinstance(order, dict):
            order = {name: list(x) if isinstance(x, tuple) else x for name, x in order.items() if name != "keep"}
        return {
            "kind": "windows",
            "tokens": fingerprint(self.tokens),
            "tokenizer": None if tokenizer is None else digest_of(tokenizer.describe()),
            "seq_len": self.seq_len,
            "seed": self.seed,
            "split": None if self.split is None else [int(x) for x in self.split],
            "documents": self.documents,
            "packing": None if self.packing is None else [self.packing.data, len(self.packing)],
            "order": order,
        }


@dataclass(frozen=True, eq=False)
class EvaluationBatches(TokenBatches):
    """Fixed batches for evaluation: `windows` windows, evenly spaced over the range `split`; default: all of them, in
    order.

    When the windows do not fill the last batch, every batch has "padding" [B, S] bool, True on the rows that fill it,
    and "mask", False there; so the loss over all batches is the same for every batch size. `len(...)` is the number of
    batches.
    documents, zigzag: as of `Batches`.

    >>> evaluation = EvaluationBatches(np.arange(100), batch_size=5, seq_len=8)
    >>> len(evaluation), evaluation.real_tokens(0), evaluation.real_tokens(2)
    (3, 40, 16)
    """

    tokens: Tokens
    batch_size: int
    seq_len: int
    split: tuple[int, int] | None = None
    windows: int | None = None
    documents: bool | int = False
    zigzag: int = 1

    def __post_init__(self) -> None:
        _check(self)
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
        """How many tokens of the full batch (all ranks) count in the loss: the weight of its mean loss."""
        rows = min(self.batch_size, self._shown - number * self.batch_size)
        if self.documents is False:
            return self.seq_len * rows
        return int(self.at(number)["mask"].sum())

    def rows(self, position: int, ranges: Ranges) -> Batch:
        """Some rows of a batch: ranges (start, stop) of its rows. ValueError when there is no such batch."""
        number = position
        if not 0 <= number < len(self):
            raise ValueError(f"EvaluationBatches.at: got batch {number}, wanted 0 to {len(self) - 1}")
        rows = number * self.batch_size + numbers_in(ranges)
        real = rows < self._shown
        batch = _cut(self, np.where(real, rows, 0) * _window_count(self) // self._shown)
        if self._shown % self.batch_size:
            batch["padding"] = np.broadcast_to(~real[:, None], batch["tokens"].shape)
            batch["mask"] = ~batch["padding"] & batch.get("mask", True)
        return arranged(batch, self.zigzag)


def _check_plan(of: Batches) -> None:
    check_sizes(of)
    plan = "packing" if of.packing is not None else "order"
    if of.order not in ("own", "megatron") and not isinstance(of.order, Megatron):
        raise ValueError(f"Batches: order: got {of.order!r:.60}, wanted 'own', 'megatron' or data.Megatron(...)")
    if of.split is not None or (of.packing is not None and (of.order != "own" or of.documents is not False)):
        raise ValueError(
            f"Batches: {plan}: got split, documents or another order beside it, wanted none; a plan is of the documents"
            " that it was made of, Megatron's order of Megatron(sequences=...)"
        )
    if of.packing is None:
        check_documents(of.documents, of.tokens, "Batches")
        of.windows  # noqa: B018 the order is made now, and its errors come now
    elif of.packing.seq_len != of.seq_len or int((of.packing.starts + of.packing.lengths).max()) >= len(of.tokens):
        raise ValueError(
            f"Batches: packing: got a plan of rows of {of.packing.seq_len} up to token "
            f"{int((of.packing.starts + of.packing.lengths).max()):,}, wanted rows of {of.seq_len} of the "
            f"{len(of.tokens):,} tokens; make one: data.pack(tokens.document_starts(), seq_len)"
        )
    elif (bounds := getattr(of.tokens, "bounds", None)) is not None:
        for piece in np.linspace(0, len(of.packing.starts) - 1, min(256, len(of.packing.starts))).astype(int).tolist():
            start = int(of.packing.starts[piece])
            stop = start + int(of.packing.lengths[piece]) + 1
            if len(bounds(start, stop)):
                raise ValueError(
                    f"Batches: packing: got a plan in which tokens {start:,} to {stop:,} are of one document, wanted "
                    "one of this corpus, where another begins among them; make it anew: "
                    "data.pack(tokens.document_starts(), seq_len)"
                )


def _megatrons(order: MegatronOrder, samples: np.ndarray, documents: bool | int) -> dict[str, np.ndarray]:
    ids, ends, real, padding = order.read(samples)
    batch = {"tokens": ids[:, :-1].copy(), "labels": ids[:, 1:].copy()}  # of one row both would be one memory
    if documents is not False:
        batch |= document_entries(ends if documents is True else ids[:, :-1] == documents)
        batch["mask"] &= real
    elif not (order.options.extra_token and order.options.drop_last):
        batch["mask"] = real
    return batch if order.options.drop_last else {**batch, "padding": padding}


def _range(of: Batches | EvaluationBatches) -> tuple[int, int]:
    return (0, len(of.tokens)) if of.split is None else of.split


def _window_count(of: Batches | EvaluationBatches) -> int:
    start, stop = _range(of)
    return int((stop - start - 1) // of.seq_len)  # numpy's numbers may come in by the split


def _check(of: Batches | EvaluationBatches) -> None:
    check_sizes(of)
    name, (start, stop), size = type(of).__name__, _range(of), len(of.tokens)
    if not 0 <= start <= stop <= size:
        raise ValueError(f"{name}: split: got ({start}, {stop}), wanted a range of the {size:,} tokens")
    if _window_count(of) < 1:
        raise ValueError(
            f"{name}: got {stop - start:,} tokens, wanted one window of seq_len + 1 = {of.seq_len + 1:,} or more; "
            "give a longer text, a smaller seq_len or another split"
        )
    if isinstance(dtype := getattr(of.tokens, "dtype", None), np.dtype):
        _require_ids(dtype)
    if (dims := getattr(of.tokens, "ndim", 1)) != 1:
        raise ValueError(f"{name}: tokens: got an array of {dims} dims, wanted one of 1; flatten it")
    check_documents(of.documents, of.tokens, name)


def _require_ids(dtype: np.dtype) -> None:
    if dtype.kind not in "iu":
        raise ValueError(f"Batches: tokens: got {dtype}, wanted whole numbers; convert them: tokens.astype(np.int32)")


def _cut(of: Batches | EvaluationBatches, windows: np.ndarray) -> dict[str, np.ndarray]:
    S = of.seq_len
    if isinstance(of, Batches) and of.packing is not None:
        return of.packing.read(of.tokens, windows)
    starts = _range(of)[0] + windows * S
    ids = _windows_at(of.tokens, starts, S + 1)
    _require_ids(ids.dtype)
    batch = {"tokens": ids[:, :-1].astype(np.int64), "labels": ids[:, 1:].astype(np.int64)}
    if of.documents is not False:
        batch |= document_entries(document_ends(of.tokens, starts.tolist(), ids, of.documents))
    return batch


def _windows_at(tokens: Tokens, starts: np.ndarray, count: int) -> np.ndarray:
    """[n, count]: so many tokens from each of `starts` on, in their own dtype; of an array in memory with one gather
    from the view of all its windows, as a slice for each row costs more than its bytes."""
    ids = tokens.ids if isinstance(tokens, IndexedTokens | TokenArray) else tokens
    if isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.flags.c_contiguous:
        every = np.ndarray((len(ids) - count + 1, count), ids.dtype, ids, strides=(ids.itemsize, ids.itemsize))
        return every[starts]
    return np.stack([tokens[start : start + count] for start in starts.tolist()])

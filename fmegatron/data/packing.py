"""Packing: documents put into rows of S tokens so that few are cut and little is padding, as a plan that is stored."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from fmegatron.data.documents import Tokens
from fmegatron.data.stored import digest_of, load_arrays, save_arrays


@dataclass(frozen=True, eq=False)
class Packing:
    """Which pieces of documents are in which row of `seq_len` tokens.

    starts, lengths: int64 [pieces]: tokens [start, start + length + 1) of the corpus, of which the first `length` are
    shown, and the last is a label only. rows: int64 [rows + 1]: row r has the pieces rows[r] to rows[r + 1]. data: a
    digest of the documents' bounds.
    """

    seq_len: int
    starts: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray
    data: str

    def __len__(self) -> int:
        return len(self.rows) - 1

    @property
    def padding(self) -> float:
        """The share of all tokens of all rows that is padding."""
        return 1 - float(self.lengths.sum()) / (len(self) * self.seq_len)

    def save(self, path: str | os.PathLike) -> None:
        """Write the plan as a file, which `load_packing` maps."""
        made_of = {"kind": "packing", "seq_len": self.seq_len, "data": self.data}
        save_arrays(path, made_of, {"starts": self.starts, "lengths": self.lengths, "rows": self.rows})

    def read(self, tokens: Tokens, rows: np.ndarray) -> dict[str, np.ndarray]:
        """The rows of these numbers: "tokens", "labels", "documents", "positions" int64 [n, S], "mask" bool [n, S].

        Padding is token 0 with the label 0, masked, behind the last document and of the document -1.
        """
        S, n = self.seq_len, len(rows)
        batch = {name: np.zeros((n, S), dtype=np.int64) for name in ("tokens", "labels", "documents", "positions")}
        batch["mask"] = np.zeros((n, S), dtype=bool)
        for row, number in enumerate(rows.tolist()):
            first, stop, at = int(self.rows[number]), int(self.rows[number + 1]), 0
            for place, piece in enumerate(range(first, stop)):
                start, length = int(self.starts[piece]), int(self.lengths[piece])
                ids, here = tokens[start : start + length + 1], slice(at, at + length)
                batch["tokens"][row, here], batch["labels"][row, here] = ids[:-1], ids[1:]
                batch["documents"][row, here], batch["positions"][row, here] = place, np.arange(length)
                batch["mask"][row, here] = True
                at += length
            batch["documents"][row, at:], batch["positions"][row, at:] = -1, np.arange(S - at)
        return batch


def pack(starts: np.ndarray, seq_len: int) -> Packing:
    """Documents into rows of `seq_len`, each where it fits best, the longest first; a document that is longer than a
    row is cut into pieces of which each but the last fills one.

    starts: int64 [documents + 1]: where each begins, and the number of tokens (`IndexedTokens.document_starts()`); of a
    part of them for a split. A document of n tokens takes n - 1, as its last one is a label only; each label is shown
    once an epoch. Source: best-fit packing, Ding et al. 2024, arXiv 2404.10830.

    >>> plan = pack(np.array([0, 6, 9, 14, 16]), seq_len=6)
    >>> len(plan), plan.lengths.tolist(), round(plan.padding, 2)
    (2, [5, 1, 2, 4], 0.0)
    """
    starts = np.asarray(starts, dtype=np.int64)
    counts = np.diff(starts) - 1
    if seq_len < 1 or (counts < -1).any():
        raise ValueError(f"pack: got seq_len {seq_len} and {len(counts)} documents, wanted rising starts of documents")
    pieces = np.maximum(-(-counts // seq_len), 0)
    document = np.repeat(np.arange(len(counts)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = starts[document] + number * seq_len
    length = np.minimum(counts[document] - number * seq_len, seq_len)
    order = np.argsort(-length, kind="stable")
    row_of = np.empty(len(order), dtype=np.int64)
    free: list[list[int]] = [[] for _ in range(seq_len + 1)]  # rows by the room that they have left
    some, count = 0, 0  # bit r of `some`: there is a row with room r
    for piece, size in zip(order.tolist(), length[order].tolist(), strict=True):
        fitting = some >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = free[room].pop()
            if not free[room]:
                some ^= 1 << room
        else:
            room, row, count = seq_len, count, count + 1
        row_of[piece] = row
        if room > size:
            free[room - size].append(row)
            some |= 1 << (room - size)
    if not count:
        raise ValueError(f"pack: got {len(counts)} documents without a label, wanted one of two tokens or more")
    by_row = np.lexsort((np.arange(len(order)), row_of))
    rows = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(row_of, minlength=count), out=rows[1:])
    return Packing(seq_len, begin[by_row], length[by_row], rows, digest_of(starts))


def load_packing(path: str | os.PathLike) -> Packing:
    """The plan in a file that `Packing.save` wrote, mapped. ValueError for another file."""
    made_of, arrays = load_arrays(path)
    if made_of.get("kind") != "packing" or set(arrays) != {"starts", "lengths", "rows"}:
        raise ValueError(f"{path}: got a plan of another kind, wanted one that data.pack(...).save wrote")
    return Packing(made_of["seq_len"], arrays["starts"], arrays["lengths"], arrays["rows"], made_of["data"])

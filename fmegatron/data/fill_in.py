"""Fill-in-the-middle: some documents cut in three and put in another order, as a pure map of (seed, sample)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fmegatron.data.sources import Row
from fmegatron.tree import fold_in


@dataclass(frozen=True)
class FillInTheMiddle:
    """A function of (row, number of the sample), for `Mapped`: each document of a row becomes, at this rate, <prefix>
    beginning <suffix> end <middle> middle (PSM), or <prefix> <suffix> end <middle> beginning middle (SPM).

    prefix, suffix, middle: ids of these tokens. rate: share of documents. spm: share of those in the second order.
    eod: id that ends a document, which stays at its end; None: a row is one document. seed: with the sample's number it
    fixes all that is random. A row keeps its length: what is too much at its end is cut off, as in Megatron's GPTFIM.
    Rows with "documents" are refused: their bounds would not be those of the new row. Source: Bavarian et al. 2022,
    "Efficient training of language models to fill in the middle", arXiv 2207.14255.
    """

    prefix: int
    suffix: int
    middle: int
    seed: int
    rate: float = 0.5
    spm: float = 0.5
    eod: int | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.rate <= 1 and 0 <= self.spm <= 1):
            raise ValueError(f"FillInTheMiddle: got rate={self.rate} and spm={self.spm}, wanted shares from 0 to 1")

    def __call__(self, row: Row, sample: int) -> Row:
        """The row of a sample, its documents permuted."""
        if set(row) != {"tokens", "labels"}:
            raise ValueError(
                f"FillInTheMiddle: got rows of {', '.join(row)}, wanted tokens and labels only; leave documents= away "
                "and name the id that ends a document here: eod="
            )
        ids = np.append(row["tokens"], row["labels"][-1])
        random = np.random.Generator(np.random.PCG64(fold_in(self.seed, "fill in", sample)))
        ends = np.flatnonzero(ids == self.eod) + 1 if self.eod is not None else np.zeros(0, dtype=np.int64)
        parts = []
        for part in np.split(ids, ends):
            end = 1 if self.eod is not None and part.size and part[-1] == self.eod else 0
            body, tail = part[: len(part) - end], part[len(part) - end :]
            parts += [self._permuted(body, random), tail]
        new = np.concatenate(parts)[: len(ids)].astype(np.int64)
        return {"tokens": new[:-1], "labels": new[1:]}

    def _permuted(self, ids: np.ndarray, random: np.random.Generator) -> np.ndarray:
        chosen, spm = random.random(2) < (self.rate, self.spm)  # drawn for each document, chosen or not
        a, b = sorted(random.integers(0, len(ids) + 1, 2).tolist())
        if not chosen or not len(ids):
            return ids
        first, middle, last = ids[:a], ids[a:b], ids[b:]
        if spm:
            return np.concatenate([[self.prefix, self.suffix], last, [self.middle], first, middle])
        return np.concatenate([[self.prefix], first, [self.suffix], last, [self.middle], middle])

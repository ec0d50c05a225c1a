"""Blend: training batches of several corpora by weight, each sample a function of its number alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fmegatron.data.shares import Rule, Shares
from fmegatron.data.steps import StepBatches, check_sizes, require_from_start, whole


@dataclass(frozen=True, eq=False)
class Blend(StepBatches):
    """Training batches whose rows come from several, in shares that are right at every prefix.

    parts: (weight, batches) of each; sample n of the blend is the next one of its part, so a part is read in its own
    order, epoch after epoch. batch_size: default that of the first part. changes: (tokens, weights): from this position
    on, in tokens that the run has read, the weights are these. rule: "even", at every prefix less than one sample from
    the exact share; "megatron", the choice of Megatron's blended dataset (see `shares.Shares`).
    Raises ValueError for parts of different seq_len or zigzag, and weights that are no shares.

    >>> from fmegatron.data import Batches
    >>> few, many = (Batches(np.arange(a, a + 100), 4, 8, seed=0) for a in (0, 1000))
    >>> blend = Blend([(1, few), (3, many)])
    >>> [int(row[0]) >= 1000 for row in blend.at(0)["tokens"]], blend.counts(2)
    ([True, False, True, True], [2, 6])
    """

    parts: Sequence[tuple[float, StepBatches]]
    batch_size: int = 0
    offset: int = 0  # see `after`
    changes: Sequence[tuple[int, Sequence[float]]] = ()
    rule: Rule = "even"
    seq_len: int = field(init=False)
    zigzag: int = field(init=False)

    def __post_init__(self) -> None:
        parts = tuple((weight, part) for weight, part in self.parts)
        if not parts or not all(isinstance(part, StepBatches) for _, part in parts):
            raise ValueError("Blend: parts: got none, or other things, wanted (weight, Batches) one or more times")
        first = parts[0][1]
        for _, part in parts:
            require_from_start(part, "Blend: parts")
        for name in ("seq_len", "zigzag"):
            values = {getattr(part, name) for _, part in parts}
            if len(values) > 1:
                raise ValueError(f"Blend: {name}: got parts of {sorted(values)}, wanted the same for all")
            object.__setattr__(self, name, getattr(first, name))
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "batch_size", self.batch_size or first.batch_size)
        check_sizes(self)
        before = 0
        for at, weights in [(0, [weight for weight, _ in parts]), *self.changes]:
            good = len(weights) == len(parts) and all(math.isfinite(w) and w >= 0 for w in weights) and sum(weights) > 0
            if not good or whole(at, "Blend: changes") < before:
                raise ValueError(
                    f"Blend: weights: got {list(weights)!r:.80} from token {at} on, wanted a number of 0 or more for "
                    f"each of {len(parts)} parts, one above 0, at rising positions"
                )
            before = at
        if self.rule not in ("even", "megatron"):
            raise ValueError(f"Blend: rule: got {self.rule!r}, wanted 'even' or 'megatron'")

    @classmethod
    def of_epochs(cls, parts: Sequence[tuple[float, StepBatches]], **options) -> Blend:
        """The blend that shows each part so many epochs when it has shown all: (epochs, batches) of each.

        options: of `Blend`. ValueError for parts whose `windows` are not known.
        """
        for _, part in parts:
            if not hasattr(part, "windows"):
                raise ValueError(f"Blend.of_epochs: got {type(part).__name__}, wanted Batches, whose windows are known")
        return cls([(epochs * getattr(part, "windows"), part) for epochs, part in parts], **options)  # noqa: B009 looked for

    @cached_property
    def _shares(self) -> Shares:
        changes = [(-(-at // self.seq_len), weights) for at, weights in self.changes]
        return Shares([(0, [weight for weight, _ in self.parts]), *changes], self.rule)

    def counts(self, step: int) -> list[int]:
        """How many samples of each part the first `step` steps show."""
        return self._shares.counts(self.samples(step))

    def read(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Arrays [n, S] of the samples of these numbers, int64 [n]; what only some parts have is made for all."""
        source, number = self._shares.of(samples)
        found = {name: _default(name, len(samples), self.seq_len, dtype) for name, dtype in self._entries.items()}
        for k in np.unique(source).tolist():
            here = source == k
            for name, x in self.parts[k][1].read(number[here]).items():
                found[name][here] = x
        return found

    @cached_property
    def _entries(self) -> dict[str, np.dtype]:
        """What the samples of any part have: all rows of all ranks and steps have it, so that one step fits them."""
        found: dict[str, np.dtype] = {}
        for _, part in self.parts:
            first = part.read(np.zeros(1, dtype=np.int64))
            found |= {name: np.promote_types(found.get(name, x.dtype), x.dtype) for name, x in first.items()}
        return found

    def describe(self) -> dict[str, Any]:
        """What a checkpoint states of this data, as JSON."""
        parts = [{"weight": weight, **(part.describe() or {})} for weight, part in self.parts]
        changes = [[at, list(weights)] for at, weights in self.changes]
        return {"kind": "blend", "rule": self.rule, "changes": changes, "parts": parts}


def _default(name: str, rows: int, length: int, dtype: np.dtype) -> np.ndarray:
    """What an entry is for rows of a part that does not have it: one document, in order, that counts."""
    if name == "positions":
        return np.tile(np.arange(length, dtype=dtype), (rows, 1))
    return np.full((rows, length), name == "mask", dtype=dtype)

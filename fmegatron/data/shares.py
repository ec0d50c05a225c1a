"""Shares: which of several sources gives sample n, so that each has its share of every beginning of the sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from threading import Lock
from typing import Literal

import numpy as np

Rule = Literal["even", "megatron"]
_BLOCK = 4096


class Shares:
    """Sources of weights w: sample n has a source k and a number in it, 0, 1, 2 …, both functions of n alone.

    rule "even": Tijdeman's schedule, under which the count of each of K sources in the first n samples differs from
    n w_k by at most 1 - 1/(2K - 2), for every n and also where weights change ("The chairman assignment problem",
    1980). "megatron": always the source that lags most behind its share, as Megatron's `build_blending_indices` does
    with the weights of its --data-path; its error can be above 1 (1.68 was seen with five sources).

    phases: (first sample, weights), the first of sample 0. Samples are computed in order in blocks of 4,096, about a
    microsecond each; counts at the blocks' beginnings are remembered.
    """

    def __init__(self, phases: Sequence[tuple[int, Sequence[float]]], rule: Rule) -> None:
        self._begins = [begin for begin, _ in phases]
        given = [np.array(weights, dtype=np.float64) for _, weights in phases]
        # Megatron's builder and its BlendedDataset each divide by the sum: the last bit of a weight decides where
        # two sources lag by the same, as with 0.6, 0.3, 0.1.
        for _ in range(2 if rule == "megatron" else 1):
            given = [weights / np.sum(weights) for weights in given]
        self._weights = [weights.tolist() for weights in given]
        self._base = [[0.0] * len(self._weights[0])]  # shares due when each phase begins
        for p, (begin, stop) in enumerate(zip(self._begins, self._begins[1:], strict=False)):
            last = self._base[p]
            self._base.append([b + w * (stop - begin) for b, w in zip(last, self._weights[p], strict=True)])
        self._rule = rule
        self._counts = [[0] * len(self._weights[0])]  # at the beginning of each block that has been computed
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._lock = Lock()

    def of(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, number in it) of samples, int64 [n] each."""
        source, number = np.empty(len(samples), dtype=np.int64), np.empty(len(samples), dtype=np.int64)
        blocks = samples // _BLOCK
        for block in np.unique(blocks).tolist():
            here, (sources, numbers) = blocks == block, self._block(block)
            source[here], number[here] = sources[samples[here] % _BLOCK], numbers[samples[here] % _BLOCK]
        return source, number

    def counts(self, samples: int) -> list[int]:
        """How many of the first `samples` each source gives."""
        source, number = self._block(samples // _BLOCK)
        counts = list(self._counts[samples // _BLOCK])
        for k in range(len(counts)):
            counts[k] += int((source[: samples % _BLOCK] == k).sum())
        return counts

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        with self._lock:
            while len(self._counts) <= block or block not in self._blocks:
                n = min(block, len(self._counts) - 1)
                made = self._made(n)
                if n == len(self._counts) - 1:
                    after = [c + int((made[0] == k).sum()) for k, c in enumerate(self._counts[n])]
                    self._counts.append(after)
                self._blocks[n] = made
                for old in list(self._blocks)[:-4]:
                    del self._blocks[old]
            return self._blocks[block]

    def _made(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        counts, choose = list(self._counts[block]), self._even if self._rule == "even" else self._greedy
        source, number = np.empty(_BLOCK, dtype=np.int64), np.empty(_BLOCK, dtype=np.int64)
        for i, k in enumerate(choose(counts, block * _BLOCK)):
            source[i], number[i] = k, counts[k]
            counts[k] += 1
        return source, number

    def _greedy(self, counts: list[int], first: int):
        for n in range(first, first + _BLOCK):
            p = self._phase(n)
            at = max(float(n), 1.0) - self._begins[p]
            lags = [w * at + b - c for w, b, c in zip(self._weights[p], self._base[p], counts, strict=True)]
            yield lags.index(max(lags))

    def _even(self, counts: list[int], first: int):
        K = len(counts)
        if K == 1:
            yield from [0] * _BLOCK
            return
        slack = 1 / (2 * K - 2)
        begins = [self._when(k, c + slack) for k, c in enumerate(counts)]  # from when on a source may give its next
        ends = [self._when(k, c + 1 - slack) for k, c in enumerate(counts)]  # until when it must
        for n in range(first, first + _BLOCK):
            ready = [k for k in range(K) if begins[k] <= n + 1 + 1e-6]
            k = min(ready, key=ends.__getitem__) if ready else begins.index(min(begins))
            yield k  # the caller counts it
            begins[k], ends[k] = self._when(k, counts[k] + slack), self._when(k, counts[k] + 1 - slack)

    def _when(self, k: int, due: float) -> float:
        """How many samples there are when the share of source k is `due`."""
        found = math.inf
        for p, begin in enumerate(self._begins):
            weight, base = self._weights[p][k], self._base[p][k]
            if weight > 0:
                found = begin + max(due - base, 0.0) / weight
                if p + 1 == len(self._begins) or found <= self._begins[p + 1]:
                    return found
            elif base >= due:
                return float(begin)
            found = math.inf
        return found

    def _phase(self, n: int) -> int:
        return max(p for p, begin in enumerate(self._begins) if begin <= n)

"""Megatron's order of samples: which tokens sample n of its GPTDataset shows, computed in numpy, without index files.

The sequences of a split, as often as epochs are needed, are shuffled by RandomState(seed) and put one behind the other;
sample i is the tokens [i S, i S + S + 1) of this text, and the samples are shuffled by the same generator. A last epoch
that would give less than 80% of its samples is shuffled on its own. Source: Megatron-LM, core/datasets/gpt_dataset.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fmegatron.data.indexed import IndexedTokens
from fmegatron.data.steps import whole
from fmegatron.data.stored import digest_of, load_arrays, save_arrays

_PART = 1 << 16  # lengths that are digested together, as int64: they need no array of that width


@dataclass(frozen=True)
class Megatron:
    """Megatron's order as an argument: `Batches(tokens, B, S, seed, order=data.Megatron(samples=steps * B))`.

    samples: how many the run will read, on which the number of epochs depends; None: one epoch. sequences: (first,
    last + 1) of the split (`megatron_split`); None: all. extra_token: windows of S + 1 tokens; without it S, and the
    last token has no label. drop_last: leave out the rest that fills no window (training); else it is padded. keep:
    store the order beside the data, PREFIX.DIGEST.order, so that the next run maps it.
    """

    samples: int | None = None
    sequences: tuple[int, int] | None = None
    extra_token: bool = True
    drop_last: bool = True
    keep: bool = True

    def __post_init__(self) -> None:
        if self.samples is not None and whole(self.samples, "Megatron: samples") < 1:
            raise ValueError(f"Megatron: samples: got {self.samples}, wanted 1 or more, or None for one epoch")


def megatron_split(tokens: IndexedTokens, split: str | Sequence[float]) -> list[tuple[int, int]]:
    """Ranges (first, last + 1) of sequences for training, validation and test, by Megatron's rule: "969, 30, 1"."""
    shares = [float(x) for x in (split.split(",") if isinstance(split, str) else split)]
    if not shares or min(shares) < 0 or sum(shares) <= 0:
        raise ValueError(f"split: got {split!r}, wanted shares of 0 or more, such as '969, 30, 1'")
    shares = [*shares, 0.0, 0.0][: max(3, len(shares))]
    ends = [0.0]
    for share in shares:
        ends.append(ends[-1] + share / sum(shares))
    cuts = [int(round(end * float(tokens.sequences))) for end in ends]
    return list(zip(cuts, cuts[1:], strict=False))


class MegatronOrder:
    """The samples of one split: `len(order)`, `order.read(numbers)`.

    Raises ValueError for tokens that are not IndexedTokens, and for a split without a full sample.
    """

    def __init__(self, tokens: Any, seq_len: int, seed: int, options: Megatron) -> None:
        if not isinstance(tokens, IndexedTokens):
            raise ValueError(
                f"order: got Megatron's and tokens of {type(tokens).__name__}, wanted data.IndexedTokens, whose "
                "sequences it shuffles"
            )
        self.tokens, self.seq_len, self.options = tokens, seq_len, options
        first, stop = options.sequences or (0, tokens.sequences)
        if not 0 <= first < stop <= tokens.sequences:
            raise ValueError(f"Megatron: sequences: got ({first}, {stop}), wanted a range of {tokens.sequences}")
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed: got {seed}, wanted 0 to 2**32 - 1, which Megatron's generator takes")
        self._lengths = np.ascontiguousarray(tokens.lengths[first:stop], dtype=np.int32)
        self._first = first
        parts = (self._lengths[a : a + _PART].astype(np.int64) for a in range(0, len(self._lengths), _PART))
        made_of = {"seq_len": seq_len, "seed": seed, "samples": options.samples, "extra_token": options.extra_token,
                   "drop_last": options.drop_last, "first": first, "lengths": digest_of(*parts)}  # fmt: skip
        arrays = self._kept(made_of)
        self._sequences, self._starts, self._shuffled = (arrays[name] for name in ("sequences", "starts", "shuffled"))

    def __len__(self) -> int:
        return len(self._shuffled)

    def read(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(ids int64 [n, S + 1], the last of 0 without an extra token; ends bool [n, S]: the last token of a sequence;
        real bool [n, S]: tokens that have a label; padding bool [n, S]: behind the last token of the split)."""
        if len(samples) and samples.max() >= len(self):
            raise ValueError(
                f"order: got sample {samples.max():,}, wanted 0 to {len(self) - 1:,}, those of Megatron's order; name "
                "how many the run reads: Megatron(samples=steps * batch_size)"
            )
        S, extra = self.seq_len, int(self.options.extra_token)
        ids = np.zeros((len(samples), S + 1), dtype=np.int64)
        ends, real = np.zeros((len(samples), S), dtype=bool), np.ones((len(samples), S), dtype=bool)
        padding = np.zeros_like(ends)
        for row, number in enumerate(self._shuffled[samples].tolist()):
            at, stop = number * S, min(number * S + S + extra, int(self._starts[-1]))
            real[row, max(0, stop - at - 1) :], padding[row, max(0, stop - at) :] = False, True
            place, begin = int(np.searchsorted(self._starts, at, side="right")) - 1, at
            while at < stop:
                left, right = int(self._starts[place]), int(self._starts[place + 1])
                if right > left:
                    offset, count = self._offset(int(self._sequences[place])) + at - left, min(right, stop) - at
                    ids[row, at - begin : at - begin + count] = self.tokens[offset : offset + count]
                    at += count
                    if at == right and at - begin <= S:
                        ends[row, at - begin - 1] = True
                place += 1
        return ids, ends, real, padding

    def _offset(self, sequence: int) -> int:
        return int(self.tokens._offsets[sequence]) // self.tokens.dtype.itemsize

    def _kept(self, made_of: dict[str, Any]) -> dict[str, np.ndarray]:
        """The arrays of the order, from beside the data where it has been stored; else made, and stored there."""
        prefix = self.tokens.prefix
        if not self.options.keep or "://" in prefix or not self.tokens.is_local:
            return self._made(made_of["seed"])
        path = f"{prefix}.{digest_of(made_of)}.order"
        try:
            before, arrays = load_arrays(path)
            if before == made_of:
                return arrays
        except FileNotFoundError:
            pass
        except ValueError as error:
            warnings.warn(f"Megatron's order is made anew: {error}", RuntimeWarning, stacklevel=2)
        arrays = self._made(made_of["seed"])
        try:
            save_arrays(path, made_of, arrays)
        except OSError as error:
            text = f"{path}: Megatron's order could not be stored ({error}); it is in memory, and made again next time"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return arrays

    def _made(self, seed: int) -> dict[str, np.ndarray]:
        S, extra, wanted = self.seq_len, int(self.options.extra_token), self.options.samples
        per_epoch, epochs = int(self._lengths.sum(dtype=np.int64)), 1
        if per_epoch == 0:
            raise ValueError(
                f"{self.tokens.prefix}: got a split without tokens, wanted a window of {S + extra} or more"
            )
        if wanted is not None:
            epochs = max(1, -(-(wanted * S + extra) // per_epoch))
        before_last, one = ((epochs - 1) * per_epoch - extra) // S, (per_epoch - extra) // S
        separate = epochs > 1 and wanted is not None and wanted - before_last < int(0.8 * one)
        random = np.random.RandomState(seed)
        # Number and length of a sequence are shuffled as one integer of 64 bits, for which numpy's shuffle has a case
        # of its own, so that lengths need not be gathered from all over the memory afterwards.
        n, rounds = len(self._lengths), (epochs - 1, 1) if separate else (epochs,)
        pairs = np.empty((epochs, n, 2), dtype=np.int32)
        pairs[:, :, 0], pairs[:, :, 1] = np.arange(self._first, self._first + n, dtype=np.int32), self._lengths
        for part in np.split(pairs, rounds[:-1]):
            random.shuffle(part.reshape(-1).view(np.int64))
        pairs = pairs.reshape(-1, 2)
        tokens = epochs * per_epoch - extra
        total = tokens // S if self.options.drop_last else -(-tokens // S)
        if total < 1:
            raise ValueError(
                f"{self.tokens.prefix}: got {per_epoch:,} tokens in the split, wanted one window of {S + extra:,}; "
                "give a smaller seq_len or another split"
            )
        starts = np.zeros(len(pairs) + 1, dtype=np.int64)
        np.cumsum(pairs[:, 1], out=starts[1:])
        first = before_last if separate else total
        dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
        shuffled = np.arange(total, dtype=dtype)
        random.shuffle(shuffled[:first])
        if first != total:
            random.shuffle(shuffled[first:])
        return {"sequences": pairs[:, 0].copy(), "starts": starts, "shuffled": shuffled}

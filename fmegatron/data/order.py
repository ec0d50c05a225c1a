"""The order of samples: which of `size` items sample n shows, each once an epoch; computed for many samples at once."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from fmegatron.data.permutation import permuted
from fmegatron.data.steps import Ranges, numbers_in
from fmegatron.tree import fold_in

# Rows whose places in the order are computed at once, of a batch's rows at most one epoch. `permuted` costs its number
# of calls of numpy until there are thousands: of 20,000, 32 positions take 0.8 ms, 1,024 take 1.6, 8,192 take 2.4.
_TOGETHER = 8192
_EPOCHS = 16  # of few items, so many at once: each is a permutation by itself


def shuffled(seed: int, size: int, samples: np.ndarray) -> np.ndarray:
    """Which of `size` the samples of these numbers (int64 [n]) show: int64 [n]."""
    found = np.empty(len(samples), dtype=np.int64)
    together = min(_TOGETHER, _EPOCHS * size)
    blocks = samples // together
    for block in np.unique(blocks).tolist():
        here = blocks == block
        order = _order(seed, size, together, ((0, together),), 1, block * together)[0]
        found[here] = order[samples[here] - block * together]
    return found


def shuffled_rows(seed: int, size: int, batch_size: int, rows: Ranges, step: int, offset: int) -> np.ndarray:
    """Which of `size` some rows of the batch of `step` show, int64 [rows]; the order of many steps is computed at once.

    offset: samples before step 0.
    """
    part = sum(stop - start for start, stop in rows)
    steps = max(1, min(_TOGETHER // part, size // batch_size))
    block, at = divmod(step, steps)
    return _order(seed, size, batch_size, rows, steps, offset + block * steps * batch_size)[at]


# The current block of several readers: ranks of a test, a run, its read-ahead, the parts of a blend; 64 KiB each.
@lru_cache(maxsize=512)
def _order(seed: int, windows: int, batch_size: int, ranges: Ranges, steps: int, first: int) -> np.ndarray:
    """Which windows some rows of a batch show in a block of steps that begins with sample `first`: int64 [steps, rows],
    read-only. One permutation of many positions costs little more than of few. A block may begin before sample 0
    (`Batches.after`); no rank asks for those rows."""
    rows = np.arange(first, first + steps * batch_size, batch_size, dtype=np.int64)[:, None]
    rows = rows + numbers_in(ranges)
    epochs, order = rows // windows, np.empty_like(rows)
    for epoch in range(int(epochs.min()), int(epochs.max()) + 1):
        here = epochs == epoch
        order[here] = permuted(rows[here] % windows, windows, fold_in(seed, "epoch", epoch))
    order.flags.writeable = False
    return order

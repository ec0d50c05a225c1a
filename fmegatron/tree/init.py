"""init: each rank draws its own boxes; the global array is the same, bit for bit, on every mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fmegatron.layout import Box, row_major_strides
from fmegatron.tree.keys import fold_in
from fmegatron.tree.random import Scratch, normal_values, pair_words, round_keys, scratch, uniform_values
from fmegatron.tree.spec import ArraySpec, Constant, Normal, Uniform
from fmegatron.tree.structure import flatten, unflatten


def init(specs: Any, key: int, rank: int, device: torch.device | str | None = None) -> Any:
    """The tree of this rank's local tensors of a tree of ArraySpecs.

    The value of an element depends on the key, the path of its leaf and its global index only, so every mesh gives the
    same global arrays bit for bit, and a leaf keeps its values when others come or go. Values are drawn in float32 and
    rounded to the leaf's dtype.  key: see `fold_in`.  device: where the tensors end; they are drawn on the CPU.
    """
    paths, leaves, spec = flatten(specs)
    space = scratch()
    return unflatten(
        spec, [_leaf(s, fold_in(key, p), rank, p, space, device) for p, s in zip(paths, leaves, strict=True)]
    )


def fill(local: torch.Tensor, spec: ArraySpec, key: int, rank: int, space: Scratch | None = None) -> None:
    """Write the initial values of a rank's part of one array into `local`, a contiguous CPU tensor of its local size.

    key: of this leaf, its path folded in. Raises ValueError for an init that the dtype cannot hold.
    """
    if isinstance(spec.init, Constant):
        local.fill_(spec.init.value)
        return
    if not isinstance(spec.init, Normal | Uniform):
        raise ValueError(f"got init {spec.init!r}, wanted Normal(std), Uniform(lo, hi) or Constant(value)")
    if not spec.dtype.is_floating_point:
        raise ValueError(f"got {spec.init} for {spec.layout}, wanted a floating-point dtype or a Constant")
    keys, space = round_keys(key), scratch() if space is None else space
    for box in spec.layout.boxes(rank):
        _fill_box(box.view(local), box, spec.shape, keys, spec.init, space)


def _leaf(spec: ArraySpec, key: int, rank: int, path: str, space: Scratch, device) -> torch.Tensor:
    if not isinstance(spec, ArraySpec):
        raise ValueError(f"{path}: got {type(spec).__name__}, wanted an ArraySpec(layout, init)")
    if spec.layout.unreduced:
        raise ValueError(f"{path}: got {spec.layout}, wanted no unreduced axes: a pending sum has no initial value")
    local = torch.empty(spec.layout.local_shape(rank), dtype=spec.dtype)
    try:
        fill(local, spec, key, rank, space)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return local if device is None else local.to(device)


def _fill_box(view: torch.Tensor, box: Box, shape: tuple[int, ...], keys, distribution, space: Scratch) -> None:
    """Write the values of a box of a global array of `shape` into `view` (of the shape of the box)."""
    strides = row_major_strides(shape)
    # Trailing dims that the box holds in full make longer runs of consecutive global indices.
    run_dim = len(shape) - 1
    while run_dim > 0 and box.shape[run_dim] == shape[run_dim]:
        run_dim -= 1
    run_dim = max(run_dim, 0)
    run = math.prod(box.shape[run_dim:])
    rows_shape = box.shape[:run_dim]
    start = sum(a * stride for a, stride in zip(box.start, strides, strict=True))
    view = view.reshape(*rows_shape, run)  # stays a view: the trailing dims are whole in the local block too
    for piece, at, counts in _tiles(view, start, rows_shape + (run,), strides[:run_dim] + (1,), space.counters.size):
        _fill_tile(piece, at, counts, strides[:run_dim], keys, distribution, space)


def _tiles(view, start, counts, strides, pairs) -> Iterator[tuple[torch.Tensor, int, tuple[int, ...]]]:
    """Cut a block of rows into tiles of at most `pairs` pairs: (view, first global index, counts)."""
    per_row = _pairs_per_row(start, counts, strides)
    if math.prod(counts[:-1]) * per_row <= pairs:
        yield view, start, counts
        return
    dim = next((d for d, n in enumerate(counts[:-1]) if n > 1), len(counts) - 1)
    if dim == len(counts) - 1:
        step = 2 * (pairs - 1)
    else:
        step = max(1, pairs // (math.prod(counts[dim + 1 : -1]) * per_row))
    for i in range(0, counts[dim], step):
        n = min(step, counts[dim] - i)
        piece = view.narrow(dim, i, n)
        smaller = counts[:dim] + (n,) + counts[dim + 1 :]
        yield from _tiles(piece, start + i * strides[dim], smaller, strides, pairs)


def _pairs_per_row(start: int, counts: tuple[int, ...], row_strides: tuple[int, ...]) -> int:
    """Pairs that every row of a tile needs: one more where a row may begin with the second element of a pair."""
    odd = start % 2 or any(n > 1 and stride % 2 for n, stride in zip(counts[:-1], row_strides, strict=False))
    return (counts[-1] + 2) // 2 if odd else (counts[-1] + 1) // 2


def _fill_tile(view, start, counts, row_strides, keys, distribution, space: Scratch) -> None:
    """Write the values of one tile: rows of `counts[-1]` consecutive global indices."""
    run = counts[-1]
    per_row = _pairs_per_row(start, counts, row_strides)
    starts = np.array(start, np.int64)
    for n, stride in zip(counts[:-1], row_strides, strict=True):
        starts = starts[..., None] + np.arange(n, dtype=np.int64) * stride
    starts = starts.reshape(-1)
    first = starts >> 1
    low = (first.astype(np.uint32)[:, None] + space.counters[:per_row]).reshape(-1)  # the lower 32 bits of each pair
    high = None
    if int(first.max()) + per_row > 1 << 32:
        high = ((first[:, None] + np.arange(per_row)) >> 32).astype(np.uint32).reshape(-1)
    left, right = pair_words(keys, low, high, space)
    if isinstance(distribution, Normal):
        values = normal_values(left, right, distribution.std, space)
    else:
        values = uniform_values(left, right, distribution.lo, distribution.hi, space)
    values = values.reshape(starts.size, 2 * per_row)
    odd = starts & 1
    if not odd.any():
        values = values[:, :run]
    elif odd.all():
        values = values[:, 1 : run + 1]
    else:
        values = np.where(odd[:, None].astype(bool), values[:, 1 : run + 1], values[:, :run])
    view.copy_(torch.from_numpy(values).reshape(view.shape))

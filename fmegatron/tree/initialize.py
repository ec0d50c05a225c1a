"""init: each rank draws its own boxes; the global array is the same, bit for bit, on every mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fmegatron.layout import Box, boxes
from fmegatron.tree.checks import check
from fmegatron.tree.keys import fold_in
from fmegatron.tree.labels import in_memory, labelled
from fmegatron.tree.random import Scratch, normal_values, pair_words, round_keys, scratch, uniform_values
from fmegatron.tree.spec import ArraySpec, Constant, Normal, Uniform
from fmegatron.tree.structure import Tree, did_you_mean, flatten, in_words, unflatten


def init(specs: Tree, key: int, rank: int, device: torch.device | str | None = None, given: Tree | None = None) -> Tree:
    """The tree of this rank's local tensors of a tree of ArraySpecs, drawn straight into their shards.

    The value of an element depends on the key, the name of its leaf (`ArraySpec.drawn_as`, else its path) and its
    global index only, so every mesh gives the same global arrays bit for bit, a leaf keeps its values when others come
    or go, and copies of a leaf (master weights, averages) equal it. Values are drawn in float32 and rounded to the
    leaf's dtype.

    Args:
        specs: tree of ArraySpecs.
        key: see `fold_in`.
        rank: this rank on the mesh of the specs.
        device: where the tensors end, but for those whose layouts name host memory, which are beside it; random values
            are drawn on the CPU.
        given: a tree of local tensors that are known already (weights from elsewhere), under the names of their leaves:
            they are taken as they are, and copies are made of them. For a state of `step.state_specs`: parameters, or
            some.

    Raises:
        ValueError: a spec that cannot be drawn; leaves of one name that are not one array (other shapes or initial
            values); a copy whose original was not named before the tree was put together (`tree.named`); given tensors
            that no leaf takes, or that are not what their leaf's layout states.
    """
    paths, leaves, spec = flatten(specs)
    for path, leaf in zip(paths, leaves, strict=True):
        _require_spec(path, leaf)
    originals = _originals(paths, leaves)
    known = _known(given, originals, rank)
    space, out = scratch(), []
    for path, leaf in zip(paths, leaves, strict=True):
        name = leaf.drawn_as or path
        if name not in known:
            local = _drawn(path, leaf, fold_in(key, name), rank, space, device)
        elif leaf.is_copy:
            local = _copied(path, leaf, originals[name][1], known[name], rank)
        else:
            local = known[name]
        out.append(labelled(in_memory(local, leaf.layout, device), leaf.layout))
    return unflatten(spec, out)


def fill(local: torch.Tensor, spec: ArraySpec, key: int, rank: int, space: Scratch | None = None) -> None:
    """Write the initial values of a rank's part of one array into `local`, a contiguous tensor of its local size,
    on the CPU where they are random.

    key: of this leaf, its path folded in. Padding (`Layout.padded`) is zeros, whatever the initial values are. Raises
    ValueError for an init that the dtype cannot hold.
    """
    if spec.layout.padded:
        local.zero_()
    if isinstance(spec.init, Constant):
        places = [box.view(local) for box in spec.layout.boxes(rank)] if spec.layout.padded else [local]
        for place in places:
            place.fill_(spec.init.value)
        return
    if not isinstance(spec.init, Normal | Uniform):
        raise ValueError(f"got init {spec.init!r}, wanted a number, Normal(std) or Uniform(lo, hi)")
    if not spec.dtype.is_floating_point:
        raise ValueError(f"got {spec.init} for {spec.layout}, wanted a floating-point dtype or a number")
    keys, space = round_keys(key), scratch() if space is None else space
    for box in spec.layout.boxes(rank):
        _fill_box(box.view(local), box, spec.shape, keys, spec.init, space)


def _require_spec(path: str, spec: Any) -> None:
    if not isinstance(spec, ArraySpec):
        fix = "; tree.specs(shapes, mesh, ...) makes specs of shapes" if isinstance(spec, int) else ""
        raise ValueError(f"{path}: got {in_words(spec)}, wanted an ArraySpec(layout, init){fix}")
    if spec.layout.unreduced:
        raise ValueError(f"{path}: got {spec.layout}, wanted no unreduced axes: a pending sum has no initial value")


def _originals(paths: list[str], specs: list[ArraySpec]) -> dict[str, tuple[str, ArraySpec]]:
    """Name -> (path, spec) of the leaves that are no copies; ValueError where leaves of one name are not one array."""
    found: dict[str, tuple[str, ArraySpec]] = {}
    for path, spec in zip(paths, specs, strict=True):
        if not spec.is_copy:
            found.setdefault(spec.drawn_as or path, (path, spec))
    for path, spec in zip(paths, specs, strict=True):
        name = spec.drawn_as or path
        if name in found:
            at, original = found[name]
            if (spec.shape, spec.init) != (original.shape, original.init):
                raise ValueError(
                    f"{path}: got shape {spec.shape} and {spec.init} under the name {name!r}, wanted shape "
                    f"{original.shape} and {original.init} as {at!r} has, which is drawn under the same name; make the "
                    "copy of the final spec, or give one of them another name"
                )
        elif spec.is_copy and not isinstance(spec.init, Constant):
            same = [at for at, other in found.values() if (other.shape, other.init) == (spec.shape, spec.init)]
            if near := [at for at in same if at.endswith("/" + name)]:
                raise ValueError(
                    f"{path}: got a copy of {name!r}, which is not in this tree, wanted one of {near[0]!r}, which is "
                    "drawn under another name, so the copy would begin as other numbers; name the specs first (specs "
                    "= tree.named(specs)), then make copies and optimizer states of them, then put the tree together"
                )
    return found


def _known(given: Tree, originals: dict[str, tuple[str, ArraySpec]], rank: int) -> dict[str, torch.Tensor]:
    """Name -> tensor of what is given, each checked against the layout of the leaf that takes it."""
    if given is None:
        return {}
    paths, tensors, _ = flatten(given)
    for path, x in zip(paths, tensors, strict=True):
        if path not in originals:
            inside = path.partition("/")[2]  # of {"params": ...}, or of a State
            near = f" (did you mean {inside}?)" if inside in originals else did_you_mean(path, list(originals))
            fix = f"; give what is in {path.partition('/')[0]!r} alone" if inside in originals else ""
            raise ValueError(
                f"given: {path}: got a tensor that no leaf takes{near}, wanted it under the name that the parameters "
                f"have in their own tree{fix}"
            )
        check({path: x}, {path: originals[path][1]}, rank)
    return dict(zip(paths, tensors, strict=True))


def _drawn(path: str, spec: ArraySpec, key: int, rank: int, space: Scratch, device: Any) -> torch.Tensor:
    on_device = isinstance(spec.init, Constant) and spec.layout.memory == "device"
    place = device if on_device else None  # nothing to draw: most of an optimizer's state
    local = torch.empty(spec.layout.local_shape(rank), dtype=(*spec.rounded_to, spec.dtype)[0], device=place)
    try:
        fill(local, spec, key, rank, space)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return _rounded(local, spec)


def _copied(path: str, spec: ArraySpec, original: ArraySpec, source: torch.Tensor, rank: int) -> torch.Tensor:
    """The copy of a given tensor, cut to the boxes of the copy, which are inside of those of the original."""
    source = source.detach()
    make = torch.zeros if spec.layout.padded else torch.empty
    local = make(spec.layout.local_shape(rank), dtype=source.dtype, device=source.device)
    missing = sum(box.size for box in spec.layout.boxes(rank))
    for box in spec.layout.boxes(rank):
        for held in original.layout.boxes(rank):
            inside = held.intersect(box.start, box.stop)
            if inside is not None and (own := box.intersect(inside.start, inside.stop)) is not None:
                own.view(local).copy_(inside.view(source.contiguous()))
                missing -= inside.size
    if missing:
        raise ValueError(
            f"{path}: got given values in {original.layout}, which leave out {missing} elements of rank {rank}, wanted "
            f"all of {spec.layout}; give parameters of a layout that holds them"
        )
    return _rounded(local, spec)


def _rounded(local: torch.Tensor, spec: ArraySpec) -> torch.Tensor:
    for dtype in (*spec.rounded_to, spec.dtype):
        local = local.to(dtype)
    return local


def _fill_box(view: torch.Tensor, box: Box, shape: tuple[int, ...], keys, distribution, space: Scratch) -> None:
    """Write the values of a box of a global array of `shape` into `view` (of the shape of the box)."""
    strides = boxes.row_major_strides(shape)
    # Trailing dims that the box holds in full make longer runs of consecutive global indices.
    run_dim = len(shape) - 1
    while run_dim > 0 and box.shape[run_dim] == shape[run_dim]:
        run_dim -= 1
    run_dim = max(run_dim, 0)
    run = math.prod(box.shape[run_dim:])
    rows_shape = box.shape[:run_dim]
    start = sum(a * stride for a, stride in zip(box.start, strides, strict=True))
    view = view.reshape(*rows_shape, run)  # stays a view: the trailing dims are full in the local block too
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

"""Gather a small tree of shards over one axis in a single collective (the weights of a layer, before it runs)."""

from __future__ import annotations

import torch
from torch import Tensor

from fmegatron import tree
from fmegatron.collectives import Axis, all_gather
from fmegatron.layout import Layout, Split


def gather_tree(shards, layouts, axis: Axis):
    """The same tree with every leaf that is sharded over `axis` made whole along it; other leaves stay as they are.

    `w[D_fsdp, F_tp] -> w[D, F_tp]`, for all leaves at once: local shards are flattened, concatenated (one buffer per
    dtype), all-gathered once, cut, and laid out again on whichever dim the axis splits, interleaved dims included.
    Transpose: the same path backwards, so one reduce_scatter over `axis` sums and shards all the weights' gradients.
    `layouts` has the structure of `shards` and says where the axis lies.
    Raises ValueError naming the leaf when a layout is uneven, or when another axis splits the same dim below this one
    (the minor axis must be gathered first).
    """
    if axis.size == 1:
        return shards
    paths, leaves, spec = tree.flatten(shards)
    places = [_place(path, layout, axis) for path, layout in zip(paths, tree.leaves(layouts), strict=True)]
    for dtype in dict.fromkeys(leaf.dtype for leaf, place in zip(leaves, places, strict=True) if place):
        mine = [i for i, place in enumerate(places) if place and leaves[i].dtype == dtype]
        flat = [leaves[i].reshape(-1) for i in mine]
        whole = all_gather(torch.cat(flat) if len(flat) > 1 else flat[0], axis, 0)
        pieces = whole.view(axis.size, -1).split([x.numel() for x in flat], 1)
        for i, piece in zip(mine, pieces, strict=True):
            leaves[i] = _lay_out(piece.unflatten(1, leaves[i].shape), *places[i])
    return tree.unflatten(spec, leaves)


def _place(path: str, layout: Layout, axis: Axis) -> tuple[int, tuple[int, ...]] | None:
    """(the dim that the axis splits, local sizes of the dim's parts), or None where the leaf is not sharded over it."""
    for dim in range(len(layout.shape)):
        names = tuple(name for name in layout.axes(dim) if layout.mesh[name] > 1)
        if not set(names) & set(axis.names):
            continue
        if names[len(names) - len(axis.names) :] != axis.names:
            raise ValueError(
                f"{path}: dim {dim} of {layout} is split over {names}; {axis} can be gathered only as its minor end; "
                "put it last in the rule"
            )
        if not layout.is_even or layout.flat:
            raise ValueError(
                f"{path}: {layout} is {'flattened' if layout.flat else 'uneven'}, a gather inside a step wants equal "
                f"shards of a dim; make the dim a multiple of {layout.mesh.extent(names)}, or do not shard this leaf"
            )
        split = layout.spec[dim]
        parts = split.sizes(layout.shape[dim]) if isinstance(split, Split) else (layout.shape[dim],)
        return dim, tuple(size // layout.mesh.extent(names) for size in parts)
    return None


def _lay_out(piece: Tensor, dim: int, parts: tuple[int, ...]) -> Tensor:
    """[ranks, *local shape] -> the local shape with `dim` whole; parts of an interleaved dim are joined one by one."""
    if len(parts) == 1:  # no split: its transpose, a cat of one tensor, has other strides once it is compiled
        return piece.movedim(0, dim).flatten(dim, dim + 1)
    return torch.cat([part.movedim(0, dim).flatten(dim, dim + 1) for part in piece.split(list(parts), dim + 1)], dim)

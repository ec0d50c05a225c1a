"""Weights with a scale, so that they can travel in 8 bits: one scale per array, the same on all ranks and meshes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmegatron import tree
from fmegatron.collectives import Axes, known_ranks, pmax, wires
from fmegatron.tree import structure


class Scaled(NamedTuple):
    """An array (or shard), and the fp32 number that makes it fit 8 bits: |value / scale| is at most the largest one.

    scale: 0-d; of stacked arrays [L], one for each. A subtree where a layout has a leaf.
    """

    value: Tensor
    scale: Tensor


def with_scales(
    shards: structure.Tree,
    layouts: structure.Tree,
    axes: Axes,
    dtype: torch.dtype,
    stacked: bool | structure.Tree = False,
) -> structure.Tree:
    """Every array of two or more dims becomes `Scaled` for `dtype`; other leaves stay as they are.

    `w[D_fsdp, F_tp] -> (w, max |w| / largest number of dtype)`, the maximum over all ranks: one pmax of a vector for
    all arrays that are sharded over the same axes; of a loss that is cut into stages one for each layer, of which a
    stage makes its own. No gradient flows through a scale. All-zero arrays have scale 1.

    Args:
        shards: tree of this rank's tensors.
        layouts: tree of their layouts.
        axes: Axes(mesh).
        dtype: in which the arrays are to travel, with 8 bits.
        stacked: whether the first dim of an array is one of layers that get a scale each: a bool, or a tree of them or
            of numbers and names of stacks (0 or "": of none), whose layers are those of one block each.
    """
    axes.require(layouts, "with_scales")
    _, layout_leaves, spec = structure.flatten(layouts)
    leaves: list[Any] = spec.flatten_up_to(shards)
    stack = [stacked] * len(leaves) if isinstance(stacked, bool) else tree.leaves(stacked)
    dims = [len(layout.shape) - bool(is_stacked) for layout, is_stacked in zip(layout_leaves, stack, strict=True)]
    by_stages = known_ranks.recorded_stages() is not None  # whose layers are whole, though pp splits them at rest
    groups: dict[tuple[tuple[str, ...], Any], list[int]] = {}
    for i, layout in enumerate(layout_leaves):
        if dims[i] > 1:
            names = layout.without("pp").sharded if by_stages else layout.sharded
            groups.setdefault((names, by_stages and stack[i]), []).append(i)
    for (names, by_layer), mine in groups.items():
        own = [_largest(leaves[i].detach(), bool(stack[i])) for i in mine]
        counts = [x.numel() for x in own]
        if by_layer:
            layers = zip(*(x.unbind() for x in own), strict=True)
            largest = [pmax(torch.stack(layer), axes[names]).unbind() for layer in layers]
            found = [torch.stack(of_leaf) for of_leaf in zip(*largest, strict=True)]
        else:
            found = pmax(torch.cat(own), axes[names]).split(counts)
        for i, most in zip(mine, found, strict=True):
            scale = most / wires.largest_of(dtype)
            scale = torch.where(scale > 0, scale, 1.0)
            leaves[i] = Scaled(leaves[i], scale if stack[i] else scale.view(()))
    return structure.unflatten(spec, leaves)


def _largest(x: Tensor, stacked: bool) -> Tensor:
    """[L] or [1]: the largest magnitude, fp32."""
    return x.abs().amax(tuple(range(int(stacked), x.dim()))).float().view(-1)

"""Weights with a scale, so that they can travel in 8 bits: one scale per array, the same on all ranks and meshes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmegatron import tree
from fmegatron.collectives import Axes, pmax, wires
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
    all arrays that are sharded over the same axes. No gradient flows through a scale. All-zero arrays have scale 1.

    Args:
        shards: tree of this rank's tensors.
        layouts: tree of their layouts.
        axes: Axes(mesh).
        dtype: in which the arrays are to travel, with 8 bits.
        stacked: whether the first dim of an array is one of layers that get a scale each; a bool or a tree of them.
    """
    axes.require(layouts, "with_scales")
    _, layout_leaves, spec = structure.flatten(layouts)
    leaves: list[Any] = spec.flatten_up_to(shards)
    stack = [stacked] * len(leaves) if isinstance(stacked, bool) else tree.leaves(stacked)
    dims = [len(layout.shape) - is_stacked for layout, is_stacked in zip(layout_leaves, stack, strict=True)]
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, layout in enumerate(layout_leaves):
        if dims[i] > 1:
            groups.setdefault(layout.sharded, []).append(i)
    for names, mine in groups.items():
        own = [_largest(leaves[i].detach(), stack[i]) for i in mine]
        found = pmax(torch.cat(own), axes[names]) / wires.largest_of(dtype)
        found = torch.where(found > 0, found, 1.0).split([x.numel() for x in own])
        for i, scale in zip(mine, found, strict=True):
            leaves[i] = Scaled(leaves[i], scale if stack[i] else scale.view(()))
    return structure.unflatten(spec, leaves)


def _largest(x: Tensor, stacked: bool) -> Tensor:
    """[L] or [1]: the largest magnitude, fp32."""
    return x.abs().amax(tuple(range(int(stacked), x.dim()))).float().view(-1)

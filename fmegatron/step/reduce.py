"""The reduction of gradients over the ranks, as their layouts ask for it."""

from __future__ import annotations

import torch

from fmegatron import tree
from fmegatron.collectives import Axes, Wire, reshard_many
from fmegatron.layout import DataParallel, Layout

__all__ = ["raw_gradient_layout", "reduce_gradients"]


def raw_gradient_layout(layout: Layout, data_axes: tuple[str, ...]) -> Layout:
    """Layout of a parameter's gradient as autograd leaves it: a pending sum over the data axes that do not shard it."""
    return DataParallel(data_axes).grads_layout(layout)


def reduce_gradients(
    grads: tree.Tree,
    layouts: tree.Tree,
    axes: Axes,
    to: tree.Tree = None,
    wire: Wire | tree.Tree = Wire(),  # noqa: B008  a frozen value
    together: int = 0,
) -> tree.Tree:
    """Sum the gradients of replicas over `axes.data`: from `raw_gradient_layout` to the layout of the parameter.

    Args:
        grads: the tree of gradients, as autograd leaves them.
        layouts: of the parameters.
        axes: of their mesh.
        to: a tree of other layouts to bring them to (`Placed.grads`, `Placed.optim`): where one of them is sharded by
            an axis over which the gradient is a pending sum, the sum is a reduce-scatter; where it is still pending,
            nothing. None: the parameters' own.
        wire: in which dtype sums are made and arrive (a `Wire`, or a tree of them: `Precision.wires`).
        together: up to how many bytes leaves share a collective (`reshard_many`); 0: each leaf travels alone.
    """
    axes.require(layouts, "reduce_gradients: layouts")
    _, leaves, spec = tree.flatten(grads)
    targets = tree.leaves(layouts if to is None else to)
    sources = [raw_gradient_layout(layout, axes.data) for layout in tree.leaves(layouts)]
    wires = wire if isinstance(wire, Wire) else tree.leaves(wire)
    return tree.unflatten(spec, reshard_many(leaves, sources, targets, axes, wires, together))


def widened(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in a dtype unless its own is as wide."""
    return x.to(dtype) if x.dtype.itemsize < dtype.itemsize else x

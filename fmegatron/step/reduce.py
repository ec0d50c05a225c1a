"""The reduction of gradients over the ranks, as their layouts ask for it."""

from __future__ import annotations

import torch

from fmegatron import tree
from fmegatron.collectives import Axes, resharding
from fmegatron.collectives.wires import Wire
from fmegatron.layout import DataParallel, Layout
from fmegatron.tree import labels, structure

__all__ = ["raw_gradient_layout", "reduce_gradients"]


def raw_gradient_layout(layout: Layout, data_axes: tuple[str, ...]) -> Layout:
    """Layout of a parameter's gradient as autograd leaves it: a pending sum over the data axes that do not shard it."""
    return DataParallel(data_axes).grads_layout(layout)


def reduce_gradients(
    grads: structure.Tree,
    to: structure.Tree = None,
    wire: Wire | structure.Tree = Wire(),  # noqa: B008  a frozen value
    bucket_bytes: int = 0,
) -> structure.Tree:
    """Sum the gradients of replicas over the data axes, into the layouts of their parameters.

    Args:
        grads: the tree of gradients, as autograd leaves them: they know that they are sums still to be made, and over
            which axes, as `value_and_grad` gives them (`raw_gradient_layout`).
        to: a tree of other layouts to bring them to (`Placed.grads`, `Placed.optim`): where one of them is sharded by
            an axis over which the gradient is a pending sum, the sum is a reduce-scatter; where it is still pending,
            nothing. None: the parameters' own.
        wire: in which dtype sums are made and arrive (a `Wire`, or a tree of them: `Precision.wires`).
        bucket_bytes: up to how many bytes leaves share a collective (`reshard_many`); 0: each leaf travels alone.

    The results know their layouts. Raises ValueError, naming the leaf, for one whose layout is not known: what was
    computed of a gradient is another array.
    """
    sources = tree.leaves(tree.layouts(grads))
    if not sources:
        return grads
    axes = Axes(sources[0].mesh)
    axes.require(sources, "reduce_gradients: the gradients")
    targets = [layout.replace(unreduced=()) for layout in sources] if to is None else tree.leaves(to)
    return _summed(grads, sources, targets, axes, wire, bucket_bytes)


def reduced_to(
    grads: structure.Tree,
    params: structure.Tree,
    axes: Axes,
    to: structure.Tree,
    wire: structure.Tree,
    bucket_bytes: int,
):
    """`reduce_gradients` of a step that knows the layouts of the parameters, and its own data axes."""
    sources = [raw_gradient_layout(layout, axes.data) for layout in tree.leaves(params)]
    return _summed(grads, sources, tree.leaves(to), axes, wire, bucket_bytes)


def _summed(grads, sources, targets, axes, wire, bucket_bytes):
    _, leaves, spec = structure.flatten(grads)
    wires = wire if isinstance(wire, Wire) else tree.leaves(wire)
    reduced = structure.unflatten(spec, resharding.reshard_many(leaves, sources, targets, axes, wires, bucket_bytes))
    return known_as(reduced, structure.unflatten(spec, targets))


def known_as(values: structure.Tree, layouts: structure.Tree) -> structure.Tree:
    """The values, known to lie so, each in its own dtype: what a step has computed."""
    return tree.map(lambda x, layout: labels.labelled(x, layout.replace(dtype=x.dtype)), values, layouts)


def widened(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in a dtype unless its own is as wide."""
    return x.to(dtype) if x.dtype.itemsize < dtype.itemsize else x

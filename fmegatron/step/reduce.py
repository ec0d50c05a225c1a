"""The reduction of gradients over the ranks, as their layouts ask for it."""

from __future__ import annotations

import torch

from fmegatron import tree
from fmegatron.collectives import Axes, Wire, reshard_many
from fmegatron.layout import DataParallel, Layout
from fmegatron.tree.labels import labelled

__all__ = ["raw_gradient_layout", "reduce_gradients"]


def raw_gradient_layout(layout: Layout, data_axes: tuple[str, ...]) -> Layout:
    """Layout of a parameter's gradient as autograd leaves it: a pending sum over the data axes that do not shard it."""
    return DataParallel(data_axes).grads_layout(layout)


def reduce_gradients(
    grads: tree.Tree,
    layouts: tree.Tree | None = None,
    axes: Axes | None = None,
    to: tree.Tree = None,
    wire: Wire | tree.Tree = Wire(),  # noqa: B008  a frozen value
    together: int = 0,
) -> tree.Tree:
    """Sum the gradients of replicas over `axes.data`: from `raw_gradient_layout` to the layout of the parameter.

    Args:
        grads: the tree of gradients, as autograd leaves them.
        layouts: of the parameters; None: the gradients know theirs, as `value_and_grad` gives them.
        axes: of their mesh; None: Axes(mesh), whose data axes are dp, fsdp and those of sequences.
        to: a tree of other layouts to bring them to (`Placed.grads`, `Placed.optim`): where one of them is sharded by
            an axis over which the gradient is a pending sum, the sum is a reduce-scatter; where it is still pending,
            nothing. None: the parameters' own.
        wire: in which dtype sums are made and arrive (a `Wire`, or a tree of them: `Precision.wires`).
        together: up to how many bytes leaves share a collective (`reshard_many`); 0: each leaf travels alone.

    The results know their layouts. Raises ValueError, naming the leaf, for one whose layout is not known: what was
    computed of a gradient is another array.
    """
    if layouts is None:
        sources = tree.leaves(tree.layouts(grads))
        own = [layout.replace(unreduced=()) for layout in sources]
        axes = axes or (Axes(own[0].mesh) if own else None)
    else:
        own = tree.leaves(layouts)
        axes = axes or (Axes(own[0].mesh) if own else None)
        sources = [raw_gradient_layout(layout, () if axes is None else axes.data) for layout in own]
    if axes is None:  # no gradient at all
        return grads
    axes.require(own, "reduce_gradients: layouts")
    _, leaves, spec = tree.flatten(grads)
    targets = own if to is None else tree.leaves(to)
    wires = wire if isinstance(wire, Wire) else tree.leaves(wire)
    reduced = reshard_many(leaves, sources, targets, axes, wires, together)
    of_dtype = [layout.replace(dtype=x.dtype) for x, layout in zip(reduced, targets, strict=True)]
    return tree.unflatten(spec, list(map(labelled, reduced, of_dtype)))


def widened(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in a dtype unless its own is as wide."""
    return x.to(dtype) if x.dtype.itemsize < dtype.itemsize else x

"""Weights as a loss function takes them, gathered over the data axes; a stack of layers as a value of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree

from fmegatron import nn, tree
from fmegatron.collectives import Axes, Precision
from fmegatron.collectives.wires import Wire
from fmegatron.nn import scaled
from fmegatron.step.layer import Stack
from fmegatron.tree import structure

__all__ = ["of_whole"]


def of_whole(
    loss_fn: Callable, specs: structure.Tree, axes: Axes, precision: Precision | None, reshard_after_forward: bool
) -> Callable:
    """A function of this rank's shards that gives loss_fn gathered weights instead, in the dtypes of `precision`.

    A part of the tree whose leaves are all stacked, with one number of layers, is a `Stack`; all others together are
    one `nn.gather_tree`.
    """
    nodes, spec = optree.tree_flatten(specs, is_leaf=_is_stack)
    of_nodes, stacks = [tree.layouts(node) for node in nodes], [_is_stack(node) for node in nodes]
    plain = [i for i, is_stack in enumerate(stacks) if not is_stack]
    layouts = [of_nodes[i] for i in plain]
    wires: Any = Wire()
    if precision is not None:  # of the whole tree, as its paths tell what is a norm or a bias
        of_all = spec.flatten_up_to(precision.wires(tree.layouts(specs)))
        wires = [of_all[i] for i in plain]
    of_stack = [
        tree.map(lambda of, n=n: n if isinstance(of, tree.ArraySpec) and of.stacked else 0, node)
        for n, node in enumerate(nodes, 1)
    ]
    stacked = structure.unflatten(spec, of_stack)

    @functools.wraps(loss_fn)
    def of_shards(params: structure.Tree, *rest: Any, **named: Any) -> Any:
        if precision is not None and precision.wire.scaled and precision.wire.gather is not None:
            params = scaled.with_scales(params, tree.layouts(specs), axes, precision.wire.gather, stacked)
        found: list[Any] = spec.flatten_up_to(params)
        whole = nn.gather_tree([found[i] for i in plain], layouts, axes[axes.data], wires, reshard_after_forward)
        others = iter(whole)
        found = [
            Stack(x, of, axes, precision, reshard_after_forward) if is_stack else next(others)
            for x, of, is_stack in zip(found, of_nodes, stacks, strict=True)
        ]
        return loss_fn(structure.unflatten(spec, found), *rest, **named)

    return of_shards


def _is_stack(node: Any) -> bool:
    """Whether all leaves of a tree of specs count layers, and the same number of them."""
    found = optree.tree_leaves(node)
    counts = {of.layout.shape[0] if isinstance(of, tree.ArraySpec) and of.stacked else None for of in found}
    return len(counts) == 1 and None not in counts

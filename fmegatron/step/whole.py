"""Weights as a loss function takes them, gathered over the data axes, and a stack of layers as a value of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import optree

from fmegatron import nn, tree
from fmegatron.collectives import Axes, Precision
from fmegatron.collectives.wires import Wire
from fmegatron.nn import scaled
from fmegatron.step.layer import layer_layout, layers, unstack
from fmegatron.step.partition import Policy
from fmegatron.step.tracing import line_here
from fmegatron.tree import structure

__all__ = ["Stack", "of_whole"]


@dataclass(frozen=True)
class Stack:
    """The weights of equal layers, arrays [L, ...], of which a rank holds a part of each layer.

    `for w in stack: x = block(x, w)` has those of one layer after the other, whole over the data axes; where they are
    gathered says the step (`step.regather`). `stack.run(block, x)` computes the same with the block compiled once.
    """

    shards: structure.Tree = field(repr=False)
    layouts: structure.Tree
    axes: Axes = field(repr=False)
    precision: Precision | None = None
    reshard_after_forward: bool = True

    def run(
        self,
        block: Callable,
        x: Any,
        *rest: Any,
        save: Policy | None = "mincut",
        offload: int | None = None,
        **named: Any,
    ) -> Any:
        """block(x, weights, *rest, **named) of each layer in turn, as `step.layers`.

        Args:
            block: a pure function of tensors, that returns x or (x, more).
            x: a tensor.
            *rest: trees of tensors, the same for all layers, to which no gradient flows.
            save: what a layer keeps for its backward (`step.compiled_layer`).
            offload: bytes from which on it waits in host memory.
            **named: as rest.
        """
        how = {"precision": self.precision, "offload": offload, "reshard_after_forward": self.reshard_after_forward}
        return layers(block, self.shards, self.layouts, self.axes, save, **how)(x, *rest, **named)

    def __len__(self) -> int:
        return tree.leaves(self.layouts)[0].shape[0]

    def __getitem__(self, index: Any) -> Any:
        """ValueError that names the user's line: an index per layer gathers each time, and there is no whole stack."""
        raise ValueError(
            f"{line_here()}: got [{index!r}] of a stack of {len(self)} layers, wanted the layers in turn, each with "
            "its names: `for w in stack: x = block(x, w)`, or stack.run(block, x), which compiles the block once; "
            "one's own order is that of list(stack)"
        )

    def __iter__(self) -> Iterator[structure.Tree]:
        of_one = tree.map(layer_layout, self.layouts)
        wire = Wire() if self.precision is None else self.precision.wires(of_one)
        for shards in unstack(self.shards):
            yield nn.gather_tree(shards, of_one, self.axes[self.axes.data], wire, self.reshard_after_forward)


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

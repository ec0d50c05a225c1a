"""Memory of a graph: which values share it, and how many bytes are alive at one time in a given order."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Hashable, Iterable, Mapping

import torch
from torch import fx

from fmegatron.step.graph.nodes import declared_in, is_light, is_start, is_view, is_wait, written_by
from fmegatron.step.torch_private import opname

__all__ = ["materialized", "memory_of", "memory_written", "most_alive", "peak_bytes"]

_COPIES = frozenset({"clone", "_to_copy"})  # of weights and gradients, into the layout in which they are used
_REDUCTIONS = frozenset({"sum", "mean", "amax", "copy_"})


def memory_of(nodes: Iterable[fx.Node]) -> dict[fx.Node, Hashable]:
    """For every node whose memory its value is in: that of itself, or of what it is a view of or waits for.

    Read from the operators, because nodes that were copied into a graph share fake tensors. The i-th output of a node
    with several is (node, i).
    """
    known = {}
    for node in nodes:
        known[node] = _memory(node, known)
    return known


def _memory(node: fx.Node, known: Mapping[fx.Node, Hashable]) -> Hashable:
    while node.op == "call_function" and node.all_input_nodes:
        source, stated = node.all_input_nodes[0], declared_in(node)
        if stated is None and node.target is operator.getitem and not is_view(source):
            return source, node.args[1]
        if not (node.target is operator.getitem or is_view(node) or is_wait(node)):
            break
        node = source if stated is None else stated
        if node in known:
            return known[node]
    return node


def memory_written(node: fx.Node, memory: dict[fx.Node, Hashable]) -> set[Hashable]:
    """Memory that a node writes into. (No node draws from a generator: `step.purity`.)"""
    return {memory[n] for n in written_by(node)}


def peak_bytes(graph: fx.Graph) -> int:
    """The most bytes that are alive at one time besides the arguments, as far as they are `materialized`."""
    return most_alive(list(graph.nodes), materialized(graph))[0]


def materialized(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose values are in memory when the graph is compiled: all but those that work element by element for
    others of their kind or for sums, which are fused with their readers."""
    found = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        tags = getattr(node.target, "tags", ())
        fused = torch.Tag.pointwise in tags and opname(node.target) not in _COPIES
        if not fused or any(_reads_memory(user) for user in node.users):
            found.add(node)
    return found


def _reads_memory(user: fx.Node) -> bool:
    """Whether a reader is computed on its own: a layer, a product, a collective; a view of it counts as its readers."""
    if is_view(user):
        return any(map(_reads_memory, user.users))
    name = opname(user.target)
    return user.op == "call_function" and name not in _REDUCTIONS and (is_start(user) or not is_light(user))


def most_alive(order: list[fx.Node], counted: Collection[fx.Node] | None = None) -> tuple[int, int]:
    """(the most bytes that are alive at one time if the nodes of a graph run in this order, at which of them).

    counted: the nodes whose values count; None: all that compute.
    """
    memory = memory_of(order)
    size = {buffer: value.numel() * value.element_size() for n in order for buffer, value in _made(n, memory)}
    begin: dict[Hashable, int] = {}
    end: dict[Hashable, int] = {}
    for i, node in enumerate(order):
        for buffer, _ in _made(node, memory):
            if (counted is None or node in counted) and node.op == "call_function":
                begin[buffer] = i
            end[buffer] = i
        for read in node.all_input_nodes:
            end[memory[read]] = i
    change = [0] * (len(order) + 1)
    for buffer, i in begin.items():
        change[i] += size[buffer]
        change[end[buffer] + 1] -= size[buffer]
    alive = list(itertools.accumulate(change))
    at = max(range(len(alive)), key=alive.__getitem__)
    return alive[at], at


def _made(node: fx.Node, memory: dict[fx.Node, Hashable]) -> list[tuple[Hashable, torch.Tensor]]:
    """(memory, value) of what a node makes anew: nothing for a view, each output on its own where it has several."""
    value = node.meta.get("val")
    if memory[node] is not node or value is None:
        return []
    if isinstance(value, torch.Tensor):
        return [(node, value)]
    return [((node, i), v) for i, v in enumerate(value) if isinstance(v, torch.Tensor)]

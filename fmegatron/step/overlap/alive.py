"""What is alive when a lowered graph runs in its order: bytes of gathered weights, or of everything that it makes."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable

import torch
from torch import fx

from fmegatron.step.overlap.roles import memory_of, units

__all__ = ["gathered_bytes", "largest_unit_bytes", "peak_bytes"]


def gathered_bytes(graph: fx.Graph) -> int:
    """The most bytes of gathered weights that are alive at one time: buffers of gathers from their start on, and the
    arrays that are laid out from them, until the last node that reads them."""
    return _most(graph, {n for unit in units(graph) for n in unit.after})


def largest_unit_bytes(graph: fx.Graph) -> int:
    """The bytes of the largest set of weights that one gather (or several, for one computation) brings."""
    return max((unit.nbytes for unit in units(graph)), default=0)


def peak_bytes(graph: fx.Graph) -> int:
    """The most bytes that are alive at one time besides the arguments. Without fusion: compiled code makes less."""
    return _most(graph, [n for n in graph.nodes if n.op == "call_function"])


def _most(graph: fx.Graph, nodes: Iterable[fx.Node]) -> int:
    memory, counted = memory_of(graph), set(nodes)
    size = {place: value.numel() * value.element_size() for n in graph.nodes for place, value in _made(n, memory)}
    begin: dict[Hashable, int] = {}
    end: dict[Hashable, int] = {}
    for i, node in enumerate(graph.nodes):
        for place, _ in _made(node, memory):
            if node in counted and node.op == "call_function":
                begin[place] = i
            end[place] = i
        for read in node.all_input_nodes:
            end[memory[read]] = i
    change = [0] * (len(graph.nodes) + 1)
    for place, i in begin.items():
        change[i] += size[place]
        change[end[place] + 1] -= size[place]
    return max(itertools.accumulate(change))


def _made(node: fx.Node, memory: dict[fx.Node, Hashable]) -> list[tuple[Hashable, torch.Tensor]]:
    """(memory, value) of what a node makes anew: nothing for a view, each output on its own where it has several."""
    value = node.meta.get("val")
    if memory[node] is not node or value is None:
        return []
    if isinstance(value, torch.Tensor):
        return [(node, value)]
    return [((node, i), v) for i, v in enumerate(value) if isinstance(v, torch.Tensor)]

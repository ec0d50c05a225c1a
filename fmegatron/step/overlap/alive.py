"""Memory of a lowered graph in its order: live bytes of gathered weights, or of all intermediates."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable

import torch
from torch import fx

from fmegatron.step.overlap.roles import is_light, is_start, is_view, memory_of, units
from fmegatron.step.torch_private import opname

__all__ = ["gathered_bytes", "largest_unit_bytes", "materialized", "most_alive", "peak_bytes"]


_COPIES = frozenset({"clone", "_to_copy"})  # of weights and gradients, into the layout in which they are used
_REDUCTIONS = frozenset({"sum", "mean", "amax", "copy_"})


def gathered_bytes(graph: fx.Graph) -> int:
    """The most bytes of gathered weights that are alive at one time: buffers of gathers from their start on, and the
    arrays that are laid out from them, until the last node that reads them."""
    return most_alive(list(graph.nodes), {n for unit in units(graph) for n in unit.after})[0]


def largest_unit_bytes(graph: fx.Graph) -> int:
    """The bytes of the largest set of weights that one gather (or several, for one computation) brings."""
    return max((unit.nbytes for unit in units(graph)), default=0)


def peak_bytes(graph: fx.Graph) -> int:
    """The most bytes that are alive at one time besides the arguments, as far as they are `materialized`."""
    return most_alive(list(graph.nodes), materialized(graph))[0]


def materialized(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose values lie in memory when the graph is compiled: all but those that work element by element for
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
    size = {place: value.numel() * value.element_size() for n in order for place, value in _made(n, memory)}
    begin: dict[Hashable, int] = {}
    end: dict[Hashable, int] = {}
    for i, node in enumerate(order):
        for place, _ in _made(node, memory):
            if (counted is None or node in counted) and node.op == "call_function":
                begin[place] = i
            end[place] = i
        for read in node.all_input_nodes:
            end[memory[read]] = i
    change = [0] * (len(order) + 1)
    for place, i in begin.items():
        change[i] += size[place]
        change[end[place] + 1] -= size[place]
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

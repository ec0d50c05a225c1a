"""Order of a graph: dependencies of its nodes, topological sorting, and insertion of calls."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from torch import fx

from fmegatron.step.graph.memory import memory_of, memory_written
from fmegatron.step.graph.nodes import is_light, is_start, is_wait, start_of

__all__ = ["add_call", "ancestors", "behind", "layers", "sort_by", "topological"]


def behind(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For every node the nodes that must come before it: its arguments, and what writes or reads memory before it that
    one of them writes."""
    found, writer, touched, memory = {}, {}, {}, memory_of(graph.nodes)
    for node in graph.nodes:
        writes = memory_written(node, memory)
        before, read = dict.fromkeys(node.all_input_nodes), list(node.all_input_nodes)
        if is_wait(node):  # until then the collective reads its arguments
            read += start_of(node).all_input_nodes
        for buffer in {memory[node], *(memory[n] for n in read), *writes}:
            if buffer in writer:
                before[writer[buffer]] = None
            if buffer in writes:
                before |= dict.fromkeys(touched.get(buffer, ()))
                writer[buffer], touched[buffer] = node, []
            else:
                touched.setdefault(buffer, []).append(node)
        before.pop(node, None)
        found[node] = list(before)
    return found


def layers(graph: fx.Graph) -> dict[fx.Node, fx.Node | None]:
    """For every node the last real computation that it depends on (itself, if it is one): reductions of the gradients
    of one layer share it."""
    found: dict[fx.Node, fx.Node | None] = {}
    position = {n: i for i, n in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op == "call_function" and not is_light(node) and not is_start(node):
            found[node] = node
        else:
            before = [found[x] for x in node.all_input_nodes if found[x] is not None]
            found[node] = max(before, key=position.__getitem__, default=None)
    return found


def ancestors(nodes: Iterable[fx.Node], directly: dict[fx.Node, list[fx.Node]]) -> set[fx.Node]:
    """All nodes that must come before one of these; directly: as `behind` gives them."""
    found, todo = set(), [before for node in nodes for before in directly[node]]
    while todo:
        n = todo.pop()
        if n not in found:
            found.add(n)
            todo += directly[n]
    return found


def add_call(graph: fx.Graph, target, args, like: fx.Node) -> fx.Node:
    """A node with the fake value that its arguments imply, and the line of another one."""
    node = graph.call_function(target, args)
    with like.meta["val"].fake_mode:
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
    node.meta["at"] = like.meta.get("at", "?")
    return node


def topological(graph: fx.Graph) -> list[fx.Node]:
    """Nodes after what must come before them, else in the order they have; what needs a merged collective moves behind
    it."""
    nodes, before = list(graph.nodes), behind(graph)
    position, missing = {n: i for i, n in enumerate(nodes)}, {n: len(before[n]) for n in nodes}
    after: dict[fx.Node, list[fx.Node]] = {n: [] for n in nodes}
    for node, earlier in before.items():
        for n in earlier:
            after[n].append(node)
    ready = [position[n] for n in nodes if not missing[n]]
    heapq.heapify(ready)
    order = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        order.append(node)
        for following in after[node]:
            missing[following] -= 1
            if not missing[following]:
                heapq.heappush(ready, position[following])
    return order


def sort_by(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Put the nodes of a graph into this order (all of them, each after its arguments)."""
    for node, following in zip(reversed(nodes[:-1]), reversed(nodes[1:]), strict=True):
        following.prepend(node)
    graph.lint()

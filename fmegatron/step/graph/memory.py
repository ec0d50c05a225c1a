"""Memory of a graph: which values share it, and how many bytes are alive at one time in a given order."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping

import torch
from torch import fx

from fmegatron.step.graph.nodes import declared_in, is_light, is_start, is_view, is_wait, start_of, written_by
from fmegatron.step.torch_private import opname

__all__ = ["Memory", "materialized", "memory_of", "memory_written", "peak_bytes"]

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


def peak_bytes(graph: fx.Graph, beside: Callable[[fx.Node], int] | None = None) -> int:
    """The most bytes that are alive at one time besides the arguments, as far as they are `materialized`.

    beside: as `Memory` takes it.
    """
    return max(Memory(graph, materialized(graph), beside).alive(graph.nodes), default=0)


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


class Memory:
    """What the nodes of a graph have in memory, for any order of them.

    What a collective is given is in memory until it is waited for.

    counted: the nodes whose values count; None: all that compute. beside: node -> bytes that it takes beside its
    arguments and what it makes: a collective until it is waited for, others while they run. None: none.
    """

    def __init__(
        self,
        graph: fx.Graph,
        counted: Collection[fx.Node] | None = None,
        beside: Callable[[fx.Node], int] | None = None,
    ):
        memory = memory_of(graph.nodes)
        self.made: dict[fx.Node, list[tuple[Hashable, int]]] = {}  # node -> (memory, bytes) that it makes
        self.read: dict[fx.Node, set[Hashable]] = {}  # node -> the memory that must be there until it has run
        self.beside: dict[fx.Node, int] = {}
        self.nbytes: dict[Hashable, int] = {}
        for node in graph.nodes:
            if node.op == "call_function" and (counted is None or node in counted):
                self.made[node] = [(buffer, _nbytes(value)) for buffer, value in _made(node, memory)]
                self.nbytes |= self.made[node]
            self.read[node] = {memory[x] for x in node.all_input_nodes}
            if is_wait(node):
                self.read[node] |= {memory[x] for x in start_of(node).all_input_nodes}
            if beside is not None and (nbytes := beside(node)):
                self.beside[node] = nbytes

    def alive(self, order: Iterable[fx.Node]) -> list[int]:
        """The bytes that are alive when each of the nodes runs, if they run in this order."""
        nodes = list(order)
        begin: dict[Hashable, int] = {}
        end: dict[Hashable, int] = {}
        landed: dict[fx.Node, int] = {}
        for i, node in enumerate(nodes):
            for buffer, _ in self.made.get(node, ()):
                begin[buffer] = end[buffer] = i
            end |= dict.fromkeys(self.read[node], i)
            if is_wait(node):
                landed[start_of(node)] = i
        change = [0] * (len(nodes) + 1)
        for i, node in enumerate(nodes):
            if node in self.beside:
                change[i] += self.beside[node]
                change[landed.get(node, i) + 1] -= self.beside[node]
        for buffer, i in begin.items():
            change[i] += self.nbytes[buffer]
            change[end[buffer] + 1] -= self.nbytes[buffer]
        return list(itertools.accumulate(change))[:-1]

    def in_flight(self, start: fx.Node) -> int:
        """Bytes that a collective holds until it is waited for: what it is given, what it brings, what is beside."""
        made = sum(nbytes for _, nbytes in self.made.get(start, ()))
        return made + sum(self.nbytes.get(buffer, 0) for buffer in self.read[start]) + self.beside.get(start, 0)


def _nbytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()


def _made(node: fx.Node, memory: dict[fx.Node, Hashable]) -> list[tuple[Hashable, torch.Tensor]]:
    """(memory, value) of what a node makes anew: nothing for a view, each output on its own where it has several."""
    value = node.meta.get("val")
    if memory[node] is not node or value is None:
        return []
    if isinstance(value, torch.Tensor):
        return [(node, value)]
    return [((node, i), v) for i, v in enumerate(value) if isinstance(v, torch.Tensor)]

"""Roles of the nodes of a lowered step: collectives that start, their waits, gathers of weights, computation.

A gather of *weights* depends on nothing but the step's arguments, so it may start at any time; `units` groups the
gathers of a graph by the node that first computes with what they bring.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from fmegatron.collectives.torch_private import schema_of
from fmegatron.step.torch_private import Op, opname
from fmegatron.step.trace import written_by

__all__ = [
    *("Unit", "behind", "from_arguments", "is_layer", "is_light", "is_start", "is_view", "is_wait", "kind", "layers"),
    *("memory_of", "units", "waits_of"),
]

_WAIT = "wait_tensor"
_MAY_BE_VIEWS = frozenset({"_unsafe_view", "reshape", "contiguous"})
_LIGHT = frozenset({"cat", "stack", "clone", "_to_copy", "_unsafe_view", "barrier", "full", "arange", "scalar_tensor"})
_LIGHT |= {"pack", "unpack", "amax"}  # several dtypes in one buffer; scales of what travels in 8 bits


def _c10d_name(node: fx.Node) -> str | None:
    target = node.target
    return opname(target) if getattr(target, "namespace", "") == "_c10d_functional" else None


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective."""
    return _c10d_name(node) == _WAIT


def is_start(node: fx.Node) -> bool:
    """Whether a node starts a collective."""
    return _c10d_name(node) not in (None, _WAIT)


def is_layer(node: fx.Node) -> bool:
    """Whether a node is a compiled layer (or another graph that is compiled on its own)."""
    return getattr(node.target, "entry", None) is not None


def kind(node: fx.Node) -> str:
    """ "gather", "scatter" (reduce-scatter), "reduce" (all-reduce) or "exchange", of a node that starts one."""
    name = node.meta.get("symbolic") or _c10d_name(node)  # an exact reduce-scatter is an exchange with sums behind it
    for word, prefix in (("gather", "all_gather"), ("scatter", "reduce_scatter"), ("reduce", "all_reduce")):
        if name.startswith(prefix):
            return word
    return "exchange"


def waits_of(start: fx.Node) -> list[fx.Node]:
    """The waits for a collective; a coalesced one has one for each of its tensors."""
    found = []
    for user in start.users:
        found += [user] if is_wait(user) else [w for w in user.users if is_wait(w)]
    return found


def is_light(node: fx.Node) -> bool:
    """Whether a node only lays out, casts or makes values element by element: no work that could hide communication."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, Op) or schema_of(node.target).is_mutable or is_start(node):
        return False
    if is_layer(node):
        return False
    name = opname(node.target)
    return torch.Tag.pointwise in node.target.tags or name in _LIGHT or is_wait(node) or is_view(node)


def memory_of(nodes: Iterable[fx.Node]) -> dict[fx.Node, Hashable]:
    """For every node whose memory its value lies in: that of itself, or of what it is a view of or waits for.

    Read from the operators, because nodes that were copied into a graph share fake tensors. The i-th output of a node
    with several is (node, i).
    """
    known = {}
    for node in nodes:
        known[node] = _memory(node, known)
    return known


def _memory(node: fx.Node, known: Mapping[fx.Node, Hashable]) -> Hashable:
    while node.op == "call_function" and node.all_input_nodes:
        source = node.all_input_nodes[0]
        if node.target is operator.getitem and not is_view(source):
            return source, node.args[1]
        if not (node.target is operator.getitem or is_view(node) or is_wait(node)):
            break
        node = source
        if node in known:
            return known[node]
    return node


def is_view(node: fx.Node) -> bool:
    """Whether a node's value lies in the memory of its first argument."""
    return isinstance(node.target, Op) and _returns_a_view(node.target)


@functools.cache
def _returns_a_view(op: Op) -> bool:
    return opname(op) in _MAY_BE_VIEWS or any(r.alias_info is not None for r in schema_of(op).returns)


def behind(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For every node the nodes that must come before it: its arguments, and whoever writes or reads memory before it
    that one of them writes."""
    found, writer, touched, memory = {}, {}, {}, memory_of(graph.nodes)
    for node in graph.nodes:
        writes = _written(node, memory)
        before, read = dict.fromkeys(node.all_input_nodes), list(node.all_input_nodes)
        if is_wait(node):  # until then the collective reads its arguments
            start = node.args[0] if is_start(node.args[0]) else node.args[0].args[0]
            read += start.all_input_nodes if isinstance(start, fx.Node) else []
        for place in {memory[node], *(memory[n] for n in read), *writes}:
            if place in writer:
                before[writer[place]] = None
            if place in writes:
                before |= dict.fromkeys(touched.get(place, ()))
                writer[place], touched[place] = node, []
            else:
                touched.setdefault(place, []).append(node)
        before.pop(node, None)
        found[node] = list(before)
    return found


def _written(node: fx.Node, memory: dict[fx.Node, Hashable]) -> set[Hashable]:
    """Memory that a node writes into. (No node draws from a generator: `step.unkeyed`.)"""
    return {memory[n] for n in written_by(node)}


def layers(graph: fx.Graph) -> dict[fx.Node, fx.Node | None]:
    """For every node the last real computation that it depends on (itself, if it is one): reductions of the gradients
    of one layer share it."""
    found: dict[fx.Node, fx.Node | None] = {}
    place = {n: i for i, n in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op == "call_function" and not is_light(node) and not is_start(node):
            found[node] = node
        else:
            before = [found[x] for x in node.all_input_nodes if found[x] is not None]
            found[node] = max(before, key=place.get, default=None)
    return found


def from_arguments(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that depend on the step's arguments alone, by layout and gathers: they could run at any time."""
    memory, found = memory_of(graph.nodes), set()
    fixed = {place for n in graph.nodes for place in _written(n, memory)}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            found.add(node)
        elif (
            (is_light(node) or (is_start(node) and (kind(node) == "gather" or node.args[1] == "max")))
            and all(x in found for x in node.all_input_nodes)
            and memory[node] not in fixed
        ):
            found.add(node)
    return found


@dataclass(frozen=True)
class Unit:
    """Weights that are gathered for one computation: one layer, the embedding, the head.

    anchor: the first node that computes with them. stages: gathers that may start together, in the order in which they
    depend on each other (a gather over two axes, one after the other, has two stages). after: everything between the
    gathers and the computation (waits and layout).
    """

    anchor: fx.Node
    stages: tuple[tuple[fx.Node, ...], ...]
    after: frozenset[fx.Node]

    @property
    def gathers(self) -> list[fx.Node]:
        """All gathers of the unit."""
        return [g for stage in self.stages for g in stage]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that the last stage brings."""
        return sum(sum(map(_nbytes, _values(g))) for g in self.stages[-1])


def _values(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta["val"]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _nbytes(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()


def units(graph: fx.Graph) -> list[Unit]:
    """The gathers of weights of a graph, by the computation that first needs them, in its order."""
    movable, place = from_arguments(graph), {n: i for i, n in enumerate(graph.nodes)}
    gathered: dict[fx.Node, int] = {}  # node behind a gather -> how many gathers lie on the way to it
    for node in graph.nodes:
        if node in movable:
            depth = max((gathered.get(x, 0) for x in node.all_input_nodes), default=0)
            starts = is_start(node) and kind(node) == "gather"  # not the maximum that scales are made of
            if starts or depth:
                gathered[node] = depth + starts
    by_anchor: dict[fx.Node, list[fx.Node]] = {}
    for gather in filter(is_start, gathered):
        # A coalesced gather serves several computations: the unit is that of the last, the others come before it.
        parts = [u for u in gather.users if u.target is operator.getitem] or [gather]
        readers = [[u for n in _behind(part, gathered) for u in n.users if u not in gathered] for part in parts]
        first = [min(found, key=place.get) for found in readers if found]
        if first:
            by_anchor.setdefault(max(first, key=place.get), []).append(gather)
    found = []
    for anchor in sorted(by_anchor, key=place.get):
        gathers = by_anchor[anchor]
        depths = sorted({gathered[g] for g in gathers})
        stages = tuple(tuple(g for g in gathers if gathered[g] == d) for d in depths)
        after = frozenset(n for g in gathers for n in _behind(g, gathered))
        found.append(Unit(anchor, stages, after))
    return found


def _behind(gather: fx.Node, within: Iterable[fx.Node]) -> set[fx.Node]:
    """The gather and what is made of it alone."""
    found, todo = set(), [gather]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [u for u in node.users if u in within]
    return found

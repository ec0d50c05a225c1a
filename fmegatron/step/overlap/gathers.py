"""Gathers of weights: units of gathers by the layer that needs them, reuse at the turn to the backward, own groups.

A gather of *weights* depends on nothing but the step's arguments, so it may start at any time; `units` groups the
gathers of a graph by the node that first computes with what they bring.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from fmegatron.collectives import World
from fmegatron.step.graph.memory import memory_of, memory_written
from fmegatron.step.graph.nodes import is_light, is_start, kind
from fmegatron.step.torch_private import opname

__all__ = ["Unit", "keep_last", "separate_groups", "units"]

_OTHER_NAMES = ("detach", "alias")


def _from_arguments(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that depend on the step's arguments alone, by layout and gathers: they could run at any time."""
    memory, found = memory_of(graph.nodes), set()
    fixed = {buffer for n in graph.nodes for buffer in memory_written(n, memory)}
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
    movable, position = _from_arguments(graph), {n: i for i, n in enumerate(graph.nodes)}
    gathered: dict[fx.Node, int] = {}  # node behind a gather -> how many gathers are on the way to it
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
        first = [min(found, key=position.__getitem__) for found in readers if found]
        if first:
            by_anchor.setdefault(max(first, key=position.__getitem__), []).append(gather)
    found = []
    for anchor in sorted(by_anchor, key=position.__getitem__):
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


def keep_last(graph: fx.Graph) -> None:
    """Let a layer that is gathered again, with at most one other gather (the head's) in between, keep its weights."""
    found, same = units(graph), _same(graph)
    asked = [frozenset(same[g] for g in unit.gathers) for unit in found]
    for j in range(1, len(found)):
        i = next((i for i in (j - 1, j - 2) if i >= 0 and asked[i] == asked[j]), None)
        if i is not None:
            _replace(graph, found[i], found[j], same)
    graph.lint()


def _replace(graph: fx.Graph, first: Unit, second: Unit, same: dict[fx.Node, fx.Node]) -> None:
    """What the first unit gathered and laid out serves the second, too."""
    kept = {same[n]: n for n in graph.nodes if n in first.after}
    for node in reversed([n for n in graph.nodes if n in second.after and same[n] in kept]):
        node.replace_all_uses_with(kept[same[node]])
        graph.erase_node(node)


def _same(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For every node the first one that computes the same from the step's arguments; a node that does more: itself."""
    movable, first, found = _from_arguments(graph), {}, {}
    for node in graph.nodes:
        found[node] = node
        if node not in movable or node.op != "call_function":
            continue
        if opname(node.target) in _OTHER_NAMES:
            found[node] = found[node.args[0]]
            continue
        arguments = fx.map_arg((node.args, dict(node.kwargs)), found.get)
        found[node] = first.setdefault((node.target, repr(arguments)), node)
    return found


def separate_groups(graph: fx.Graph, world: World) -> None:
    """Every gather of a lowered graph goes over a second group of the same ranks, "fmegatron:fsdp#gather".

    All ranks must call this for the same graph: groups are made here.
    """
    for node in graph.nodes:
        if is_start(node) and kind(node) == "gather":
            *rest, group = node.args
            node.args = (*rest, world.group_name(world.axes_of(group), "gather"))

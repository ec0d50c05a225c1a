"""The turn from forward to backward: weights of the last layer are kept instead of gathered twice in a row."""

from __future__ import annotations

from torch import fx

from fmegatron.step.overlap.roles import Unit, from_arguments, units
from fmegatron.step.torch_private import opname

__all__ = ["keep_last"]

_OTHER_NAMES = ("detach", "alias")


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
    movable, first, found = from_arguments(graph), {}, {}
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

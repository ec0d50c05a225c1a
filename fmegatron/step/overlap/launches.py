"""The order of a graph as one line of text: starts and waits of collectives, and the layers between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from fmegatron.step.overlap.roles import is_layer, is_start, is_wait, kind

__all__ = ["launched", "launches", "named"]

_LETTERS = (("gather", "G"), ("scatter", "R"), ("reduce", "A"), ("exchange", "X"))


def named(nodes: Iterable[fx.Node]) -> dict[fx.Node, str]:
    """Names by order: G0, G1 gathers, R reduce-scatters, A all-reduces, X exchanges; F and B a layer's forward and
    backward, C another compiled graph; "w:G0" the wait for G0."""
    names: dict[fx.Node, str] = {}
    counts: dict[str, int] = {}
    wholes: dict[str, str] = {}
    for node in nodes:
        if node.op != "call_function":
            continue
        if is_wait(node):
            source = node.args[0]
            names[node] = "w:" + (names.get(source) or names.get(source.args[0], "?"))
            continue
        if is_start(node):
            letter = letter_of(node)
        elif is_layer(node):
            called = node.target.entry.op.name()
            letter = "F" if "_fwd_" in called else "B" if "_bwd_" in called else "C"
        else:
            continue
        whole = node.meta.get("part_of", node.name)  # a coalesced collective may run in parts (`step.gloo_all_to_all`)
        if whole not in wholes:
            wholes[whole] = f"{letter}{counts.get(letter, 0)}"
            counts[letter] = counts.get(letter, 0) + 1
        names[node] = wholes[whole]
    return names


def letter_of(start: fx.Node) -> str:
    """G, R, A or X for a node that starts a collective."""
    return dict(_LETTERS)[kind(start)]


def launched(graph: fx.Graph) -> list[str]:
    """The names of all collectives that a lowered graph starts, one after the other, those in its layers too."""

    def starts(graph: fx.Graph) -> Iterator[fx.Node]:
        for node in graph.nodes:
            if is_layer(node):
                yield from starts(node.target.entry.graph_module.graph)
            elif is_start(node):
                yield node

    counts: dict[str, int] = {}
    found, last = [], None
    for node in starts(graph):
        letter, whole = letter_of(node), node.meta.get("part_of")
        if whole is None or whole != last:
            counts[letter] = counts.get(letter, 0) + 1
        last = whole
        found.append(f"{letter}{counts[letter] - 1}")
    return found


def launches(graph: fx.Graph) -> str:
    """The order of a lowered graph: "G0 w:G0 G1 F0 w:G1 F1 ..."; repeated waits of a coalesced collective count once.

    Read `step.graph("overlap")` of a jit with it.
    """
    return " ".join(dict.fromkeys(named(graph.nodes).values()))

"""Inlining: a traced graph with each opaque layer replaced by the nodes of its own graph."""

from __future__ import annotations

import functools
import operator
from typing import Any

from torch import fx

from fmegatron.step.graph.nodes import entry_of, user_line

__all__ = ["inline_layers"]


def inline_layers(graph: fx.Graph) -> fx.Graph:
    """A copy of a traced graph with the nodes of its own symbolic graph in place of each opaque compiled layer.

    Equal layers are one entry, whose nodes have the line that called it when it was traced, perhaps in another program:
    they get the line of its first call in this one.
    """
    flat = fx.Graph()
    out = _copy_into(flat, graph, None, {})
    flat.output(out)
    return flat


def _copy_into(flat, graph, arguments, lines):
    """Copy nodes; `arguments` stand for the placeholders (None: copy these too). -> what the graph returns.

    lines: the user's lines that are replaced, and by which.
    """
    copied: dict[fx.Node, Any] = {}
    arguments, inner = iter(arguments) if arguments is not None else None, _lines_of_layers(graph, lines)

    def lookup(value):
        return fx.map_arg(value, lambda n: copied[n])

    for node in graph.nodes:
        entry = entry_of(node)
        if node.op == "output":
            return lookup(node.args[0])
        if node.op == "placeholder" and arguments is not None:
            copied[node] = next(arguments)
        elif node.op == "get_attr":
            constant = functools.reduce(getattr, node.target.split("."), graph.owning_module)
            copied[node] = flat.call_function(_constant(constant))
        elif entry is not None:
            copied[node] = tuple(_copy_into(flat, entry.graph_module.graph, lookup(node.args[0]), inner))
        elif node.target is operator.getitem and isinstance(copied[node.args[0]], tuple):
            copied[node] = copied[node.args[0]][node.args[1]]
        else:
            copied[node] = flat.node_copy(node, lambda n: copied[n])
            copied[node].meta["at"] = _relined(node, lines)
    raise AssertionError("graph without an output node")


def _lines_of_layers(graph, lines) -> dict[str, str]:
    """`lines`, and for each line that called a layer of this graph when it was traced that of its first call here. Of
    backward calls the line is that of what their gradient came from, and says nothing."""
    found = dict(lines)
    for node in graph.nodes:
        entry = entry_of(node)
        if entry is not None and "(backward)" not in (at := _relined(node, lines)):
            found.setdefault(user_line(entry.called_at), user_line(at))
    return found


def _relined(node, lines) -> str:
    """The line of a node, with the user's part replaced."""
    at = node.meta.get("at", "?")
    user = user_line(at)
    return lines.get(user, user) + at.removeprefix(user)


def _constant(value):
    def constant():
        return value

    return constant

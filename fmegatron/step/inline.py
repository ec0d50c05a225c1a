"""Inlining: a traced graph with each opaque layer replaced by the nodes of its own graph."""

from __future__ import annotations

import functools
import operator
from typing import Any

from torch import fx

__all__ = ["inline_layers"]


def inline_layers(graph: fx.Graph) -> fx.Graph:
    """A copy of a traced graph with the nodes of its own symbolic graph in place of each opaque compiled layer.

    Equal layers are one entry, whose nodes have the line that called it first: they get the line that calls it here.
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
    arguments = iter(arguments) if arguments is not None else None

    def lookup(value):
        return fx.map_arg(value, lambda n: copied[n])

    for node in graph.nodes:
        entry = getattr(node.target, "entry", None) if node.op == "call_function" else None
        if node.op == "output":
            return lookup(node.args[0])
        if node.op == "placeholder" and arguments is not None:
            copied[node] = next(arguments)
        elif node.op == "get_attr":
            constant = functools.reduce(getattr, node.target.split("."), graph.owning_module)
            copied[node] = flat.call_function(_constant(constant))
        elif entry is not None:
            here = {_user_line(entry.called_at): _user_line(_relined(node, lines))}
            copied[node] = tuple(_copy_into(flat, entry.graph_module.graph, lookup(node.args[0]), here))
        elif node.target is operator.getitem and isinstance(copied[node.args[0]], tuple):
            copied[node] = copied[node.args[0]][node.args[1]]
        else:
            copied[node] = flat.node_copy(node, lambda n: copied[n])
            copied[node].meta["at"] = _relined(node, lines)
    raise AssertionError("graph without an output node")


def _relined(node, lines) -> str:
    at = node.meta.get("at", "?")
    user = _user_line(at)
    return lines.get(user, user) + at.removeprefix(user)


def _user_line(at: str) -> str:
    """The first of "exp.py:21 (in fmegatron/nn/norm.py:19) (backward)"."""
    return at.partition(" (")[0]


def _constant(value):
    def constant():
        return value

    return constant

"""Copies of parameters from host memory, in a trace: what is read of a part of an array is copied as that part.

A step that brings a stack of layers to the device (`step.offload.brought`) and takes its layers one by one would have
the whole of it there. Here the layers are taken where the stack rests, and each is copied for itself; `step.regather`
then puts the copies where they are used.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator

from torch import fx

from fmegatron.step.graph.nodes import is_light, is_view, meta_of, node_of
from fmegatron.step.lower import copy_module
from fmegatron.step.torch_private import Op, opname

__all__ = ["copied_in_parts", "is_copied"]


def is_copied(node: fx.Node) -> bool:
    """Whether a node copies an array to the device that is an argument, or is laid out of one, in host memory, when it
    needs nothing that is computed: a parameter."""
    of_ours = isinstance(node.target, Op) and node.target.namespace == "fmegatron_step"
    if not of_ours or opname(node.target) != "from_host":
        return False
    return _argument(node_of(node.args[0])).op == "placeholder" and _needs_nothing(node_of(node.args[1]))


def _argument(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and (is_view(node) or node.target is operator.getitem):
        node = node_of(node.args[0])
    return node


def _needs_nothing(node: fx.Node) -> bool:
    """Whether a value is an argument, or laid out or made element by element of some."""
    seen, todo = set[fx.Node](), [node]
    while todo:
        one = todo.pop()
        if one.op == "call_function" and one not in seen:
            if not is_light(one):
                return False
            todo += one.all_input_nodes
        seen.add(one)
    return True


def copied_in_parts(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a traced graph in which parts of parameters are taken in host memory, and copied from there; the same
    module where no part is taken."""
    if not any(is_copied(node) and any(_parts(node)) for node in graph_module.graph.nodes):
        return graph_module
    module = copy_module(graph_module)
    graph = module.graph
    for copy in filter(is_copied, list(graph.nodes)):
        taken = list(_parts(copy))
        there = {name: node_of(copy.args[0]) for name in _names(copy)}
        for node in taken:  # in the order of the graph: what a part is taken of comes before it
            with graph.inserting_before(node):
                part = graph.node_copy(node, functools.partial(_or_itself, there))
                there[node] = part
                if node.target is not operator.getitem and not _is_tensor(node):
                    continue  # the parts are its items
                brought = graph.create_node("call_function", copy.target, (part, *copy.args[1:]))
                brought.meta = {**copy.meta, "val": node.meta["val"]}
            node.replace_all_uses_with(brought)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    return module


def _or_itself(known: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    return known.get(node, node)


def _is_tensor(node: fx.Node) -> bool:
    return not isinstance(node.meta["val"], (list, tuple))


def _names(copy: fx.Node) -> list[fx.Node]:
    """The copy, and what is only another name of it."""
    found, todo, lies = [], [copy], meta_of(copy.meta["val"])
    while todo:
        node = todo.pop()
        found.append(node)
        todo += [
            user for user in node.users if is_view(user) and _is_tensor(user) and meta_of(user.meta["val"]) == lies
        ]
    return found


def _parts(copy: fx.Node) -> Iterator[fx.Node]:
    """The views that take less than all of a copy, and their items."""
    whole = copy.meta["val"].numel()
    for name in _names(copy):
        for user in name.users:
            if not is_view(user) or len(user.all_input_nodes) != 1:
                continue
            values = user.meta["val"]
            values = values if isinstance(values, (list, tuple)) else [values]
            if max((x.numel() for x in values), default=whole) < whole:
                yield user
                if not _is_tensor(user):
                    yield from user.users

"""Alignment: which nodes of a graph over many ranks correspond to which nodes of the graph over one rank."""

from __future__ import annotations

import difflib
import operator

from torch import fx

from fmegatron.collectives import kinds, table
from fmegatron.step.graph import nodes

__all__ = ["LOOKS", "align", "call_of", "is_shard_end", "name_of", "seen_through", "sources_of", "token_of"]


# Ops that only look at the same elements in another shape: they lose nothing, but their result may be a kind of shard
# that `relate` does not know.
LOOKS = frozenset(
    ("clone", "detach", "alias", "view", "_unsafe_view", "unsqueeze", "squeeze", "expand", "t", "transpose", "permute")
)
_KEEPS = LOOKS | {"_to_copy", "index_select"}


def _is_item(node):
    """Whether a node is one of the results of a collective, which is a list."""
    return node.target is operator.getitem and kinds.collective_of(node.args[0].target) is not None


def sources_of(node):
    """The inputs of a node; of a result of a collective just the tensor that became it."""
    return [node.args[0].args[0][node.args[1]]] if _is_item(node) else node.all_input_nodes


def call_of(node):
    """The node of the operation: for a result of a collective, that collective."""
    return node.args[0] if _is_item(node) else node


def name_of(node):
    """The op of a node; of an argument its path."""
    node = call_of(node)
    name = getattr(node.target, "__name__", str(node.target))
    return name.split(".")[0] if node.op == "call_function" else node.meta.get("path", node.name)


def token_of(node):
    """What a node and its twin have in common: the line and the op."""
    return node.meta.get("at"), str(node.target)


def seen_through(node: fx.Node) -> fx.Node:
    """The node that this one only looks at in another shape."""
    while node.op == "call_function" and name_of(node) in LOOKS:
        node = nodes.node_of(node.args[0])
    return node


def is_shard_end(node):
    """`shard` leaves three nodes: a view, index_select by the rank's index, squeeze. Whether this is the last one."""
    return name_of(node) == "squeeze" and name_of(node.args[0]) == "index_select" and _is_index(node.args[0].args[2])


def _of_shard(node):
    """Whether a node is one of the three of a `shard`."""
    ends = [node, *node.users]
    ends += [end for user in node.users for end in user.users]
    return any(is_shard_end(end) and node in (end, end.args[0], end.args[0].args[0]) for end in ends)


def _is_index(node):
    while kinds.collective_of(node.target) is None and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return kinds.collective_of(node.target) is table.AXIS_INDEX


def align(many: fx.Graph, one: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node of the graph over many ranks, the nodes of the graph of one rank that may be its twin, best first.

    The graphs differ: over axes of size 1 collectives leave no node, and torch elides ops on dims of size 1. Nodes are
    paired in order by (line, op); what is on the same line with the same op is the second guess. A collective, and an
    op that only one graph has and that keeps values, has the twin of its input.
    """
    calls = [n for n in many.nodes if n.op == "call_function" and not (kinds.collective_of(n.target) or _is_item(n))]
    others = [n for n in one.nodes if n.op == "call_function"]
    first_guess = {}
    matcher = difflib.SequenceMatcher(None, [token_of(n) for n in calls], [token_of(n) for n in others], autojunk=False)
    for block in matcher.get_matching_blocks():
        first_guess |= {calls[block.a + i]: others[block.b + i] for i in range(block.size)}
    same_line: dict[tuple, list[fx.Node]] = {}
    for node in others:
        same_line.setdefault(token_of(node), []).append(node)
    placeholders = (g.find_nodes(op="placeholder") for g in (many, one))
    twins = {a: [b] for a, b in zip(*placeholders, strict=True)}
    for node in many.nodes:
        if node.op != "call_function":
            continue
        if _is_item(node):  # its twin is that of the tensor that went in
            twins[node] = (
                []
                if kinds.collective_of(node.args[0].target) is table.AXIS_INDEX
                else twins.get(sources_of(node)[0], [])
            )
            continue
        if kinds.collective_of(node.target):  # a list, and no value to compare
            continue
        guesses = [first_guess[node]] if node in first_guess else []
        guesses += [n for n in same_line.get(token_of(node), ()) if n not in guesses]
        if _of_shard(node):  # one rank has no such node, and perhaps another view on this line
            own = twins.get(node.all_input_nodes[0], [])
            guesses = [*own, *(n for n in guesses if n not in own)]
        if not guesses and name_of(node) in _KEEPS:
            guesses = twins.get(node.all_input_nodes[0], [])
        twins[node] = guesses
    return twins

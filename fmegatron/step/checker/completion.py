"""Whether later ops may complete a rank's own part, or what was reordered in it, by reachability in the graph.

A sum over the ranks of what each made of its own part alone, in the same way, is that of one rank only where it is a
sum over the parts. What is not (the largest k, a part turned round that meets one that is not) needs a value of another
rank, or the rank's index. Where nothing that is made of the same shards is sent, gathered or exchanged, and nothing of
it meets the index, before sums over the ranks are made of it, nothing can complete it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fmegatron.collectives import kinds, table
from fmegatron.step.checker.context import Scope, op_name, suspected
from fmegatron.step.checker.values import Suspect, Unknown, Value
from fmegatron.step.graph.nodes import items_of

__all__ = [
    "comes_from_another",
    "in_any_order",
    "is_added_up",
    "is_sent_on",
    "may_be_completed",
    "met_in_another_order",
    "pieces_paired",
]

Node = torch.fx.Node
_SUMS = (table.PSUM, table.REDUCE_SCATTER)
_PRODUCTS = frozenset("mul mm bmm addmm baddbmm".split())
_FROM_OTHERS = (table.PPERMUTE, table.ALL_TO_ALL, table.ALL_TO_ALL_ROWS, table.DECLARE)
# Ops that treat what stands at each place of a dim alike, beside the pointwise ones.
_EACH = frozenset(
    "mm addmm bmm baddbmm sum mean _softmax _log_softmax amax amin unsqueeze squeeze permute transpose t expand clone"
    " detach _to_copy alias native_layer_norm linalg_vector_norm getitem".split()
)
_ADDED_UP = frozenset(
    "sum mean neg clone alias view _unsafe_view reshape squeeze unsqueeze permute transpose t".split()
)
_WHOLE = frozenset("sum mean amax amin prod linalg_vector_norm".split())


def in_any_order(node: Node) -> bool:
    """Whether all that is made of what a node gives is a reduction over all of its elements, each treated alike before:
    where they stand does not matter."""
    todo, seen, reduced = [node], {node}, False
    while todo:
        for user in todo.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if op_name(user) in _WHOLE:
                at = {"linalg_vector_norm": 2, "prod": None}.get(op_name(user), 1)  # of `prod` with a dim, that dim
                given = user.args[1:2] if at is None else user.args[at : at + 1]
                dims = given[0] if given and given[0] is not None else ()
                rank = user.all_input_nodes[0].meta["val"].dim()
                if dims != () and len(dims if isinstance(dims, (list, tuple)) else (dims,)) not in (0, rank):
                    return False
                reduced = True
            elif user.target is operator.getitem or (
                torch.Tag.pointwise in getattr(user.target, "tags", ()) and len(user.all_input_nodes) == 1
            ):
                todo.append(user)
            else:
                return False
    return reduced


def is_added_up(node: Node) -> bool:
    """Whether all that is made of what a node gives is a sum of all of its elements, times numbers, each treated alike
    before."""
    todo, seen = [node], {node}
    while todo:
        one = todo.pop()
        if isinstance(one.meta.get("val"), torch.Tensor) and not one.meta["val"].dim():
            continue
        for user in one.users:
            times = op_name(user) in ("mul", "div") and len(user.all_input_nodes) == 1
            psum = kinds.collective_of(user.target) is table.PSUM or user.target is operator.getitem
            if not (times or psum or op_name(user) in _ADDED_UP):
                return False
            if user not in seen:
                seen.add(user)
                todo.append(user)
    return True


def may_be_completed(scope: Scope, node: Node, axis: str) -> bool:
    """Whether anything made of the shards of which a node is made comes from another rank of the axis, or meets a
    rank's index, before it is summed over the ranks. Of the graph of a layer nothing is known."""
    roots = _roots(node, axis) if node.graph is scope.top and not scope.depth else None
    if roots is None:
        return True
    if (roots, axis) not in scope.completed:
        scope.completed[roots, axis] = _sent(scope, _of_index(node.graph, axis), roots, axis)
    return scope.completed[roots, axis]


def is_sent_on(scope: Scope, node: Node, axis: str) -> bool:
    """Whether what a node gives, or what the forward makes of it, goes to another rank of the axis, or meets a rank's
    index, before it is summed over the ranks: an end that a scan carries on. Nothing is known of a layer's graph."""
    if node.graph is not scope.top or scope.depth:
        return True
    return not node.meta.get("backward") and _sent(scope, _of_index(node.graph, axis), [node], axis, forward=True)


def met_in_another_order(scope: Scope, node: Node, values: Sequence[Value], axis: str) -> Suspect | None:
    """Of shards that a rank has turned round in itself, met at a node by others that it has not: a suspect, where
    nothing may complete them."""
    given = [(n, v, v.marks.get(axis)) for n in node.all_input_nodes if isinstance(v := scope.values.get(n), Value)]
    turned = [(n, mark) for n, v, mark in given if isinstance(mark, Unknown)]
    if len(turned) != 1 or not any(v.shards(axis) for v in values):
        return None
    (source, mark), where = turned[0], [scope.reordered[o] for o in turned[0][1].origins if o in scope.reordered]
    if len(mark.origins) != 1 or len(where) != 1 or not _each_place_alike(source, where[0]):
        return None
    return None if may_be_completed(scope, where[0], axis) else suspected(
        where[0], f"{op_name(where[0])} over a sharded dim turns round each rank's part, and {op_name(node)} combines "
        "it with parts that are not", f"all_gather the dim over {axis!r} first, and take a rank's own part behind it"
    )  # fmt: skip


def pieces_paired(scope: Scope, node: Node, axis: str) -> Suspect | None:
    """Of pieces of every shard of one value that a product pairs: on one rank others make pairs."""
    if op_name(node) not in _PRODUCTS:
        return None
    values = [v for n in node.all_input_nodes if isinstance(v := scope.values.get(n), Value)]
    given = [mark.origins for v in values if isinstance(mark := v.marks.get(axis), Unknown)]
    found = {scope.cuts[o] for one in given for o in one if len(one) == 1 and o in scope.cuts}
    if len(found) < 2 or len({cut[:2] for cut in found}) > 1:
        return None
    source, dim, _ = next(iter(found))
    return None if may_be_completed(scope, source, axis) else suspected(
        node, f"pairs pieces of every shard of dim {dim}: of the whole dim others are pairs",
        f"a layout whose shards have those parts (`Layout.cuts`), or all_gather the dim over {axis!r} first",
    )  # fmt: skip


def comes_from_another(node: Node, axis: str) -> bool:
    """Whether a node is made of what another rank of the axis has sent."""
    return _roots(node, axis) is None


def _each_place_alike(node: Node, until: Node) -> bool:
    """Whether a node is made of another, and on the way of nothing that has moved it along a dim."""
    todo, seen = [node], set()
    while todo:
        one = todo.pop()
        if one is until or one in seen or one.op != "call_function":
            continue
        seen.add(one)
        if torch.Tag.pointwise not in getattr(one.target, "tags", ()) and op_name(one) not in _EACH:
            return False
        todo += one.all_input_nodes
    return True


def _roots(node: Node, axis: str) -> frozenset[Node] | None:
    """Where the shards of which a node is made come from, inputs of the graph or what was cut; None: another rank."""
    todo, seen, found = [node], {node}, []
    if _collective_over(node, axis) in _FROM_OTHERS:
        return None
    while todo:
        for one in todo.pop().all_input_nodes:
            if one in seen:
                continue
            seen.add(one)
            how = _collective_over(one, axis)
            if how in _FROM_OTHERS:
                return None
            if one.op == "placeholder" or how in (table.CUT, table.REDUCE_SCATTER):
                found.append(one)
            elif how is None:
                todo.append(one)
    return frozenset(found)


def _collective_over(node: Node, axis: str) -> Any:
    """The collective over the axis that a node is; None where it is none, or only says that it is a term of a sum."""
    collective = kinds.collective_of(node.target) if node.op == "call_function" else None
    if collective is None or axis not in items_of(node.args[1]):
        return None
    terms = collective is table.DECLARE and str(node.args[3]).startswith("terms")
    return None if terms else collective


def _of_index(graph: torch.fx.Graph, axis: str) -> set[Node]:
    """What is made of a rank's index along the axis, and is no shard that was taken by it."""
    todo = [n for n in graph.nodes if _collective_over(n, axis) is table.AXIS_INDEX]
    seen = set(todo)
    while todo:
        new = [n for n in todo.pop().users if n not in seen and _collective_over(n, axis) is None and n.op != "output"]
        seen.update(new)
        todo += new
    return seen


def _sent(scope: Scope, by_index: set[Node], roots: Iterable[Node], axis: str, forward: bool = False) -> bool:
    todo, seen = list(roots), set(roots)
    while todo:
        for user in todo.pop().users:
            if user in seen or user.op == "output" or user not in scope.live:
                continue
            if forward and user.meta.get("backward"):
                continue
            seen.add(user)
            how = _collective_over(user, axis)
            if user in by_index or (how is not None and how not in _SUMS):
                return True
            if how is None:
                todo.append(user)
    return False

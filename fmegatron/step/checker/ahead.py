"""Results that are known before their node is reached, of several ops that mean one thing together (`Scope.ahead`).

Each is stated where the first of these ops is interpreted, as values are dropped after their last use; the ops between
keep what their own rules say, which arrives at an output only where one of them is used besides.
"""

from __future__ import annotations

import math
import operator

import torch

from fmegatron.step.checker.arithmetic import elementwise
from fmegatron.step.checker.context import Scope, op_name
from fmegatron.step.checker.dims import UNIFORM, Atom, size_of
from fmegatron.step.checker.movement import squeezed
from fmegatron.step.checker.reductions import along
from fmegatron.step.checker.values import Value
from fmegatron.step.graph.nodes import int_of, items_of, node_of

__all__ = ["gradient_of_logcumsumexp", "own_of_ranks"]

Node = torch.fx.Node
_CHUNKS = frozenset(("split", "split_with_sizes", "chunk"))
_VIEWS = frozenset(("view", "_unsafe_view", "reshape", "unflatten"))
# What torch makes of |gradient| on the way back through logcumsumexp, once for what is above 0 and once below.
_WAY = ("sub", "flip", "logcumsumexp", "flip", "add", "exp", "sub")


def gradient_of_logcumsumexp(scope: Scope, node: Node, gradient: Value) -> None:
    """node: the `abs` of the gradient with which torch begins; the difference with which it ends is linear in it."""
    logs = [user for user in node.users if op_name(user) == "log"]
    if len(logs) != 1 or len(node.users) != 1 or not node.meta.get("backward"):
        return
    ways = [_way(one) for one in logs[0].users if op_name(one) == "where" and node_of(one.args[1]) is logs[0]]
    if len(ways) != 2 or len(logs[0].users) != 2 or None in ways:
        return
    one, other = [way for way in ways if way is not None]
    signs = {op_name(node_of(way[0].args[0])): node_of(way[0].args[0]) for way in (one, other)}
    alike = all(node_of(a.args[1]) is node_of(b.args[1]) for i in (1, 5) for a, b in [(one[i], other[i])])
    dims = {int_of(way[3].args[1]) for way in (one, other)}
    ends = {"gt": 0, "lt": 1}
    if not alike or len(dims) != 1 or signs.keys() != ends.keys() or one[7] is not other[7]:
        return
    for name, sign in signs.items():
        way = one if node_of(one[0].args[0]) is sign else other
        if sign.args != (node.args[0], 0) or node_of(one[7].args[ends[name]]) is not way[6]:
            return
    values = [scope.values.get(node_of(one[i].args[1])) for i in (1, 5)]
    values = [v for v in values if isinstance(v, Value)]
    if len(values) == 2:
        known = elementwise(scope, node, "product", [gradient, *values])
        scope.ahead[one[7]] = along(scope, node, known, dims.pop(), "logcumsumexp")


def _way(where: Node) -> list[Node] | None:
    """The ops behind a node, each the only user of the one before, where they are those of `_WAY`."""
    way = [where]
    for name in _WAY:
        users = list(way[-1].users)
        if len(users) != 1 or op_name(users[0]) != name or (name != "sub" and node_of(users[0].args[0]) is not way[-1]):
            return None
        way.append(users[0])
    return way


def own_of_ranks(scope: Scope, node: Node, own: Value, dim: int) -> None:
    """node: takes this rank's entry of a dim that has one for each rank; of what it takes, [0] is all.

    Which dim of that is shared then depends on what the entries were: a dim that a view cut into them, major first, or
    the one along which they were chunks of one value; of others nothing is known ahead.
    """
    users = [user for user in node.users if user.op == "call_function" and op_name(user) == "select"]
    taken = [user for user in users if int_of(user.args[2]) in (0, -1) and int_of(user.args[1]) % len(own.dims) == dim]
    if not taken or (shared := _shared(node_of(node.args[0]), dim)) is None:
        return
    value = squeezed(own, dim)
    if shared != dim:
        axes, whole = own.dims[dim][0].axes, own.dims[shared]
        if len(whole) != 1 or not whole[0].plain or whole[0].sharded or whole[0].cuts or whole[0].axes is UNIFORM:
            return
        dims = [(Atom(size_of(whole), axes),) if d == shared else one for d, one in enumerate(own.dims)]
        value = value.with_dims(one for d, one in enumerate(dims) if d != dim)
    scope.ahead.update(dict.fromkeys(taken, value))


def _shared(entries: Node, dim: int) -> int | None:
    """The dim of entries, one for each rank along `dim`, that is a part of a dim of one value; `dim`: a part of what
    follows it. None: not known."""
    while (
        entries.op == "call_function"
        and len(entries.all_input_nodes) == 1
        and torch.Tag.pointwise in getattr(entries.target, "tags", ())
    ):
        entries = entries.all_input_nodes[0]
    if op_name(entries) == "stack":
        parts, at = items_of(entries.args[0]), int_of(entries.args[1]) if len(entries.args) > 1 else 0
        whole = parts[0].all_input_nodes[0] if isinstance(parts[0], Node) and parts[0].all_input_nodes else None
        if at % entries.meta["val"].dim() != dim or whole is None:
            return None
        if [(p.target, p.args) for p in map(node_of, parts)] != [
            (operator.getitem, (whole, i)) for i in range(len(parts))
        ]:
            return None
        if op_name(whole) not in _CHUNKS or len(whole.meta["val"]) != len(parts):
            return None
        along = int_of(whole.args[2] if len(whole.args) > 2 else whole.kwargs.get("dim", 0))
        along %= parts[0].meta["val"].dim()
        return along + (along >= dim)
    if op_name(entries) not in _VIEWS or "val" not in entries.meta:
        return None
    before, after = node_of(entries.args[0]).meta["val"].shape, entries.meta["val"].shape
    begins = [math.prod(before[d:]) for d in range(len(before))]  # elements from each dim on
    left = math.prod(after[dim:])
    if left not in begins or dim + 1 == len(after):
        return None
    inside = left // before[begins.index(left)]  # of one element of that dim
    return dim if after[dim] > 1 and math.prod(after[dim + 2 :]) >= inside else None

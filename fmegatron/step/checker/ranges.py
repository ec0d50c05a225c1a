"""Ids of which each rank of some axes knows those of its own range: lookups in tables split by hand, and the way back.

    at = ids - axis_index(tp, like=ids) * table.shape[0]
    inside = (at >= 0) & (at < table.shape[0])
    x = psum(table[at.clamp(0, table.shape[0] - 1)] * inside[..., None], tp)

Each id is in the range of one rank. So what is looked up, and set to 0 outside, is a term of a sum over the ranks, and
so is anything that all have, set to 0 outside; values that are added up at such positions, 0 outside, are the rank's
part of the table's gradient. What is known beside the marks of values is a `Range`, of nodes from the rank's index on:
of which ids, of which size, and where in them each element is, so that ids and mask cannot be two different things.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fmegatron.step.checker.context import Scope, op_name
from fmegatron.step.checker.dims import Atom, joined, over, size_of
from fmegatron.step.checker.values import Pending, Value, Varying
from fmegatron.step.graph.nodes import int_of, items_of, node_of

__all__ = ["Range", "found", "noted", "written"]

Node = torch.fx.Node
Steps = tuple[tuple[int, int], ...]  # of each dim (size, how far apart its elements are in the ids, in order)


class Range(NamedTuple):
    """role: "index", "next" (the rank's, and one more); "begin", "end" of its range; "at", an id minus that begin;
    "from begin", "to end", "inside" and their opposites (a condition of an id); "looked up", right inside; "masked", 0
    outside; "term", linear in such. ids: the node; steps: of which of them each element is (None: of none)."""

    role: str
    axes: tuple[str, ...]
    size: int
    ids: Node | None = None
    steps: Steps | None = None


_NOT = MappingProxyType({
    "from begin": "before", "before": "from begin", "to end": "behind", "behind": "to end", "inside": "outside",
    "outside": "inside",
})  # fmt: skip
# {(op, what is on its left, what is on its right): what that is}; a number stands for itself.
_COMPARED: Mapping[tuple[str, Any, Any], str] = MappingProxyType(
    {("ge", "at", 0): "from begin", ("gt", "at", -1): "from begin", ("lt", "at", 0): "before"}
    | {("lt", "at", "size"): "to end", ("ge", "at", "size"): "behind"}
    | {("ge", "ids", "begin"): "from begin", ("lt", "ids", "begin"): "before"}
    | {("lt", "ids", "end"): "to end", ("ge", "ids", "end"): "behind"}
)
_TURNED = MappingProxyType({"ge": "le", "le": "ge", "gt": "lt", "lt": "gt"})
_LINEAR = frozenset("sum mul neg mm bmm view _unsafe_view reshape expand unsqueeze squeeze permute transpose t".split())
_SAME = frozenset("clone detach alias _to_copy convert_element_type clamp clamp_min clamp_max contiguous".split())
_LOOKUPS = frozenset("embedding index index_select gather".split())
_PUTS = frozenset("embedding_dense_backward index_put scatter_add index_add".split())


def noted(scope: Scope, node: Node, one: Range) -> None:
    """Keep what is known of a node, and look at what is made of it."""
    scope.ranges[node] = one
    scope.beside.update(node.users)


def written(scope: Scope, memory: Node) -> None:
    """Nothing is known any more of what was written into, nor of ranges of such ids."""
    for node, one in [*scope.ranges.items()]:
        if memory in (node, one.ids):
            del scope.ranges[node]


def found(scope: Scope, node: Node, given: dict, rule: Callable) -> Any:
    """The value of a node of whose operands some are ranges, where more is known of it than its rule knows; None."""
    name, marked = op_name(node), [n for n in node.all_input_nodes if n in scope.ranges]
    if not marked:
        return None
    if name in _LOOKUPS:
        return _looked_up(scope, node, name, given, rule)
    if name in _PUTS:
        return _put(scope, node, name, given, rule)
    if name in ("psum", "reduce_scatter"):
        return _summed(scope, node, given, rule)
    one = _moved(scope, node, name) or _bound(scope, node, name) or _condition(scope, node, name)
    if one is not None:
        noted(scope, node, one)
        return _again(scope, node, given, rule, one) if one.role == "masked" else None
    if "val" in node.meta and isinstance(node.meta["val"], torch.Tensor):
        known = _combined(scope, node, name, marked, given, rule)
        return _term(scope, node, name, marked, given, rule) if known is None else known
    return None


def _again(scope: Scope, node: Node, given: dict, rule: Callable, one: Range) -> Value | None:
    """The value of what is 0 outside of the range, as its rule has it of what all ranks have; each has another."""
    plain = {key: _without(v, one.axes) if isinstance(v, Value) else v for key, v in given.items()}
    out = rule(scope, node, plain)
    if not isinstance(out, Value) or not all(out.replicated(axis) for axis in one.axes):
        return None
    return out.marked(dict.fromkeys(one.axes, Varying()))


def _summed(scope: Scope, node: Node, given: dict, rule: Callable) -> Any:
    """The sum over the ranks of what is 0 outside of each one's range, or is linear in such values."""
    xs = []
    for source, x in zip(items_of(node.args[0]), given["xs"], strict=True):
        one = scope.ranges.get(source, _NO)
        axes = [a for a in one.axes if one.role in ("masked", "term") and x.is_(a, Varying)]
        xs.append(x.marked({axis: Pending("sum", source) for axis in axes}))
    return rule(scope, node, {**given, "xs": xs})


def _term(scope: Scope, node: Node, name: str, marked: list[Node], given: dict, rule: Callable) -> Value | None:
    """What is linear in values that are 0 outside: a term of a sum over the ranks."""
    ranges, one = [scope.ranges[n] for n in marked], scope.ranges[marked[0]]
    if any(other.role not in ("masked", "term") or other.axes != one.axes for other in ranges):
        return None
    alone = len(marked) == 1 and all(n in marked or _same_for_all(scope, n, one.axes) for n in node.all_input_nodes)
    both = name in ("add", "sub") and len(marked) == len(node.all_input_nodes) == len(node.args)
    linear = node.args.count(marked[0]) == 1 and (name in _LINEAR or (name == "div" and node.args[0] is marked[0]))
    if not both and not (alone and linear):
        return None
    value = _again(scope, node, given, rule, one)
    if value is not None:
        noted(scope, node, Range("term", one.axes, one.size))
    return value


def _without(v: Value, axes: tuple[str, ...]) -> Value:
    """As all ranks have it, of a value that is a term of a sum, or differs by the rank's index."""
    return v.without([a for a in axes if v.is_(a, Varying) or v.pending(a, "sum")])


def _same_for_all(scope: Scope, node: Any, axes: tuple[str, ...]) -> bool:
    value = scope.values.get(node) if isinstance(node, Node) else None
    return not isinstance(node, Node) or (isinstance(value, Value) and all(value.replicated(a) for a in axes))


# ---- ids, and where they are -----------------------------------------------------------------------------------------
def _bound(scope: Scope, node: Node, name: str) -> Range | None:
    """Of the rank's index times the size of a part: where its range begins; and with the size added, where it ends. Of
    ids minus the beginning: where in the range they are."""
    if len(node.args) != 2 or name not in ("mul", "add", "sub"):
        return None
    a, b = node.args if isinstance(node.args[0], Node) and node.args[0] in scope.ranges else reversed(node.args)
    one = scope.ranges.get(a) if isinstance(a, Node) else None
    if one is None:
        return None
    if name == "mul" and one.role == "index":
        size = _size_by(scope, node, b, one.axes)
        return None if size is None else Range("begin", one.axes, size)
    if name == "mul" and one.role == "next":
        size = _size_by(scope, node, b, one.axes)
        return None if size is None else Range("end", one.axes, size)
    if name == "add" and one.role == "index" and b == 1:
        return Range("next", one.axes, 1)
    if name == "add" and one.role == "begin" and _size_by(scope, node, b, one.axes) == one.size:
        return one._replace(role="end")
    if name == "sub" and one.role == "begin" and a is node.args[1] and isinstance(b, Node) and b not in scope.ranges:
        return _of_ids(scope, b, one, "at")
    return None


def _size_by(scope: Scope, node: Node, number: Any, axes: tuple[str, ...]) -> int | None:
    """A number that is known to be the size of a dim which these axes, and no others, share in parts of one piece."""
    for whole, sizes, ranks in node.meta.get("parts", ()):
        if not isinstance(number, int) or whole != number or ranks or len(sizes) != 1 or sizes[0][2] != 1:
            continue
        atoms = joined(scope.sizes.get(sizes[0][:2]) or ())
        if len(atoms) == 1 and atoms[0].axes == axes and atoms[0].plain and not atoms[0].cuts:
            return number
    ranks = math.prod(int(scope.mesh[axis]) for axis in axes)
    for whole, made in node.meta.get("made", ()):  # a plain number of which another mesh has told it
        if isinstance(number, int) and whole == number and made is not None and not made[0] and not made[2]:
            if {axis: power for axis, power in made[1] if axis in scope.mesh.names} == dict.fromkeys(axes, -1):
                return number if ranks > 1 else None
    return None


def _of_ids(scope: Scope, ids: Node, one: Range, role: str) -> Range | None:
    meta = ids.meta["val"]
    if not _same_for_all(scope, ids, one.axes) or meta.is_floating_point():
        return None
    ends = [math.prod(meta.shape[d + 1 :]) for d in range(meta.dim())]
    return Range(role, one.axes, one.size, ids, tuple(zip(meta.shape, ends, strict=True)))


def _condition(scope: Scope, node: Node, name: str) -> Range | None:
    if name.endswith("_not") and node.args[0] in scope.ranges:
        one = scope.ranges[node_of(node.args[0])]
        return one._replace(role=_NOT[one.role]) if one.role in _NOT else None
    if len(node.args) != 2:
        return None
    a, b = node.args
    if name in _TURNED and not (isinstance(a, Node) and scope.ranges.get(a, _NO).role == "at"):
        if isinstance(a, Node) and scope.ranges.get(a, _NO).role in ("begin", "end"):
            a, b, name = b, a, _TURNED[name]
    one, other = [scope.ranges.get(x) if isinstance(x, Node) else None for x in (a, b)]
    if name in _TURNED:
        if one is not None and one.role == "at":
            right = "size" if _size_by(scope, node, b, one.axes) == one.size else b
            role = _COMPARED.get((name, "at", right)) if isinstance(right, (int, str)) else None
            return None if role is None else one._replace(role=role)
        if one is None and other is not None and isinstance(a, Node):
            role = _COMPARED.get((name, "ids", other.role))
            return None if role is None else _of_ids(scope, a, other, role)
        return None
    if one is None or other is None or one[1:4] != other[1:4] or (steps := _fit(node, one, other)) is None:
        return None
    both = {one.role, other.role}
    if both == {"from begin", "to end"} and (name.endswith("_and") or name == "mul"):
        return one._replace(role="inside", steps=steps)
    return one._replace(role="outside", steps=steps) if both == {"before", "behind"} and name.endswith("_or") else None


_NO = Range("", (), 0)


# ---- movement --------------------------------------------------------------------------------------------------------
def _moved(scope: Scope, node: Node, name: str) -> Range | None:
    """The same in another shape, or by another dtype; ids that are brought into the range where they are outside."""
    source = node.args[0] if node.args else None
    one = scope.ranges.get(source) if isinstance(source, Node) else None
    if one is None or len(node.all_input_nodes) != 1:
        return None
    shape = tuple(node.meta["val"].shape) if isinstance(node.meta.get("val"), torch.Tensor) else None
    if name in _SAME and (not name.startswith("clamp") or _keeps(node, name, one)):
        return one
    if one.steps is None or shape is None:
        return one if one.role in ("index", "begin", "end") and name in ("view", "expand", "unsqueeze") else None
    steps = _steps_after(node, name, one.steps, shape)
    return None if steps is None else one._replace(steps=steps)


def _keeps(node: Node, name: str, one: Range) -> bool:
    low, high = {"clamp_min": (1, None), "clamp_max": (None, 1), "clamp": (1, 2)}[name]
    least = node.args[low] if low is not None and len(node.args) > low else None
    most = node.args[high] if high is not None and len(node.args) > high else None
    from_begin = least is None or (isinstance(least, (int, float)) and least <= 0)
    to_end = most is None or (isinstance(most, (int, float)) and most >= one.size - 1)
    return one.role == "at" and from_begin and to_end and not node.kwargs


def _steps_after(node: Node, name: str, steps: Steps, shape: tuple[int, ...]) -> Steps | None:
    if name in ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze"):
        return _viewed(steps, shape)
    if name in ("select", "select_backward"):  # of a dim of one element
        at = int_of(node.args[1 if name == "select" else 2]) % max(len(shape), len(steps))
        size = steps[at][0] if name == "select" else shape[at]
        return ((*steps[:at], *steps[at + 1 :]) if name == "select" else _viewed(steps, shape)) if size == 1 else None
    if name == "expand":
        front: Steps = ((1, 0),) * (len(shape) - len(steps))
        both = zip((*front, *steps), shape, strict=True)
        return tuple([(n, step if size == n else 0) for (size, step), n in both])
    if name in ("t", "transpose", "permute"):
        order = list(range(len(steps)))
        if name == "permute":
            order = [int_of(d) % len(steps) for d in items_of(node.args[1])]
        elif len(order) > 1:
            a, b = (int_of(d) for d in node.args[1:3]) if name == "transpose" else (0, 1)
            order[a], order[b] = order[b], order[a]
        return tuple(steps[d] for d in order)
    return None


def _viewed(steps: Steps, shape: tuple[int, ...]) -> Steps | None:
    """Neighbours that are one run of elements, cut anew."""
    runs: list[tuple[int, int]] = []
    for n, step in steps:
        if n == 1:
            continue
        if runs and (runs[-1][1] == n * step or (runs[-1][1] == step == 0)):
            runs[-1] = (runs[-1][0] * n, step)
        else:
            runs.append((n, step))
    out, left = [], list(reversed(runs))
    for n in shape:
        if n == 1:
            out.append((1, 0))
            continue
        if not left or left[-1][0] % n:
            return None
        size, step = left.pop()
        out.append((n, step * (size // n)))
        if size > n:
            left.append((size // n, step))
    return None if left else tuple(out)


def _fit(node: Node, *ranges: Range) -> Steps | None:
    """Of which ids the elements of a result are, where all operands agree."""
    shape, found_ = tuple(node.meta["val"].shape), []
    for one in ranges:
        if one.steps is None or len(one.steps) > len(shape):
            return None
        front: Steps = ((1, 0),) * (len(shape) - len(one.steps))
        both = zip((*front, *one.steps), shape, strict=True)
        found_.append(tuple([(n, 0 if size == 1 else step) for (size, step), n in both]))
    real = [tuple(step for n, step in steps if n > 1) for steps in found_]
    return found_[0] if all(one == real[0] for one in real) else None


# ---- what is looked up, masked, put back -----------------------------------------------------------------------------
def _combined(scope: Scope, node: Node, name: str, marked: list[Node], given: dict, rule: Callable) -> Value | None:
    """Elements of what is looked up, or masked, with what all ranks have; and the mask."""
    ranges = [scope.ranges[n] for n in marked]
    one = ranges[0]
    if any(other[1:4] != one[1:4] for other in ranges) or one.ids is None or (steps := _fit(node, *ranges)) is None:
        return None
    roles = [other.role for other in ranges]
    if not all(n in scope.ranges or _same_for_all(scope, n, one.axes) for n in node.all_input_nodes):
        return None
    role = None
    if name == "mul" and "inside" in roles:
        role = "at" if "at" in roles else "masked" if not {*roles} - {"inside", "looked up", "masked"} else None
    elif name in ("masked_fill", "where"):
        role = _filled(scope, node, name)
    elif "looked up" in roles and {*roles} == {"looked up"} and _of_elements(node):
        role = "looked up"
    elif "masked" in roles and {*roles} <= {"masked", "looked up"} and len(marked) == 1:
        linear = name in ("mul", "neg") or (name == "div" and node.args[0] is marked[0])
        role = "masked" if linear else None
    if role is None:
        return None
    one = one._replace(role=role, steps=steps)
    noted(scope, node, one)
    if role == "masked":
        return _again(scope, node, given, rule, one)
    plain = {key: _without(v, one.axes) if isinstance(v, Value) else v for key, v in given.items()}
    out = rule(scope, node, plain)
    return out.marked(dict.fromkeys(one.axes, Varying())) if isinstance(out, Value) else None


def _of_elements(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) and isinstance(node.meta["val"], torch.Tensor)


def _filled(scope: Scope, node: Node, name: str) -> str | None:
    """masked_fill(x, outside, 0), where(inside, x, 0), where(outside, 0, x); of positions any number will do."""
    if name == "masked_fill":
        x, condition, other = node.args[:3]
        wanted = "outside"
    else:
        condition, x, other = node.args[:3]
        wanted = "inside"
        if scope.ranges.get(node_of(condition), _NO).role == "outside":
            x, other, wanted = other, x, "outside"
    if scope.ranges.get(node_of(condition), _NO).role != wanted:
        return None
    of_x = scope.ranges.get(x, _NO).role if isinstance(x, Node) else None
    if of_x is None:
        return None
    if of_x == "at":
        return "at" if other not in scope.ranges else None
    value = scope.values.get(other) if isinstance(other, Node) else None
    zero = value.constant == 0 if isinstance(value, Value) else other == 0
    return "masked" if zero and of_x in ("", "looked up", "masked") else None


def _looked_up(scope: Scope, node: Node, name: str, given: dict, rule: Callable) -> Value | None:
    """Rows of this rank's part of a table at positions in its range."""
    key = {"embedding": "indices", "index": "indices"}.get(name, "index")
    table, dim, at = _table(scope, node, name)
    if at is None or table is None or dim is None:
        return None
    one = scope.ranges.get(at)
    if one is None or one.role != "at" or one.steps is None:
        return None
    x = scope.values[table]
    atoms = joined(x.dims[dim])
    if table in scope.ranges or len(atoms) != 1 or atoms[0].axes != one.axes or not atoms[0].plain or atoms[0].cuts:
        return None
    if atoms[0].size != one.size or not all(axis in over(x.dims[dim]) for axis in one.axes):
        return None
    names = {"embedding": "weight"}.get(name, "self")
    index = _without(scope.values[at], one.axes)
    whole = x.with_dims((Atom(one.size),) if d == dim else dim_ for d, dim_ in enumerate(x.dims))
    indices = [None] * dim + [index] if name == "index" else index
    out = rule(scope, node, {**given, names: whole, key: indices})
    if not isinstance(out, Value) or not all(out.replicated(axis) for axis in one.axes):
        return None
    behind = len(out.dims) - len(one.steps) - dim if name != "gather" else 0
    front = dim if name != "gather" else 0
    around = [(size_of(d), 0) for d in out.dims]
    steps = (*around[:front], *one.steps, *around[len(around) - behind :])
    if len(steps) != len(out.dims):
        return None
    noted(scope, node, one._replace(role="looked up", steps=tuple(steps)))
    return out.marked(dict.fromkeys(one.axes, Varying()))


def _table(scope: Scope, node: Node, name: str) -> tuple[Node | None, int | None, Node | None]:
    """(what is indexed, along which dim, by what) of a lookup by one index."""
    x = node_of(node.args[0])
    rank = len(scope.values[x].dims) if isinstance(scope.values.get(x), Value) else 0
    if name == "embedding":
        return x, 0, node_of(node.args[1])
    if name == "index":
        given = [(d, i) for d, i in enumerate(items_of(node.args[1])) if i is not None]
        return (x, given[0][0], node_of(given[0][1])) if len(given) == 1 else (None, None, None)
    return x, int_of(node.args[1]) % max(1, rank), node_of(node.args[2])


def _put(scope: Scope, node: Node, name: str, given: dict, rule: Callable) -> Value | None:
    """What is 0 outside of the range, added up at positions in it: this rank's part of the whole."""
    if name == "embedding_dense_backward" and given["padding_idx"] == -1:
        g, at, dim, base = node.args[0], node.args[1], 0, None
    elif name == "embedding_dense_backward":
        return None
    elif name == "index_put":
        indices = [(d, i) for d, i in enumerate(items_of(node.args[1])) if i is not None]
        if len(indices) != 1 or not given["accumulate"]:
            return None
        (dim, at), g, base = indices[0], node.args[2], node.args[0]
    else:
        base, dim, at, g = node.args[0], int_of(node.args[1]), node.args[2], node.args[3]
        dim %= max(1, node.meta["val"].dim())
    one, of = scope.ranges.get(node_of(at)), scope.ranges.get(node_of(g))
    shape = tuple(node.meta["val"].shape)
    if one is None or of is None or one.role != "at" or of.role != "masked" or one[1:4] != of[1:4]:
        return None
    if base is not None and scope.values[node_of(base)].constant != 0 or shape[dim] != one.size or not one.steps:
        return None
    front = 0 if name == "scatter_add" else dim
    there: Steps = of.steps or ()
    behind = len(there) - front - len(one.steps)
    wanted = (*[0] * front, *[s for _, s in one.steps], *[0] * behind)
    if behind < 0 or any(n > 1 and s != t for (n, s), t in zip(there, wanted, strict=True)):
        return None
    plain = {k: _without(v, one.axes) if isinstance(v, Value) else v for k, v in given.items()}
    if name == "index_put":
        plain["indices"] = [v if v is None else _without(v, one.axes) for v in given["indices"]]
    out = rule(scope, node, plain)
    if not isinstance(out, Value) or not all(out.replicated(axis) for axis in one.axes):
        return None
    return out.with_dims((Atom(one.size, one.axes),) if d == dim else rest for d, rest in enumerate(out.dims))

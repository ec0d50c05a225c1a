"""Chunks of a rank's rows (`b["x"].chunk(2)`): on one rank they are other rows of the batch, so only sums are right.

Where the layout of a batch does not assign rows to chunks, what is made of one chunk may be as each rank has it only
until the chunks are added up, each treated like the others: what is linear in sums over a chunk's rows. A chunk that is
divided by its own sum of weights, weighed otherwise, or put beside the rows of another one is another value on another
mesh. Steps that cut no rows pay nothing for this: `Scope.chunks` is empty.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from fmegatron.collectives import kinds, table
from fmegatron.step.checker.context import Scope, op_name
from fmegatron.step.checker.dims import UNIFORM, over
from fmegatron.step.checker.values import Mark, Value
from fmegatron.step.graph.nodes import int_of, is_view, items_of, node_of, written_by

__all__ = ["after", "at_outputs", "begin"]

Node = torch.fx.Node
_WHY = "makes of a part of each rank's rows what is no sum over them, and on another mesh these are other rows"
_FIX = (
    "Add up sums over the parts, each made alike, and divide once; or give the batch a layout that assigns rows to "
    "parts, strategy.batch_layout(shape, dtype, mesh, microbatches=n), as step.accumulate asks for"
)
_LINEAR = frozenset(
    "add sub neg clone view _unsafe_view reshape expand permute transpose t unsqueeze squeeze detach alias _to_copy sum"
    " mean slice select split split_with_sizes unbind cat stack slice_backward select_backward convert_element_type"
    " contiguous flip copy".split()
)
_PRODUCTS = frozenset(
    "mul mm bmm matmul dot mv addmm baddbmm convolution where index_select embedding_dense_backward".split()
)
_JOIN = (table.PSUM, table.PMAX, table.REDUCE_SCATTER, table.ALL_GATHER)
_EMPTY = frozenset(
    ("ones_like", "zeros_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
)


class Chunk(NamedTuple):
    """What is made of some of a rank's rows. axes: that split the rows among ranks. size: of all of a rank's rows.

    terms: {number of what was made: the rows that it was made of}, which are added up. summed: whether it was summed or
    gathered over ranks. at: where the rows were cut.
    """

    axes: tuple[str, ...]
    size: int
    terms: Mapping[int, frozenset[int]]
    at: Node
    summed: bool = False


def begin(scope: Scope, node: Node, x: Value, dim: int, rows: range) -> bool:
    """Note what is made of these rows of each rank's part of a batch: of a slice, or of one of several parts. False for
    rows of what is such a part itself."""
    axes, size = tuple(sorted(over(x.dims[dim]))), node_of(node.args[0]).meta["val"].shape[dim]
    if _part(scope, node_of(node.args[0])):
        return False
    which = [node]
    if isinstance(node.meta["val"], (list, tuple)):
        ends = [sum(part.shape[dim] for part in node.meta["val"][:i]) for i in range(len(node.meta["val"]))]
        which = [user for user in node.users if ends[int_of(user.args[1])] == rows.start]
    made = _number(scope, ("part", len(rows), dim, _made(scope, node_of(node.args[0]))))
    for one in which:
        scope.chunks[one] = Chunk(axes, size, {made: frozenset(rows)}, node)
    return True


def after(scope: Scope, node: Node) -> None:
    """What a node makes of parts of a rank's rows; a value that is another one on another mesh is not proven."""
    if op_name(node) == "slice" and _uniform(scope, node):  # as cat takes it of the gradient of a sum
        scope.chunks["made", node] = _number(
            scope, ("some", _made(scope, node_of(node.args[0])), node.meta["val"].shape)
        )
    of = node.all_input_nodes if kinds.collective_of(node.target) is not table.DECLARE else items_of(node.args[0])[:1]
    found = [(n, one) for n in of if (one := _part(scope, n))]
    if not found or node in scope.chunks or op_name(node) in _EMPTY:
        return
    first = found[0][1]
    axes = tuple(dict.fromkeys(axis for _, one in found for axis in one.axes))
    summed = any([one.summed for _, one in found])
    made = _joined(scope, node, found, summed)
    if kinds.collective_of(node.target) in _JOIN:
        summed |= not set(items_of(node.args[1])).isdisjoint(axes)
    if made is None:
        _open(scope, node, axes)
    elif any(len(rows) < first.size for rows in made.values()):
        state = Chunk(axes, first.size, made, first.at, summed)
        written = written_by(node)
        scope.chunks.update(dict.fromkeys((node, *written), state))
        if any(one.op == "call_function" and is_view(one) and not written_by(one) for one in written):
            _open(scope, node, axes)


def at_outputs(scope: Scope, outputs: Iterable[Node | None]) -> None:
    """What is made of some of the rows alone, or not alike, and is given back as it is."""
    for node in outputs:
        if node is not None and (one := _part(scope, node)) is not None:
            _open(scope, node, one.axes, one.at)


def _uniform(scope: Scope, node: Node) -> bool:
    """Whether what is sliced is the same all along that dim."""
    x = scope.values.get(node_of(node.args[0]))
    return isinstance(x, Value) and all(atom.axes is UNIFORM for atom in x.dims[int_of(node.args[1])])


def _part(scope: Scope, node: Any) -> Chunk | None:
    found = scope.chunks.get(node) if isinstance(node, Node) else None
    return found if isinstance(found, Chunk) else None


def _joined(scope: Scope, node: Node, found: list, summed: bool) -> Mapping[int, frozenset[int]] | None:
    """The terms of a node; None where it is none of sums over rows, or does not treat the parts alike."""
    name = op_name(node).rstrip("_")
    states = [one for _, one in found]
    if len({(one.size, one.axes) for one in states}) > 1:
        return None
    if name == "add" and len(node.args) == 2 and not node.kwargs:
        return _added(scope, node, states)
    parts = {rows for one in states for rows in one.terms.values()}
    if len(parts) > 1 and len(states) > 1:
        return _beside(scope, node, found) if name in ("cat", "stack") and not summed else None
    if not (summed or any(len(one.terms) > 1 for one in states)):
        return {_number(scope, ("of", _made(scope, node))): parts.pop()}
    if not _is_linear(node, name, [n for n, _ in found]):
        return None
    if len(states) == 1:
        others = tuple("" if _part(scope, n) else _made(scope, n) for n in node.all_input_nodes)
        how = str(node.target), others, _plain(node)
        return {_number(scope, (how, term)): rows for term, rows in states[0].terms.items()}
    return {_number(scope, ("of", _made(scope, node))): parts.pop()}


def _added(scope: Scope, node: Node, states: list[Chunk]) -> Mapping[int, frozenset[int]] | None:
    if len(states) == 1:
        other = next((a for a in node.args if not _part(scope, a)), None)
        value = scope.values.get(other) if isinstance(other, Node) else None
        if other == 0 or (isinstance(value, Value) and value.constant == 0):
            return states[0].terms
        if states[0].summed:  # linear, and a constant beside it
            beside = _number(scope, ("beside", _made(scope, node)))
            return {**states[0].terms, beside: frozenset(range(states[0].size))}
        rows = set(states[0].terms.values())
        return {_number(scope, ("of", _made(scope, node))): rows.pop()} if len(rows) == 1 else None
    a, b = states if len(states) == 2 else states * 2
    terms = dict(a.terms)
    for term, rows in b.terms.items():
        before = terms.get(term, frozenset())
        if before & rows:  # the same again
            term = _number(scope, ("again", term))
            before = terms.get(term, frozenset())
        terms[term] = before | rows
    one = len({*a.terms.values(), *b.terms.values()}) == 1
    if one and not (a.summed or b.summed):
        return {_number(scope, ("of", _made(scope, node))): next(iter(a.terms.values()))}
    values = [v for n in node.all_input_nodes if isinstance(v := scope.values.get(n), Value)]
    rows = any(v.shards(axis) for v in values for axis in a.axes) and not (a.summed and b.summed)
    return None if rows and not one else terms  # rows are added to those of another part


def _beside(scope: Scope, node: Node, found: list) -> Mapping[int, frozenset[int]] | None:
    """Parts of rows in their order, each made alike: a rank's rows again."""
    terms = [one.terms for _, one in found]
    if any(len(one) > 1 for one in terms) or len({term for one in terms for term in one}) > 1:
        return None
    rows = [row for one in terms for part in one.values() for row in sorted(part)]
    value = scope.values[node]
    return {0: frozenset(rows)} if rows == sorted(rows) and isinstance(value, Value) else None


def _is_linear(node: Node, name: str, of: list[Node]) -> bool:
    if name in _LINEAR or node.target is operator.getitem or kinds.collective_of(node.target) is not None:
        return True
    if name == "div":
        return len(of) == 1 and node.args[0] is of[0] and not node.kwargs
    if name == "where":
        return len(of) == 1 and node.args[0] is not of[0]
    return name in _PRODUCTS and len(of) == 1 and sum(a is of[0] for a in node.args) == 1


def _open(scope: Scope, node: Node, axes: Iterable[str], at: Node | None = None) -> None:
    value = scope.values[node]
    mark: Mark = scope.unknown(at or node, _WHY, _FIX)._replace(gradient=True)

    def marked(v: Any) -> Any:
        free = [axis for axis in axes if isinstance(v, Value) and axis not in v.marks]
        return v.marked(dict.fromkeys(free, mark)) if free else v

    scope.values[node] = [marked(v) for v in value] if isinstance(value, list) else marked(value)


# ---- what was made ---------------------------------------------------------------------------------------------------
def _number(scope: Scope, made: tuple) -> int:
    """A number that stands for what was made in this way."""
    return scope.chunks.setdefault(made, len(scope.chunks))


def _made(scope: Scope, node: Any) -> Any:
    """A number that is equal for nodes that compute the same of the same, but for the part of the rows."""
    if not isinstance(node, Node):
        return repr(node)
    todo = [node]
    while todo:
        one = todo[-1]
        ahead = [n for n in one.all_input_nodes if ("made", n) not in scope.chunks and not _part(scope, n)]
        if ahead and ("made", one) not in scope.chunks:
            todo += ahead
            continue
        todo.pop()
        if ("made", one) not in scope.chunks:
            scope.chunks["made", one] = _number(scope, _way(scope, one))
    return scope.chunks["made", node]


def _way(scope: Scope, node: Node) -> tuple:
    if node.op != "call_function":
        return node.op, node.name
    of = []
    for n in node.all_input_nodes:
        known = _part(scope, n)
        of.append(tuple(sorted(known.terms)) if known else scope.chunks["made", n])
    return str(node.target), tuple(of), _plain(node)


def _plain(node: Node) -> str:
    """The arguments of a node with numbers in the place of nodes."""
    at = {n: f"%{i}" for i, n in enumerate(node.all_input_nodes)}
    return repr(torch.fx.map_arg((node.args, node.kwargs), lambda n: at[n]))

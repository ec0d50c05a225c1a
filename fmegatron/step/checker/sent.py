"""What ranks send to one another as it is: rows that each has for itself, by counts, and all of a value (ppermute)."""

from __future__ import annotations

from dataclasses import replace

import torch

from fmegatron.step.checker.context import op_name
from fmegatron.step.checker.dims import over, plain, size_of
from fmegatron.step.checker.statements import OPEN, left_of
from fmegatron.step.checker.values import Mark, Pending, Somewhere, Unknown, Value, Varying, Wrong, filled

__all__ = ["by_counts", "permuted", "rows_sent"]

Node = torch.fx.Node


def rows_sent(node: Node, x: Value, axes: tuple[str, ...], rows: int) -> Value:
    """Rows of each rank's own that went to other ranks. They are in another order over all axes that sharded them."""
    if x.constant == 0:
        return filled([rows, *map(size_of, x.dims[1:])], 0)
    marks: dict[str, Mark | None] = {axis: Varying() for axis in over(x.dims[0])}
    for axis in axes:
        mark = x.marks.get(axis)
        marks[axis] = left_of(mark) or Varying()
        if isinstance(mark, Pending) or (mark is None and axis not in over(x.dims[0])):
            birth = mark.birth if isinstance(mark, Pending) else None
            marks[axis] = Wrong(node, f"{op_name(node)} of rows that are {x.state(axis)}",
                       f"rows that each rank of {axis!r} has for itself are exchanged; wrong axis?", birth)  # fmt: skip
    out = x.marked(marks)
    return replace(out, data=False, equal_terms=False).with_dims((plain(rows), *out.dims[1:]))


def by_counts(node: Node, x: Value, axes: tuple[str, ...], counts: list[Value]) -> Value:
    """What is known of tensors by which it was decided what is sent, holds for what was sent."""
    for one in counts:
        marks = {axis: mark for axis, mark in one.marks.items() if isinstance(mark, OPEN) and not x.is_(axis, *OPEN)}
        for axis in one.having(Pending):
            marks[axis] = Wrong(node, f"{op_name(node)} by counts that are {one.state(axis)}",
                       "count the rows of this rank", one.birth(axis))  # fmt: skip
        x = x.marked({axis: x.marks[axis] if x.is_(axis, Wrong) else mark for axis, mark in marks.items()})
        others = [axis for axis in one.axes() if axis not in axes and x.replicated(axis)]
        x = x.marked(dict.fromkeys(others, Varying()))
    return x


def permuted(node: Node, x: Value, axes: tuple[str, ...]) -> Value:
    """A value that went to another rank."""
    # What is sharded is elsewhere now: `declare` says what the sum of a ring means. Terms of a sum stay terms, of which
    # their birth says that they came from another rank (`marks.pending_after`).
    moved = [a for a in axes if x.shards(a) or x.is_(a, Somewhere)]
    open_ = {a: left_of(x.marks[a]) for a in axes if x.is_(a, Unknown)}
    terms: dict[str, Mark | None] = {a: Pending("sum", node) for a in axes if x.pending(a, "sum")}
    out = x.marked(open_ | terms).marked(dict.fromkeys(moved, Varying()))
    return replace(out, data=False, index_of=(), ramp=False) if moved else out

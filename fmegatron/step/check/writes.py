"""Rules for in-place ops: the values of all arrays that share the written memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from fmegatron.step.check.arithmetic import elementwise
from fmegatron.step.check.atoms import plain, size_of
from fmegatron.step.check.combine import strongest
from fmegatron.step.check.scope import Scope, op_name
from fmegatron.step.check.values import Value
from fmegatron.step.graph.nodes import storage_of, written_by

Node = torch.fx.Node


def written(scope: Scope, node: Node) -> None:
    """An op that writes into an argument, or a list of them, gives each the new value.

    What shares its memory and lies in it alike has the new value, too; an array of which a slice is written is the old
    one beside the new; of other views nothing is known any more.
    """
    targets = written_by(node)
    if not targets:
        return
    new = scope.values[node]
    if torch.Tag.inplace_view in node.target.tags:  # only the shape is another
        scope.values[targets[0]] = new
        return
    values = new if isinstance(new, list) else [new]
    if len(values) != len(targets):  # not what it returns is what it writes
        values = [None] * len(targets)
    for target, value in zip(targets, values, strict=True):
        _overwrite(scope, node, target, value)


def _overwrite(scope: Scope, node: Node, target: Node, new: Value | None) -> None:
    place = target.meta["val"]
    storage = storage_of(place)
    for other, value in list(scope.values.items()):
        meta = other.meta.get("val")
        if not isinstance(value, Value) or not isinstance(meta, torch.Tensor) or other is node:
            continue
        if storage_of(meta) != storage:
            continue
        if new is not None and _lies(meta) == _lies(place):
            scope.values[other] = new
            continue
        beside = _with_slice(scope, node, target, other, value, new)
        if beside is not None:
            scope.values[other] = beside
            continue
        axes = value.axes() | (frozenset(scope.mesh.names) if new is None else new.axes())
        why = f"{node.target} writes into memory that other values share"
        blank = Value(tuple(plain(n) for n in meta.shape))
        both = [value] if new is None else [value, new]
        marks = {axis: strongest(scope, node, both, axis) or scope.unknown(node, why) for axis in axes}
        scope.values[other] = blank.marked({axis: mark for axis, mark in marks.items() if scope.mesh[axis] > 1})


def _with_slice(scope: Scope, node: Node, target: Node, other: Node, value: Value, new: Value | None) -> Value | None:
    """An array after a slice of it, or an index, was written; None where that is not what the target is, or where the
    dim is sharded."""
    if new is None or target.op != "call_function" or op_name(target) not in ("slice", "select"):
        return None
    source = target.args[0]
    if _lies(source.meta["val"]) != _lies(other.meta["val"]):
        if not isinstance(scope.values.get(source), Value):
            return None
        inner = _with_slice(scope, node, target, source, scope.values[source], new)
        return None if inner is None else _with_slice(scope, node, source, other, value, inner)
    dim = (target.args[1] if len(target.args) > 1 else 0) % len(value.dims)
    old = value.with_dims(() if d == dim else atoms for d, atoms in enumerate(value.dims))
    if op_name(target) == "select":
        new = new.with_dims((*new.dims[:dim], (), *new.dims[dim:]))
    part = new.with_dims(() if d == dim else atoms for d, atoms in enumerate(new.dims))
    if any(atom.sharded or atom.fold for atom in (*value.dims[dim], *new.dims[dim])):
        return None
    made = old.settled and not old.sharded and (old.constant is not None or _is_empty(source))
    if made and not (old.constant or 0):
        out = part
    elif old.marks == part.marks and not old.excess and not part.excess:
        out = elementwise(scope, node, "beside", [old, part])
    else:  # one part is pending and the other is not
        return None
    size = size_of(value.dims[dim])
    dims = [plain(size) if d == dim else atoms for d, atoms in enumerate(out.dims)]
    constant = 0 if (value.constant, new.constant) == (0, 0) else None
    return replace(out.with_dims(dims), constant=constant)


def _is_empty(node: Node) -> bool:
    """Whether it is memory that holds nothing yet."""
    return node.op == "call_function" and op_name(node) in ("empty", "empty_like", "new_empty", "empty_strided")


def _lies(x: torch.Tensor) -> tuple:
    """Where the elements of a tensor lie in its storage."""
    return x.shape, x.stride(), x.storage_offset()

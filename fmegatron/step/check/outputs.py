"""Checks each output of a step against its required layout."""

from __future__ import annotations

import torch

from fmegatron.layout import Layout
from fmegatron.step.check.atoms import folds_of, interleaved, order_of
from fmegatron.step.check.excess import too_large
from fmegatron.step.check.scope import GO_ON, Scope
from fmegatron.step.check.values import (
    First,
    Mark,
    Pending,
    Somewhere,
    Suspect,
    Unknown,
    Value,
    Varying,
    Wrong,
    value_of,
)

Node = torch.fx.Node


def compare(scope: Scope, value: Value, node: Node, path: str, layout: Layout | None) -> dict[str, frozenset[int]]:
    """Notes findings where a value is not what its layout says -> axis -> reasons why that is not known."""
    want = value_of(layout, node.meta["val"].shape)
    source = node
    while source.target is torch.ops.aten.detach.default:  # of the line that calls the step, not of the step
        source = source.args[0]
    unproven: dict[str, frozenset[int]] = {}
    for axis in scope.mesh.names:
        if scope.mesh[axis] == 1:
            continue
        mark = _difference(scope, value, want, axis, source, path)
        if isinstance(mark, (Suspect, Wrong)):
            scope.find(mark.node, axis, mark.what, mark.fix, mark.birth)
        elif isinstance(mark, Unknown):
            unproven[axis] = mark.origins
    return unproven


def _difference(scope: Scope, value: Value, want: Value, axis: str, node: Node, path: str) -> Mark | None:
    """Over one axis, the Suspect, Unknown or Wrong that an output is; None where it is right, or a finding is noted."""
    mark = value.marks.get(axis)
    wanted, got = want.state(axis), value.state(axis)
    if isinstance(mark, Unknown) and mark.own and wanted == "replicated":
        reason = scope.reason(min(mark.origins))
        what = f"the output {path} is each rank's own, its layout says replicated: {reason.why} at {reason.at}"
        return Wrong(node, what, f"gather what it is made of over {axis!r} first, or reduce it")
    if isinstance(mark, (Suspect, Unknown, Wrong)):
        return mark
    if isinstance(mark, (Varying, First)) and wanted != "replicated":
        return scope.unknown(node, "it depends on the rank's index, and no rule knows how the parts make up the whole",
                             f"declare(x, axis, forward=...) says it. {GO_ON}")  # fmt: skip
    if isinstance(mark, Somewhere) and mark.or_sum:
        return scope.unknown(node, "it is sharded on a dim that shapes do not tell, or a pending sum")
    fold = next((f for dim in value.dims for f in folds_of(dim) if f.axis == axis), None)
    if fold is not None:
        what = f"the output {path} has parts side by side that are still to be reduced ({fold.kind})"
        scope.find(fold.node, axis, what, "reduce the value first; wrong axis?")
        return None
    dims = want.shards(axis)
    if got == wanted and dims:
        mark = _placement(scope, value, want, axis, node, path, dims[0])
        if mark is not None:
            return mark
    right = got == wanted or (got == "sharded" and wanted.startswith("sharded"))
    right |= got == "replicated" and (value.constant is not None or value.equal_terms or node.op == "placeholder")
    if not right:
        _not_as_wanted(scope, value, axis, node, path, got, wanted)
        return None
    excess = value.excess.get(axis)
    return too_large(scope, node, axis, excess) if excess else None


def _not_as_wanted(scope: Scope, value: Value, axis: str, node: Node, path: str, got: str, wanted: str) -> None:
    mark = value.marks.get(axis)
    birth = mark.birth if isinstance(mark, Pending) else None
    fix = f"psum it over {axis!r}" if isinstance(mark, Pending) else "look where its gradient or its value comes from"
    scope.find(node, axis, f"the output {path} is {got}, its layout says {wanted}", fix, birth)


def _placement(scope: Scope, value: Value, wanted: Value, axis: str, node: Node, path: str, d: int) -> Mark | None:
    """Of a dim that is sharded as it must be: in the same ranges, too?"""
    got, want = interleaved(value.dims[d]), interleaved(wanted.dims[d])
    orders = [order_of(dim) for dim in (got, want)]
    if set(orders[0]) == set(orders[1]) and orders[0] != orders[1]:
        mine, layouts = ("+".join(order) for order in orders)
        what = f"the output {path} is sharded over {mine} on dim {d}, its layout says {layouts}"
        scope.find(node, axis, what, "deal its ranges in the order of the layout")
    elif (
        not value.having(Wrong)
        and len(got) == len(want) == 1
        and got[0].plain
        and want[0].plain
        and got[0].cuts - want[0].cuts
    ):
        parts = f"in parts that begin at {sorted(got[0].cuts)}, its layout says {sorted(want[0].cuts) or 0}"
        return scope.unknown(node, f"the output {path} is sharded on dim {d} {parts}")
    return None

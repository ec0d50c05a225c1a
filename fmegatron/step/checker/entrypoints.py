"""Checks of a step: of a function over declared layouts, of a traced graph, and of each call that a jit compiles.

A step is interpreted once over what is sharded, pending or replicated, for any number of ranks. Nothing is computed and
no rank exists, but for what `check` finds unproven (`on_random_numbers.py`): forward, backward and optimizer are nodes
of one graph, and a rule for each states what its result is over every axis of the mesh. At the end the outputs are
compared with the layouts of the new state. The abstract domain is that of partial and sharded values of the sharding
literature (GSPMD, Xu et al. 2021; "varying" and "invariant" of shard_map), applied to backward and optimizer as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fmegatron import tree
from fmegatron.collectives import kinds
from fmegatron.layout import Layout, Mesh, dtypes, notation
from fmegatron.step.batch_rows import require_rows
from fmegatron.step.checker.context import GO_ON, Finding, Report, Scope, Unproven
from fmegatron.step.checker.dims import folds_of, interleaved, order_of, said, same_pieces
from fmegatron.step.checker.interpret import interpreted
from fmegatron.step.checker.marks import too_large
from fmegatron.step.checker.memories import mixed
from fmegatron.step.checker.on_random_numbers import Step, differing
from fmegatron.step.checker.padding import at_output
from fmegatron.step.checker.scaled_numbers import known_numbers, told_ranks
from fmegatron.step.checker.shares import owing
from fmegatron.step.checker.values import (
    OWED,
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
from fmegatron.step.description import Description
from fmegatron.step.graph.nodes import node_of, user_line
from fmegatron.step.second_device import on_second_device
from fmegatron.step.torch_private import FakeTensorMode
from fmegatron.step.tracing import Traced, trace
from fmegatron.tree import checks, labels, structure

__all__ = ["ANYHOW", "check", "check_call", "check_traced"]

Node = torch.fx.Node


def check(
    fn: Callable | Description,
    *args: structure.Tree,
    allow: Mapping[str, str] | None = None,
) -> Report:
    """Whether `fn(state, batch) -> (state, metrics)` keeps its layouts: all findings, with their lines.

    Args:
        fn: over symbolic axes of the mesh of its arguments: a step, or any function of arrays, such as an evaluation.
            Or a `step.Description`, alone: its step, with its state and batch.
        *args: what it is called with, abstract or not: trees of ArraySpecs, of Layouts, or of tensors whose layouts are
            known (`tree.place`). The mesh is theirs, of any size: no process group, no device, no memory; 16,384 ranks
            take as long as one. In result 0, what stands where argument 0 has an array must have its layout: such a
            function is an update, and what it reports beside must be the same on all ranks. Of other functions this
            holds for results without dims; arrays may have any layout, but are no pending sums. Where a function
            itself states the layout of a result (`tree.place`), it must have it.
        allow: "file.py:line" -> reason: findings of these lines are listed as silenced.

    A finding is a proof of a mistake: at its line a value stops meaning what it means on one rank (arithmetic that
    undoes just this mistake, on purpose, could still mend it: `allow` states so). What no rule can decide is never a
    finding: the report lists it as unproven, with the outputs that depend on it, and is then not `ok`. Before that a
    small step is run on random numbers, on simulated ranks and on one: what differs in every reading is a finding, and
    unproven where rules prove it.
    What is proven: that every sum over ranks which an output needs is made once, over the right axes, in forward,
    backward and optimizer. What no check of types can see, and simulated ranks do (`testing.simulate`, `parity`):
    constants (a loss scale that is wrong), a false `declare`, and mistakes inside of a movement, such as the direction
    of a ring, or gradients that it does not bring home. Sizes decide: a mesh on which a rank has one head, or as many
    rows as columns, shows less than one on which all sizes differ.
    Raises ValueError, naming the path, for an array whose layout is not known, and for two meshes.
    """
    given = fn
    fn, args = (fn.function, (fn.state, fn.batch)) if isinstance(fn, Description) and not args else (fn, args)
    layouts = tree.layouts(args)
    flat = tree.leaves(layouts)
    if isinstance(fn, Description) or not flat:
        raise ValueError(
            "check: got no arrays, or a Description with some, wanted those that a function is called with, or a "
            "Description alone: check(step, state, batch), check(describe(config))"
        )
    checks.require_mesh(layouts, flat[0].mesh, "check: the arguments", "the first of them")
    empty = tree.map(_empty, layouts)
    traced = trace(fn, empty)
    kinds.require_mesh_of_graph(traced.graph_module.graph, flat[0].mesh, "check", "the arguments")
    require_rows(traced, flat, "check: the arguments")
    outputs = _wanted(traced, (0,))
    step = Step(given, args, traced, outputs, _empty)
    report = check_traced(traced, flat[0].mesh, flat, outputs, data=_data(traced), allow=allow)
    if not report.findings:
        told, before = told_ranks(given, flat[0].mesh), None
        if report.unproven and known_numbers(traced, fn, layouts, told, _empty):
            known = check_traced(traced, flat[0].mesh, flat, outputs, data=_data(traced), allow=allow)
            if not known.findings and len(known.unproven_outputs) < len(report.unproven_outputs):
                before, report = report, known
        report = differing(report, step, flat[0].mesh, before)
    fault = on_second_device(traced, fn, empty)
    if fault is None:
        return report
    at, what = fault
    if user_line(at) in (allow or {}):
        return report
    text = f"{at}: made without a device; on a second device {what}. Fix: give device=x.device"
    return replace(report, on_second_device=text)


def _wanted(traced: Traced, kept: Collection[int]) -> list[Layout | Anyhow | None]:
    """The layout that each output must have: of the array of an argument `kept` in whose place it stands, else what the
    function states. Of what is left, what an update reports beside the new state, and what has no dims, is the same on
    all ranks (None); an array that another function returns may have any (ANYHOW).

    A function that returns no tuple has one result, which stands for its first argument.
    """
    inputs, heads = dict(zip(traced.in_paths, traced.in_labels, strict=True)), {str(position) for position in kept}
    places = _places(traced)
    updates = any(at in inputs and at.partition("/")[0] in heads for at in places)
    found: list[Layout | Anyhow | None] = []
    for at, node, stated in zip(places, traced.outputs, traced.out_labels, strict=True):
        label = (inputs.get(at) if at.partition("/")[0] in heads else None) or stated
        free = node.meta["val"].dim() > 0 and not updates
        if label is None or (label is stated and label.layout.unreduced):  # a gradient, whose loss may be no part
            found.append(Anyhow(label.layout.unreduced if label else ()) if free or label else None)
        else:
            found.append(label.layout)
    return found


def _places(traced: Traced) -> list[str]:
    """For each output the path of the argument in whose place it stands, if there is one."""
    several = traced.out_tree.type is tuple
    return [path if several else f"0/{path}" if path else "0" for path in traced.out_paths]


def _in_place_of(traced: Traced) -> list[Layout | None]:
    """For each output the layout of the array in whose place it stands; None where there is none."""
    inputs = dict(zip(traced.in_paths, traced.in_labels, strict=True))
    return [label.layout if (label := inputs.get(at)) else None for at in _places(traced)]


def _data(traced: Traced) -> set[str]:
    """Paths of the inputs behind the first argument."""
    return {path for path in traced.in_paths if path.partition("/")[0] != "0"}


@dataclass(frozen=True)
class Anyhow:
    """Of an output: each rank may have what it likes of it, but for a pending sum, which is a part of no array.

    pending: axes over which it may be one: a gradient, as autograd leaves it.
    """

    pending: tuple[str, ...] = ()


ANYHOW = Anyhow()
_RANKS_OWN = (Varying, First, Somewhere)


def check_traced(
    traced: Traced,
    mesh: Mesh,
    in_layouts: Sequence[Layout | None],
    out_layouts: Sequence[Layout | Anyhow | None],
    *,
    data: Collection[str] = (),
    allow: Mapping[str, str] | None = None,
    like: Sequence[Layout | None] = (),
) -> Report:
    """`check` of a graph that is there already.

    Args:
        traced: the graph of a step.
        mesh: its ranks.
        in_layouts: a layout per placeholder; None: the same on all ranks.
        out_layouts: a layout per output; None likewise; ANYHOW: it is not compared.
        data: paths of inputs whose rows may be assigned to ranks and microbatches in any order.
        allow: as of `check`.
        like: a layout per output, or None, that it may turn out to have, where it may have any (`Report.found`).
    """
    graph = traced.graph_module.graph
    scope = Scope(mesh, top=graph)
    shapes = [node.meta["val"].shape for node in graph.find_nodes(op="placeholder")]
    given = zip(traced.in_paths, in_layouts, shapes, strict=True)
    arguments = [replace(value_of(layout, shape), data=path in data) for path, layout, shape in given]
    results = [*zip(interpreted(scope, graph, arguments), traced.outputs, traced.out_paths, out_layouts, strict=True)]
    open_: dict[int, tuple[dict, dict]] = {}  # reason -> axes, outputs that depend on it (as ordered sets)
    for i, (value, node, path, layout) in enumerate(results):
        for axis, origins in _compare(scope, value, node, path, layout, i).items():
            for origin in sorted(origins):
                axes, paths = open_.setdefault(origin, ({}, {}))
                axes[axis], paths[path] = None, None
    reported: list[Finding | Unproven] = [*sorted(scope.findings, key=scope.findings.__getitem__)]
    reported += mixed(graph, in_layouts, out_layouts, traced.out_paths)
    for origin in sorted(open_):
        (at, op, why, fix), (axes, paths) = scope.reason(origin), open_[origin]
        reported.append(Unproven(at, op, tuple(axes), why, fix, tuple(paths)))
    allow = dict(allow or {})
    silenced = tuple((one, allow[user_line(one.at)]) for one in reported if user_line(one.at) in allow)
    kept = [one for one in reported if user_line(one.at) not in allow]
    findings = tuple(one for one in kept if isinstance(one, Finding))
    found = tuple(
        (i, layout)
        for i, ((value, node, path, wanted), layout) in enumerate(zip(results, like, strict=False))
        if layout is not None and wanted == ANYHOW and _has(scope, value, node, path, layout, i)
    )
    return Report(findings, tuple(one for one in kept if isinstance(one, Unproven)), silenced, found)


def _empty(layout: Layout) -> torch.Tensor:
    _require_even(layout, "check")
    with FakeTensorMode():  # no memory, and yet of the device on which a step makes its own tensors
        return labels.labelled(torch.empty(layout.local_shape(0), dtype=layout.dtype, device="cpu"), layout)


def _has(scope: Scope, value: Value, node: Node, path: str, layout: Layout, number: int) -> bool:
    """Whether an output is proven to have a layout; nothing is noted."""
    if layout.unreduced or node.meta["val"].dtype is not layout.dtype:
        return False
    if tuple(node.meta["val"].shape) != layout.local_shape(0):
        return False
    trial = replace(scope, findings={}, reasons=dict(scope.reasons))
    return not _compare(trial, value, node, path, layout, number) and not trial.findings


def _require_even(layout: Layout, who: str) -> None:
    notation.require_shares(layout, who)
    if not layout.is_even:
        raise ValueError(
            f"{who}: got the layout {layout}, which is uneven, wanted equal shapes on all ranks, that they have one "
            "graph; pad the dim, or choose another mesh"
        )


def check_call(
    traced: Traced,
    mesh: Mesh,
    donate: Collection[int],
    name: str,
    allow: Mapping[str, str] | None = None,
    speak: bool = True,
) -> Report:
    """Check a traced call whose arguments all have known layouts: the Report, after a warning where outputs
    are unproven.

    donate: positions of the arguments whose results must have their layouts. speak: whether this process warns: of the
    ranks of a job, one does. Raises ValueError with all findings and their lines, or naming the argument that does not
    have its layout.
    """
    given = [label.layout for label in traced.in_labels if label is not None]
    checks.require_mesh(dict(zip(traced.in_paths, given, strict=True)), mesh, f"jit of {name}", "the world")
    kinds.require_mesh_of_graph(traced.graph_module.graph, mesh, f"jit of {name}", "the world")
    for path, fake, layout in zip(traced.in_paths, traced.fakes, given, strict=True):
        _require_even(layout, f"{name}: argument {path!r}")
        if tuple(fake.shape) != layout.local_shape(0) or fake.dtype is not layout.dtype:
            raise ValueError(
                f"{name}: argument {path!r}: got {dtypes.dtype_name(fake.dtype)}{list(fake.shape)}, wanted "
                f"{dtypes.dtype_name(layout.dtype)}{list(layout.local_shape(0))} on each rank, by its layout {layout}; "
                "place it with the layout that it has: tree.place(x.detach(), layout)"
            )
    require_rows(traced, given, name)
    outputs, like = _wanted(traced, donate), _in_place_of(traced)
    report = check_traced(traced, mesh, given, outputs, data=_data(traced), allow=allow, like=like).require(name)
    if report.unproven and speak:
        lines = "\n  ".join(map(str, report.unproven))
        count, all_ = len(report.unproven_outputs), len(traced.out_paths)
        warnings.warn(
            f"{name}: the check of collectives cannot prove {count} of {all_} outputs:\n  {lines}", stacklevel=2
        )
    return report


def _compare(
    scope: Scope, value: Value, node: Node, path: str, layout: Layout | Anyhow | None, number: int
) -> dict[str, frozenset[int]]:
    """Notes findings where the output of that number is not what its layout says -> axis -> reasons why that is not
    known."""
    if isinstance(layout, Layout) and (got := tuple(node.meta["val"].shape)) != layout.local_shape(0):
        what = f"the output {path} is {list(got)} on each rank, its layout says {list(layout.local_shape(0))}"
        scope.find(node, "", what, "give it the shape of what it stands for")
        return {}
    want, source = value_of(None if isinstance(layout, Anyhow) else layout, node.meta["val"].shape), node
    while source.target is torch.ops.aten.detach.default:  # of the line that calls the step, not of the step
        source = node_of(source.args[0])
    unproven: dict[str, frozenset[int]] = {}
    for axis in scope.mesh.names:
        if scope.mesh[axis] == 1:
            continue
        if scope.doubts and (doubts := scope.doubted(number, axis)):
            unproven[axis] = doubts
        if isinstance(layout, Anyhow):
            kinds = (*_RANKS_OWN, Pending) if axis in layout.pending else _RANKS_OWN
            if isinstance(value.marks.get(axis), (*kinds, type(None))):
                continue  # parts of it, or each rank its own
        mark = _difference(scope, value, want, axis, source, path)
        if isinstance(mark, (Suspect, Wrong)):
            scope.find(mark.node, axis, mark.what, mark.fix, mark.birth)
            unproven.pop(axis, None)
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
    if isinstance(mark, Somewhere) and (mark.or_sum or mark.reduced):
        return scope.unknown(node, "it is sharded on a dim that shapes do not tell, or a pending sum")
    fold = next((f for dim in value.dims for f in folds_of(dim) if f.axis == axis), None)
    if fold is not None:
        what = f"the output {path} has parts side by side that are still to be reduced ({fold.kind})"
        scope.find(fold.node, axis, what, "reduce the value first; wrong axis?")
        return None
    if (padding := at_output(scope, node, value, want, axis, path)) is not None:
        return padding
    dims = want.shards(axis)
    if isinstance(mark, Somewhere) and dims and not mark.may_be(dims[0]):
        return scope.unknown(node, f"the output {path} is sharded on a dim that shapes do not tell")
    if got == wanted and dims:
        mark = _placement(scope, value, want, axis, node, path, dims[0])
        if mark is not None:
            return mark
    right = got == wanted or (got == "sharded" and wanted.startswith("sharded"))
    right |= got == "replicated" and (value.constant is not None or value.equal_terms or node.op == "placeholder")
    if not right:
        _not_as_wanted(scope, value, axis, node, path, got, wanted)
        return None
    if got == "replicated" and axis in value.portion and value.constant is None:
        if (mark := owing(scope, value, axis, node)) is not None or value.portion[axis] in OWED:
            return mark
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
        and (got[0].cuts - want[0].cuts or not same_pieces(got[0].cuts, want[0].cuts))
    ):
        parts = f"in parts that begin at {said(got[0].cuts)}, its layout says {said(want[0].cuts)}"
        return scope.unknown(node, f"the output {path} is sharded on dim {d} {parts}")
    return None

"""Checks of a step: of a function over declared layouts, of a traced graph, and of each call that a jit compiles.

A step is interpreted once over what is sharded, pending or replicated, for any number of ranks. Nothing is computed and
no rank exists: forward, backward and optimizer are nodes of one graph, and a rule for each states what its result is
over every axis of the mesh. At the end the outputs are compared with the layouts of the new state. The abstract domain
is that of partial and sharded values of the sharding literature (GSPMD, Xu et al. 2021; "varying" and "invariant" of
shard_map), applied to backward and optimizer as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fmegatron import tree
from fmegatron.layout import DataParallel, Layout, Mesh
from fmegatron.step.batch_rows import microbatches_of, require_batch, require_rows
from fmegatron.step.check.context import GO_ON, Finding, Report, Scope, Unproven
from fmegatron.step.check.dims import folds_of, interleaved, order_of
from fmegatron.step.check.interpret import interpreted
from fmegatron.step.check.marks import too_large
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
from fmegatron.step.graph.nodes import node_of, user_line
from fmegatron.step.torch_private import FakeTensorMode
from fmegatron.step.trace import Traced, trace

__all__ = ["Declared", "check", "check_call", "check_traced", "declared_by"]

Node = torch.fx.Node


def check(
    step: Callable,
    state_layouts: tree.Tree,
    batch_layouts: tree.Tree,
    mesh: Mesh,
    *,
    allow: Mapping[str, str] | None = None,
) -> Report:
    """Whether `step(state, batch) -> (state, metrics)` keeps its layouts on `mesh`: all findings, with their lines.

    Args:
        step: over symbolic axes of the mesh.
        state_layouts: a tree of Layouts (or ArraySpecs). The new state must have the layouts of the old one, the
            metrics must be the same on all ranks.
        batch_layouts: such a tree for the batch.
        mesh: of any size. No process group, no device, no memory: 16,384 ranks take as long as one.
        allow: "file.py:line" -> reason: findings of these lines are listed as silenced.

    A finding is a proof of a mistake: at its line a value stops meaning what it means on one rank (arithmetic that
    undoes just this mistake, on purpose, could still mend it: `allow` states so). What no rule can decide is never a
    finding: the report lists it as unproven, with the outputs that depend on it, and is then not `ok`.
    What is proven: that every sum over ranks which an output needs is made once, over the right axes, in forward,
    backward and optimizer. What no check of types can see, and simulated ranks do (`testing.simulate`, `parity`):
    constants (a loss scale that is wrong), a false `declare`, and mistakes inside of a movement, such as the direction
    of a ring, or gradients that it does not bring home. Sizes decide: a mesh on which a rank has one head, or as many
    rows as columns, shows less than one on which all sizes differ.
    """
    for name, given in (("state_layouts", state_layouts), ("batch_layouts", batch_layouts)):
        tree.require_mesh(given, mesh, f"check: {name}", "the argument")
    arguments = tree.map(_empty, (state_layouts, batch_layouts))
    traced = trace(step, arguments)
    layouts = [x if isinstance(x, Layout) else x.layout for x in tree.leaves((state_layouts, batch_layouts))]
    require_rows(traced, layouts, "check: the arguments")
    state = dict(zip(tree.paths(state_layouts), tree.leaves(state_layouts), strict=True))
    outputs = []
    for path in traced.out_paths:
        head, _, rest = path.partition("/")
        leaf = state.get(rest) if head == "0" else None
        outputs.append(leaf if leaf is None or isinstance(leaf, Layout) else leaf.layout)
    data = {path for path in traced.in_paths if path.startswith("1/") or path == "1"}
    return check_traced(traced, mesh, layouts, outputs, data=data, allow=allow)


def check_traced(
    traced: Traced,
    mesh: Mesh,
    in_layouts: list[Layout | None],
    out_layouts: list[Layout | None],
    *,
    data: Collection[str] = (),
    allow: Mapping[str, str] | None = None,
) -> Report:
    """`check` of a graph that is there already.

    Args:
        traced: the graph of a step.
        mesh: its ranks.
        in_layouts: a layout per placeholder; None: the same on all ranks.
        out_layouts: a layout per output; None likewise.
        data: paths of inputs whose rows may be assigned to ranks and microbatches in any order.
        allow: as of `check`.
    """
    scope, graph = Scope(mesh), traced.graph_module.graph
    shapes = [node.meta["val"].shape for node in graph.find_nodes(op="placeholder")]
    given = zip(traced.in_paths, in_layouts, shapes, strict=True)
    arguments = [replace(value_of(layout, shape), data=path in data) for path, layout, shape in given]
    results = zip(interpreted(scope, graph, arguments), traced.outputs, traced.out_paths, out_layouts, strict=True)
    open_: dict[int, tuple[dict, dict]] = {}  # reason -> axes, outputs that depend on it (as ordered sets)
    for value, node, path, layout in results:
        for axis, origins in _compare(scope, value, node, path, layout).items():
            for origin in sorted(origins):
                axes, paths = open_.setdefault(origin, ({}, {}))
                axes[axis], paths[path] = None, None
    reported: list[Finding | Unproven] = [*sorted(scope.findings, key=scope.findings.__getitem__)]
    for origin in sorted(open_):
        (at, op, why, fix), (axes, paths) = scope.reason(origin), open_[origin]
        reported.append(Unproven(at, op, tuple(axes), why, fix, tuple(paths)))
    allow = dict(allow or {})
    silenced = tuple((one, allow[user_line(one.at)]) for one in reported if user_line(one.at) in allow)
    kept = [one for one in reported if user_line(one.at) not in allow]
    findings = tuple(one for one in kept if isinstance(one, Finding))
    return Report(findings, tuple(one for one in kept if isinstance(one, Unproven)), silenced)


def _empty(leaf: Any) -> torch.Tensor:
    layout = leaf if isinstance(leaf, Layout) else leaf.layout
    if not layout.is_even:
        raise ValueError(
            f"check: got the layout {layout}, which is uneven, wanted equal shapes on all ranks, that they have one "
            "graph; pad the dim, or choose another mesh"
        )
    with FakeTensorMode():  # no memory, and yet of the device on which a step makes its own tensors
        return torch.empty(layout.local_shape(0), dtype=layout.dtype, device="cpu")


@dataclass(frozen=True, eq=False)
class Declared:
    """Layouts of a step's two arguments; the new state (result 0) has those of the old one.

    state: a tree of Layouts or ArraySpecs.  batch: such a tree, or the strategy by whose `batch_layout` every leaf is
    split, for as many microbatches as the step cuts it into (microbatches).  loss: the function of which the step takes
    the gradient, for formulas that know it (`plan.quick`).
    """

    state: Any
    batch: Any
    microbatches: int = 1
    loss: Callable | None = field(default=None, repr=False, compare=False)

    def require_batch(self, layout: Layout, who: str) -> None:
        """ValueError unless what has this layout may be the step's batch: for what assigns rows to the ranks."""
        if isinstance(self.batch, DataParallel):
            require_batch(layout, self.batch, self.microbatches, tree.leaves(self.state)[0].mesh, who)


def declared_by(fn: Callable) -> Declared | None:
    """What a function states in its attribute `declared` (as steps of `build_train_step` do), else None."""
    found = getattr(fn, "declared", None)
    return found if isinstance(found, Declared) else None


def check_call(
    traced: Traced, declared: Declared, name: str, allow: Mapping[str, str] | None = None, speak: bool = True
) -> Report:
    """Check a traced call of `step(state, batch)`: the Report, after a warning where outputs are unproven.

    speak: whether this process warns: of the ranks of a job, one does. Raises ValueError with all findings and their
    lines, or naming the argument that does not have its layout.
    """
    state = _by_path(declared.state, "0")
    mesh = next(iter(state.values())).mesh
    shapes = {path: fake for path, fake in zip(traced.in_paths, traced.fakes, strict=True)}
    data = {path for path in shapes if path.startswith("1/") or path == "1"}
    if isinstance(declared.batch, DataParallel):
        parts = microbatches_of(traced)
        batch = {path: _of_rows(shapes[path], mesh, declared.batch, parts.get(path, 1)) for path in data}
    else:
        batch = _by_path(declared.batch, "1")
    known = state | batch
    for path, fake in shapes.items():
        if path in known and tuple(fake.shape) != known[path].local_shape(0):
            raise ValueError(
                f"{name}: argument {path!r}: got shape {tuple(fake.shape)}, wanted {known[path].local_shape(0)} on "
                f"each rank, by its layout {known[path]}; correct the layout, or jit with check=False"
            )
    given = [known.get(path) for path in traced.in_paths]
    require_rows(traced, given, name)
    wanted = [state.get(path) for path in traced.out_paths]
    report = check_traced(traced, mesh, given, wanted, data=data, allow=allow).require(name)
    if report.unproven and speak:
        lines = "\n  ".join(map(str, report.unproven))
        count, all_ = len(report.unproven_outputs), len(traced.out_paths)
        warnings.warn(
            f"{name}: the check of collectives cannot prove {count} of {all_} outputs:\n  {lines}", stacklevel=2
        )
    return report


def _by_path(layouts: Any, head: str) -> dict[str, Layout]:
    leaves = [x if isinstance(x, Layout) else x.layout for x in tree.leaves(layouts)]
    return {f"{head}/{path}" if path else head: x for path, x in zip(tree.paths(layouts), leaves, strict=True)}


def _of_rows(fake: Any, mesh: Mesh, strategy: DataParallel, microbatches: int) -> Layout:
    """The layout of a leaf of the batch; a 0-d one is the same on all ranks."""
    shape = tuple(fake.shape)
    ways = [mesh.extent([axis for axis in axes if axis in mesh]) for axes in (strategy.axes, strategy.sequence)]
    whole = tuple(n * k for n, k in zip(shape, (*ways, *[1] * len(shape)), strict=False))
    return strategy.batch_layout(whole, fake.dtype, mesh, microbatches)


def _compare(scope: Scope, value: Value, node: Node, path: str, layout: Layout | None) -> dict[str, frozenset[int]]:
    """Notes findings where a value is not what its layout says -> axis -> reasons why that is not known."""
    want = value_of(layout, node.meta["val"].shape)
    source = node
    while source.target is torch.ops.aten.detach.default:  # of the line that calls the step, not of the step
        source = node_of(source.args[0])
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

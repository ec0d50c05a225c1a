"""Check a traced step: interpret its graph once over what is sharded, pending or replicated, for any number of ranks.

Nothing is computed and no rank exists: forward, backward and optimizer are nodes of one graph, and a rule says for each
what its result is over every axis of the mesh. At the end the outputs are compared with the layouts of the new state.
The abstract domain is that of partial and sharded values of the sharding literature (GSPMD, Xu et al. 2021; "varying"
and "invariant" of shard_map), applied to backward and optimizer as well.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from fmegatron import tree
from fmegatron.collectives import require_mesh_of_graph
from fmegatron.layout import Layout, Mesh
from fmegatron.step.check.findings import Report
from fmegatron.step.check.rules import value_after
from fmegatron.step.check.scope import Scope, line_of
from fmegatron.step.check.values import Value, order_of, plain, value_of
from fmegatron.step.rows import require_rows
from fmegatron.step.torch_private import FakeTensorMode
from fmegatron.step.trace import Traced, trace, written_by


def check(
    step: Callable, state_layouts: Any, batch_layouts: Any, mesh: Mesh, *, allow: Mapping[str, str] | None = None
) -> Report:
    """Whether `step(state, batch) -> (state, metrics)` keeps its layouts on `mesh`: all findings, with their lines.

    step: over symbolic axes of the mesh.  state_layouts, batch_layouts: trees of Layouts (or ArraySpecs). The new state
    must have the layouts of the old one, the metrics must be the same on all ranks.  allow: "file.py:line" -> reason:
    findings at these lines are listed as silenced. No process group, no device, no memory: 16,384 ranks take as long as
    one.
    What it cannot see: constants (a wrong loss scale), a false `declare`; `testing.simulate` sees those.
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
    data = {path for path in traced.in_paths if path.startswith("1/")}
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
    """`check` of a graph that is there already. A layout per placeholder and output; None: the same on all ranks.

    data: paths of inputs whose rows may be dealt to ranks and microbatches in any order.
    """
    scope, graph = Scope(mesh), traced.graph_module.graph
    shapes = [node.meta["val"].shape for node in graph.find_nodes(op="placeholder")]
    given = zip(traced.in_paths, in_layouts, shapes, strict=True)
    arguments = [replace(value_of(layout, shape), data=path in data) for path, layout, shape in given]
    results = zip(_walk(scope, graph, arguments), traced.outputs, traced.out_paths, out_layouts, strict=True)
    for value, node, path, layout in results:
        _compare(scope, value, node, path, layout)
    allow = dict(allow or {})
    kept = tuple(f for f in scope.findings if f.at.split(" ")[0] not in allow)
    silenced = tuple((f, allow[f.at.split(" ")[0]]) for f in scope.findings if f.at.split(" ")[0] in allow)
    return Report(tuple(dict.fromkeys(kept)), tuple(scope.unproven.items()), silenced)


def _empty(leaf: Any) -> torch.Tensor:
    layout = leaf if isinstance(leaf, Layout) else leaf.layout
    if not layout.is_even:
        raise ValueError(
            f"{layout} is uneven: ranks would have graphs of their own; pad the dim, or choose another mesh"
        )
    with FakeTensorMode():  # no memory, and yet of the device on which a step makes its own tensors
        return torch.empty(layout.local_shape(0), dtype=layout.dtype, device="cpu")


def _walk(scope: Scope, graph: torch.fx.Graph, arguments: Iterable[Value]) -> list[Value]:
    """The Values that a graph returns. A value is dropped after its last use: many live objects would make Python's
    garbage collector go through all memory of the process."""
    require_mesh_of_graph(graph, scope.mesh, "check", "the layouts")
    values, arguments, uses = scope.values, iter(arguments), Counter()
    for node in graph.nodes:
        uses.update(node.all_input_nodes)
    for node in graph.nodes:
        if node.op == "output":
            return [values[source] for source in node.args[0]]
        if node.op == "placeholder":
            values[node] = next(arguments)
        elif node.op == "get_attr":
            constant = functools.reduce(getattr, node.target.split("."), graph.owning_module)
            values[node] = value_of(None, constant.shape)
        elif hasattr(node.target, "entry"):  # a compiled layer
            values[node] = _layer(scope, node.target.entry.graph_module.graph, [values[n] for n in node.args[0]])
        else:
            values[node] = value_after(scope, node)
            _written(scope, node)
        for source in node.all_input_nodes:
            uses[source] -= 1
            if not uses[source]:
                del values[source]
    raise AssertionError("graph without an output node")


def _layer(scope: Scope, graph: torch.fx.Graph, arguments: list[Value]) -> list[Value]:
    """What a compiled layer returns; for arguments as before what it did before, so that depth costs nothing."""
    calls = scope.layers.setdefault(graph, [])
    for given, found in calls:
        if given == arguments:
            return found
    calls.append((arguments, _walk(replace(scope, values={}), graph, arguments)))
    return calls[-1][1]


def _written(scope: Scope, node: torch.fx.Node) -> None:
    """An op that writes into an argument, or a list of them, gives each the new value.

    What shares its memory and lies in it alike has the new value, too; of other views nothing is known any more.
    """
    targets, new = written_by(node), scope.values[node]
    values = new if isinstance(new, list) else [new]
    if len(values) != len(targets):  # not what it returns is what it writes
        values = [None] * len(targets)
    for target, value in zip(targets, values, strict=True):
        _overwrite(scope, node, target.meta["val"], value)


def _overwrite(scope: Scope, node: torch.fx.Node, place: torch.Tensor, new: Value | None) -> None:
    storage = place.untyped_storage()._cdata
    for other, value in list(scope.values.items()):
        meta = other.meta.get("val")
        if not isinstance(value, Value) or not isinstance(meta, torch.Tensor):
            continue
        if meta.untyped_storage()._cdata != storage:
            continue
        if new is not None and _lies(meta) == _lies(place):
            scope.values[other] = new
            continue
        unknown = value.axes() | (frozenset(scope.mesh.names) if new is None else new.axes())
        if unknown:
            scope.unproven.setdefault(f"{node.target} into shared memory", line_of(node))
        scope.values[other] = Value(tuple(plain(n) for n in meta.shape), tainted=unknown)


def _lies(x: torch.Tensor) -> tuple:
    """Where the elements of a tensor lie in its storage."""
    return x.shape, x.stride(), x.storage_offset()


def _compare(scope: Scope, value: Value, node: torch.fx.Node, path: str, layout: Layout | None) -> None:
    want = value_of(layout, node.meta["val"].shape)
    for axis in scope.mesh.names:
        if scope.mesh[axis] == 1 or axis in value.tainted:
            continue
        got, wanted = value.state(axis), want.state(axis)
        dims = want.shards(axis)
        if got == wanted and dims and want.sharded == value.sharded:
            orders = [order_of(v.dims[dims[0]]) for v in (value, want)]
            if set(orders[0]) == set(orders[1]) and orders[0] != orders[1]:
                mine, layouts = ("+".join(order) for order in orders)
                what = f"the output {path} is sharded over {mine} on dim {dims[0]}, its layout says {layouts}"
                scope.find(node, axis, what, "deal its ranges in the order of the layout")
                continue
        if got == wanted or (got == "sharded" and wanted.startswith("sharded")):
            continue
        if got == "replicated" and (value.constant is not None or value.equal_terms):
            continue
        if got == "replicated" and node.op == "placeholder":
            continue
        birth = value.partial[axis].birth if axis in value.partial else value.drawn.get(axis)
        while node.target is torch.ops.aten.detach.default:  # of the line that calls the step, not of the step
            node = node.args[0]
        fix = f"psum it over {axis!r}" if axis in value.partial else "look where its gradient or its value comes from"
        if axis in value.drawn:
            fix = "draw from a key that is an argument, as a function of global positions"
        scope.find(node, axis, f"the output {path} is {got}, its layout says {wanted}", fix, birth)

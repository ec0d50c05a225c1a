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
from fmegatron.step.batch_rows import require_rows
from fmegatron.step.check.findings import Finding, Report, Unproven
from fmegatron.step.check.made import made
from fmegatron.step.check.outputs import compare
from fmegatron.step.check.pieces import pieces_of, result_of
from fmegatron.step.check.rules import unproven, value_after
from fmegatron.step.check.scope import GO_ON, Scope
from fmegatron.step.check.values import Value, value_of
from fmegatron.step.check.writes import written
from fmegatron.step.graph.nodes import written_by
from fmegatron.step.torch_private import FakeTensorMode
from fmegatron.step.trace import Traced, trace

Node = torch.fx.Node


def check(
    step: Callable, state_layouts: Any, batch_layouts: Any, mesh: Mesh, *, allow: Mapping[str, str] | None = None
) -> Report:
    """Whether `step(state, batch) -> (state, metrics)` keeps its layouts on `mesh`: all findings, with their lines.

    step: over symbolic axes of the mesh.  state_layouts, batch_layouts: trees of Layouts (or ArraySpecs). The new state
    must have the layouts of the old one, the metrics must be the same on all ranks.  allow: "file.py:line" -> reason:
    what is said of these lines is listed as silenced. No process group, no device, no memory: 16,384 ranks take as long
    as one.

    A finding is a proof of a mistake: at its line a value stops meaning what it means on one rank (arithmetic that
    undoes just this mistake, on purpose, could still mend it: `allow` says so). What no rule can decide is never a
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
    """`check` of a graph that is there already. A layout per placeholder and output; None: the same on all ranks.

    data: paths of inputs whose rows may be dealt to ranks and microbatches in any order.
    """
    scope, graph = Scope(mesh), traced.graph_module.graph
    shapes = [node.meta["val"].shape for node in graph.find_nodes(op="placeholder")]
    given = zip(traced.in_paths, in_layouts, shapes, strict=True)
    arguments = [replace(value_of(layout, shape), data=path in data) for path, layout, shape in given]
    results = zip(_walk(scope, graph, arguments), traced.outputs, traced.out_paths, out_layouts, strict=True)
    open_: dict[int, tuple[dict, dict]] = {}  # reason -> axes, outputs that depend on it (as ordered sets)
    for value, node, path, layout in results:
        for axis, origins in compare(scope, value, node, path, layout).items():
            for origin in sorted(origins):
                axes, paths = open_.setdefault(origin, ({}, {}))
                axes[axis], paths[path] = None, None
    said: list[Finding | Unproven] = sorted(scope.findings, key=scope.findings.__getitem__)
    for origin in sorted(open_):
        (at, op, why, fix), (axes, paths) = scope.reason(origin), open_[origin]
        said.append(Unproven(at, op, tuple(axes), why, fix, tuple(paths)))
    allow = dict(allow or {})
    silenced = tuple((one, allow[one.at.split(" ")[0]]) for one in said if one.at.split(" ")[0] in allow)
    kept = [one for one in said if one.at.split(" ")[0] not in allow]
    findings = tuple(one for one in kept if isinstance(one, Finding))
    return Report(findings, tuple(one for one in kept if isinstance(one, Unproven)), silenced)


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
    _mark_live(scope, graph)
    for node in graph.nodes:
        uses.update(node.all_input_nodes)
    for node in graph.nodes:
        if node.op == "output":
            # An op of several results, taken apart, may have none in a place: the gradient of an absent weight.
            return [None if source is None else values[source] for source in node.args[0]]
        if node.op == "placeholder":
            values[node] = next(arguments)
        elif node not in scope.live:  # no output depends on it
            continue
        elif node.op == "get_attr":
            constant = functools.reduce(getattr, node.target.split("."), graph.owning_module)
            values[node] = made(constant)
        elif hasattr(node.target, "entry"):  # a compiled layer
            values[node] = _layer(scope, node.target.entry.graph_module.graph, [values[n] for n in node.args[0]])
        else:
            scope.order[node] = len(scope.order)
            values[node] = _after(scope, node)
            written(scope, node)
        for source in node.all_input_nodes:
            uses[source] -= 1
            if not uses[source]:
                del values[source]
    raise AssertionError("graph without an output node")


def _mark_live(scope: Scope, graph: torch.fx.Graph) -> None:
    """The nodes on which outputs depend: all else may be as wrong as it likes."""
    live = scope.live
    for node in reversed(graph.nodes):
        if node.op == "output" or node in live or written_by(node):
            live.add(node)
            live.update(node.all_input_nodes)


def _after(scope: Scope, node: Node) -> Any:
    """The Value of a node by its rule; without one, by those of the ops that it is made of."""
    found = value_after(scope, node)
    if found is not None or node.meta.get("val") is None:
        return found
    graph = pieces_of(scope, node)
    if graph is None:
        return unproven(scope, node, f"no rule for {node.target}", GO_ON)
    inner = replace(scope, values={}, depth=scope.depth + 1)
    return result_of(node, _walk(inner, graph, [scope.values[n] for n in node.all_input_nodes]))


def _layer(scope: Scope, graph: torch.fx.Graph, arguments: list[Value]) -> list[Value]:
    """What a compiled layer returns; for arguments as before what it did before, so that depth costs nothing."""
    calls = scope.layers.setdefault(graph, [])
    for given, found in calls:
        if given == arguments:
            return found
    calls.append((arguments, _walk(replace(scope, values={}), graph, arguments)))
    return calls[-1][1]

"""Interpreter of one traced graph for all ranks in this process: a list of per-rank values per node.

A collective is an operation on such a list (`Collective.simulated`). Ranks that hold the very
same tensors compute once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from fmegatron.collectives import kinds, table
from fmegatron.collectives.torch_private import schema_of
from fmegatron.layout import Mesh
from fmegatron.step.graph import nodes
from fmegatron.step.pipeline import entry as pipeline
from fmegatron.step.pipeline.on_every_rank import simulated
from fmegatron.step.real_strides import that_copies
from fmegatron.step.torch_private import UNSAFE_VIEW

__all__ = ["interpret"]


# ---- collectives -----------------------------------------------------------------------------------------------------
def _communicate(collective: kinds.Collective, node: fx.Node, values: dict[fx.Node, list], mesh: Mesh) -> list[list]:
    """values: of each node before, one per rank -> the results, per rank a list."""
    columns = [values[n] for n in nodes.items_of(node.args[0])]
    axes, sizes = tuple(nodes.items_of(node.args[1])), node.args[2]
    counts = [x for x in node.args[3:] if isinstance(x, fx.Node)]
    out = [[] for _ in range(mesh.size)]
    for column, given in zip(columns, collective.each(node.args[3:], len(columns)), strict=True):
        done = {}  # groups that hold the same tensors compute once
        found = [None] * mesh.size
        for ranks in mesh.groups(axes):
            own = [[values[x][r] for r in ranks] if isinstance(x, fx.Node) else x for x in given]
            key = tuple(id(one[r]) for one in (column, *(values[n] for n in counts)) for r in ranks)
            if key not in done:
                try:
                    done[key] = collective.simulated([column[r] for r in ranks], sizes, *own)
                except ValueError as e:  # counts that do not agree
                    raise ValueError(f"simulate: {node.meta.get('at', '?')}: {e}") from None
            for rank, y in zip(ranks, done[key], strict=True):
                found[rank] = y
        for row, y in zip(out, found, strict=True):
            row.append(y)
    return out


# ---- graphs ----------------------------------------------------------------------------------------------------------
# Their results are in the memory of their argument, which their schemas do not state (`nn.GRU` writes into a part).
_aten = torch.ops.aten
_VIEWS_BY_NATURE = frozenset(
    {UNSAFE_VIEW, operator.getitem, _aten.unsafe_split.Tensor, _aten.unsafe_split_with_sizes.default}
)


def _written(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose storage some in-place node writes, the aliases of such nodes included."""
    parent = {node: node for node in graph.nodes}
    written = []

    def root(node):
        while parent[node] is not node:
            node = parent[node]
        return node

    for node in graph.nodes:
        if node.target in _VIEWS_BY_NATURE:
            parent[root(node)] = root(node.args[0])
        if node.target is table.DECLARE.op:
            for source in node.args[0]:
                parent[root(node)] = root(source)
        schema = schema_of(node.target)
        if schema is None:
            continue
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is None:
                continue
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            for source in [
                v for v in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(v, fx.Node)
            ]:
                written += [source] if argument.alias_info.is_write else []
                if any(r.alias_info is not None for r in schema.returns):
                    parent[root(node)] = root(source)
    roots = {root(node) for node in written}
    return {node for node in graph.nodes if root(node) in roots}


def _own(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    return type(value)(_own(v) for v in value) if isinstance(value, (list, tuple)) else value


def interpret(
    graph: fx.Graph, mesh: Mesh, inputs: list[list], keep: bool = False, around: Callable | None = None
) -> tuple[list[list], dict]:
    """Run a flat graph (see `inline_layers`) for every rank of the mesh.

    inputs: per placeholder the list of its values, one per rank. -> (per output such a list, and the same for every
    node if `keep`, else an empty dict). The inputs are not changed, whatever the graph writes in place. Nodes that draw
    random numbers draw once for all ranks. around: (node, function, args, kwargs) -> what the node gives, of what is no
    collective and changes nothing in place. Raises ValueError for a graph over axes of another mesh.
    """
    kinds.require_mesh_of_graph(graph, mesh, "simulate", "the ranks")
    values: dict[fx.Node, list] = {}
    given, written = iter(inputs), _written(graph)
    last_use = {source: node for node in graph.nodes for source in node.all_input_nodes}
    with torch.no_grad():
        for node in graph.nodes:
            if node.op == "output":
                return [values[n] for n in node.args[0]], (values if keep else {})
            collective = kinds.collective_of(node.target)
            entry = nodes.entry_of(node)
            if node.op == "placeholder":
                out = next(given)
            elif isinstance(entry, pipeline.PipelineEntry) and entry.plan is not None:
                found = simulated(entry.plan, [values[n] for n in nodes.items_of(node.args[0])], mesh, interpret)
                out = [list(row) for row in zip(*found, strict=True)]
            elif collective:
                out = _communicate(collective, node, values, mesh)
            else:
                out = _compute(node, values, mesh.size, node not in written, around)
            if node in written and (node.op == "placeholder" or collective not in (None, table.DECLARE)):
                out = [_own(v) for v in out]  # what is written in place belongs to one rank alone
            values[node] = out
            if not keep:
                for source in node.all_input_nodes:
                    if last_use[source] is node:
                        del values[source]
    raise AssertionError("interpret: the graph has no output node")


def _compute(node, values, world, share, around):
    done, out = {}, []
    sources = node.all_input_nodes
    target, more = that_copies(node) if share else (node.target, {})
    for rank in range(world):
        key = tuple(id(values[s][rank]) for s in sources) if share else rank
        if key not in done:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n, rank=rank: values[n][rank])
            try:
                if around is None or not share:
                    done[key] = target(*args, **kwargs, **more)
                else:
                    done[key] = around(node, target, args, {**kwargs, **more})
            except (RuntimeError, IndexError) as e:  # what fake tensors let pass: products of two dtypes, wrong indices
                raise ValueError(f"simulate: {node.meta.get('at', '?')}: {node.target} on rank {rank}: {e}") from None
        out.append(done[key])
    return out

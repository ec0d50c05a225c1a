"""Run one traced graph for all ranks in this process: a list of per-rank values per node.

A collective is an operation on such a list. Ranks that hold the very same tensors compute once.
"""

from __future__ import annotations

import functools
import operator

import torch
from torch import fx

from fmegatron.collectives import Place, is_symbolic, require_mesh_of_graph
from fmegatron.collectives.torch_private import schema_of
from fmegatron.collectives.wire import wide
from fmegatron.layout import Mesh
from fmegatron.step.torch_private import UNSAFE_VIEW

__all__ = ["interpret"]


# ---- collectives on the list of one group's tensors ------------------------------------------------------------------
def _sum(xs):
    return functools.reduce(torch.add, xs)


def _on_a_group(name: str, xs: list[torch.Tensor], n: int = 1, dim=0, split_dim=0, concat_dim=0, shift=0) -> list:
    match name:
        case "psum":
            return [_sum(xs)] * len(xs)
        case "pmax":
            return [functools.reduce(torch.maximum, xs)] * len(xs)
        case "all_gather":
            return [torch.cat(xs, dim)] * n
        case "reduce_scatter":
            return [part.contiguous() for part in _sum(xs).chunk(n, dim)]
        case "all_to_all":
            sent = [x.chunk(n, split_dim) for x in xs]
            return [torch.cat([sent[source][i] for source in range(n)], concat_dim) for i in range(n)]
        case "ppermute":
            return [xs[(i - shift) % n] for i in range(n)]
    raise AssertionError(f"no simulation of {name}")


def _on_a_group_of_lists(
    name: str, xs: list[list], sizes=(), places=(), exact=False, n=1, split_dims=(), concat_dims=()
) -> list[list]:
    """The coalesced collectives: tensor by tensor, what a list changes is not what is computed."""
    out = []
    for i, column in enumerate(zip(*xs, strict=True)):
        column = [x.to(wide(x.dtype)) for x in column] if exact else list(column)
        place = Place.parse(places[i]) if places else None
        match name:
            case "psum_many":
                out.append([_sum(column)] * len(column))
            case "all_gather_many":
                out.append([place.whole(torch.stack(column), sizes).contiguous()] * len(column))
            case "reduce_scatter_many":
                out.append([piece.clone() for piece in place.pieces(_sum(column), sizes).unbind(0)])
            case "all_to_all_many":
                out.append(_on_a_group("all_to_all", column, n, split_dim=split_dims[i], concat_dim=concat_dims[i]))
            case _:
                raise AssertionError(f"no simulation of {name}")
    return [list(row) for row in zip(*out, strict=True)]


def _communicate(name: str, node: fx.Node, values: list, mesh: Mesh) -> list:
    names = [argument.name for argument in schema_of(node.target).arguments]
    given = dict(zip(names[1:], node.args[1:], strict=False)) | node.kwargs
    axes = tuple(given.pop("axes"))
    del given["mesh"]
    if name == "declare":
        return values
    if name == "axis_index":
        indices = [torch.tensor(i, device=values[0].device) for i in range(mesh.extent(axes))]
        return [indices[mesh.index(rank, axes)] for rank in range(mesh.size)]
    out = list(values)
    done = {}  # groups that hold the same tensors compute once
    for ranks in mesh.groups(axes):
        many = isinstance(values[0], list)
        key = tuple(id(x) for r in ranks for x in (values[r] if many else [values[r]]))
        if key not in done:
            done[key] = (_on_a_group_of_lists if many else _on_a_group)(name, [values[r] for r in ranks], **given)
        for rank, y in zip(ranks, done[key], strict=True):
            out[rank] = y
    return out


# ---- graphs ----------------------------------------------------------------------------------------------------------
_VIEWS_BY_NATURE = frozenset({UNSAFE_VIEW, torch.ops.fmegatron.declare.default, operator.getitem})


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


def interpret(graph: fx.Graph, mesh: Mesh, inputs: list[list], keep: bool = False) -> tuple[list[list], dict]:
    """Run a flat graph (see `inline_layers`) for every rank of the mesh.

    inputs: per placeholder the list of its values, one per rank. -> (per output such a list, and the same for every
    node if `keep`, else an empty dict). The inputs are not changed, whatever the graph writes in place. Nodes that draw
    random numbers draw once for all ranks. Raises ValueError for a graph over axes of another mesh.
    """
    require_mesh_of_graph(graph, mesh, "simulate", "the ranks")
    values: dict[fx.Node, list] = {}
    given, written = iter(inputs), _written(graph)
    last_use = {source: node for node in graph.nodes for source in node.all_input_nodes}
    with torch.no_grad():
        for node in graph.nodes:
            if node.op == "output":
                return [values[n] for n in node.args[0]], (values if keep else {})
            collective = is_symbolic(node.target) if node.op == "call_function" else None
            if node.op == "placeholder":
                out = next(given)
            elif collective:
                given_to = node.args[0]
                if isinstance(given_to, (list, tuple)):  # per rank a list
                    column = [[values[n][rank] for n in given_to] for rank in range(mesh.size)]
                else:
                    column = values[given_to]
                out = _communicate(collective, node, column, mesh)
            else:
                out = _compute(node, values, mesh.size, share=node not in written)
            if node in written and (node.op == "placeholder" or collective and collective != "declare"):
                out = [_own(v) for v in out]  # what is written in place belongs to one rank alone
            values[node] = out
            if not keep:
                for source in node.all_input_nodes:
                    if last_use[source] is node:
                        del values[source]
    raise AssertionError("graph without an output node")


def _compute(node, values, world, share):
    done, out = {}, []
    sources = node.all_input_nodes
    for rank in range(world):
        key = tuple(id(values[s][rank]) for s in sources) if share else rank
        if key not in done:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n, rank=rank: values[n][rank])
            try:
                done[key] = node.target(*args, **kwargs)
            except RuntimeError as e:  # what fake tensors let pass, such as products of two dtypes
                raise ValueError(f"simulate: {node.meta.get('at', '?')}: {node.target} on rank {rank}: {e}") from None
        out.append(done[key])
    return out
